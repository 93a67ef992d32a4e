"""``DoReFaQuantizer`` and ``NaiveQuantizer``: the weight alone decides, so replicas only must not write.

``BNNQuantizer`` needs no rule: the sign of a weight has no state and no zero to divide by.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import replicas
from ..statistics import at_least_tiny
from .signatures import bits_of, note_bits

__all__ = ["dorefa", "naive"]


def dorefa(self: Any, weight: Tensor, module: Any, config: Any, name: str) -> Tensor:
    """DoReFa's weight (Zhou et al. 2016, equation 9); an all-zero weight gives no NaN."""
    bits = bits_of(config, "weight")
    note_bits(module, "weight_bit", bits)
    squashed = weight.tanh()
    level = squashed / at_least_tiny(2 * squashed.abs().max()) + 0.5
    quantised: Tensor = 2 * self.quantize(level, bits) - 1
    return quantised


def naive(self: Any, weight: Tensor, module: Any, config: Any, name: str) -> Tensor:
    """Eight bits by the largest absolute value seen so far, which the quantizer keeps in a dict."""
    scale = weight.abs().max() / 127
    known = self.layer_scale.get(name)
    if known is not None:
        scale = torch.maximum(known.to(scale), scale)

    def keep(scales: Any) -> None:
        self.layer_scale[name] = scales[0].detach()

    replicas.defer(scale, module, "layer_scale", keep)
    return weight.div(at_least_tiny(scale)).to(torch.int8).to(weight.dtype).mul(scale)
