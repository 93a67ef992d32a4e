"""Which replica am I? Rank, size and collectives among the threads of one ``nn.DataParallel``.

Outside a worker thread every function here is the identity, so code that uses it needs no case for
one device. What makes a thread know its replica is in ``parallel``.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from typing import Any, Callable, Dict, FrozenSet, List, Optional, Tuple, TypeVar

import torch
from torch import Tensor
from torch.nn import Module

from .group import Group
from .rendezvous import Parcel, Place

__all__ = [
    "Replica",
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "current",
    "defer",
    "is_replica",
    "local",
    "rank",
    "recomputing",
    "size",
]

M = TypeVar("M", bound=Module)
_OPERATIONS: Dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "max": torch.maximum,
    "min": torch.minimum,
    "sum": torch.add,
}


class _Here(threading.local):
    replica: Optional[Replica] = None


_here = _Here()


def current() -> Optional[Replica]:
    """The replica whose worker thread this is; None outside ``nn.DataParallel``."""
    return _here.replica


def rank() -> int:
    """Index of this thread's replica, 0 outside ``nn.DataParallel``."""
    return 0 if _here.replica is None else _here.replica.rank


def size() -> int:
    """Number of replicas of this forward, 1 outside ``nn.DataParallel``."""
    return 1 if _here.replica is None else _here.replica.group.size


def local(module: M) -> M:
    """The copy of ``module`` that lives where this thread runs; itself outside a replica."""
    return module if _here.replica is None else _here.replica.local(module)


def is_replica(module: Module) -> bool:
    """Whether ``module`` is a copy that ``nn.DataParallel`` made."""
    return bool(module.__dict__.get("_is_replica", False))


def recomputing() -> bool:
    """Whether this forward runs inside a backward (activation checkpointing); unknown to torch < 2.0."""
    task = getattr(torch._C, "_current_graph_task_id", None)
    return task is not None and task() != -1


def all_reduce(tensor: Tensor, op: str, module: Module, slot: str) -> Tensor:
    """Combine one tensor of every replica, elementwise.

    Parameters
    ----------
    tensor
        Same shape and dtype on every replica, on the replica's own device.
    op
        ``"max"``, ``"min"`` or ``"sum"`` (in the order of the ranks).
    module, slot
        Where the collective takes place: the module as this thread sees it, and a name within it.

    Returns
    -------
    Tensor
        The combined tensor on the caller's device; ``tensor`` itself where there is one replica.
    """
    parts = all_gather(tensor, module, slot)
    combine = _OPERATIONS[op]
    result = parts[0]
    for part in parts[1:]:
        result = combine(result, part)
    return result


def all_gather(tensor: Tensor, module: Module, slot: str) -> List[Tensor]:
    """One tensor of every replica, in the order of the ranks, on the caller's device.

    Parameters are those of :func:`all_reduce`; shapes may differ between replicas.
    """
    here = _here.replica
    if here is None or here.group.size == 1:
        return [tensor]
    parcels = here.group.exchange(here.rank, here.place(module, slot), Parcel(tensor.detach()))
    return [tensor if r == here.rank else parcel.fetch(tensor) for r, parcel in parcels]


def all_gather_object(value: Any, module: Module, slot: str) -> List[Any]:
    """As :func:`all_gather`, for a Python value that holds no tensor (a count): no device takes part."""
    here = _here.replica
    if here is None or here.group.size == 1:
        return [value]
    return [given for _, given in here.group.exchange(here.rank, here.place(module, slot), value)]


def defer(value: Any, module: Module, slot: str, settle: Callable[[List[Any]], None]) -> None:
    """Call ``settle`` with the values of all replicas, by rank, when the forward is done; nobody waits.

    For state that is not a buffer (an observer, a dict): replicas share the object, so none of
    them may write to it. Outside a replica ``settle([value])`` is called at once. If the forward
    raises, nothing is settled.
    """
    here = _here.replica
    if here is None:
        settle([value])
    else:
        here.group.defer(here.rank, here.place(module, slot), value, settle)


class Replica:
    """One worker thread of a parallel forward: its module, its rank, its group."""

    def __init__(self, module: Module, network: Optional[Module], group: Group, rank: int) -> None:
        self.module = module
        self.network = network
        self.group = group
        self.rank = rank
        self.begun = False
        # Worker threads take over autograd's mode, not this one, and may then not update what it has made.
        self._inference = torch.is_inference_mode_enabled()
        self.fatal: Optional[BaseException] = None
        self.homes: Dict[int, Dict[str, Tensor]] = {}
        self._visits: Counter[Tuple[int, str]] = Counter()
        self._positions: Optional[Dict[int, int]] = None
        self._copies: Optional[Dict[int, Module]] = None
        self._network_modules: Optional[List[Module]] = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.begun = True
        outer = _here.replica
        _here.replica = self
        try:
            with torch.inference_mode() if self._inference else contextlib.nullcontext():
                return self.module(*args, **kwargs)
        except Exception:
            raise
        except BaseException as error:  # torch's worker loses these: KeyboardInterrupt, SystemExit
            self.fatal = error
            raise
        finally:
            _here.replica = outer
            self.group.leave(self.rank)

    def position(self, module: Module) -> int:
        """Index of a replica's module in ``modules()``, the same on every replica; -1 if foreign."""
        if self._positions is None:
            self._positions = {id(m): i for i, m in enumerate(self.module.modules())}
        return self._positions.get(id(module), -1)

    def place(self, module: Module, slot: str) -> Place:
        position = self.position(module)
        self._visits[(position, slot)] += 1
        name = f"{slot} of layer {position} ({type(module).__name__})"
        return Place(self._visits[(position, slot)], position, slot, getattr(module, "name", name))

    def note_update(self, module: Module, names: FrozenSet[str]) -> None:
        """Tell the group that ``module``'s buffers ``names`` were updated here."""
        with self.group.changed:
            self.group.updated.setdefault(self.position(module), []).append((self.rank, module, names))

    def local(self, module: M) -> M:
        """This replica's copy of the network's ``module``; ``module`` where there is none."""
        if self._copies is None:
            self._copies = {id(o): c for o, c in zip(self._originals(), self.module.modules())}
        return self._copies.get(id(module), module)  # type: ignore[return-value]

    def original(self, module: Module) -> Optional[Module]:
        """The network's module that ``module`` is a copy of."""
        position, originals = self.position(module), self._originals()
        return originals[position] if 0 <= position < len(originals) else None

    def _originals(self) -> List[Module]:
        if self._network_modules is None:
            self._network_modules = [] if self.network is None else list(self.network.modules())
        return self._network_modules
