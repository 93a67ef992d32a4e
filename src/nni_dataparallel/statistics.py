"""Ranges, moving averages, scales and zero points: pure tensor functions.

Every formula is the one of Jacob et al., "Quantization and Training of Neural Networks for
Efficient Integer-Arithmetic-Only Inference" (CVPR 2018), in the order of operations that NNI
uses, so that results on one device are the same to the last bit.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor

__all__ = [
    "at_least_tiny",
    "batch_range",
    "cut_dimension",
    "fake_quantize",
    "gradient_within",
    "moving_average",
    "qparams",
    "smallest_divisor",
]

_TINY = torch.finfo(torch.float32).tiny
_SMALLEST = {torch.float16: 2.0**-24}


def batch_range(x: Tensor, dims: Optional[Sequence[int]] = None) -> Tuple[Tensor, Tensor]:
    """Smallest and largest value of ``x``.

    Parameters
    ----------
    x
        Any shape, not empty.
    dims
        The dimensions to reduce (kept with size 1); None reduces all of them to a 0-dim tensor.

    Returns
    -------
    (Tensor, Tensor)
        ``(min, max)``, dtype and device of ``x``; NaN where ``x`` holds one.
    """
    if dims is None:
        return torch.amin(x), torch.amax(x)  # twice as fast as min() and max() on a CPU
    return torch.amin(x, list(dims), keepdim=True), torch.amax(x, list(dims), keepdim=True)


def cut_dimension(shapes: Sequence[Any]) -> int:
    """The dimension along which a batch was cut into shards of these shapes: the one in which they differ, else the first."""
    uneven = [d for d in range(len(shapes[0])) if any(shape[d] != shapes[0][d] for shape in shapes)]
    return uneven[0] if uneven else 0


def moving_average(average: Tensor, value: Tensor, decay: Union[float, Tensor]) -> Tensor:
    """``average * decay + (1 - decay) * value``, as a fresh tensor."""
    return average * decay + (1 - decay) * value


def smallest_divisor(dtype: torch.dtype) -> float:
    """The smallest positive number that ``dtype`` can divide by."""
    return _SMALLEST.get(dtype, _TINY)


def at_least_tiny(x: Tensor) -> Tensor:
    """``x``, in place, with the smallest number that its dtype can divide by instead of 0 (nni#3084, nni#4443)."""
    return x.clamp_(min=smallest_divisor(x.dtype))


def qparams(
    low: Tensor,
    high: Tensor,
    qmin: int,
    qmax: int,
    span: Union[float, Tensor],
    symmetric: bool = False,
    middle: int = 0,
) -> Tuple[Tensor, Tensor]:
    """Scale and zero point of the range ``[low, high]``, widened to contain 0.

    Parameters
    ----------
    low, high
        Same shape, float.
    qmin, qmax
        Smallest and largest quantised value.
    span
        ``qmax - qmin`` as the float or tensor to divide by. NNI's two lines differ here, and on
        CUDA the division by a Python number rounds otherwise than that by a tensor.
    symmetric
        Scale from the larger absolute value; the zero point is then ``middle``.

    Returns
    -------
    (Tensor, Tensor)
        ``(scale, zero_point)``, shape and dtype of ``low`` and ``high``. A range of width 0 gives
        the smallest usable scale instead of 0, which would divide by zero (nni#3084, nni#4443).
    """
    low, high = torch.clamp(low, max=0), torch.clamp(high, min=0)
    width = torch.max(low.abs(), high.abs()) / (span / 2) if symmetric else (high - low) / span
    scale = at_least_tiny(width)
    if symmetric:
        return scale, torch.full_like(scale, middle)
    return scale, (qmin - torch.round(low / scale)).clamp_(qmin, qmax)


def fake_quantize(x: Tensor, scale: Tensor, zero_point: Tensor, qmin: int, qmax: int) -> Tensor:
    """Round ``x`` to the grid of ``scale`` and ``zero_point`` and come back; a fresh tensor."""
    quantised = (x / scale).add_(zero_point).clamp_(qmin, qmax).round_()
    return quantised.sub_(zero_point).mul_(scale)


def gradient_within(grad: Tensor, level: Tensor, qmin: Union[int, Tensor], qmax: Union[int, Tensor]) -> Tensor:
    """The gradient of a clamp: ``grad`` where ``qmin <= level <= qmax`` (or ``level`` is NaN), 0 elsewhere; a fresh tensor.

    Parameters
    ----------
    grad, level
        Same shape, floating point.
    qmin, qmax
        Smallest and largest quantised value, whole numbers; as tensors of one element they are not read, and it takes longer.
    """
    if (
        isinstance(qmin, Tensor)
        or isinstance(qmax, Tensor)
        or grad.shape != level.shape
        or grad.dtype != level.dtype
        or grad.dtype not in (torch.float32, torch.float64)
    ):
        outside = (level < qmin).logical_or_(level > qmax)
        return torch.where(outside, grad.new_zeros(()), grad)
    # Comparing, joining and choosing take three times as long. The kernel leaves its bounds out, and takes NaN for either.
    below, above = -_next_above(-qmin, level.dtype), _next_above(qmax, level.dtype)
    level = level.nan_to_num(float(qmin), math.inf, -math.inf)
    return torch.ops.aten.hardtanh_backward(grad, level, below, above)  # type: ignore[no-any-return]


@functools.lru_cache(maxsize=None)
def _next_above(number: int, dtype: torch.dtype) -> float:
    """The number of ``dtype`` that follows a whole number.

    After 0 it is the smallest normal one: processors may take those before it for 0 (``torch.set_flush_denormal``).
    """
    info = torch.finfo(dtype)
    if number == 0:
        return info.tiny
    mantissa, exponent = math.frexp(number)
    spacing = math.ldexp(info.eps, exponent - 1)
    return number + (spacing / 2 if mantissa == -0.5 else spacing)
