"""What was hashed and what not, in numbers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import List, Tuple

from torch import Tensor, nn

from .choosing import Tensors
from .factors import Int8Factor, weight_of
from .layout import Layout
from .pool import Pool

__all__ = ["CompressionReport", "bytes_of"]


def bytes_of(module: nn.Module) -> int:
    """Bytes of the tensors in a state dict; a tensor that has several names counts once."""
    tensors = {id(tensor): tensor for tensor in module.state_dict(keep_vars=True).values() if isinstance(tensor, Tensor)}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


@dataclass(frozen=True)
class CompressionReport:
    """The result of ``FeatherNet.compression_report()``; ``print`` it.

    Attributes
    ----------
    hashed
        ``(name, shape)`` of the tensors that come from the factors, in the order of their slices.
    left_out
        ``(name, shape, reason)`` of the Parameters that stay as they are.
    hashed_count, left_out_count
        How many numbers these are.
    n, m
        Both factors are n x m.
    requested, actual
        The compression that was asked for; numbers in both factors over hashed numbers (m is rounded up).
    overall
        Numbers in the factors, the scalars and what is left out over those in the plain model's Parameters.
    dense_bytes, bytes, int8_bytes
        Of the tensors in the state dict: the plain model's, the net's as it is now, the net's after ``convert()``.

    Examples
    --------
    >>> import torch
    >>> from nni_dataparallel.feathermap import FeatherNet
    >>> net = FeatherNet(torch.nn.Sequential(torch.nn.Linear(64, 100), torch.nn.BatchNorm1d(100)), compress=0.1)
    >>> print(net.compression_report())
    6,500 of 6,700 numbers are hashed (2 tensors)
    ...
      left out  1.bias (100,): norm
    """

    hashed: List[Tuple[str, Tuple[int, ...]]] = field(repr=False)
    left_out: List[Tuple[str, Tuple[int, ...], str]] = field(repr=False)
    hashed_count: int
    left_out_count: int
    n: int
    m: int
    requested: float
    actual: float
    overall: float
    dense_bytes: int
    bytes: int = 0
    int8_bytes: int = 0

    @classmethod
    def of(cls, tensors: List[Tensors], layout: Layout, compress: float, dense_bytes: int) -> CompressionReport:
        """The report of a choice of tensors, without the bytes of a net."""
        hashed = [each for each in tensors if each.reason is None]
        left = [(each.name, tuple(each.parameter.shape), each.reason) for each in tensors if each.reason is not None]
        rest = sum(each.parameter.numel() for each in tensors if each.reason is not None)
        factors = 2 * layout.n * layout.m
        return cls(
            hashed=[(each.name, tuple(each.parameter.shape)) for each in hashed],
            left_out=left,
            hashed_count=layout.count,
            left_out_count=rest,
            n=layout.n,
            m=layout.m,
            requested=compress,
            actual=factors / layout.count,
            overall=(factors + len(hashed) + rest) / (layout.count + rest),
            dense_bytes=dense_bytes,
        )

    def now(self, net: nn.Module, pool: Pool) -> CompressionReport:
        """The report with the bytes that ``net`` has now."""
        now = bytes_of(net)
        if isinstance(pool.V1, Int8Factor):
            return replace(self, bytes=now, int8_bytes=now)
        codes_and_scales = self.m + weight_of(pool.V1).element_size()
        return replace(self, bytes=now, int8_bytes=now - bytes_of(pool) + 2 * self.n * codes_and_scales)

    def __str__(self) -> str:
        total = self.hashed_count + self.left_out_count
        lines = [
            f"{self.hashed_count:,} of {total:,} numbers are hashed ({len(self.hashed)} tensors)",
            f"two factors of {self.n} x {self.m}: {self.actual:.4f} of the hashed numbers (requested {self.requested:.4f}), "
            f"{self.overall:.4f} of all",
            f"bytes: {self.dense_bytes:,} dense, {self.bytes:,} now, {self.int8_bytes:,} as INT8",
        ]
        lines += [f"  hashed    {name} {shape}" for name, shape in self.hashed]
        lines += [f"  left out  {name} {shape}: {reason}" for name, shape, reason in self.left_out]
        return "\n".join(lines)
