"""``patch`` and its relatives: the fix table applied to the stock classes in place."""

from __future__ import annotations

import contextlib
from typing import Dict, Iterator

from . import fixes, patching

__all__ = ["is_patched", "patch", "patch_map", "patched", "unpatch"]

HOLDER = "patch"


def patch() -> None:
    """Repair the stock NNI classes in place; doing it twice is doing it once.

    Classes imported earlier (``from nni... import QAT_Quantizer``) are reached too.

    Raises
    ------
    UnsupportedReleaseError
        When NNI is missing, of an unknown release, or of one without fixes.
    PatchError
        When the installed NNI does not look like its release. Nothing is patched then.
    """
    rows = fixes.rows_for(fixes.installed_release())
    patching.require(rows)
    for row in rows:
        patching.install(row, HOLDER)


def unpatch() -> None:
    """Put every stock attribute back, by identity. Does nothing where nothing was patched."""
    for row in reversed(fixes.FIXES):
        patching.uninstall(row, HOLDER)


@contextlib.contextmanager
def patched() -> Iterator[None]:
    """``with patched():`` patches inside the block; a patch that was there before stays."""
    before = is_patched()
    patch()
    try:
        yield
    finally:
        if not before:
            unpatch()


def is_patched() -> bool:
    """Whether every fix for the installed NNI is live on the stock classes right now."""
    try:
        return all(patch_map().values())
    except fixes.UnsupportedReleaseError:
        return False


def patch_map() -> Dict[str, bool]:
    """Target -> whether its fix is live, read from the attributes themselves.

    Raises
    ------
    UnsupportedReleaseError
        As :func:`patch`.
    """
    return {row.target: patching.is_live(row) for row in fixes.rows_for(fixes.installed_release())}
