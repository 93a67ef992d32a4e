"""The NNI releases that there are, and the one that is installed. Imports neither torch nor NNI."""

from __future__ import annotations

import sys
from importlib import metadata, util
from typing import Tuple

from .notices import PatchError

__all__ = ["RELEASES", "UnsupportedReleaseError", "installed_release", "require_known"]

RELEASES: Tuple[str, ...] = (
    "1.4", "1.5", "1.6", "1.7", "1.7.1", "1.8", "1.9",
    "2.0", "2.1", "2.2", "2.3", "2.4", "2.5", "2.6", "2.6.1", "2.7", "2.8", "2.9", "2.10", "2.10.1",
    "3.0rc1", "3.0",
)  # fmt: skip
"""Every NNI release on the package registry that has a PyTorch compressor. All of them are covered."""


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


def require_known(release: str) -> None:
    """Raise :class:`UnsupportedReleaseError` for a release that is not in ``RELEASES``."""
    if release not in RELEASES:
        raise UnsupportedReleaseError(
            f"NNI {release} is unknown to nni_dataparallel; nothing was patched. "
            f"Covered releases: {', '.join(RELEASES)}. "
            "Install one of them, for example: pip install nni==2.10.1"
        )
