"""Collectives among all who share a batch: the replicas of one ``nn.DataParallel``, the ranks of one DDP forward.

Where there is nobody else every function here is the identity, so code that uses it needs no case for one device.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple, TypeVar

import torch
from torch import Tensor
from torch.nn import Module

from . import ranks
from .ranks import Ranks
from .rendezvous import Parcel
from .worker import Replica, current, is_replica, local, rank, recomputing, size

__all__ = [
    "Replica",
    "Share",
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "alone",
    "current",
    "defer",
    "is_replica",
    "local",
    "merge_statistics",
    "merged_statistics",
    "rank",
    "recomputing",
    "share_of",
    "size",
]

T = TypeVar("T")
_OPERATIONS: Dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "max": torch.maximum,
    "min": torch.minimum,
    "sum": torch.add,
}


_local_only = False


def merge_statistics(mode: str) -> None:
    """Whose statistics count: ``"global"``, those of the whole batch (the default), or ``"local"``.

    With ``"local"`` nobody waits for anybody: the statistics are those of replica 0, and of each rank of DDP, of which
    rank 0's are kept, as torch's batch norm has it. The numbers are then not those of one device.

    Raises
    ------
    ValueError
        For another mode.
    """
    global _local_only
    if mode not in ("global", "local"):
        raise ValueError(f'statistics are "global" (of the whole batch) or "local" (of replica 0, of each rank), not {mode!r}')
    _local_only = mode == "local"


def merged_statistics() -> str:
    """The mode that :func:`merge_statistics` has set."""
    return "local" if _local_only else "global"


def alone() -> bool:
    """Whether this thread has nobody to merge statistics with: one device, one rank."""
    return _local_only or (size() == 1 and ranks.current() is None)


def all_reduce(tensor: Tensor, op: str, module: Module, slot: str) -> Tensor:
    """Combine one tensor of every replica and every rank, elementwise.

    Parameters
    ----------
    tensor
        Same shape and dtype everywhere, on the caller's own device.
    op
        ``"max"``, ``"min"`` or ``"sum"`` (of replicas in the order of their ranks).
    module, slot
        Where the collective takes place: the module as this thread sees it, and a name within it.

    Returns
    -------
    Tensor
        The combined tensor on the caller's device; ``tensor`` itself where there is nobody else.
    """
    if alone():
        return tensor
    parcels = _met(Parcel(tensor.detach()), module, slot)
    combine = _OPERATIONS[op]
    result: Optional[Tensor] = None
    for rank_, parcel in parcels:
        part = tensor if rank_ == rank() else parcel.fetch(tensor)
        result = part if result is None else combine(result, part)
    assert result is not None
    whole: Tensor = result
    return _across(
        lambda group, place: Parcel(group.all_reduce(whole, op, place)), Parcel(whole), parcels, module, slot
    ).fetch_or_own(tensor)


def all_gather(tensor: Tensor, module: Module, slot: str) -> List[Tensor]:
    """The tensors of all replicas, in the order of the batch, on the caller's device; of other ranks one each.

    Parameters are those of :func:`all_reduce`; lengths may differ. What a rank's replicas have is joined along dimension 0.
    """
    if alone():
        return [tensor]
    parcels = _met(Parcel(tensor.detach()), module, slot)
    parts = [tensor if r == rank() else parcel.fetch(tensor) for r, parcel in parcels]
    if ranks.current() is None:
        return parts
    mine = torch.cat(parts) if len(parts) > 1 else parts[0]
    nobody: List[Parcel] = []
    found = _across(lambda group, place: [Parcel(part) for part in group.gather(mine, place)], nobody, parcels, module, slot)
    return [parcel.fetch_or_own(tensor) for parcel in found]


class Share(NamedTuple):
    """Where this thread's part of a batch lies in it."""

    first: int
    length: int
    """Rows of the whole batch."""
    numel: int
    """Elements of the whole batch."""
    token: Any = None
    """What the first replica of this process brought along."""


def share_of(length: int, numel: int, module: Module, slot: str, token: Any = None) -> Share:
    """What this thread's ``length`` rows and ``numel`` elements are of the whole batch."""
    if alone():
        return Share(0, length, numel, token)
    parts = _met((length, numel, token), module, slot)
    mine = [sum(part[i] for _, part in parts) for i in (0, 1)]
    own = ranks.current()
    others = _across(lambda group, place: group.gather_numbers(mine, place), [tuple(mine)], parts, module, slot)
    before = sum(part[0] for part in others[: own.rank]) if own is not None else 0
    before += sum(part[0] for r, part in parts if r < rank())
    return Share(before, sum(part[0] for part in others), sum(part[1] for part in others), parts[0][1][2])


def all_gather_object(value: Any, module: Module, slot: str) -> List[Any]:
    """A Python value of every replica of this process, by rank."""
    return [given for _, given in _met(value, module, slot)]


def _place(module: Module, slot: str) -> str:
    """In words that are the same on all ranks: NNI's wrappers know their layers' names."""
    name = getattr(module, "name", None)
    return f"{slot} of {name}" if isinstance(name, str) else slot


def _met(value: Any, module: Module, slot: str) -> List[Tuple[int, Any]]:
    """``(rank, value)`` of the replicas of this process."""
    here = current()
    if here is None or here.group.size == 1:
        return [(rank(), value)]
    return here.group.exchange(here.rank, here.place(module, slot), value)


def _across(work: Callable[[Ranks, str], T], default: T, met: List[Tuple[int, Any]], module: Module, slot: str) -> T:
    """What ``work`` finds out with the other ranks; ``default`` where there are none.

    Where a process has several replicas, the first of those that met speaks for all.
    """
    group = ranks.current()
    if group is None:
        return default
    leads = met[0][0] == rank()
    found = work(group, _place(module, slot)) if leads else None
    if len(met) > 1:
        found = next(given for _, given in _met(found, module, f"{slot} of all ranks") if given is not None)
    assert found is not None
    return found


def defer(
    value: Any,
    module: Module,
    slot: str,
    settle: Callable[[List[Any]], None],
    join: Optional[Callable[[List[Tensor]], Tensor]] = None,
    always: bool = False,
) -> None:
    """Call ``settle`` with the values of all replicas, by rank, when the forward is done; nobody waits.

    For state that is not a buffer (an observer, a dict): replicas share the object, so none of
    them may write to it. Outside a replica ``settle([value])`` is called at once. If the forward
    raises, nothing is settled.

    With ``join``, which makes one tensor of those of a process, the tensors of other ranks are settled, too. With
    ``always`` the values are a result of the forward, not statistics: ``"local"`` does not leave out any.
    """
    here = current()

    def settle_all(values: List[Any]) -> None:
        group = None if _local_only else ranks.current()
        settle(values if join is None or group is None else group.gather(join(values), _place(module, slot)))

    if here is None:
        settle_all([value])
    elif always or not _local_only:
        here.group.defer(here.rank, here.place(module, slot), value, settle_all)
    elif here.rank == 0:
        here.group.defer(0, here.place(module, slot), value, settle_all)
