"""Which ranks shared the batch that a layer saw last: for what comes after DDP's forward, in losses and backward hooks."""

from __future__ import annotations

import itertools
import weakref
from typing import Iterable, NamedTuple, Optional

import torch
from torch.nn import Module

from . import ranks, replicas
from .ranks import Ranks

__all__ = ["note_ranks", "ranks_of"]


class _Seen(NamedTuple):
    when: int
    ranks: Optional[Ranks]


_clock = itertools.count()
# Beside the wrappers, since a process group can be neither copied nor saved. Forwards without gradients (a validation
# on rank 0) come between a forward and what follows from its gradients.
_latest: weakref.WeakKeyDictionary[Module, _Seen] = weakref.WeakKeyDictionary()
_latest_trained: weakref.WeakKeyDictionary[Module, _Seen] = weakref.WeakKeyDictionary()


def note_ranks(wrapper: Module) -> None:
    """Remember who shares the batch of this forward."""
    if replicas.recomputing():
        return
    here = replicas.current()
    original = wrapper if here is None else here.original(wrapper) or wrapper
    seen = _Seen(next(_clock), ranks.current())
    _latest[original] = seen
    if torch.is_grad_enabled():
        _latest_trained[original] = seen


def ranks_of(wrappers: Iterable[Module], trained: bool = False) -> Optional[Ranks]:
    """Who shared the batch of these wrappers' latest forward (``trained``: that had gradients); None for one device."""
    known = _latest_trained if trained else _latest
    return max((known[wrapper] for wrapper in wrappers if wrapper in known), default=_Seen(0, None), key=lambda s: s.when).ranks
