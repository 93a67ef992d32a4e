"""The step counter: the buffer ``steps`` of the model.

NNI reads it with ``int()`` in every layer, which on a GPU waits for the device each time. Here it
is read once per change.
"""

from __future__ import annotations

import weakref
from typing import Any, Callable, Tuple

from torch import Tensor

from .wrapping import follow_parameters

__all__ = ["read_steps", "step_with_optimizer", "warming_up"]

_read: weakref.WeakKeyDictionary[Any, Tuple[Any, int, int]] = weakref.WeakKeyDictionary()


def read_steps(quantizer: Any) -> int:
    """The value of ``quantizer.bound_model.steps``; the device is asked once per change of it."""
    steps: Tensor = quantizer.bound_model.steps
    if steps.is_inference():  # has no version to tell a change by
        return int(steps)
    known = _read.get(quantizer)
    if known is not None and known[0]() is steps and known[1] == steps._version:
        return known[2]
    version, value = steps._version, int(steps)
    _read[quantizer] = (weakref.ref(steps), version, value)
    return value


def warming_up(wrapper: Any) -> bool:
    """Whether ``wrapper``'s layer is before its ``quant_start_step``."""
    start: int = wrapper.config.get("quant_start_step", 0)
    return start > 1 and start > read_steps(wrapper.quantizer)


def step_with_optimizer(stock: Callable[..., None], self: Any) -> None:
    """``QAT_Quantizer.step_with_optimizer``: count, without asking the device what it counted."""
    before = read_steps(self)
    stock(self)
    steps: Tensor = self.bound_model.steps
    if not steps.is_inference():
        _read[self] = (weakref.ref(steps), steps._version, before + 1)
    for wrapper in self.get_modules_wrapper():
        if wrapper.config.get("quant_start_step", 0) > before:
            follow_parameters(wrapper)
