"""Where in the user's code something happened: file and line out of a traceback or a stack."""

from __future__ import annotations

import linecache
import re
import sys
import sysconfig
import traceback
from pathlib import Path
from types import FrameType
from typing import List, NamedTuple, Optional, Tuple

import torch

__all__ = ["Fault", "Place", "caller", "fault_of"]

_LIBRARIES = tuple(
    str(folder) for folder in (Path(torch.__file__).parent, Path(__file__).parent.parent, sysconfig.get_paths()["stdlib"])
)
_INSTALLED = (sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"])
# A worker thread's exception reaches the caller as text only.
_FRAME = re.compile(r'^\s*File "([^"]+)", line (\d+), in (\S+)', re.MULTILINE)


class Place(NamedTuple):
    """A line of code."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    @property
    def code(self) -> str:
        """What stands there."""
        return linecache.getline(self.file, self.line).strip()


class Fault(NamedTuple):
    """An exception, and the user's line that it came from."""

    text: str
    place: Optional[Place]


def _rank(file: str) -> int:
    """2 for the user's files, 1 for NNI's, 0 for torch's, Python's and this package's."""
    if file.startswith("<"):
        return 0
    if file.startswith(_INSTALLED) or not file.startswith(_LIBRARIES):
        ours = file.startswith(_LIBRARIES[:2])
        return 0 if ours else 1 if "/nni/" in file.replace("\\", "/") else 2
    return 0


def _innermost(frames: List[Tuple[str, int]]) -> Optional[Place]:
    """The innermost line that is the user's or NNI's."""
    return next((Place(file, line) for file, line in reversed(frames) if _rank(file)), None)


def fault_of(error: BaseException) -> Fault:
    """The message of ``error`` without the traceback in it, and where it came from: first of all in a worker thread."""
    text = str(error)
    frames = [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]
    in_worker = [(file, int(line)) for file, line, _ in _FRAME.findall(text)]
    lines = [line.strip() for line in text.strip().splitlines()]
    if "Original Traceback (most recent call last):" in lines:
        message = next((s for s in reversed(lines) if re.match(r"[\w.]+(Error|Exception|Warning|Iteration)\b", s)), lines[-1])
    else:
        message = f"{type(error).__name__}: {lines[0] if lines else ''}"
    return Fault(message.rstrip(": "), _innermost(in_worker) or _innermost(frames))


def caller() -> Optional[Place]:
    """The line that called, if the nearest code outside torch and this package is the user's."""
    frame: Optional[FrameType] = sys._getframe(1)
    while frame is not None:
        rank = _rank(frame.f_code.co_filename)
        if rank:
            return Place(frame.f_code.co_filename, frame.f_lineno) if rank == 2 else None
        frame = frame.f_back
    return None
