"""Fake quantisation of NNI 3.0, with gradients in tensors of their own.

NNI zeroes the gradient *in place*, in a tensor that belongs to autograd: other branches get the masked
gradient too, and the expanded gradient of a sum is zeroed as a whole by one masked element, which depends on
where the batch was cut. The formulas are NNI's, in its order of operations.
"""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Dict, Iterator, Tuple

import torch
from torch import Tensor

from ..statistics import smallest_divisor
from .ranges import kernel_of, positional, rows_of
from .views import is_parameter

__all__ = ["apply_quant_helper"]


class _Clamped(torch.autograd.Function):
    """Round to the grid; no gradient where the value was clamped (Jacob et al., CVPR 2018)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, zero_point: Tensor, qmin: int, qmax: int) -> Tensor:
        level = zero_point + x / scale
        ctx.save_for_backward((level < qmin) | (level > qmax))
        return (torch.round(torch.clamp(level, qmin, qmax)) - zero_point) * scale  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tuple[Any, ...]:
        (outside,) = ctx.saved_tensors
        return torch.where(outside, grad.new_zeros(()), grad), None, None, None, None


class _Sign(torch.autograd.Function):
    """1 or -1 (Courbariaux et al., "Binarized Neural Networks", 2016); no gradient for outputs beyond 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, is_output: bool) -> Tensor:
        ctx.is_output = is_output
        ctx.save_for_backward(x)
        sign = torch.sign(x)
        return torch.where(sign == 0, torch.ones_like(sign), sign)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tuple[Any, ...]:
        (x,) = ctx.saved_tensors
        return (torch.where(x.abs() > 1, grad.new_zeros(()), grad) if ctx.is_output else grad), None


class _GradientTimes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tuple[Any, ...]:
        return grad * ctx.factor, None


Method = Callable[[Any, Tensor, Any], Tensor]


def _qat(stock: Any, x: Tensor, space: Any) -> Tensor:
    scale, zero_point = space.scale, space.zero_point
    if space._scaler is not None:
        # In the order of NNI, which looks up the shape that this forward has tracked.
        zero_point, scale = (space._scaler.expand(t, space.shape, keepdim=True) for t in (zero_point, scale))
    return _Clamped.apply(x, scale, zero_point, space.qmin, space.qmax)  # type: ignore[no-any-return]


def _dorefa_weight(stock: Any, x: Tensor, space: Any) -> Tensor:
    x = x.tanh()
    x = x / (2 * x.abs().max().clamp(min=smallest_divisor(x.dtype))) + 0.5  # an all-zero weight would give NaN
    return 2 * stock.__globals__["quant_apply_methods"]["clamp_round"](x, space) - 1  # type: ignore[no-any-return]


def _binary(stock: Any, x: Tensor, space: Any) -> Tensor:
    return _Sign.apply(x, space._target_type.value == "output")  # type: ignore[no-any-return]


OWN: Dict[str, Method] = {"qat_clamp_round": _qat, "dorefa_clamp_round_weight": _dorefa_weight, "bnn_clamp_round": _binary}
LEARNED = ("lsq_clamp_round", "lsq_plus_clamp_round")


def apply_quant_helper(stock: Callable[..., Tensor], self: Any, target: Tensor, target_space: Any) -> Tensor:
    """``ModuleWrapper._apply_quant_helper``: ours where NNI's has a fault, on replicas with this shard's part of a scale."""
    method = target_space._setting.get("apply_method") or "clamp_round"
    own = OWN.get(method)
    if target_space.scale is None or target_space.zero_point is None or method == "bypass":
        return stock(self, target, target_space)
    with _for_this_shard(self, target, target_space, method in LEARNED):
        return stock(self, target, target_space) if own is None else own(stock, target, target_space)


@contextlib.contextmanager
def _for_this_shard(wrapper: Any, x: Tensor, space: Any, learned: bool) -> Iterator[None]:
    """On a replica, show NNI's formula the part of the scale that is this shard's, and the whole batch's gradient factor."""
    by_position = not is_parameter(space) and positional(space, x.dim())
    rows = rows_of(wrapper, space._target_name, x) if by_position or (learned and not is_parameter(space)) else None
    if rows is None:
        yield
        return
    names = (space._scale_name, space._zero_point_name)
    state = wrapper.__dict__
    before = {name: getattr(wrapper, name) for name in names}
    shown = dict(before)
    if by_position:
        step = kernel_of(space, x.dim())[0]
        shown = {name: t[rows.first // step : (rows.first + len(x)) // step] for name, t in shown.items()}
    if learned and 0 < x.numel() < rows.numel:
        # NNI divides the gradient of a scale by the root of its tensor's number of elements.
        shown[names[0]] = _GradientTimes.apply(shown[names[0]], (x.numel() / rows.numel) ** 0.5)
    holders = {name: wrapper._buffers if name in wrapper._buffers else state for name in names}
    for name in names:
        holders[name][name] = shown[name]
    try:
        yield
    finally:
        for name in names:
            holders[name][name] = before[name]
