"""Symmetric quantisation of a matrix: pure tensor functions."""

from __future__ import annotations

from numbers import Integral
from typing import NamedTuple, Optional, Tuple

import torch
from torch import Tensor

__all__ = ["Scheme", "codes_on_grid", "quantise", "round_through"]


class Scheme(NamedTuple):
    """How a factor is quantised: symmetric, to ``bits`` bits, one scale per row or one for all."""

    bits: int = 8
    per_row: bool = True

    @property
    def largest(self) -> int:
        """The largest code; the smallest is its negative, so that -128 is not used."""
        return int(2 ** (self.bits - 1) - 1)

    def checked(self) -> Scheme:
        """The scheme itself, if it makes sense; ``ValueError`` or ``TypeError`` if not."""
        if not isinstance(self.per_row, bool):
            raise TypeError(f"per_row is True or False, not {self.per_row!r}")
        if isinstance(self.bits, bool) or not isinstance(self.bits, Integral):
            raise TypeError(f"bits is a whole number from 2 to 8, not {self.bits!r}")
        if not 2 <= self.bits <= 8:
            raise ValueError(f"bits is {self.bits}: the factors can have 2 to 8 bits, since they are stored as int8")
        return Scheme(int(self.bits), self.per_row)


def round_through(x: Tensor) -> Tensor:
    """``round(x)``, whose gradient is that of ``x`` (straight-through).

    The value is the integer itself and not merely close to it: ``round(x) - x`` is exact in floating point.
    """
    return x + (x.round() - x).detach()


def quantise(matrix: Tensor, scheme: Scheme) -> Tuple[Tensor, Tensor]:
    """Codes and scales of a matrix: ``matrix ~ codes * scale``.

    Parameters
    ----------
    matrix
        (n, m), floating point.
    scheme
        Bits and granularity.

    Returns
    -------
    codes : Tensor
        (n, m), whole numbers in ``matrix``'s dtype, from ``-largest`` to ``largest``. Differentiable, straight-through.
    scale : Tensor
        (n, 1) or (1, 1), positive, without gradient: ``amax(abs) / largest``.
    """
    size = matrix.detach().abs()
    amax = size.amax(1, keepdim=True) if scheme.per_row else size.amax().reshape(1, 1)
    # A row of zeros has codes 0 at any scale but 0, which would give NaN.
    scale = (amax / scheme.largest).clamp_min(torch.finfo(matrix.dtype).tiny)
    return round_through(matrix / scale).clamp(-scheme.largest, scheme.largest), scale


def codes_on_grid(matrix: Tensor) -> Optional[Tuple[Tensor, Tensor, Tensor]]:
    """Codes, scales and zero points of a matrix that *is* quantised, whoever did it; None if it is on no grid of 8 bits.

    A row that some toolkit has quantised consists of multiples of an unknown scale. Since its largest entry is one of
    the multiples 1 to 255, trying these finds the scale: no toolkit needs to be asked, and none can be misunderstood.

    Parameters
    ----------
    matrix
        (n, m), float32 or float64.

    Returns
    -------
    codes : Tensor
        (n, m) int8.
    scale : Tensor
        (n, 1): the matrix is ``(codes - zero_point) * scale``.
    zero_point : Tensor
        (n, 1) int16, zero wherever the row fits int8 without (a grid that is not symmetric may not).
    """
    values = matrix.detach().double()
    amax = values.abs().amax(1, keepdim=True)
    # What is left of s * q after two roundings in the matrix' own precision, in units of s.
    tolerance = 256 * 4 * torch.finfo(matrix.dtype).eps
    scale = torch.where(amax > 0, torch.zeros_like(amax), torch.ones_like(amax))
    for multiple in range(1, 256):
        open_rows = (scale == 0).flatten().nonzero().flatten()
        if not len(open_rows):
            break
        candidate = amax[open_rows] / multiple
        steps = values[open_rows] / candidate
        fits = ((steps - steps.round()).abs() <= tolerance).all(1)
        scale[open_rows[fits]] = candidate[fits]
    if not bool((scale > 0).all()):
        return None
    codes = (values / scale).round()
    low, high = codes.amin(1, keepdim=True), codes.amax(1, keepdim=True)
    if bool((high - low > 255).any()):
        return None
    zero_point = torch.where((low < -128) | (high > 127), -128 - low, torch.zeros_like(low))
    return (codes + zero_point).to(torch.int8), scale.to(matrix.dtype), zero_point.to(torch.int16)
