"""What is patched, read from the live attributes, with the versions and devices that a bug report needs."""

from __future__ import annotations

import os
import platform
import site
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

import torch

from . import api, environment, fixes, patching, replicas

__all__ = ["APPLIED", "NOT_APPLIED", "NOT_NEEDED", "SCHEMA", "SKIPPED", "WAITING", "hook_file", "status"]

SCHEMA = 1
APPLIED, NOT_APPLIED, SKIPPED = "applied", "not applied", "skipped"
WAITING, NOT_NEEDED = "waiting for import", "not needed in this release"


def status(every: bool = False) -> Dict[str, Any]:
    """The state of this process, as plain data; ``python -m nni_dataparallel status --json`` prints the same.

    Nothing is imported or patched by it, and no CUDA context is made.

    Parameters
    ----------
    every : bool
        List the fixes for other releases of NNI, too.

    Returns
    -------
    dict
        ``schema``
            1. A new key does not change it; a key that goes, or another meaning, does.
        ``nni_dataparallel``, ``torch``, ``python``, ``platform``
            Versions.
        ``nni``
            ``version`` (None if it is missing), and ``problem``: None, or why nothing can be patched.
        ``devices``
            ``cpu`` (cores), ``cuda`` (number of devices), ``cuda_names`` (None before the first use of CUDA).
        ``armed``
            Whether NNI is patched, or will be when it is imported.
        ``statistics``
            ``"global"`` or ``"local"``.
        ``environment``
            Each variable of the package, and its value or None.
        ``hook``
            The ``.pth`` file by which interpreters honour NNI_DATAPARALLEL; None where it is not installed.
        ``counts``
            State -> how many fixes are in it.
        ``fixes``
            For each fix ``name``, ``target``, ``state``, ``why`` (a text or None), ``reason``, ``releases``, ``url`` (of the
            upstream issue, or None). The states are "applied", "not applied", "skipped" (does not fit what is installed),
            "waiting for import", "not needed in this release".

    Examples
    --------
    >>> import nni_dataparallel
    >>> with nni_dataparallel.patched():
    ...     found = nni_dataparallel.status()
    >>> found["armed"], found["statistics"], found["counts"]["skipped"]
    (True, 'global', 0)
    """
    release, problem = _release()
    listed = [_described(fix, release) for fix in fixes.FIXES] if problem is None else []
    counts = dict.fromkeys((APPLIED, NOT_APPLIED, SKIPPED, WAITING, NOT_NEEDED), 0)
    for fix in listed:
        counts[fix["state"]] += 1
    return {
        "schema": SCHEMA,
        "nni_dataparallel": sys.modules["nni_dataparallel"].__version__,
        "nni": {"version": release, "problem": problem},
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "devices": _devices(),
        "armed": api.is_armed(),
        "statistics": replicas.merged_statistics(),
        "environment": {name: os.environ.get(name) for name in environment.VARIABLES},
        "hook": hook_file(),
        "counts": counts,
        "fixes": [fix for fix in listed if every or fix["state"] != NOT_NEEDED],
    }


def _release() -> Tuple[Optional[str], Optional[str]]:
    release = None
    try:
        release = fixes.installed_release()
        fixes.rows_for(release)
    except fixes.UnsupportedReleaseError as error:
        return release, str(error)
    return release, None


def _devices() -> Dict[str, Any]:
    count = torch.cuda.device_count()
    names: Optional[List[str]] = [] if count == 0 else None
    if count and torch.cuda.is_initialized():  # the first look at a name makes a context, and forked workers fail after it
        names = [torch.cuda.get_device_name(i) for i in range(count)]
    return {"cpu": os.cpu_count(), "cuda": count, "cuda_names": names}


def hook_file() -> Optional[str]:
    """Where the ``.pth`` file lies that honours NNI_DATAPARALLEL when an interpreter starts."""
    folders = [*site.getsitepackages(), site.getusersitepackages() if site.ENABLE_USER_SITE else ""]
    found = (Path(folder) / "nni_dataparallel.pth" for folder in folders if folder)
    return next((str(path) for path in found if path.is_file()), None)


def _described(fix: patching.Fix, release: Optional[str]) -> Dict[str, Any]:
    state, why = _state(fix, str(release))
    return {
        "name": fix.name,
        "target": fix.target,
        "state": state,
        "why": why,
        "reason": fix.reason,
        "releases": fix.releases,
        "url": fixes.upstream(fix.issue),
    }


def _state(fix: patching.Fix, release: str) -> Tuple[str, Optional[str]]:
    if not fix.fits(release):
        return NOT_NEEDED, None
    if patching.is_live(fix):
        return APPLIED, None
    if patching.was_replaced(fix):
        return NOT_APPLIED, "other code has put something else in its place"
    if fix.target in api.skipped():
        return SKIPPED, api.skipped()[fix.target]
    if fix.module not in sys.modules:
        return (WAITING, None) if api.is_armed() else (NOT_APPLIED, None)
    if api.is_waiting():
        return WAITING, "of NNI's compressors"
    return NOT_APPLIED, patching.check(fix)
