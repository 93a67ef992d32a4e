"""``QAT_Quantizer`` of NNI 1.4 - 1.9: a bias-corrected moving average, updated in evaluation too.

These releases know neither training nor evaluation: whoever runs a forward moves the range and
quantises with it. Scale and zero point are shared by weight and output, and None before the first
forward. The step counter is a number of the quantizer's, not a buffer of the model's.
"""

from __future__ import annotations

from typing import Any, Tuple

from torch import Tensor

from .. import replicas
from ..statistics import batch_range, moving_average, qparams
from .bias import quantize_bias
from .observers import merged_range, rounded_by_layer
from .signatures import bits_of

__all__ = ["quantize_bias_in_place", "quantize_output", "quantize_weight"]


def _affine(low: Tensor, high: Tensor, bits: int) -> Tuple[Tensor, Tensor]:
    qmax = (1 << bits) - 1
    return qparams(low, high, 0, qmax, float(qmax))


def _idle(self: Any, config: Any) -> bool:
    return bool(config.get("quant_start_step", 0) > self.steps)


def quantize_weight(self: Any, weight: Tensor, module: Any, config: Any, name: str) -> Tensor:
    """The rule for weights; also leaves scale and zero point in their buffers."""
    if _idle(self, config):
        return weight
    bits = bits_of(config, "weight")
    module._buffers["scale"], module._buffers["zero_point"] = _affine(*batch_range(weight), bits)
    return rounded_by_layer(self, weight, module, bits)


def quantize_bias_in_place(self: Any, weight: Tensor, module: Any, config: Any, name: str) -> Tensor:
    """1.9 quantises the bias, too, and writes the result over it."""
    if not _idle(self, config):
        quantize_bias(module, _affine)
    return quantize_weight(self, weight, module, config, name)


def quantize_output(self: Any, output: Tensor, module: Any, config: Any, name: str) -> Tensor:
    """The rule for outputs: the range of the whole batch, merged before the moving average."""
    if _idle(self, config):
        return output
    bits, buffers = bits_of(config, "output"), module._buffers
    if not replicas.recomputing():
        ends = merged_range(output, module, "output")
        for end, value in zip(("min", "max"), ends):
            biased = moving_average(buffers[f"tracked_{end}_biased"], value, buffers["ema_decay"])
            buffers[f"tracked_{end}_biased"] = biased
            buffers[f"tracked_{end}"] = biased / (1 - buffers["ema_decay"] ** self.steps)
    buffers["scale"], buffers["zero_point"] = _affine(buffers["tracked_min"], buffers["tracked_max"], bits)
    return rounded_by_layer(self, output, module, bits)
