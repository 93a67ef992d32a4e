"""Wait for the first import of some modules. Standard library only: interpreters start with it."""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` is not worth importing at the start of every interpreter
    from typing import Any, Callable, FrozenSet, Optional

__all__ = ["stop", "waiting", "watch"]


class _Watcher:
    """A finder that finds nothing: the import system asks it first, that is all.

    It stays in ``sys.meta_path`` when it is done: the import system walks along that list while it asks.
    """

    def __init__(self) -> None:
        self.names: FrozenSet[str] = frozenset()
        self.callback: Optional[Callable[[], None]] = None

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if self.callback is not None and name in self.names:
            callback, self.callback = self.callback, None
            callback()


_watcher = _Watcher()


def watch(names: FrozenSet[str], callback: Callable[[], None]) -> None:
    """Call ``callback`` once, before the first of the modules ``names`` is imported; at once if one of them is."""
    if not names.isdisjoint(sys.modules):
        stop()
        callback()
        return
    _watcher.names, _watcher.callback = names, callback
    if _watcher not in sys.meta_path:
        sys.meta_path.insert(0, _watcher)  # type: ignore[arg-type]


def stop() -> None:
    """Wait no longer."""
    _watcher.callback = None


def waiting() -> bool:
    """Whether the modules are still to come."""
    return _watcher.callback is not None
