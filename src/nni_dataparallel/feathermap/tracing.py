"""Is this call traced? Then it must be pure: no state of the thread, nothing in place."""

from __future__ import annotations

from typing import Callable, Optional

import torch

__all__ = ["compiling", "traced"]

_is_compiling: Optional[Callable[[], bool]] = getattr(getattr(torch, "compiler", None), "is_compiling", None)


def compiling() -> bool:
    """Whether torch.compile or torch.export traces this call (torch >= 2.1)."""
    return _is_compiling is not None and _is_compiling()


def traced() -> bool:
    """Whether anything traces this call: these, an ONNX export, torch.jit.trace."""
    return compiling() or torch.onnx.is_in_onnx_export() or torch.jit.is_tracing()  # type: ignore[attr-defined]
