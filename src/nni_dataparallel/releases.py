"""The NNI releases that there are, and the one that is installed. Imports neither torch nor NNI."""

from __future__ import annotations

import sys
from importlib import util
from typing import Optional, Tuple

from .notices import PatchError

__all__ = ["RELEASES", "UnsupportedReleaseError", "installed_release", "require_known", "require_present"]

RELEASES: Tuple[str, ...] = (
    "1.4", "1.5", "1.6", "1.7", "1.7.1", "1.8", "1.9",
    "2.0", "2.1", "2.2", "2.3", "2.4", "2.5", "2.6", "2.6.1", "2.7", "2.8", "2.9", "2.10", "2.10.1",
    "3.0rc1", "3.0",
)  # fmt: skip
"""Every NNI release on the package registry that has a PyTorch compressor. All of them are covered."""


class UnsupportedReleaseError(PatchError):
    """The installed NNI is missing, unknown, or not covered by the fix table.

    Examples
    --------
    >>> from nni_dataparallel import PatchError, UnsupportedReleaseError
    >>> from nni_dataparallel.releases import require_known
    >>> issubclass(UnsupportedReleaseError, PatchError)
    True
    >>> try:
    ...     require_known("0.9")
    ... except UnsupportedReleaseError as error:
    ...     print(str(error)[:38])
    NNI 0.9 is unknown to nni_dataparallel
    """


def installed_release() -> str:
    """The release of the NNI that an import would find.

    Raises
    ------
    UnsupportedReleaseError
        When NNI is not installed.
    """
    loaded = _loaded()
    if loaded is not None:
        return loaded
    require_present()
    from importlib import metadata  # half of what the start of `run` would take

    try:
        return metadata.version("nni")
    except metadata.PackageNotFoundError:
        import nni

        return str(nni.__version__)


def _loaded() -> Optional[str]:
    version = getattr(sys.modules.get("nni"), "__version__", None)
    return None if version is None else str(version)


def require_present() -> None:
    """Raise :class:`UnsupportedReleaseError` where NNI is missing; where it is loaded, also if its release is unknown."""
    loaded = _loaded()
    if loaded is not None:
        require_known(loaded)
        return
    try:
        missing = util.find_spec("nni") is None
    except ValueError:  # a stub without a spec stands in sys.modules
        missing = True
    if missing:
        raise UnsupportedReleaseError(
            "NNI is not installed in this environment. Install the release your script was written for, "
            "for example: pip install nni==2.10.1"
        )


def require_known(release: str) -> None:
    """Raise :class:`UnsupportedReleaseError` for a release that is not in ``RELEASES``."""
    if release not in RELEASES:
        raise UnsupportedReleaseError(
            f"NNI {release} is unknown to nni_dataparallel; nothing was patched. "
            f"Covered releases: {', '.join(RELEASES)}. "
            "Install one of them, for example: pip install nni==2.10.1"
        )
