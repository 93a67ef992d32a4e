"""The processes that share the batch of this thread's forward, and their collectives.

Who they are is said by whoever runs the forward (``ddp.py``). Outside of such a forward there are none: nothing
communicates, so nothing can hang.
"""

from __future__ import annotations

import contextlib
import math
import threading
import weakref
import zlib
from typing import Any, Iterator, List, Optional, Sequence, Tuple

import torch
from torch import Tensor
from torch import distributed as dist

__all__ = ["Ranks", "current", "within"]


class _Here(threading.local):
    ranks: Optional[Ranks] = None


_here = _Here()


class Ranks:
    """The processes that share a batch.

    Every collective is told its ``place`` in words, the same on all ranks. They are matched by order alone: ranks that run
    different layers would get each other's numbers, so a number made of the place travels along.
    """

    def __init__(self, group: Any, device: Optional[torch.device] = None) -> None:
        # Not a reference: it would hold the sockets of a destroyed group open, and the other ranks waiting.
        self._reference = None if group is None else weakref.ref(group)
        self._device = device
        self._unseen: List[Tuple[Tensor, List[int], str]] = []
        self.size: int = dist.get_world_size(group)
        self.rank: int = dist.get_rank(group)

    @property
    def _group(self) -> Any:
        group = None if self._reference is None else self._reference()
        if self._reference is not None and group is None:
            raise RuntimeError("the process group that shared this batch is destroyed: run a forward in the new one first")
        return group

    def _sent(self, tensor: Tensor) -> Tensor:
        """``tensor`` where, and as what, the backend can read it."""
        backend = dist.get_backend(self._group)
        if backend == "nccl" and not tensor.is_cuda:
            return tensor.to(self._device if self._device is not None and self._device.type == "cuda" else "cuda")
        if backend == "gloo" and tensor.dtype == torch.bfloat16:  # gloo of torch < 2.1 refuses it
            return tensor.float()
        return tensor

    def _refusal(self, place: str) -> RuntimeError:
        return RuntimeError(
            f"rank {self.rank} of {self.size} observes {place!r} while another rank observes something else. Ranks that share a "
            "batch must run the same observed layers in the same order, also with find_unused_parameters=True: take the branch on "
            'something that all ranks agree on, or patch(statistics="local").'
        )

    def all_reduce(self, tensor: Tensor, op: str, place: str = "") -> Tensor:
        """``tensor`` of all ranks, combined elementwise: ``"max"``, ``"min"`` or ``"sum"``; one collective.

        A NaN of any rank is one of the result, as on one device: a backend's maximum keeps it or not, by the order of ranks.
        """
        own = self._sent(tensor.detach()).flatten()
        number, count = _number_of(place, own.dtype), own.numel()
        nans: List[Tensor] = []
        marks = [number]
        if op != "sum":
            marks.append(-number)
            if own.is_floating_point():
                nan = own.isnan()
                nans.append(nan.to(own.dtype) * (1 if op == "max" else -1))
                own = own.masked_fill(nan, -math.inf if op == "max" else math.inf)
        sent = torch.cat([own, *nans, own.new_tensor(marks)])
        dist.all_reduce(sent, getattr(dist.ReduceOp, op.upper()), group=self._group)
        self._compare(sent[-len(marks) :], [number * self.size] if op == "sum" else marks, place)
        result = sent[:count]
        if nans:
            result = result.masked_fill(sent[count : 2 * count] != 0, math.nan)
        return result.reshape(tensor.shape).to(tensor.device, tensor.dtype)

    def _compare(self, found: Tensor, expected: List[int], place: str) -> None:
        """Now on the CPU; on a GPU, which would be waited for, when the forward is done."""
        if found.is_cuda:
            self._unseen.append((found, expected, place))
        elif found.tolist() != expected:
            raise self._refusal(place)

    def verify(self) -> None:
        """Raise if ranks have observed different places."""
        unseen, self._unseen = self._unseen, []
        if unseen:
            wanted = torch.tensor([number for _, expected, _ in unseen for number in expected], dtype=torch.float64)
            found = torch.cat([tensor.double() for tensor, _, _ in unseen]).cpu()
            if not torch.equal(found, wanted):
                wrong = (one for one in unseen if one[0].tolist() != one[1])
                raise self._refusal(next(wrong)[2])

    def gather_numbers(self, numbers: Sequence[int], place: str = "") -> List[Tuple[int, ...]]:
        """A few integers of every rank, by rank; one collective."""
        mine = self._sent(torch.tensor([_number_of(place, torch.int64), *numbers], dtype=torch.int64))
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(parts, mine, group=self._group)
        found = [part.tolist() for part in parts]
        if any(part[0] != found[self.rank][0] for part in found):
            raise self._refusal(place)
        return [tuple(part[1:]) for part in found]

    def gather(self, tensor: Tensor, place: str = "") -> List[Tensor]:
        """A tensor of every rank, by rank, of the same dtype and number of dimensions; shapes may differ: two collectives."""
        shapes = self.gather_numbers(tensor.shape, place)
        sent = self._sent(tensor.detach()).contiguous().flatten()
        longest = max(_numel(shape) for shape in shapes)
        padded = torch.cat([sent, sent.new_zeros(longest - sent.numel())])
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded, group=self._group)
        return [part[: _numel(shape)].reshape(shape).to(tensor.device, tensor.dtype) for part, shape in zip(parts, shapes)]


def _number_of(place: str, dtype: torch.dtype) -> int:
    """A number that ``dtype`` adds up exactly over the ranks."""
    number = zlib.crc32(place.encode())
    return 1 << number % 8 if dtype.is_floating_point and torch.finfo(dtype).bits < 32 else number % 8191


def _numel(shape: Sequence[int]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count


def current() -> Optional[Ranks]:
    """The processes that share the batch of this thread's forward; None outside DDP."""
    return _here.ranks


@contextlib.contextmanager
def within(ranks: Optional[Ranks]) -> Iterator[None]:
    """Statistics of forwards in the block are merged over ``ranks``; over none with None."""
    outer = _here.ranks
    _here.ranks = ranks
    try:
        yield
        if ranks is not None:
            ranks.verify()
    finally:
        _here.ranks = outer
