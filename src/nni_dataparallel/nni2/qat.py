"""``QAT_Quantizer`` of NNI 2.5 - 2.10.1: separate scales for input, weight and output."""

from __future__ import annotations

from typing import Any, Callable, List, Optional, Tuple

import torch
from torch import Tensor

from ..statistics import batch_range, fake_quantize, qparams
from .observers import track
from .steps import read_steps, warming_up

__all__ = ["quantize_input", "quantize_output", "quantize_weight"]

_CHANNEL = {"input": 1, "weight": 0, "output": 1}


def _channel_dims(x: Tensor, setting: Any, slot: str) -> Optional[List[int]]:
    """The dimensions to reduce: all but the channel's, or None for one range per tensor."""
    if not str(getattr(setting.quant_scheme, "value", setting.quant_scheme)).startswith("per_channel"):
        return None
    return [dim for dim in range(x.dim()) if dim != _CHANNEL[slot]]


def _qparams(low: Tensor, high: Tensor, setting: Any) -> Tuple[Tensor, Tensor]:
    qmin, qmax = setting.get_qmin_qmax()
    symmetric = str(getattr(setting.quant_scheme, "value", setting.quant_scheme)).endswith("symmetric")
    unsigned = str(getattr(setting.quant_dtype, "value", setting.quant_dtype)) == "uint"
    middle = (qmin + qmax) // 2 if unsigned else 0
    return qparams(low, high, qmin, qmax, float(qmax - qmin), symmetric, middle)


def _assign(module: Any, slot: str, scale: Tensor, zero_point: Tensor) -> None:
    for name, value in ((f"{slot}_scale", scale), (f"{slot}_zero_point", zero_point)):
        buffer = module._buffers[name]
        setattr(module, name, value.to(buffer.dtype).reshape(buffer.shape))


def _with_stored(x: Tensor, module: Any, slot: str, qmin: int, qmax: int) -> Tensor:
    """Quantise with the stored scale; a scale of 0 was never set, then ``x`` stays what it is."""
    # Copies, for backward to keep: the buffers are written to by later forwards.
    scale = module._buffers[f"{slot}_scale"].clone()
    zero_point = module._buffers[f"{slot}_zero_point"].clone()
    _assign(module, slot, scale, zero_point)
    quantised = fake_quantize(x, scale, zero_point, qmin, qmax)
    return torch.where(scale == 0, x, quantised)


def quantize_weight(stock: Callable[..., Any], self: Any, wrapper: Any, **kwargs: Any) -> Tensor:
    """``QAT_Quantizer.quantize_weight``: a fresh tensor each time, recorded after the forward."""
    module = wrapper.module
    weight: Tensor = module.weight
    setting = module.layer_quant_setting.weight
    qmin, qmax = setting.get_qmin_qmax()
    if not wrapper.training:
        quantised = _with_stored(weight, module, "weight", qmin, qmax)
    elif warming_up(wrapper):
        return weight
    else:
        low, high = batch_range(weight, _channel_dims(weight, setting, "weight"))
        scale, zero_point = _qparams(low, high, setting)
        _assign(module, "weight", scale, zero_point)
        quantised = fake_quantize(weight, scale, zero_point, qmin, qmax)
    module.weight = quantised
    return quantised


def _quantize_activation(self: Any, x: Tensor, wrapper: Any, slot: str) -> Tensor:
    module = wrapper.module
    settings = module.layer_quant_setting
    setting = getattr(settings, slot)
    qmin, qmax = setting.get_qmin_qmax()
    if not wrapper.training:
        return _with_stored(x, module, slot, qmin, qmax)
    names = (f"tracked_min_{slot}", f"tracked_max_{slot}")
    first = read_steps(self) == 1
    low, high = track(x, wrapper, slot, names, settings.ema_decay, first, dims=_channel_dims(x, setting, slot))
    if warming_up(wrapper):
        return x
    scale, zero_point = _qparams(low, high, setting)
    _assign(module, slot, scale, zero_point)
    return fake_quantize(x, scale, zero_point, qmin, qmax)


def quantize_input(stock: Callable[..., Any], self: Any, inputs: Tensor, wrapper: Any, **kwargs: Any) -> Tensor:
    """``QAT_Quantizer.quantize_input``: the range of the whole batch."""
    return _quantize_activation(self, inputs, wrapper, "input")


def quantize_output(stock: Callable[..., Any], self: Any, output: Tensor, wrapper: Any, **kwargs: Any) -> Tensor:
    """``QAT_Quantizer.quantize_output``: the range of the whole batch."""
    return _quantize_activation(self, output, wrapper, "output")
