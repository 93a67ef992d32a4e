"""Patching armed without importing torch or NNI: what ``auto``, ``run`` and an interpreter with NNI_DATAPARALLEL=1 do.

NNI's compressors are what is patched; a process that never imports them (nnictl, a tuner, pip) pays for nothing. Nor is
torch imported before the script does so: by then it may have set OMP_NUM_THREADS or CUDA_VISIBLE_DEVICES.
"""

from __future__ import annotations

import sys

from . import environment, hook

__all__ = ["COMPRESSORS", "at_interpreter_start", "start"]

COMPRESSORS = frozenset({"nni.compression", "nni.algorithms.compression"})
"""Packages that hold every NNI module with a fix."""
_told = False


def start() -> bool:
    """Patch NNI's compressors when they are imported, or now if they are; False where the environment says not to.

    What cannot be patched is said in a :class:`PatchWarning`, and the script goes on with stock NNI.

    Raises
    ------
    ValueError
        When one of the environment variables has a value that it cannot have.
    """
    from . import notices, releases

    environment.statistics()  # an error now, not when NNI is imported
    if environment.disabled():
        return False
    try:
        releases.require_present()
    except releases.UnsupportedReleaseError as error:
        notices.warn(str(error), notices.PatchWarning)
        return True
    hook.watch(COMPRESSORS, _arm)
    return True


def at_interpreter_start() -> None:
    """What ``nni_dataparallel.pth`` calls where NNI_DATAPARALLEL is set.

    An error here would be shown by every interpreter: a line says what is wrong, NNI stays stock. In a virtual environment
    Python reads its ``.pth`` files twice.
    """
    global _told
    try:
        environment.statistics()
        if environment.enabled() and not environment.disabled():
            hook.watch(COMPRESSORS, _arm)
    except ValueError as error:
        if sys.stderr is not None and not _told:
            _told = True
            sys.stderr.write(f"nni_dataparallel: {error}; NNI stays as it is\n")


def _arm() -> None:
    try:
        from .api import arm

        arm()
    except Exception as error:  # in the middle of the script's `import nni...`, which must go on
        from . import notices

        notices.warn(f"NNI cannot be patched and stays as it is: {type(error).__name__}: {error}", notices.PatchWarning)
