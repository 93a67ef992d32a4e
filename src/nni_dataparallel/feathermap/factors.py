"""The two factors, in whatever form: float, wrapped by a toolkit, quantised, INT8."""

from __future__ import annotations

from typing import Any, Iterator, NamedTuple, Optional

import torch
from torch import Tensor, nn

from .integers import Scheme, exact_product, quantise
from .layout import Slot

__all__ = ["Factors", "Int8Factor", "effective", "is_plain", "weight_of"]


class Int8Factor(nn.Module):
    """A factor as it is shipped.

    Parameters
    ----------
    codes
        (n, m), whole numbers from -128 to 127.
    scale
        (n, 1), or (1, 1) for the whole matrix; floating point. The factor is ``codes * scale``.
    """

    qweight: Tensor
    scale: Tensor

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        super().__init__()
        self.register_buffer("qweight", codes.detach().to(torch.int8).contiguous())
        self.register_buffer("scale", scale.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        """As ``nn.Linear(m, n, bias=False)`` with the dequantised weight."""
        return nn.functional.linear(x, self.qweight.to(self.scale.dtype) * self.scale)

    def extra_repr(self) -> str:
        """Sizes, for ``print``."""
        n, m = self.qweight.shape
        return f"{m}, {n}, {'per_row' if self.scale.numel() > 1 else 'per_tensor'}"


def is_plain(factor: nn.Module) -> bool:
    """Whether a factor is the ``nn.Linear`` it was made as: nothing wrapped, replaced, hooked or parametrised."""
    return (
        type(factor) is nn.Linear
        and "forward" not in factor.__dict__
        and not factor._forward_hooks
        and not factor._forward_pre_hooks
    )


def effective(factor: nn.Module, m: int) -> Tensor:
    """The (n, m) matrix that a factor stands for, with its graph.

    Whatever takes the place of the ``nn.Linear``, or of its forward, is asked for its answer to the identity.
    """
    if is_plain(factor):
        return factor.weight  # type: ignore[return-value]
    like = weight_of(factor)
    answer: Tensor = factor(torch.eye(m, dtype=like.dtype, device=like.device))
    return answer.t()


def _tensors(factor: nn.Module) -> Iterator[Tensor]:
    # A replica of DataParallel has no Parameters: they are plain attributes there.
    for module in factor.modules():
        for held in (module._parameters, module._buffers, module.__dict__):
            values: Any = held.values()
            for value in values:
                if isinstance(value, Tensor) and value.is_floating_point():
                    yield value


def weight_of(factor: nn.Module) -> Tensor:
    """A tensor with the dtype and device that a factor computes in: its float weight, or its scales."""
    if isinstance(factor, Int8Factor):
        return factor.scale
    matrices = [tensor for tensor in _tensors(factor) if tensor.dim() == 2]
    if not matrices:
        raise RuntimeError(
            f"pool's factor became a {type(factor).__name__} without a float matrix. Call net.convert() on the net as it was "
            "trained, in place of the toolkit's own conversion."
        )
    return matrices[0]


class Factors(NamedTuple):
    """What the weights of one forward are computed from.

    Attributes
    ----------
    left, right
        (n, m). Without scales: V = left right^T. With scales these are whole numbers (int8, or float with a graph).
    left_scale, right_scale
        (n, 1) or (1, 1), or None: V = (left right^T) * left_scale * right_scale^T.
    """

    left: Tensor
    right: Tensor
    left_scale: Optional[Tensor] = None
    right_scale: Optional[Tensor] = None

    @classmethod
    def of(cls, v1: nn.Module, v2: nn.Module, m: int, scheme: Optional[Scheme]) -> Factors:
        """The factors as they are now."""
        if isinstance(v1, Int8Factor) and isinstance(v2, Int8Factor):
            return cls(v1.qweight, v2.qweight, v1.scale, v2.scale)
        left, right = effective(v1, m), effective(v2, m)
        if scheme is None:
            return cls(left, right)
        left, left_scale = quantise(left, scheme)
        right, right_scale = quantise(right, scheme)
        return cls(left, right, left_scale, right_scale)

    def dequantised(self) -> Factors:
        """The same V from two matrices without scales."""
        if self.left_scale is None or self.right_scale is None:
            return self
        dtype = self.left_scale.dtype
        return Factors(self.left.to(dtype) * self.left_scale, self.right.to(dtype) * self.right_scale)

    def whole(self) -> Tensor:
        """V, (n, n); for factors without scales."""
        # In this layout the product is bit for bit FeatherMap's `V1 @ V2`; with a transposed operand BLAS sums differently.
        return self.left @ self.right.t().contiguous()

    def piece(self, slot: Slot) -> Tensor:
        """A slot's entries of V, in its shape, from the rows that it touches; for factors without scales."""
        return self._cut(self.left[slot.first : slot.last] @ self.right.t(), slot)

    def scaled_piece(self, slot: Slot, scalar: Tensor) -> Tensor:
        """A slot's entries of V times ``scalar``, (1,), in its shape."""
        if self.left_scale is None or self.right_scale is None:
            return self.piece(slot) * scalar
        left_scale = self.left_scale[slot.first : slot.last] if len(self.left_scale) > 1 else self.left_scale
        product = exact_product(self.left[slot.first : slot.last], self.right, self.left_scale.dtype)
        # The scalar goes to the n scales, not to the slot's entries: one pass less over the largest tensor there is.
        cut = self._cut(product * left_scale * (self.right_scale * scalar).t(), slot)
        # Memory of its own, as a plain Parameter has: kernels sum in another order where a tensor starts in mid-line.
        return cut.clone() if slot.skip else cut

    @staticmethod
    def _cut(rows: Tensor, slot: Slot) -> Tensor:
        return rows.reshape(-1)[slot.skip : slot.skip + slot.numel].view(slot.shape)
