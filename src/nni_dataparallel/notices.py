"""The package's own errors and warnings, and the line of the script at which a warning is told."""

from __future__ import annotations

import sys
import warnings

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` is not worth importing at the start of every interpreter
    from typing import Type

__all__ = ["NNIDataParallelRuntimeWarning", "NNIDataParallelWarning", "PatchError", "PatchWarning", "warn"]

INNER = frozenset({"nni", "nni_dataparallel", "torch", "wrapt", "importlib", "contextlib", "threading", "concurrent"})
"""Packages whose lines tell a reader nothing about his own script."""


class PatchError(RuntimeError):
    """A fix cannot be installed; nothing was changed.

    Examples
    --------
    >>> import nni_dataparallel
    >>> try:
    ...     nni_dataparallel.patch()
    ... except nni_dataparallel.PatchError as error:
    ...     print("training goes on with stock NNI:", error)
    """


class NNIDataParallelWarning(UserWarning):
    """Every warning of this package is one, told once per line of the script, at that line.

    Examples
    --------
    Stop instead of going on:

    >>> import warnings
    >>> from nni_dataparallel import NNIDataParallelWarning
    >>> warnings.simplefilter("error", NNIDataParallelWarning)
    """


class PatchWarning(NNIDataParallelWarning):
    """A fix was skipped, or could not be taken back; the script goes on with stock NNI in that place.

    Examples
    --------
    >>> from nni_dataparallel import NNIDataParallelWarning, PatchWarning
    >>> issubclass(PatchWarning, NNIDataParallelWarning)
    True
    """


class NNIDataParallelRuntimeWarning(NNIDataParallelWarning, RuntimeWarning):
    """Something in a forward keeps the numbers from being those of one device.

    Examples
    --------
    >>> from nni_dataparallel import NNIDataParallelRuntimeWarning, NNIDataParallelWarning
    >>> issubclass(NNIDataParallelRuntimeWarning, (NNIDataParallelWarning, RuntimeWarning))
    True
    """


def warn(text: str, category: Type[Warning] = NNIDataParallelWarning) -> None:
    """Warn at the line of the script that called NNI, torch or this package; once per line, as Python's filters say.

    Not by ``stacklevel``, which counts some frames of the import system and leaves out others. In a worker thread there
    is no line of the script: the outermost frame stands for it.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).partition(".")[0] in INNER:
        frame = frame.f_back
    place = frame.f_globals
    registry = place.setdefault("__warningregistry__", {})
    module = str(place.get("__name__", "<unknown>"))
    warnings.warn_explicit(text, category, frame.f_code.co_filename, frame.f_lineno, module=module, registry=registry)
