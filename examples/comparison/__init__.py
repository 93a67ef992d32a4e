"""What examples/compare_compression.py compares, and how."""
