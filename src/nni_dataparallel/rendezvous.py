"""The rendezvous of the replicas of one forward.

It needs no time-out: it fires as soon as every *live* replica waits in it. A replica that returns or
raises is no longer live. If the live ones wait at different places (one of them skipped a layer),
the earliest place goes on with those that are there.
"""

from __future__ import annotations

import threading
from typing import Any, Dict, List, NamedTuple, Optional, Set, Tuple

import torch
from torch import Tensor

from .notices import NNIDataParallelRuntimeWarning, warn

__all__ = ["Parcel", "Place", "Rendezvous"]

PATIENCE = 60.0
"""Seconds after which a waiting replica says what it waits for (and goes on waiting)."""


class Parcel:
    """A tensor on its way to another thread, readable once its stream has produced it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._maker = threading.get_ident()
        self.ready: Optional[torch.cuda.Event] = None
        if tensor.is_cuda:
            self.ready = torch.cuda.Event()
            self.ready.record(torch.cuda.current_stream(tensor.device))

    def fetch_or_own(self, mine: Tensor) -> Tensor:
        """The tensor itself for the thread that made it."""
        return self.tensor if threading.get_ident() == self._maker else self.fetch(mine)

    def fetch(self, mine: Tensor) -> Tensor:
        if self.ready is not None:
            # A copy between devices runs on the reader's stream of the source device: that one has
            # to wait for the producer, and the memory has to outlive the copy.
            stream = torch.cuda.current_stream(self.tensor.device)
            stream.wait_event(self.ready)
            self.tensor.record_stream(stream)  # type: ignore[arg-type]
        copy = torch.empty(self.tensor.shape, dtype=self.tensor.dtype, device=mine.device)
        return copy.copy_(self.tensor, non_blocking=True)


class Place(NamedTuple):
    """Where a replica waits; sorted by how often it was there, then by the order of ``modules()``."""

    visit: int
    position: int
    slot: str
    name: str

    def same(self, other: Place) -> bool:
        return (self.position, self.slot) == (other.position, other.slot)


class Rendezvous:
    """Where ``size`` threads exchange values, place by place."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self._live: Set[int] = set(range(size))
        self._waiting: Dict[int, Tuple[Place, Any]] = {}
        self._results: Dict[int, List[Tuple[int, Any]]] = {}

    def exchange(self, rank: int, place: Place, value: Any) -> List[Tuple[int, Any]]:
        with self.changed:
            self._waiting[rank] = (place, value)
            self._release()
            while rank not in self._results:
                if not self.changed.wait(PATIENCE) and rank not in self._results:
                    absent = sorted(self._live - set(self._waiting))
                    warn(
                        f"replica {rank} has waited {PATIENCE} s at the {place.slot} of layer {place.name!r} for replicas "
                        f"{absent}. "
                        "Is a lock held around a quantised layer, or does a replica wait for another by other means?",
                        NNIDataParallelRuntimeWarning,
                    )
            return self._results.pop(rank)

    def leave(self, rank: int) -> None:
        with self.changed:
            self._live.discard(rank)
            self._release()

    def _release(self) -> None:
        if not self._waiting or self._live - set(self._waiting):
            return
        earliest = min(place for place, _ in self._waiting.values())
        met = sorted(r for r, (place, _) in self._waiting.items() if place.same(earliest))
        values = [(r, self._waiting.pop(r)[1]) for r in met]
        for r in met:
            self._results[r] = values
        self.changed.notify_all()
