"""``python -m nni_dataparallel doctor script.py:make_model``: arguments in, exit status out."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import sys
import traceback
from pathlib import Path
from typing import Any, Callable, Optional, Tuple

from ..files import written_whole
from .diagnosis import Diagnosis
from .examination import diagnose
from .places import fault_of
from .subject import DoctorError, Loss

__all__ = ["EPILOG", "add_arguments", "main"]

EPILOG = """\
The function builds everything anew each time it is called, and returns (model, batch), (model, optimizer, batch),
(model, optimizer, quantizer, batch), or a dict with these names and, if it likes, "loss". A function loss(model, batch)
in the script is used if there is one. The script is imported under its own name: what stands under
if __name__ == "__main__" does not run.

    def make_model():
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        quantizer = QAT_Quantizer(model, config_list, optimizer, dummy_input=torch.randn(1, 3, 32, 32))
        quantizer.compress()
        return model, optimizer, quantizer, (torch.randn(8, 3, 32, 32), torch.randint(10, (8,)))

exit status: 0 nothing remains with the patch, 1 something remains, 2 the doctor could not examine it
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What ``doctor`` takes on the command line."""
    parser.epilog = f"{EPILOG}\n{parser.epilog or ''}"
    parser.add_argument("target", metavar="script.py:function", help="the function that builds model and batch")
    parser.add_argument("--replicas", type=int, default=2, help="number of virtual devices (default 2)")
    parser.add_argument("--json", action="store_true", help="print the diagnosis as JSON")
    parser.add_argument("--html", metavar="FILE", help="write the diagnosis as one HTML page, the tracked ranges drawn")


def main(options: argparse.Namespace) -> int:
    """Examine, print, write; the exit status."""
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what the script prints, once per build, is not the diagnosis
            make, loss = _load(options.target)
            diagnosis = diagnose(make, replicas=options.replicas, loss=loss)
        _show(diagnosis, options.json)
        if options.html:
            _write(options.html, diagnosis.html())
            print(f"Written: {options.html}", file=sys.stderr if options.json else sys.stdout)
    except Exception as error:
        if options.debug:
            traceback.print_exc()
        expected = isinstance(error, (DoctorError, TypeError, ValueError, RuntimeError))
        text = str(error) if expected else f"{type(error).__name__}: {error} (--debug shows where)"
        print(f"nni_dataparallel: {' '.join(text.split())}", file=sys.stderr)
        return 2
    return 0 if diagnosis.healthy else 1


def _load(target: str) -> Tuple[Callable[[], Any], Optional[Loss]]:
    """The function that ``script.py:function`` names, and the script's ``loss``."""
    file, colon, name = target.rpartition(":")
    if not colon or not file or not name.isidentifier():
        raise DoctorError(f"{target!r} does not name a function: script.py:make_model, for example")
    path = Path(file).resolve()
    if not path.is_file():
        raise DoctorError(f"there is no script {file!r}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise DoctorError(f"{file!r} is not a Python script")
    script = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))
    sys.modules.setdefault(path.stem, script)  # what it defines can be pickled and copied
    try:
        spec.loader.exec_module(script)
    except (Exception, SystemExit) as error:
        place = fault_of(error).place
        raise DoctorError(
            f"{file} cannot be imported: {type(error).__name__}: {error}" + (f" ({place})" if place else "")
        ) from error
    make, loss = getattr(script, name, None), getattr(script, "loss", None)
    if not callable(make):
        there = sorted(n for n, v in vars(script).items() if callable(v) and getattr(v, "__module__", "") == path.stem)
        raise DoctorError(f"{file} has no function {name!r}; it has {', '.join(there) or 'none'}")
    return make, loss if callable(loss) and not isinstance(loss, type) else None


def _write(file: str, text: str) -> None:
    path = Path(file)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(path) as (draft,):
            Path(draft).write_text(text, encoding="utf-8")
    except OSError as error:
        raise DoctorError(f"cannot write {file!r}: {error.strerror}") from error


def _show(diagnosis: Diagnosis, as_json: bool) -> None:
    if as_json:
        print(diagnosis.to_json())
        return
    if sys.stdout.isatty():
        try:
            from rich.console import Console
        except ImportError:
            pass
        else:
            from .text import rich_table

            Console().print(rich_table(diagnosis))
            return
    print(diagnosis.table())
