"""The fixes for NNI 2.0 - 2.10.1, one file per idea."""
