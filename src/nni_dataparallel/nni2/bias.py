"""The bias of a layer, which NNI 1.9 - 2.3 quantises to 32 bits and overwrites with the result."""

from __future__ import annotations

from typing import Any, Callable, Tuple

import torch
from torch import Tensor

from ..statistics import batch_range, fake_quantize

__all__ = ["quantize_bias"]

BITS = 32


def quantize_bias(module: Any, affine: Callable[[Tensor, Tensor, int], Tuple[Tensor, Tensor]]) -> None:
    """Round ``module.bias`` to the grid of its own range, in place.

    In place, since what is assigned to ``.data`` on a replica never reaches the Parameter. In single
    precision at least: 32 bits overflow a half.
    """
    if getattr(module, "bias", None) is None:
        return
    bias: Tensor = module.bias.data
    wide = bias.to(torch.promote_types(bias.dtype, torch.float32))
    scale, zero_point = affine(*batch_range(wide), BITS)
    bias.copy_(fake_quantize(wide, scale, zero_point, 0, (1 << BITS) - 1))
