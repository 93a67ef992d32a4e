"""``patch`` and its relatives: the fix table applied to the stock classes in place."""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
from typing import Any, Callable, Dict, Iterator, List, Optional

from wrapt import register_post_import_hook

from . import environment, fixes, hook, patching, replicas
from .notices import PatchWarning, warn

__all__ = ["arm", "is_armed", "is_patched", "is_waiting", "patch", "patch_map", "patched", "skipped", "unpatch", "unpatched"]

HOLDER = "patch"
logger = logging.getLogger("nni_dataparallel")
logger.addHandler(logging.NullHandler())
_armed = False
_announced = False
_hooked: List[str] = []
_skipped: Dict[str, str] = {}


def arm() -> None:
    """Patch what of NNI is imported now, and the rest as soon as it is; what ``auto`` comes to once NNI is imported.

    What cannot be patched is said in a :class:`PatchWarning`, and the script goes on with stock NNI. The environment
    variable ``NNI_DATAPARALLEL_STATISTICS`` is the ``statistics`` of :func:`patch`.

    Raises
    ------
    ValueError
        When the variable is neither ``global`` nor ``local``.
    """
    global _armed
    hook.stop()
    mode = environment.statistics()
    if mode is not None:
        replicas.merge_statistics(mode)
    try:
        rows = fixes.rows_for(fixes.installed_release())
    except fixes.UnsupportedReleaseError as error:
        warn(str(error), PatchWarning)
        return
    _armed = True
    for row in rows:
        if row.module in sys.modules or not row.module.startswith("nni."):
            _install_if_armed(row)(importlib.import_module(row.module))
        else:
            _wait_for_import(row)
    _announce(rows)


def _announce(rows: List[patching.Fix]) -> None:
    """One line in the log when everything that does not wait for a script's own import is in place."""
    global _announced
    if _announced or not all(row.on_import or patching.is_live(row) or row.target in _skipped for row in rows):
        return
    _announced = True
    count = sum(patching.is_live(row) for row in rows)
    logger.info("NNI %s patched: %d fixes, %s statistics", fixes.installed_release(), count, replicas.merged_statistics())


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
            _skipped.pop(row.target, None)
            logger.debug("applied the fix %r to %s", row.name, row.target)
        else:
            _skipped[row.target] = problem
            warn(f"skipped the fix {row.name!r}: {problem}", PatchWarning)
        if not _announced:
            _announce(fixes.rows_for(fixes.installed_release()))

    return install


def patch(statistics: Optional[str] = None) -> None:
    """Repair the stock NNI classes in place; doing it twice is doing it once.

    Classes imported earlier (``from nni... import QAT_Quantizer``) are reached too. Pruners are repaired
    when the script imports them.

    Parameters
    ----------
    statistics : {"global", "local"}, optional
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

    Examples
    --------
    >>> import nni_dataparallel
    >>> nni_dataparallel.patch()
    >>> nni_dataparallel.is_patched()
    True
    >>> nni_dataparallel.patch(statistics="local")
    >>> nni_dataparallel.status()["statistics"]
    'local'
    >>> nni_dataparallel.unpatch()
    """
    global _armed
    rows = fixes.rows_for(fixes.installed_release())
    patching.require(row for row in rows if row.due)  # imports modules, by which other rows may become due
    patching.require(row for row in rows if row.due)
    if statistics is not None:
        replicas.merge_statistics(statistics)
    hook.stop()
    _armed = True
    for row in rows:
        if row.due:
            patching.install(row, HOLDER)
        else:
            _wait_for_import(row)
    _skipped.clear()
    _announce(rows)


def unpatch() -> None:
    """Put every stock attribute back, by identity; NNI modules imported later stay stock, too.

    The functions of ``torch.nn.parallel`` that a fixed subclass in use needs stay wrapped. Statistics are ``"global"`` again.
    Without a patch nothing happens. What other code has put in the place of a fix stays, with a :class:`PatchWarning`.

    Examples
    --------
    >>> import nni_dataparallel
    >>> nni_dataparallel.patch()
    >>> nni_dataparallel.unpatch()
    >>> nni_dataparallel.is_patched()
    False
    """
    global _armed, _announced
    hook.stop()
    _armed = _announced = False
    _skipped.clear()
    replicas.merge_statistics("global")
    for row in reversed(fixes.FIXES):
        patching.uninstall(row, HOLDER)


@contextlib.contextmanager
def patched(statistics: Optional[str] = None) -> Iterator[None]:
    """``with patched():`` patches inside the block, around everything that trains.

    A patch that was there before, or armed, stays, and so does its ``statistics``.

    Parameters
    ----------
    statistics : {"global", "local"}, optional
        As in :func:`patch`.

    Raises
    ------
    ValueError, UnsupportedReleaseError, PatchError
        As :func:`patch`; the block does not run then.

    Examples
    --------
    >>> import nni_dataparallel
    >>> with nni_dataparallel.patched():
    ...     nni_dataparallel.is_patched()
    True
    >>> nni_dataparallel.is_patched()
    False
    """
    before, mode = is_armed() or is_patched(), replicas.merged_statistics()
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
    before, mode = is_armed(), replicas.merged_statistics()
    unpatch()
    try:
        yield
    finally:
        if before:
            arm()
        else:
            unpatch()
        replicas.merge_statistics(mode)


def is_armed() -> bool:
    """Whether what of NNI is imported from now on will be patched."""
    return _armed or hook.waiting()


def is_waiting() -> bool:
    """Whether nothing is patched until NNI's compressors are imported."""
    return hook.waiting()


def skipped() -> Dict[str, str]:
    """Target -> why ``auto`` left its fix out."""
    return dict(_skipped)


def is_patched() -> bool:
    """Whether every fix for the installed NNI is live on the stock classes right now (of pruners: if imported).

    After ``import nni_dataparallel.auto`` this is False until NNI's compressors are imported. Without NNI, or with a release that
    is unknown, it is False.

    Returns
    -------
    bool

    Examples
    --------
    >>> import nni_dataparallel
    >>> nni_dataparallel.is_patched()
    False
    >>> nni_dataparallel.patch()
    >>> nni_dataparallel.is_patched()
    True
    """
    try:
        return all(patch_map().values())
    except fixes.UnsupportedReleaseError:
        return False


def patch_map() -> Dict[str, bool]:
    """Target -> whether its fix is live, read from the attributes themselves; pruners only once they are imported.

    Returns
    -------
    dict of str to bool
        A target is ``"module:Class.method"``; only those of the installed release are there.

    Raises
    ------
    UnsupportedReleaseError
        As :func:`patch`.

    Examples
    --------
    >>> import nni_dataparallel
    >>> with nni_dataparallel.patched():
    ...     nni_dataparallel.patch_map()["torch.nn.parallel.distributed:DistributedDataParallel.forward"]
    True
    """
    rows = fixes.rows_for(fixes.installed_release())
    return {row.target: patching.is_live(row) for row in rows if row.due}
