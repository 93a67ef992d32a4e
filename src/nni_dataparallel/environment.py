"""The environment variables, parsed strictly: what is neither yes nor no is an error, not a guess."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` is not worth importing at the start of every interpreter
    from typing import Optional

__all__ = ["DISABLE", "ENABLE", "STATISTICS", "VARIABLES", "disabled", "enabled", "statistics"]

ENABLE = "NNI_DATAPARALLEL"
DISABLE = "NNI_DATAPARALLEL_DISABLE"
STATISTICS = "NNI_DATAPARALLEL_STATISTICS"
VARIABLES = (ENABLE, DISABLE, STATISTICS)

_FLAGS = {"1": True, "true": True, "on": True, "yes": True, "0": False, "false": False, "off": False, "no": False}
_MODES = ("global", "local")


def _flag(name: str) -> bool:
    value = os.environ.get(name, "").strip().lower()
    if not value:
        return False
    if value not in _FLAGS:
        raise ValueError(f"the environment variable {name} is 1, true, on, yes, 0, false, off or no, not {os.environ[name]!r}")
    return _FLAGS[value]


def enabled() -> bool:
    """``NNI_DATAPARALLEL``: whether every interpreter of this environment patches NNI."""
    return _flag(ENABLE)


def disabled() -> bool:
    """``NNI_DATAPARALLEL_DISABLE``: whether ``auto``, ``run`` and ``NNI_DATAPARALLEL`` leave NNI alone."""
    return _flag(DISABLE)


def statistics() -> Optional[str]:
    """``NNI_DATAPARALLEL_STATISTICS``: the ``statistics`` of ``patch()``, or None."""
    value = os.environ.get(STATISTICS, "").strip()
    if value and value not in _MODES:
        raise ValueError(f'the environment variable {STATISTICS} is "global" or "local", not {value!r}')
    return value or None
