"""``python -m nni_dataparallel``: run a script with NNI repaired, show the status, examine a model, see the demo."""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path
from typing import List, Optional

from . import __version__, patching
from .doctor import command as doctor
from .fixes import UnsupportedReleaseError, installed_release, rows_for


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m nni_dataparallel", description=__doc__)
    parser.add_argument("--version", action="version", version=f"nni_dataparallel {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run a training script with NNI repaired; the script stays as it is")
    run.add_argument("script", help="path of the script")
    run.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own arguments")
    commands.add_parser("status", help="list the fixes for the installed NNI and whether they fit")
    doctor.add_arguments(commands.add_parser("doctor", help="what DataParallel does to your model, and what of it is repaired"))
    demo = commands.add_parser("demo", help="train on digits with and without the fixes, print a table, draw a picture")
    demo.add_argument("--replicas", type=int, default=4, help="virtual devices where there are no two GPUs (default 4)")
    demo.add_argument("--epochs", type=int, default=3, help="passes over the 1437 training images (default 3)")
    demo.add_argument("--dtype", choices=("float64", "float32"), default="float64", help="precision (default float64)")
    demo.add_argument("--output", default="nni_dataparallel_demo.png", help="picture to write, .png or .svg")
    return parser


def _run(script: str, arguments: List[str]) -> int:
    if not Path(script).is_file():
        print(f"nni_dataparallel: there is no script {script!r}", file=sys.stderr)
        return 2
    try:
        from . import auto  # noqa: F401  (importing it patches)
    except ValueError as error:  # of the environment variable
        print(f"nni_dataparallel: {error}", file=sys.stderr)
        return 2

    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")
    return 0


def _status() -> int:
    release = installed_release()
    rows = rows_for(release)
    lines, wrong = [], 0
    for row in rows:
        due = row.due  # asked first: checking a row imports its module
        problem = patching.check(row)
        wrong += problem is not None and due
        verdict = "fits " if problem is None else "WRONG" if due else "later"
        lines.append(f"  {verdict}  {row.target}\n         {problem or row.reason}")
    print(f"NNI {release}: {len(rows)} fixes, {f'{wrong} of them do not fit' if wrong else 'all of them fit'}", *lines, sep="\n")
    return 1 if wrong else 0


def _demo(replicas: int, epochs: int, output: str, dtype: str) -> int:
    if replicas < 2 or epochs < 1:
        raise ValueError(f"the demo needs at least 2 replicas and 1 epoch, not {replicas} and {epochs}")
    if Path(output).suffix not in (".png", ".svg"):
        raise ValueError(f"the picture must be a .png or .svg file, not {output!r}")
    try:
        import matplotlib  # noqa: F401
        import rich  # noqa: F401
        import sklearn  # noqa: F401
    except ImportError as error:
        raise RuntimeError(f"the demo needs {error.name}: pip install 'nni-dataparallel[demo]'") from error
    import torch

    from .demo.training import main

    return main(replicas, epochs, output, getattr(torch, dtype))


def main(argv: Optional[List[str]] = None) -> int:
    """Entry point; returns the exit status."""
    options = _parser().parse_args(argv)
    if options.command == "run":
        return _run(options.script, options.arguments)
    if options.command == "doctor":
        return doctor.main(options)
    try:
        if options.command == "status":
            return _status()
        return _demo(options.replicas, options.epochs, options.output, options.dtype)
    except (UnsupportedReleaseError, ValueError, RuntimeError) as error:
        print(f"nni_dataparallel: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
