"""The step counter: the buffer ``steps`` of the model.

NNI reads it with ``int()`` in every layer, which on a GPU waits for the device each time. Here it
is read once per change.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, Callable, Tuple

from torch import Tensor

from .wrapping import follow_parameters

__all__ = ["idle", "read_steps", "start_step", "step_with_optimizer", "warming_up"]

_lock = threading.Lock()
_read: weakref.WeakKeyDictionary[Any, Tuple[Any, int, int]] = weakref.WeakKeyDictionary()


def read_steps(quantizer: Any) -> int:
    """The value of ``quantizer.bound_model.steps``; the device is asked once per change of it."""
    steps: Tensor = quantizer.bound_model.steps
    if steps.is_inference():  # has no version to tell a change by
        return int(steps)
    known = _read.get(quantizer)
    if known is not None and known[0]() is steps and known[1] == steps._version:
        return known[2]
    with _lock:  # replicas ask at the same time; one of them reads
        known = _read.get(quantizer)
        if known is None or known[0]() is not steps or known[1] != steps._version:
            version = steps._version
            known = _read[quantizer] = (weakref.ref(steps), version, int(steps))
    return known[2]


def start_step(wrapper: Any) -> int:
    """The ``quant_start_step`` of ``wrapper``'s layer."""
    settings = wrapper.module.__dict__.get("layer_quant_setting")
    if settings is None:
        return wrapper.config.get("quant_start_step", 0)  # type: ignore[no-any-return]
    return settings.quant_start_step  # type: ignore[no-any-return]


def warming_up(wrapper: Any) -> bool:
    """Whether ``wrapper``'s layer is before its ``quant_start_step``."""
    start = start_step(wrapper)
    return start > 1 and start > read_steps(wrapper.quantizer)


def idle(wrapper: Any) -> bool:
    """Whether ``wrapper``'s layer computes in floating point: warming up, or evaluated before it was ever trained."""
    if warming_up(wrapper):
        return True
    if wrapper.training:
        return False
    state = wrapper.__dict__.get("unquantised")
    return state is not None and state.holds(wrapper.module)


def step_with_optimizer(stock: Callable[..., None], self: Any) -> None:
    """``QAT_Quantizer.step_with_optimizer``: count, without asking the device what it counted."""
    before = read_steps(self)
    stock(self)
    steps: Tensor = self.bound_model.steps
    warm = [wrapper for wrapper in self.get_modules_wrapper() if start_step(wrapper) > before]
    if warm:
        # While the number decides something it is read once a step: `.data` changes it without a trace.
        _read.pop(self, None)
    elif not steps.is_inference():
        _read[self] = (weakref.ref(steps), steps._version, before + 1)
    for wrapper in warm:
        follow_parameters(wrapper)
