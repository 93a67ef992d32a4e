"""The two factors, in whatever form: float, wrapped by a toolkit, quantised, INT8."""

from __future__ import annotations

from typing import Any, Iterator, NamedTuple, Optional

import torch
from torch import Tensor, nn

from .integers import Scheme, quantise
from .layout import Slot
from .tracing import traced

__all__ = ["Factors", "Int8Factor", "effective", "is_plain", "is_trained", "weight_of"]


class Int8Factor(nn.Module):
    """A factor as it is shipped.

    Parameters
    ----------
    codes : torch.Tensor
        (n, m), whole numbers from -128 to 127; kept as int8, ``qweight`` in the state dict.
    scale : torch.Tensor
        (n, 1), or (1, 1) for the whole matrix; floating point. The factor is ``(codes - zero_point) * scale``.
    zero_point : torch.Tensor, optional
        (n, 1), whole numbers, for a toolkit's grid that is not symmetric; kept as int16. Without one the state dict has none.
    trained : bool
        Whether the float factor required gradients.

    Examples
    --------
    >>> import torch
    >>> from nni_dataparallel.feathermap import Int8Factor
    >>> factor = Int8Factor(torch.tensor([[127, -127], [0, 64]]), torch.tensor([[0.5], [0.25]]))
    >>> factor.dequantised()
    tensor([[ 63.5000, -63.5000],
            [  0.0000,  16.0000]])
    >>> factor.qweight.dtype
    torch.int8
    """

    qweight: Tensor
    scale: Tensor
    zero_point: Optional[Tensor]

    trained: bool = True
    """``requires_grad`` of the float factor, for when one is loaded again."""

    def __init__(self, codes: Tensor, scale: Tensor, zero_point: Optional[Tensor] = None, trained: bool = True) -> None:
        super().__init__()
        self.trained = trained
        self.register_buffer("qweight", codes.detach().to(torch.int8).contiguous())
        self.register_buffer("scale", scale.detach().clone())
        self.register_buffer("zero_point", None if zero_point is None else zero_point.detach().to(torch.int16))

    def forward(self, x: Tensor) -> Tensor:
        """As ``nn.Linear(m, n, bias=False)`` with the dequantised weight."""
        return nn.functional.linear(x, self.dequantised())

    def dequantised(self) -> Tensor:
        """(n, m), floating point."""
        codes = self.qweight.to(self.scale.dtype)
        return (codes if self.zero_point is None else codes - self.zero_point) * self.scale

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


def is_trained(factor: nn.Module) -> bool:
    """Whether a factor, or the float factor it was made of, requires gradients."""
    return factor.trained if isinstance(factor, Int8Factor) else any(p.requires_grad for p in factor.parameters())


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
    """What the weights of one forward are computed from: V = left right^T.

    Attributes
    ----------
    left, right
        (n, m), floating point; multiples of their scales where the factors are quantised.
    """

    left: Tensor
    right: Tensor

    @classmethod
    def of(cls, v1: nn.Module, v2: nn.Module, m: int, scheme: Optional[Scheme]) -> Factors:
        """The factors as they are now; quantised, if there is a scheme."""
        return cls(_matrix(v1, m, scheme), _matrix(v2, m, scheme))

    def whole(self) -> Tensor:
        """V, (n, n)."""
        # In this layout the product is bit for bit FeatherMap's `V1 @ V2`; with a transposed operand BLAS sums differently.
        return self.left @ self.right.t().contiguous()

    def piece(self, slot: Slot, scalar: Tensor) -> Tensor:
        """A slot's entries of V times ``scalar``, (1,), in its shape; only the rows that it touches are computed."""
        # The scalar goes to the rows of the small factor, not to the largest tensor that there is.
        left, right = self.left[slot.first : slot.last] * scalar.to(self.left), self.right.t()
        start, count = slot.skip, slot.numel
        if torch.is_grad_enabled() or traced():
            cut = (left @ right).reshape(-1)[start : start + count]
            cut = cut.clone() if start % _LINE else cut
        else:
            shift = -start % _LINE
            memory = left.new_empty(len(left) * len(self.right) + shift)
            torch.mm(left, right, out=memory[shift:].view(len(left), -1))
            cut = memory[shift + start : shift + start + count]
        return cut.view(slot.shape)


# A weight starts at such a multiple of entries, as a plain Parameter does: kernels sum in another order where a tensor
# starts in mid-line, and then a deployed net would not be its materialised model to the last bit.
_LINE = 16


def _matrix(factor: nn.Module, m: int, scheme: Optional[Scheme]) -> Tensor:
    if isinstance(factor, Int8Factor):
        return factor.dequantised()
    matrix = effective(factor, m)
    if scheme is None:
        return matrix
    codes, scale = quantise(matrix, scheme)
    return codes * scale
