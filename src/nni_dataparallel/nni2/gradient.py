"""The gradient of fake quantisation: 0 outside the range, straight through inside.

Two faults of NNI are mended here. Before ``quant_start_step`` nothing is quantised, so every
gradient passes; NNI masks it by a scale that does not exist yet (2.5 - 2.10.1 divide by 0 and zero
it all, so that a quantised layer does not train during its warm-up). And NNI zeroes *in place* in a
tensor that belongs to autograd: the other branch of a residual sum gets the masked gradient too,
and the expanded gradient of ``.sum()`` or ``.mean()`` is zeroed as a whole by one masked element.
The latter depends on where the batch is cut, so that replicas cannot equal one device. BNN's gradient
clip has the same fault.
"""

from __future__ import annotations

from typing import Any, Callable

from torch import Tensor

from ..statistics import gradient_within
from .steps import idle

__all__ = ["backward", "clip_backward", "forward", "quant_backward"]


def forward(stock: Callable[..., Any], ctx: Any, tensor: Tensor, quant_type: Any, wrapper: Any, *rest: Any) -> Any:
    """``QATGrad.forward``: remember whether the tensor was quantised at all."""
    straight_through = idle(wrapper)  # asked first: the forward itself may end it
    output = stock(ctx, tensor, quant_type, wrapper, *rest)
    ctx.straight_through = straight_through
    return output


def backward(stock: Callable[..., Any], cls: Any, ctx: Any, grad_output: Tensor) -> Any:
    """``QATGrad.backward``: what was not quantised has the identity's gradient."""
    if ctx.straight_through:
        return grad_output, None, None, None
    return stock(cls, ctx, grad_output)


def quant_backward(
    stock: Callable[..., Any],
    tensor: Tensor,
    grad_output: Tensor,
    quant_type: Any,
    scale: Tensor,
    zero_point: Tensor,
    qmin: Any,
    qmax: Any,
) -> Tensor:
    """``QATGrad.quant_backward``: a fresh gradient, 0 where ``tensor`` was clamped."""
    return gradient_within(grad_output, (tensor / scale).add_(zero_point).round_(), qmin, qmax)


def clip_backward(stock: Callable[..., Tensor], tensor: Tensor, grad_output: Tensor, *rest: Any) -> Tensor:
    """``ClipGrad.quant_backward``: NNI's mask, in a tensor of its own."""
    return stock(tensor, grad_output.clone(), *rest)
