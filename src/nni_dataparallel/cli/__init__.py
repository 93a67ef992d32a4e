"""``python -m nni_dataparallel``: one file per command, and the table of them."""
