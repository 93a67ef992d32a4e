"""``python -m nni_dataparallel demo``: the fault and its repair, on real digits."""
