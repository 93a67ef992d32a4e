"""The wrapper of NNI 2.x: its ``weight`` is a buffer of its own, its updates outlive a replica.

NNI keeps the trained weight as the Parameter ``old_weight`` and registers the same object (2.0 -
2.4) or an alias of its storage (2.5 - 2.10.1) as the buffer ``weight``. The alias is broadcast
through autograd, cannot be assigned on a replica without grad, and lets ``load_state_dict``
overwrite the trained weight with the quantised one.
"""

from __future__ import annotations

import threading
from typing import Any, Callable

import torch
from torch.nn import Module, Parameter

from .. import replicas
from ..recording import recorded

__all__ = ["follow_parameters", "forward", "separate", "wrap_modules"]

_TRAINED = {"weight": "old_weight", "bias": "old_bias"}
_lock = threading.Lock()


def _aliased(module: Module, name: str) -> bool:
    buffer = module._buffers.get(name)
    trained = getattr(module, _TRAINED[name], None)
    if buffer is None or trained is None:
        return False
    return isinstance(buffer, Parameter) or buffer.data_ptr() == trained.data_ptr() != 0


def separate(wrapper: Any) -> None:
    """Give the ``weight`` (and folded ``bias``) buffers of ``wrapper.module`` storage of their own."""
    module = wrapper.module
    for name in _TRAINED:
        if _aliased(module, name):
            module._buffers[name] = module._buffers[name].detach().clone()


def wrap_modules(stock: Callable[..., Any], self: Any, layer: Any, config: Any) -> Any:
    """``Quantizer._wrap_modules``: a new wrapper starts with separate buffers."""
    wrapper = stock(self, layer, config)
    separate(wrapper)
    return wrapper


def forward(stock: Callable[..., Any], self: Any, *inputs: Any) -> Any:
    """``QuantizerModuleWrapper.forward``: record what it assigns."""
    module = self.module
    if _aliased(module, "weight"):
        # Built before the fixes were installed. The original has to be mended, not the replica,
        # or recording the quantised weight would overwrite the trained one.
        here = replicas.current()
        original = None if here is None else here.original(self)
        with _lock:
            for wrapper in (self, original):
                if wrapper is not None:
                    separate(wrapper)
    with recorded(module):
        return stock(self, *inputs)


def follow_parameters(wrapper: Any) -> None:
    """Copy the trained weight into the ``weight`` buffer, as stock's alias does by itself.

    For the steps before quantisation starts, when the layer computes with the trained weight.
    """
    module = wrapper.module
    trained = getattr(module, "old_weight", None)
    buffer = module._buffers.get("weight")
    if trained is not None and buffer is not None and getattr(wrapper, "bn_module", None) is None:
        with torch.no_grad():
            buffer.copy_(trained)
