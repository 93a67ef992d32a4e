"""What ends a command with one line instead of a traceback."""

from __future__ import annotations

__all__ = ["CommandError"]


class CommandError(Exception):
    """A command cannot do what it was asked: the text says why and what to do, ``status`` is the exit status."""

    def __init__(self, text: str, status: int = 2) -> None:
        super().__init__(text)
        self.status = status
