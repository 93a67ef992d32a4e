"""Disks that are full, and files that are damaged."""

from __future__ import annotations

import contextlib
import os
import resource
from pathlib import Path
from typing import Dict, Iterator

SCALE = int(os.environ.get("ROBUSTNESS_SCALE", "1"))
"""More than 1: every bit and every length of a file instead of random ones, and as many times as many random trials."""


@contextlib.contextmanager
def full_disk(after: int = 0) -> Iterator[None]:
    """No file can grow beyond so many bytes: the system refuses to write, also what torch writes in C++."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (after, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def flipped(content: bytes, position: int, bit: int) -> bytes:
    """The same with one bit the other way round."""
    damaged = bytearray(content)
    damaged[position] ^= 1 << bit
    return bytes(damaged)


def files_in(folder: Path) -> Dict[str, bytes]:
    """Every file below a folder, hidden ones too, with its content."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
