"""``demo``: the fault and its repair, on real digits."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..notices import PatchError
from .errors import CommandError

__all__ = ["add_arguments", "main"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The demo's size and its picture."""
    parser.add_argument("--replicas", type=int, default=4, help="virtual devices where there are no two GPUs (default 4)")
    parser.add_argument("--epochs", type=int, default=3, help="passes over the 1437 training images (default 3)")
    parser.add_argument("--dtype", choices=("float64", "float32"), default="float64", help="precision (default float64)")
    parser.add_argument("--output", default="nni_dataparallel_demo.png", help="picture to write, .png or .svg")


def main(options: argparse.Namespace) -> int:
    """Check what was asked for before torch is imported, then train."""
    if options.replicas < 2 or options.epochs < 1:
        raise CommandError(f"the demo needs at least 2 replicas and 1 epoch, not {options.replicas} and {options.epochs}")
    if Path(options.output).suffix not in (".png", ".svg"):
        raise CommandError(f"the picture must be a .png or .svg file, not {options.output!r}")
    try:
        import matplotlib  # noqa: F401
        import rich  # noqa: F401
        import sklearn  # noqa: F401
    except ImportError as error:
        raise CommandError(f"the demo needs {error.name}: pip install 'nni-dataparallel[demo]'") from error
    import torch

    from ..demo import training

    dtype = getattr(torch, options.dtype)
    try:
        return training.main(options.replicas, options.epochs, options.output, dtype, options.quiet)
    except (PatchError, ValueError, RuntimeError) as error:
        raise CommandError(str(error)) from error
