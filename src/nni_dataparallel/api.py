"""``patch`` and its relatives: the fix table applied to the stock classes in place."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import warnings
from typing import Any, Callable, Dict, Iterator, List, Optional

from wrapt import register_post_import_hook

from . import fixes, patching, replicas

__all__ = ["arm", "is_patched", "patch", "patch_map", "patched", "unpatch", "unpatched"]

HOLDER = "patch"
VARIABLE = "NNI_DATAPARALLEL_STATISTICS"
_armed = False
_hooked: List[str] = []


def arm() -> None:
    """Patch what of NNI is imported now, and the rest as soon as it is; what ``auto`` does.

    What cannot be patched is said in a :class:`PatchWarning`, and the script goes on with stock NNI. The environment
    variable ``NNI_DATAPARALLEL_STATISTICS`` is the ``statistics`` of :func:`patch`.

    Raises
    ------
    ValueError
        When the variable is neither ``global`` nor ``local``.
    """
    global _armed
    if os.environ.get(VARIABLE):
        try:
            replicas.merge_statistics(os.environ[VARIABLE])
        except ValueError as error:
            raise ValueError(f"the environment variable {VARIABLE}: {error}") from None
    try:
        rows = fixes.rows_for(fixes.installed_release())
    except fixes.UnsupportedReleaseError as error:
        warnings.warn(str(error), patching.PatchWarning, stacklevel=3)
        return
    _armed = True
    for row in rows:
        if row.module in sys.modules or not row.module.startswith("nni."):
            _install_if_armed(row)(importlib.import_module(row.module))
        else:
            _wait_for_import(row)


def _wait_for_import(row: patching.Fix) -> None:
    if row.target not in _hooked:
        _hooked.append(row.target)
        register_post_import_hook(_install_if_armed(row), row.module)


def _install_if_armed(row: patching.Fix) -> Callable[[Any], None]:
    def install(module: Any) -> None:
        if not _armed:
            return
        problem = patching.check(row)
        if problem is None:
            patching.install(row, HOLDER)
        else:
            warnings.warn(f"skipped the fix {row.name!r}: {problem}", patching.PatchWarning, stacklevel=2)

    return install


def patch(statistics: Optional[str] = None) -> None:
    """Repair the stock NNI classes in place; doing it twice is doing it once.

    Classes imported earlier (``from nni... import QAT_Quantizer``) are reached too. Pruners are repaired
    when the script imports them.

    Parameters
    ----------
    statistics
        ``"global"``: ranges and other statistics are those of the whole batch, over all replicas of ``DataParallel`` and
        all ranks of ``DistributedDataParallel``; the numbers are those of one device. ``"local"``: no replica waits for
        another and no rank communicates; what replica 0 (each rank) sees of the batch counts, and before the next forward
        DDP gives all ranks what rank 0 saw, as with torch's ``BatchNorm``. Faster; the numbers are not those of one device.
        Left out, it stays as it is, at first ``"global"``. It holds for the subclasses, too.

    Raises
    ------
    ValueError
        When ``statistics`` is something else. Nothing is patched then.
    UnsupportedReleaseError
        When NNI is missing, of an unknown release, or of one without fixes.
    PatchError
        When the installed NNI does not look like its release. Nothing is patched then.
    """
    global _armed
    rows = fixes.rows_for(fixes.installed_release())
    patching.require(row for row in rows if row.due)  # imports modules, by which other rows may become due
    patching.require(row for row in rows if row.due)
    if statistics is not None:
        replicas.merge_statistics(statistics)
    _armed = True
    for row in rows:
        if row.due:
            patching.install(row, HOLDER)
        else:
            _wait_for_import(row)


def unpatch() -> None:
    """Put every stock attribute back, by identity; NNI modules imported later stay stock, too.

    The functions of ``torch.nn.parallel`` that a fixed subclass in use needs stay wrapped. Statistics are ``"global"`` again.
    """
    global _armed
    _armed = False
    replicas.merge_statistics("global")
    for row in reversed(fixes.FIXES):
        patching.uninstall(row, HOLDER)


@contextlib.contextmanager
def patched(statistics: Optional[str] = None) -> Iterator[None]:
    """``with patched():`` patches inside the block, with the ``statistics`` of :func:`patch`.

    A patch that was there before, or armed, stays, and so does its ``statistics``.
    """
    before, mode = _armed or is_patched(), replicas.merged_statistics()
    patch(statistics)
    try:
        yield
    finally:
        if not before:
            unpatch()
        replicas.merge_statistics(mode)


@contextlib.contextmanager
def unpatched() -> Iterator[None]:
    """``with unpatched():`` has stock NNI inside the block; a patch that was there before, or armed, comes back."""
    before, mode = _armed, replicas.merged_statistics()
    unpatch()
    try:
        yield
    finally:
        if before:
            arm()
        else:
            unpatch()
        replicas.merge_statistics(mode)


def is_patched() -> bool:
    """Whether every fix for the installed NNI is live on the stock classes right now (of pruners: if imported).

    After ``import nni_dataparallel.auto`` this is False until NNI's compressors are imported.
    """
    try:
        return all(patch_map().values())
    except fixes.UnsupportedReleaseError:
        return False


def patch_map() -> Dict[str, bool]:
    """Target -> whether its fix is live, read from the attributes themselves; pruners only once they are imported.

    Raises
    ------
    UnsupportedReleaseError
        As :func:`patch`.
    """
    rows = fixes.rows_for(fixes.installed_release())
    return {row.target: patching.is_live(row) for row in rows if row.due}
