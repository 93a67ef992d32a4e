"""Fake quantisation of NNI 3.0, with gradients in tensors of their own.

NNI zeroes the gradient *in place*, in a tensor that belongs to autograd: other branches get the masked
gradient too, and the expanded gradient of a sum is zeroed as a whole by one masked element, which depends on
where the batch was cut. Its learned scales come with a class made in every call, a cycle that keeps replicas alive.
The formulas are NNI's, in its order of operations.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from ..statistics import gradient_within, smallest_divisor
from .ranges import kernel_of, positional, rows_of
from .views import is_parameter

__all__ = ["apply_quant_helper"]


class _Clamped(torch.autograd.Function):
    """Round to the grid; no gradient where the value was clamped (Jacob et al., CVPR 2018)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, zero_point: Tensor, qmin: int, qmax: int) -> Tensor:
        level = (x / scale).add_(zero_point)
        ctx.save_for_backward(level)
        ctx.ends = qmin, qmax
        return _on_grid(level.clamp(qmin, qmax), scale, zero_point)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tuple[Any, ...]:
        (level,) = ctx.saved_tensors
        return gradient_within(grad, level, *ctx.ends), None, None, None, None


def _on_grid(level: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    """The value of a level, in its memory."""
    return level.round_().sub_(zero_point).mul_(scale)


class _Rounded(torch.autograd.Function):
    """Round to the grid; every gradient passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, zero_point: Tensor, qmin: int, qmax: int) -> Tensor:
        return _on_grid((x / scale).add_(zero_point).clamp_(qmin, qmax), scale, zero_point)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tuple[Any, ...]:
        return grad, None, None, None, None


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


class _Learned(torch.autograd.Function):
    """Round with a learned scale, and a learned zero point or none.

    Esser et al., "Learned Step Size Quantization" (ICLR 2020); Bhalgat et al., "LSQ+" (CVPR Workshops 2020). The
    gradient of the scale is divided by the root of ``numel``, the elements of the whole batch.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, zero_point: Optional[Tensor], ends: Tuple[int, int], numel: int) -> Tensor:
        ctx.save_for_backward(x, scale, zero_point)
        ctx.ends, ctx.numel = ends, numel
        level = x / scale if zero_point is None else x / scale + zero_point
        level = torch.round(torch.clamp(level, *ends))
        return level * scale if zero_point is None else (level - zero_point) * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tuple[Any, ...]:
        x, scale, zero_point = ctx.saved_tensors
        qmin, qmax = ctx.ends
        factor = 1.0 / (qmax * ctx.numel) ** 0.5 if qmax * ctx.numel else 1.0
        level = x / scale
        shifted, zero = (level, 0) if zero_point is None else (level + zero_point, zero_point)
        below, above = (shifted < qmin).float(), (shifted > qmax).float()
        inside = 1.0 - below - above
        rounding = -level + torch.round(level) if zero_point is None else -level - zero_point + torch.round(shifted)
        of_scale = (below * (qmin - zero) + above * (qmax - zero) + inside * rounding) * grad * factor
        of_zero = None if zero_point is None else (below * -scale + above * -scale + inside * 0.0) * grad
        return grad * inside, _summed(of_scale, scale), of_zero if of_zero is None else _summed(of_zero, zero_point), None, None


def _summed(grad: Tensor, parameter: Tensor) -> Tensor:
    """One scale for all elements gets the sum; a scale spread over the elements is summed where it was spread."""
    return grad if grad.shape == parameter.shape else grad.sum().expand(parameter.shape)


class _Scale(NamedTuple):
    """What a target on this replica is rounded with, spread over its elements."""

    scale: Tensor
    zero_point: Tensor
    numel: int
    """Elements of the whole batch."""


Method = Callable[[Tensor, Any, _Scale], Tensor]


def _qat(x: Tensor, space: Any, by: _Scale) -> Tensor:
    return _Clamped.apply(x, by.scale, by.zero_point, space.qmin, space.qmax)  # type: ignore[no-any-return]


def _straight_through(x: Tensor, space: Any, by: _Scale) -> Tensor:
    return _Rounded.apply(x, by.scale, by.zero_point, space.qmin, space.qmax)  # type: ignore[no-any-return]


def _dorefa_weight(x: Tensor, space: Any, by: _Scale) -> Tensor:
    x = x.tanh()
    x = x / (2 * x.abs().max().clamp(min=smallest_divisor(x.dtype))) + 0.5  # an all-zero weight would give NaN
    return 2 * _straight_through(x, space, by) - 1


def _dorefa_output(x: Tensor, space: Any, by: _Scale) -> Tensor:
    return _straight_through(torch.clamp(x, 0, 1), space, by)


def _binary(x: Tensor, space: Any, by: _Scale) -> Tensor:
    return _Sign.apply(x, space._target_type.value == "output")  # type: ignore[no-any-return]


def _lsq(x: Tensor, space: Any, by: _Scale) -> Tensor:
    return _Learned.apply(x, by.scale, None, (space.qmin, space.qmax), by.numel)  # type: ignore[no-any-return]


def _lsq_plus(x: Tensor, space: Any, by: _Scale) -> Tensor:
    return _Learned.apply(x, by.scale, by.zero_point, (space.qmin, space.qmax), by.numel)  # type: ignore[no-any-return]


OWN: Dict[str, Method] = {
    "clamp_round": _straight_through,
    "qat_clamp_round": _qat,
    "dorefa_clamp_round_weight": _dorefa_weight,
    "dorefa_clamp_round_output": _dorefa_output,
    "bnn_clamp_round": _binary,
    "lsq_clamp_round": _lsq,
    "lsq_plus_clamp_round": _lsq_plus,
}
LEARNED = ("lsq_clamp_round", "lsq_plus_clamp_round")


def apply_quant_helper(stock: Callable[..., Tensor], self: Any, target: Tensor, target_space: Any) -> Tensor:
    """``ModuleWrapper._apply_quant_helper``: NNI's formulas, with the part of a scale that is this shard's."""
    method = target_space._setting.get("apply_method") or "clamp_round"
    own = OWN.get(method) if _is_nnis(stock.__globals__["quant_apply_methods"].get(method)) else None
    if own is None or target_space.scale is None or target_space.zero_point is None:
        return stock(self, target, target_space)
    return own(target, target_space, _scale_of(self, target, target_space, method in LEARNED))


def _is_nnis(function: Any) -> bool:
    """Whether a method of the registry is NNI's, and not one that the user put in its place."""
    return str(getattr(getattr(function, "__self__", function), "__module__", "")).startswith("nni.")


def _scale_of(wrapper: Any, x: Tensor, space: Any, learned: bool) -> _Scale:
    scale, zero_point = space.scale, space.zero_point
    parameter = is_parameter(space)
    by_position = not parameter and positional(space, x.dim())
    # In an evaluation nobody asks for the size of the batch: only the gradient of a learned scale depends on it.
    sized = learned and not parameter and (wrapper.training or torch.is_grad_enabled())
    rows = rows_of(wrapper, space._target_name, x) if by_position or sized else None
    if rows is not None and by_position:
        step = kernel_of(space, x.dim())[0]
        if rows.first % step or len(x) % step:
            raise RuntimeError(
                f"{space._target_name} of layer {wrapper.name!r}: {step} rows share a scale, but this replica has rows "
                f"{rows.first} to {rows.first + len(x)}. Use batches that divide by {step} times the number of replicas, "
                "or a granularity with -1 in the batch dimension."
            )
        scale, zero_point = (t[rows.first // step : (rows.first + len(x)) // step] for t in (scale, zero_point))
    if space._scaler is not None:
        shape = list(x.shape)
        scale, zero_point = (space._scaler.expand(t, shape, keepdim=True) for t in (scale, zero_point))
    return _Scale(scale, zero_point, x.numel() if rows is None else rows.numel)
