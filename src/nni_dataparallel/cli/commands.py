"""The commands and the command line around them.

A command is a row: its name, the module with ``add_arguments(parser)`` and ``main(options) -> exit status``, a line of
help, examples. Its module is imported when it is called, so ``--help`` is there at once. A :class:`CommandError` ends it
with one line. Every command has ``options.quiet`` and ``options.debug``.
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from .. import __version__
from . import run
from .errors import CommandError

__all__ = ["COMMANDS", "main"]

PACKAGE = "nni_dataparallel"


class Command(NamedTuple):
    """A row: add one, and the command exists."""

    module: str
    help: str
    examples: Tuple[str, ...]


COMMANDS: Dict[str, Command] = {
    "run": Command(
        "cli.run",
        "run a training script with NNI repaired; the script stays as it is",
        (
            "run train.py --epochs 10      what follows the script is the script's",
            "run -m package.train --lr 1",
            "torchrun --nproc_per_node=2 -m nni_dataparallel run train.py",
        ),
    ),
    "status": Command(
        "cli.status",
        "versions, devices, and every fix: applied or not, and why",
        ("status", "status --json > status.json      for a bug report", "status --quiet && run train.py"),
    ),
    "doctor": Command(
        "doctor.command",
        "what DataParallel does to your model, and what of it is repaired",
        ("doctor train.py:make_model", "doctor train.py:make_model --replicas 4 --html report.html"),
    ),
    "demo": Command(
        "cli.demo",
        "train on digits with and without the fixes, print a table, draw a picture",
        ("demo", "demo --replicas 2 --epochs 1 --output range.svg"),
    ),
}


def main(argv: Optional[List[str]] = None) -> int:
    """Entry point; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    target: List[str] = []
    name = next((argument for argument in arguments if not argument.startswith("-")), None)
    if name == "run":
        place = arguments.index(name) + 1
        own, target = run.split(arguments[place:])
        arguments = [*arguments[:place], *own]
    command = COMMANDS.get(name) if name is not None else None
    module = import_module(f"{PACKAGE}.{command.module}") if command is not None else None
    options = _parser(name, module).parse_args(arguments)
    if name == "run":
        options.target = target
    try:
        return int(module.main(options))  # type: ignore[union-attr]
    except CommandError as error:
        if options.debug:
            raise
        print(f"nni_dataparallel: {error}", file=sys.stderr)
        return error.status


def _parser(name: Optional[str], module: Any) -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("-q", "--quiet", action="store_true", help="no words of this package's own")
    common.add_argument("--debug", action="store_true", help="the traceback of an error, not only its line")
    prog = "nni-dataparallel" if Path(sys.argv[0]).stem == "nni-dataparallel" else f"python -m {PACKAGE}"
    parser = argparse.ArgumentParser(
        prog=prog,
        description="NNI's compressors under DataParallel and DistributedDataParallel: the numbers of one device.",
        epilog=_epilog(prog, [command.examples[0] for command in COMMANDS.values()]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"nni_dataparallel {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for known, command in COMMANDS.items():
        own = commands.add_parser(
            known,
            parents=[common],
            help=command.help,
            description=f"{command.help[0].upper()}{command.help[1:]}.",
            epilog=_epilog(prog, command.examples),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            conflict_handler="resolve",  # a command may have a --debug of its own
        )
        if known == name:
            module.add_arguments(own)
    return parser


def _epilog(prog: str, examples: Any) -> str:
    lines = (example if example.startswith("torchrun") else f"{prog} {example}" for example in examples)
    return "\n  ".join(["examples:", *lines])
