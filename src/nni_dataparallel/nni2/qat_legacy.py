"""``QAT_Quantizer`` of NNI 2.0 - 2.4: one scale and zero point that weight and output share."""

from __future__ import annotations

from typing import Any, Callable, Optional, Tuple

import torch
from torch import Tensor

from ..statistics import batch_range, fake_quantize, qparams
from .observers import track
from .steps import warming_up

__all__ = ["OUTPUT_2_0", "OUTPUT_2_2", "quantize_output", "quantize_weight"]

BIAS_BITS = 32
INPUT = ("tracked_min_input", "tracked_max_input")
OUTPUT_2_0 = ("tracked_min_biased", "tracked_max_biased")
OUTPUT_2_2 = ("tracked_min_activation", "tracked_max_activation")


def _bits(config: Any, slot: str) -> int:
    bits = config["quant_bits"]
    return bits if isinstance(bits, int) else bits.get(slot)


def _affine(low: Tensor, high: Tensor, bits: int) -> Tuple[Tensor, Tensor, int]:
    qmax = (1 << bits) - 1
    # NNI compares with torch.Tensor([0]), which makes it the default dtype whatever the model's is.
    low, high = (end.to(torch.get_default_dtype()).reshape(1) for end in (low, high))
    scale, zero_point = qparams(low, high, 0, qmax, torch.full_like(low, float(qmax)))
    return scale, zero_point, qmax


def _quantize(x: Tensor, module: Any, bits: int) -> Tensor:
    return fake_quantize(x, module.scale, module.zero_point, 0, (1 << bits) - 1)


def _hold(module: Any) -> None:
    """Let backward save copies of scale and zero point: the buffers are written to later."""
    module.scale, module.zero_point = module.scale.clone(), module.zero_point.clone()


def _note_bits(module: Any, name: str, bits: int) -> None:
    """Keep the bit width in its buffer, which lives on the model's device (2.2 and later)."""
    buffer: Optional[Tensor] = module._buffers.get(name)
    if buffer is not None:
        with torch.no_grad():
            buffer.fill_(bits)


def quantize_weight(with_bias: bool) -> Callable[..., Tensor]:
    """Make the fix for ``QAT_Quantizer.quantize_weight``.

    Parameters
    ----------
    with_bias
        Whether the release quantises the bias in place too (2.0 - 2.3).
    """

    def fix(stock: Callable[..., Any], self: Any, wrapper: Any, **kwargs: Any) -> Tensor:
        module, bits = wrapper.module, _bits(wrapper.config, "weight")
        trained: Tensor = module.old_weight.detach()
        warm = warming_up(wrapper)
        inputs = kwargs.get("input_tensor")
        if inputs is not None and INPUT[0] in module._buffers and (warm or wrapper.training):
            track(inputs, wrapper, "input", INPUT, module.ema_decay, average=not warm)
        if warm or not wrapper.training:
            _hold(module)
            if getattr(wrapper, "bn_module", None) is None:
                # Evaluation uses what the last training forward left in the buffer; a copy of it,
                # because the next one writes into the buffer while backward may need this one.
                module.weight = trained if warm else module.weight.detach().clone()
            return trained
        if with_bias and getattr(module, "bias", None) is not None:
            bias: Tensor = module.bias.data
            scale, zero_point, qmax = _affine(*batch_range(bias), BIAS_BITS)
            # In place: what is assigned to `.data` on a replica never reaches the Parameter.
            bias.copy_(fake_quantize(bias, scale, zero_point, 0, qmax))
        module.scale, module.zero_point, _ = _affine(*batch_range(trained), bits)
        quantised = _quantize(trained, module, bits)
        _note_bits(module, "weight_bit", bits)
        module.weight = quantised
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
        module, bits = wrapper.module, _bits(wrapper.config, "output")
        _note_bits(module, "activation_bit", bits)
        warm = warming_up(wrapper)
        if warm:
            _hold(module)
            track(output, wrapper, "output", names, module.ema_decay, average=False)
            return output
        if wrapper.training:
            low, high = track(output, wrapper, "output", names, module.ema_decay)
            module.scale, module.zero_point, _ = _affine(low, high, bits)
        else:
            _hold(module)
        return _quantize(output, module, bits)

    return fix
