"""Colours, only where a person looks."""

from __future__ import annotations

import os
import sys
from typing import TextIO

__all__ = ["coloured", "paint"]

_CODES = {"green": "32", "yellow": "33", "red": "31", "bold": "1", "dim": "2"}


def coloured(stream: TextIO) -> bool:
    """Whether ``stream`` is a terminal and nobody asked for plain text (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def paint(text: str, colour: str) -> str:
    """``text`` for standard output, coloured if that is a terminal."""
    return f"\033[{_CODES[colour]}m{text}\033[0m" if coloured(sys.stdout) else text
