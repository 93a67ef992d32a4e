"""How many bytes a net takes, and how many weights a number of bytes pays for."""

from __future__ import annotations

import math
from typing import Callable, List, Optional

from torch import nn

from nni_dataparallel.feathermap import FeatherNet


def targets(model: nn.Module) -> List[nn.Parameter]:
    """What is pruned and quantised: a FeatherNet's factors, else every weight of two or more dimensions."""
    if isinstance(model, FeatherNet):
        return [model.pool.V1.weight, model.pool.V2.weight]
    return [parameter for parameter in model.parameters() if parameter.dim() > 1]


def tensor_bytes(model: nn.Module) -> int:
    """Of all tensors in the state dict."""
    return sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())


def stored_bytes(model: nn.Module, bits: int = 32, kept: Optional[int] = None) -> int:
    """Bytes of the net when its targets are stored with ``bits``, and only ``kept`` of their entries if that is given."""
    weights = targets(model)
    count = sum(weight.numel() for weight in weights)
    rest = tensor_bytes(model) - 4 * count
    scales = 0 if bits == 32 else 4 * len(weights)
    positions = 0
    if kept is not None:
        width = 2 if max(weight.numel() for weight in weights) <= 65536 else 4
        positions = min(math.ceil(count / 8), width * kept)
    return rest + scales + positions + math.ceil((count if kept is None else kept) * bits / 8)


def largest(fits: Callable[[int], bool], limit: int) -> int:
    """The largest number up to ``limit`` that fits, by bisection; 0 if none does."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
