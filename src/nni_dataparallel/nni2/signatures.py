"""How NNI's releases call a quantizer's methods, brought down to one form.

A *rule* is ``rule(quantizer, tensor, module, config, name) -> Tensor``. 1.4 calls ``quantize_weight``
and ``quantize_output`` with the tensor, the config and the layer; 1.5 adds the wrapper instead; from
1.9 on ``quantize_weight`` finds the weight itself and leaves the result in the buffer ``weight``.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, Optional, Tuple

import torch
from torch import Tensor

__all__ = ["Rule", "bits_of", "note_bits", "output_rule", "weight_of", "weight_rule"]

Rule = Callable[[Any, Tensor, Any, Any, str], Tensor]
_Method = Callable[..., Any]


def bits_of(config: Any, slot: str) -> int:
    """The bit width that a layer's config gives for ``"weight"``, ``"input"`` or ``"output"``."""
    bits = config["quant_bits"]
    return bits if isinstance(bits, int) else bits[slot]


def weight_of(wrapper: Any) -> Tensor:
    """What ``quantize_weight`` has to quantise, with its graph: the trained weight, or what folding made of it."""
    folded = getattr(wrapper, "bn_module", None) is not None
    weight: Tensor = wrapper.module._buffers["weight"] if folded else wrapper.module.old_weight
    return weight


def note_bits(module: Any, name: str, bits: int) -> None:
    """Keep the bit width in its buffer, which lives on the model's device (2.2 - 2.4)."""
    buffer: Optional[Tensor] = module._buffers.get(name)
    if buffer is not None:
        # Assigned, not written: under inference_mode a replica's buffers refuse to be written to by its thread.
        module._buffers[name] = torch.full_like(buffer, bits)


def _of_layer(rule: Rule) -> _Method:
    def fix(stock: _Method, self: Any, tensor: Tensor, config: Any, op: Any = None, op_name: str = "", **rest: Any) -> Tensor:
        return rule(self, tensor, op, config, op_name)

    return fix


def _of_wrapper(rule: Rule) -> _Method:
    def fix(stock: _Method, self: Any, tensor: Tensor, wrapper: Any, **rest: Any) -> Tensor:
        return rule(self, tensor, wrapper.module, wrapper.config, wrapper.name)

    return fix


def _of_buffer(rule: Rule) -> _Method:
    def fix(stock: _Method, self: Any, wrapper: Any, **rest: Any) -> Tensor:
        module = wrapper.module
        quantised = rule(self, weight_of(wrapper).detach(), module, wrapper.config, wrapper.name)
        module._buffers["weight"] = quantised
        return quantised

    return fix


def weight_rule(rule: Rule) -> Dict[str, Tuple[_Method, Tuple[str, ...]]]:
    """Releases -> (fix, expected parameters) for ``quantize_weight``."""
    return {
        "<1.5": (_of_layer(rule), ("self", "weight", "config")),
        ">=1.5,<1.9": (_of_wrapper(rule), ("self", "weight", "wrapper")),
        ">=1.9": (_of_buffer(rule), ("self", "wrapper")),
    }


def output_rule(rule: Rule) -> Dict[str, Tuple[_Method, Tuple[str, ...]]]:
    """Releases -> (fix, expected parameters) for ``quantize_output``."""
    return {
        "<1.5": (_of_layer(rule), ("self", "output", "config", "op")),
        ">=1.5": (_of_wrapper(rule), ("self", "output", "wrapper")),
    }
