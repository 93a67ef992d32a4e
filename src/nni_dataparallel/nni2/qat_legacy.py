"""``QAT_Quantizer`` of NNI 2.0 - 2.4: one scale and zero point that weight and output share."""

from __future__ import annotations

from typing import Any, Callable, Tuple

import torch
from torch import Tensor

from ..statistics import batch_range, qparams
from .bias import quantize_bias
from .observers import rounded_by_layer, track
from .signatures import bits_of, note_bits
from .steps import idle, warming_up
from .wrapping import grad_wanted, note_quantised

__all__ = ["OUTPUT_2_0", "OUTPUT_2_2", "quantize_output", "quantize_weight"]

INPUT = ("tracked_min_input", "tracked_max_input")
OUTPUT_2_0 = ("tracked_min_biased", "tracked_max_biased")
OUTPUT_2_2 = ("tracked_min_activation", "tracked_max_activation")


def _affine(low: Tensor, high: Tensor, bits: int) -> Tuple[Tensor, Tensor]:
    qmax = (1 << bits) - 1
    # As NNI does it: the comparison with a tensor of shape [1] and default dtype decides shape and dtype. But a
    # half precision model stays one, or its next layer would refuse the result.
    half = low.dtype if low.dtype in (torch.float16, torch.bfloat16) else None
    zero = torch.zeros(1, device=low.device, dtype=half)
    low, high = torch.min(low, zero), torch.max(high, zero)
    return qparams(low, high, 0, qmax, torch.full_like(zero, float(qmax)))


def _hold(module: Any) -> None:
    """Let backward save copies of scale and zero point: the buffers are written to later."""
    if grad_wanted():
        buffers = module._buffers
        buffers["scale"], buffers["zero_point"] = buffers["scale"].clone(), buffers["zero_point"].clone()


def quantize_weight(with_bias: bool) -> Callable[..., Tensor]:
    """Make the fix for ``QAT_Quantizer.quantize_weight``.

    Parameters
    ----------
    with_bias
        Whether the release quantises the bias in place too (2.0 - 2.3).
    """

    def fix(stock: Callable[..., Any], self: Any, wrapper: Any, **kwargs: Any) -> Tensor:
        module, bits = wrapper.module, bits_of(wrapper.config, "weight")
        buffers = module._buffers
        trained: Tensor = module.old_weight.detach()
        warm, still = warming_up(wrapper), idle(wrapper)
        inputs = kwargs.get("input_tensor")
        if inputs is not None and INPUT[0] in buffers and (warm or wrapper.training):
            track(inputs, wrapper, "input", INPUT, module.ema_decay, average=not warm)
        if still or not wrapper.training:
            _hold(module)
            if getattr(wrapper, "bn_module", None) is None:
                if still:
                    buffers["weight"] = trained
                elif grad_wanted():
                    # Evaluation uses what the last training forward left in the buffer; a copy of it,
                    # because the next one writes into the buffer while backward may need this one.
                    buffers["weight"] = buffers["weight"].detach().clone()
            return trained
        if with_bias:
            quantize_bias(module, _affine)
        buffers["scale"], buffers["zero_point"] = _affine(*batch_range(trained), bits)
        quantised = rounded_by_layer(self, trained, module, bits)
        note_bits(module, "weight_bit", bits)
        note_quantised(wrapper)
        buffers["weight"] = quantised
        return quantised

    return fix


def quantize_output(names: Tuple[str, str]) -> Callable[..., Tensor]:
    """Make the fix for ``QAT_Quantizer.quantize_output``.

    Parameters
    ----------
    names
        The buffers in which the release keeps the output's range.
    """

    def fix(stock: Callable[..., Any], self: Any, output: Tensor, wrapper: Any, **kwargs: Any) -> Tensor:
        module, bits = wrapper.module, bits_of(wrapper.config, "output")
        note_bits(module, "activation_bit", bits)
        if warming_up(wrapper):
            track(output, wrapper, "output", names, module.ema_decay, average=False)
        if idle(wrapper):
            _hold(module)
            return output
        if wrapper.training:
            low, high = track(output, wrapper, "output", names, module.ema_decay)
            module._buffers["scale"], module._buffers["zero_point"] = _affine(low, high, bits)
            note_quantised(wrapper)
        else:
            _hold(module)
        return rounded_by_layer(self, output, module, bits)

    return fix
