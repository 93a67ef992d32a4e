"""The fix table: every row, read in one look."""

from __future__ import annotations

import importlib
from typing import Any, Dict, List, Optional, Tuple

from packaging.specifiers import SpecifierSet

from . import ddp, parallel
from .nni2 import pruner_rows
from .nni2 import rows as nni2
from .nni3 import rows as nni3
from .patching import Fix
from .releases import RELEASES, UnsupportedReleaseError, installed_release, require_known

__all__ = [
    "FIXES",
    "QUANTIZERS",
    "RELEASES",
    "UnsupportedReleaseError",
    "home_of",
    "installed_release",
    "rows_for",
    "ships",
    "stock_quantizer",
    "upstream",
]

FIXES: Tuple[Fix, ...] = (*parallel.FIXES, *ddp.FIXES, *nni2.FIXES, *pruner_rows.FIXES, *nni3.FIXES)
QUANTIZERS: Dict[str, Tuple[str, ...]] = {
    name: tuple(line[name] for line in (nni2.QUANTIZERS, nni3.QUANTIZERS) if name in line)
    for name in (*nni2.QUANTIZERS, *nni3.QUANTIZERS)
}
"""Fixed quantizers -> the releases that have it, in NNI's older and newer line."""


def covered_releases() -> List[str]:
    """The releases for which the table has rows of its own."""
    return [r for r in RELEASES if any(fix.releases and fix.fits(r) for fix in FIXES)]


def upstream(issue: str) -> Optional[str]:
    """The address of an issue such as ``nni#3626``; None for none."""
    project, _, number = issue.partition("#")
    return f"https://github.com/microsoft/{project}/issues/{number}" if number else None


def home_of(release: str) -> str:
    """The package from which an NNI release's quantizers are imported."""
    packages = {**nni2.PACKAGES, **nni3.PACKAGES}
    return next(home for releases, home in packages.items() if SpecifierSet(releases).contains(release, prereleases=True))


def ships(release: str, name: str) -> bool:
    """Whether an NNI release has the quantizer ``name``."""
    return any(SpecifierSet(releases).contains(release, prereleases=True) for releases in QUANTIZERS[name])


def stock_quantizer(name: str) -> Any:
    """NNI's own class ``name``, from wherever the installed release keeps it."""
    return getattr(importlib.import_module(home_of(installed_release())), name)


def rows_for(release: str) -> List[Fix]:
    """The rows for an NNI release.

    Raises
    ------
    UnsupportedReleaseError
        When the release is unknown.
    """
    require_known(release)
    return [fix for fix in FIXES if fix.fits(release)]
