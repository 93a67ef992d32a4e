"""The fixes for NNI's newer line: 3.0."""
