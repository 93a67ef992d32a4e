"""``run``: a training script with NNI repaired; the script stays as it is."""

from __future__ import annotations

import argparse
import os
import warnings
from typing import Callable, List, Tuple

from .. import environment, startup
from ..notices import NNIDataParallelWarning
from . import script
from .errors import CommandError

__all__ = ["add_arguments", "main", "split"]

_FLAGS = ("-q", "--quiet", "-h", "--help", "--debug")


def split(arguments: List[str]) -> Tuple[List[str], List[str]]:
    """The options of ``run`` itself, and what names the script, with all that belongs to the script."""
    for i, argument in enumerate(arguments):
        if argument == "--":
            return arguments[:i], arguments[i + 1 :]
        if argument not in _FLAGS:
            return arguments[:i], arguments[i:]
    return arguments, []


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Only shown: :func:`split` takes them off first, since options after the script are the script's."""
    parser.usage = "%(prog)s [-h] [-q] [--debug] (SCRIPT | -m MODULE | -c CODE | -) [ARGUMENT ...]"


def main(options: argparse.Namespace) -> int:
    """Arm, for this process and its children, and become the script."""
    target: List[str] = options.target
    if not target:
        raise CommandError("run: which script? For example: run train.py --epochs 10, or run -m package.train")
    program = _program(target)
    if options.quiet:
        warnings.filterwarnings("ignore", category=NNIDataParallelWarning)
    try:
        armed = startup.start()
    except ValueError as error:
        raise CommandError(str(error)) from error
    if armed:
        os.environ[environment.ENABLE] = "1"  # spawned workers, ranks, trials: by nni_dataparallel.pth, where it is installed
    program()
    return 0


def _program(target: List[str]) -> Callable[[], None]:
    first, *rest = target
    if first in ("-m", "-c"):
        if not rest:
            raise CommandError(f"run: {first} needs {'a module' if first == '-m' else 'the code'} after it")
        run = script.run_module if first == "-m" else script.run_code
        return lambda: run(rest[0], rest[1:])
    if first == "-":
        return lambda: script.run_stdin(rest)
    if first.startswith("-"):
        raise CommandError(f"run: unknown option {first!r}; the script's own options follow the script")
    return lambda: script.run_file(first, rest)
