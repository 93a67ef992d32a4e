"""``status``: versions, devices, and every fix; as text or as JSON."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import warnings
from typing import Any, Dict, Iterator

from .. import startup
from .errors import CommandError
from .terminal import paint

__all__ = ["add_arguments", "main"]

_COLOURS = {"applied": "green", "skipped": "red", "not applied": "red", "waiting for import": "yellow"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """How much is shown, and how."""
    parser.add_argument("--json", action="store_true", help="plain data; the keys are those of nni_dataparallel.status()")
    parser.add_argument("--all", action="store_true", help="the fixes for other releases of NNI, too")
    parser.description = (
        "Versions, devices, and every fix: applied or not, and why. To find out, this command arms as `run` does, imports NNI's "
        "compressors and reads what has become of them.\n\n"
        "exit status: 0 all applied; 1 a fix was skipped, or NNI_DATAPARALLEL_DISABLE is set; 2 NNI is missing or unknown"
    )


def main(options: argparse.Namespace) -> int:
    """Arm, import, look."""
    with _asides():
        try:
            startup.start()
        except ValueError as error:
            raise CommandError(str(error)) from error
        found = _look(options.all)
    if options.json and not options.quiet:
        print(json.dumps(found, indent=2))
    elif not options.quiet:
        _print(found)
    if found["nni"]["problem"] is not None:
        return 2
    return 1 if found["counts"]["skipped"] or found["counts"]["not applied"] else 0


@contextlib.contextmanager
def _asides() -> Iterator[None]:
    """What NNI's modules print goes to stderr; our warnings are in the list anyway."""
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _look(every: bool) -> Dict[str, Any]:
    import torch

    from .. import fixes, patching
    from ..overview import SKIPPED, WAITING, status

    with contextlib.suppress(fixes.UnsupportedReleaseError):
        rows = fixes.rows_for(fixes.installed_release())
        problems = {row.target: problem for row in rows for problem in [patching.check(row)] if problem and row.due}
    if torch.cuda.is_available():
        torch.cuda.init()  # for the names
    found: Dict[str, Any] = status(every)
    for fix in found["fixes"]:
        if fix["state"] == WAITING and fix["target"] in problems:
            fix.update(state=SKIPPED, why=problems[fix["target"]])
            found["counts"][WAITING] -= 1
            found["counts"][SKIPPED] += 1
    return found


def _print(found: Dict[str, Any]) -> None:
    nni, counts, devices = found["nni"], found["counts"], found["devices"]
    versions = [f"{name} {found[name]}" for name in ("nni_dataparallel", "torch")]
    print(", ".join([f"NNI {nni['version'] or 'missing'}", *versions, f"Python {found['python']}"]), f"({found['platform']})")
    print(", ".join([f"devices: {devices['cpu']} CPU cores", *(devices["cuda_names"] or ["no GPU"])]))
    hook = f"honoured, by {found['hook']}" if found["hook"] else "not honoured: there is no nni_dataparallel.pth in site-packages"
    print(f"NNI_DATAPARALLEL=1 is {hook}")
    if nni["problem"] is not None:
        print(paint(nni["problem"], "red"))
        return
    others = counts["not needed in this release"]
    here = sum(counts.values()) - others
    armed = "patched in this process as `run` does it" if found["armed"] else "switched off by NNI_DATAPARALLEL_DISABLE"
    print(paint(f"{counts['applied']} of {here} fixes applied, {found['statistics']} statistics", "bold"), f"({armed})")
    for fix in found["fixes"]:
        print(f"  {paint(fix['state'].ljust(11), _COLOURS.get(fix['state'], 'dim'))}  {fix['target']}")
        link = f" ({fix['url']})" if fix["url"] else ""
        print(f"{'':15}{fix['reason']}{link}")
        if fix["why"]:
            print(f"{'':15}{paint(fix['why'], 'red')}")
    if len(found["fixes"]) == here:
        print(f"{others} more are for other releases of NNI: status --all")
