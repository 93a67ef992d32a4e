"""Does a model look trained? Its weights are about to be replaced."""

from __future__ import annotations

import math
from typing import Any, Iterable, Optional

import torch
from torch import Tensor, nn

from .choosing import Tensors

__all__ = ["REPLACED", "sign_of_training"]

REPLACED = (
    "this model looks trained ({}), and FeatherNet replaces its weights by new ones: it starts from chance. Exclude the layers "
    "that should keep theirs, freeze them (requires_grad=False), or train the FeatherNet as from scratch."
)

_SIGMAS = 6.0
_ENOUGH, _BLOCK = 200, 256


def sign_of_training(model: nn.Module, tensors: Iterable[Tensors]) -> Optional[str]:
    """What tells that ``model`` was trained, in words; None if it looks fresh.

    Norms that have counted batches or whose factors differ from each other, gradients, and weights that come
    from none of the distributions that initialisers use: uniform, normal, normal cut at two deviations, constant.
    """
    for path, module in model.named_modules():
        batches: Any = getattr(module, "num_batches_tracked", None)
        if isinstance(batches, Tensor) and not batches.is_meta and int(batches) > 0:
            return f"{path} has counted {int(batches)} batches"
    for each in tensors:
        parameter = each.parameter
        if parameter.grad is not None:
            return f"{each.name} has a gradient"
        if parameter.is_meta:
            continue
        if each.reason == "norm" and parameter.numel() > 1 and bool((parameter != parameter.flatten()[0]).any()):
            return f"{each.name} differs between channels"
    for each in tensors:
        if (
            each.reason is None
            and each.parameter.dim() > 1
            and not each.parameter.is_meta
            and not _as_drawn(each.parameter.detach())
        ):
            return f"the values of {each.name} are not distributed as an initialiser draws them"
    return None


def _as_drawn(weight: Tensor) -> bool:
    """Whether a tensor could be independent draws from one of the distributions that initialisers use."""
    x = weight.flatten(1)[:_BLOCK, :_BLOCK].to(torch.float64)  # a part tells, and costs no memory worth speaking of
    count = x.numel()
    if count < _ENOUGH or not bool(torch.isfinite(x).all()):
        return True
    deviation = float((x - x.mean()).square().mean().sqrt())
    if deviation < 1e-12 or bool((x == 0).double().mean() > 0.5):  # constant, identity, sparse
        return True
    x = (x - x.mean()) / deviation
    fourth = float(x.square().square().mean())
    return _known_shape(fourth, float(x.abs().max()), count) and all(_alike(each, fourth) for each in (x, x.t()))


def _known_shape(fourth: float, reach: float, count: int) -> bool:
    noise = _SIGMAS / math.sqrt(count)
    # Fourth moments 1.8, 3 and 2.38; their standard errors are 0.9, 4.9 and 2.2 over sqrt(count) (delta method, rounded up).
    uniform = abs(fourth - 1.8) < 0.9 * noise and reach < math.sqrt(3) * (1 + 0.6 * noise)
    normal = abs(fourth - 3.0) < 4.9 * noise
    cut = abs(fourth - 2.38) < 2.2 * noise and reach < 2.28 * (1 + 0.8 * noise)
    return uniform or normal or cut


def _alike(x: Tensor, fourth: float) -> bool:
    """Whether the rows differ in mean and size no more than independent draws do. Training makes them differ."""
    rows, length = x.shape
    if rows < 4 or length < 4:
        return True
    most = 1 + _SIGMAS * math.sqrt(2 / rows)
    means = float(x.mean(1).square().mean()) * length
    sizes = float((x.square().mean(1) - 1).square().mean()) * length / max(fourth - 1, 0.1)
    # The sizes' own distribution has a longer tail where rows are short.
    return means < most and sizes < most * (1 + 4 / length)
