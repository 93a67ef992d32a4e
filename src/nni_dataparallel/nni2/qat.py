"""``QAT_Quantizer`` of NNI 2.5 - 2.10.1: separate scales for input, weight and output."""

from __future__ import annotations

from typing import Any, Callable, List, Optional, Tuple

import torch
from torch import Tensor

from ..statistics import batch_range, fake_quantize, qparams
from .observers import overridden, track
from .steps import idle, read_steps
from .wrapping import grad_wanted, note_quantised, was_calibrated

__all__ = ["quantize_input", "quantize_output", "quantize_weight", "scale_by_ranges"]

_CHANNEL = {"input": 1, "weight": 0, "output": 1}


def _text(literal: Any) -> str:
    """NNI takes its schemes and dtypes as strings and as members of a string enumeration."""
    return str(getattr(literal, "value", literal))


def _channel_dims(x: Tensor, setting: Any, slot: str) -> Optional[List[int]]:
    """The dimensions to reduce: all but the channel's, or None for one range per tensor."""
    if not _text(setting.quant_scheme).startswith("per_channel"):
        return None
    return [dim for dim in range(x.dim()) if dim != _CHANNEL[slot]]


def _qparams(low: Tensor, high: Tensor, setting: Any) -> Tuple[Tensor, Tensor]:
    qmin, qmax = setting.get_qmin_qmax()
    symmetric = _text(setting.quant_scheme).endswith("symmetric")
    middle = (qmin + qmax) // 2 if _text(setting.quant_dtype) == "uint" else 0
    return qparams(low, high, qmin, qmax, float(qmax - qmin), symmetric, middle)


def _assign(module: Any, slot: str, scale: Tensor, zero_point: Tensor) -> None:
    buffers = module._buffers
    for name, value in ((f"{slot}_scale", scale), (f"{slot}_zero_point", zero_point)):
        old = buffers[name]
        if value.dtype != old.dtype or value.shape != old.shape:
            value = value.to(old.dtype).reshape(old.shape)
        buffers[name] = value


def _rounded(self: Any, x: Tensor, scale: Tensor, zero_point: Tensor, qmin: int, qmax: int) -> Tensor:
    """Fake quantisation; through the user's own ``_quantize`` and ``_dequantize`` if a subclass has them."""
    if overridden(self):
        return self._dequantize(self._quantize(x, scale, zero_point, qmin, qmax), scale, zero_point)  # type: ignore[no-any-return]
    return fake_quantize(x, scale, zero_point, qmin, qmax)


def _with_stored(self: Any, x: Tensor, module: Any, slot: str, qmin: int, qmax: int) -> Tensor:
    scale: Tensor = module._buffers[f"{slot}_scale"]
    zero_point: Tensor = module._buffers[f"{slot}_zero_point"]
    if grad_wanted():
        # Copies for backward to keep: the buffers are written to by later forwards.
        scale, zero_point = scale.clone(), zero_point.clone()
        _assign(module, slot, scale, zero_point)
    return _rounded(self, x, scale, zero_point, qmin, qmax)


def quantize_weight(stock: Callable[..., Any], self: Any, wrapper: Any, **kwargs: Any) -> Tensor:
    """``QAT_Quantizer.quantize_weight``: a fresh tensor each time, recorded after the forward."""
    module = wrapper.module
    weight: Tensor = module._buffers["weight"]
    if idle(wrapper):
        return weight
    setting = module.layer_quant_setting.weight
    qmin, qmax = setting.get_qmin_qmax()
    if wrapper.training:
        low, high = batch_range(weight, _channel_dims(weight, setting, "weight"))
        scale, zero_point = _qparams(low, high, setting)
        _assign(module, "weight", scale, zero_point)
        note_quantised(wrapper)
        quantised = _rounded(self, weight, scale, zero_point, qmin, qmax)
    else:
        quantised = _with_stored(self, weight, module, "weight", qmin, qmax)
    module._buffers["weight"] = quantised
    return quantised


def _quantize_activation(self: Any, x: Tensor, wrapper: Any, slot: str) -> Tensor:
    module = wrapper.module
    settings = module.layer_quant_setting
    setting = getattr(settings, slot)
    qmin, qmax = setting.get_qmin_qmax()
    if not wrapper.training:
        return x if idle(wrapper) else _with_stored(self, x, module, slot, qmin, qmax)
    names = (f"tracked_min_{slot}", f"tracked_max_{slot}")
    first = read_steps(self) == 1 and not was_calibrated(wrapper)
    low, high = track(x, wrapper, slot, names, settings.ema_decay, first, dims=_channel_dims(x, setting, slot))
    if idle(wrapper):
        return x
    scale, zero_point = _qparams(low, high, setting)
    _assign(module, slot, scale, zero_point)
    note_quantised(wrapper)
    return _rounded(self, x, scale, zero_point, qmin, qmax)


def quantize_input(stock: Callable[..., Any], self: Any, inputs: Tensor, wrapper: Any, **kwargs: Any) -> Tensor:
    """``QAT_Quantizer.quantize_input``: the range of the whole batch."""
    return _quantize_activation(self, inputs, wrapper, "input")


def quantize_output(stock: Callable[..., Any], self: Any, output: Tensor, wrapper: Any, **kwargs: Any) -> Tensor:
    """``QAT_Quantizer.quantize_output``: the range of the whole batch."""
    return _quantize_activation(self, output, wrapper, "output")


def _trained_weight(wrapper: Any) -> Tensor:
    """What an evaluation quantises: the trained weight, scaled by a folded batch norm."""
    weight: Tensor = wrapper.module.old_weight.detach()
    norm = wrapper.bn_module
    if norm is None:
        return weight
    shape = [-1] + [1] * (weight.dim() - 1)
    scaled: Tensor = weight * norm.weight.detach().reshape(shape)
    return scaled / torch.sqrt(norm.running_var + norm.eps).reshape(shape)


def scale_by_ranges(wrapper: Any) -> None:
    """Set the scales of ``wrapper``'s layer, in place, by its tracked ranges and its weight."""
    module = wrapper.module
    settings = module.layer_quant_setting
    for slot in ("weight", "input", "output"):
        setting = getattr(settings, slot)
        if not setting:
            continue
        if slot == "weight":
            weight = _trained_weight(wrapper)
            ends = batch_range(weight, _channel_dims(weight, setting, slot))
        else:
            ends = module._buffers[f"tracked_min_{slot}"], module._buffers[f"tracked_max_{slot}"]
        for name, value in zip(("scale", "zero_point"), _qparams(*ends, setting)):
            buffer = module._buffers[f"{slot}_{name}"]
            buffer.copy_(value.reshape(buffer.shape))
