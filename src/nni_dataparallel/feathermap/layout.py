"""Where each hashed tensor lies in V: pure integer arithmetic.

V is n x n and is never stored. The hashed tensors are the first N entries of V in row order, one after the
other, so a tensor touches a run of whole rows, of which the first and the last may be shared with its neighbours.
"""

from __future__ import annotations

import math
from typing import List, NamedTuple, Optional, Sequence, Tuple

__all__ = ["Layout", "Slot"]


class Slot(NamedTuple):
    """One hashed tensor's place in V.

    Attributes
    ----------
    shape
        The tensor's shape.
    offset, numel
        Its first entry in V's row order, and how many entries it has.
    first, last
        The rows of V that it touches: ``first`` up to, not including, ``last``.
    skip
        How many entries of row ``first`` come before it.
    zero_row
        A row of the tensor that is zero whatever V holds (an embedding's padding), or None.
    """

    shape: Tuple[int, ...]
    offset: int
    numel: int
    first: int
    last: int
    skip: int
    zero_row: Optional[int]


class Layout:
    """The sizes n and m of the factors, and the slots.

    Parameters
    ----------
    shapes
        Shapes of the hashed tensors, in the order of ``named_modules()``, none of them empty.
    compress
        Wanted size of both factors over the number N of hashed entries.
    m
        Width of the factors, if it is given and not computed from ``compress`` (a checkpoint's).
    zero_rows
        One entry per shape, see :class:`Slot`.
    """

    def __init__(
        self,
        shapes: Sequence[Tuple[int, ...]],
        compress: float,
        m: Optional[int] = None,
        zero_rows: Optional[Sequence[Optional[int]]] = None,
    ) -> None:
        sizes = [math.prod(shape) for shape in shapes]
        self.count = sum(sizes)
        self.n = math.isqrt(self.count - 1) + 1
        # The very expression of FeatherMap: another order of the operations could round to another m.
        self.m = math.ceil((compress * self.n) / 2) if m is None else m
        self.sizes = sizes
        self.slots: List[Slot] = []
        offset = 0
        for i, (shape, size) in enumerate(zip(shapes, sizes)):
            first, skip = divmod(offset, self.n)
            last = (offset + size - 1) // self.n + 1
            self.slots.append(Slot(tuple(shape), offset, size, first, last, skip, zero_rows[i] if zero_rows else None))
            offset += size
