"""The fixes for NNI 1.4 - 2.10.1 and 3.0rc1's older line, one file per idea."""
