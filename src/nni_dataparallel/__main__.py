"""``python -m nni_dataparallel``: run a script with NNI repaired, show the status, examine a model, see the demo."""

from __future__ import annotations

import sys

from .cli.commands import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
