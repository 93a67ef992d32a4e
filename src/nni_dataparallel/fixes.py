"""The fix table: every row, read in one look, and the releases it knows."""

from __future__ import annotations

import importlib
import sys
from importlib import metadata, util
from typing import Any, Dict, List, Tuple

from packaging.specifiers import SpecifierSet

from . import parallel, ranks
from .nni2 import pruner_rows
from .nni2 import rows as nni2
from .nni3 import rows as nni3
from .patching import Fix, PatchError

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
]

RELEASES: Tuple[str, ...] = (
    "1.4", "1.5", "1.6", "1.7", "1.7.1", "1.8", "1.9",
    "2.0", "2.1", "2.2", "2.3", "2.4", "2.5", "2.6", "2.6.1", "2.7", "2.8", "2.9", "2.10", "2.10.1",
    "3.0rc1", "3.0",
)  # fmt: skip
"""Every NNI release on the package registry that has a PyTorch compressor."""

FIXES: Tuple[Fix, ...] = (*parallel.FIXES, *ranks.FIXES, *nni2.FIXES, *pruner_rows.FIXES, *nni3.FIXES)
QUANTIZERS: Dict[str, Tuple[str, ...]] = {
    name: tuple(line[name] for line in (nni2.QUANTIZERS, nni3.QUANTIZERS) if name in line)
    for name in (*nni2.QUANTIZERS, *nni3.QUANTIZERS)
}
"""Fixed quantizers -> the releases that have it, in NNI's older and newer line."""


class UnsupportedReleaseError(PatchError):
    """The installed NNI is missing, unknown, or not covered by the fix table."""


def installed_release() -> str:
    """The release of the NNI that an import would find.

    Raises
    ------
    UnsupportedReleaseError
        When NNI is not installed.
    """
    loaded = getattr(sys.modules.get("nni"), "__version__", None)
    if loaded is not None:
        return str(loaded)
    try:
        missing = util.find_spec("nni") is None
    except ValueError:  # a stub without a spec stands in sys.modules
        missing = True
    if missing:
        raise UnsupportedReleaseError(
            "NNI is not installed in this environment. Install the release your script was written for, "
            "for example: pip install nni==2.10.1"
        )
    try:
        return metadata.version("nni")
    except metadata.PackageNotFoundError:
        import nni

        return str(nni.__version__)


def covered_releases() -> List[str]:
    """The releases for which the table has rows of its own."""
    return [r for r in RELEASES if any(fix.releases and fix.fits(r) for fix in FIXES)]


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
    if release not in RELEASES:
        raise UnsupportedReleaseError(
            f"NNI {release} is unknown to nni_dataparallel; nothing was patched. "
            f"Covered releases: {', '.join(covered_releases())}. "
            "Install one of them, for example: pip install nni==2.10.1"
        )
    return [fix for fix in FIXES if fix.fits(release)]
