"""In which surroundings does this call run?"""

from __future__ import annotations

from typing import Callable, Dict, Optional

import torch

__all__ = ["autocasting", "compiling", "traced"]

_is_compiling: Optional[Callable[[], bool]] = getattr(getattr(torch, "compiler", None), "is_compiling", None)


_by_device = hasattr(torch, "get_autocast_dtype")  # torch >= 2.4


def autocasting(kind: str) -> bool:
    """Whether autocast is on for ``"cpu"`` or ``"cuda"``; other devices answer in torch >= 2.4."""
    if kind == "meta":
        return False
    if _by_device:
        return torch.is_autocast_enabled(kind)
    asked: Dict[str, Callable[[], bool]] = {"cpu": torch.is_autocast_cpu_enabled, "cuda": torch.is_autocast_enabled}
    return kind in asked and asked[kind]()


def compiling() -> bool:
    """Whether torch.compile or torch.export traces this call (torch >= 2.1); then it must be pure."""
    return _is_compiling is not None and _is_compiling()


def traced() -> bool:
    """Whether anything traces this call: these, an ONNX export, torch.jit.trace."""
    return compiling() or torch.onnx.is_in_onnx_export() or torch.jit.is_tracing()  # type: ignore[attr-defined]
