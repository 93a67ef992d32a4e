"""Which replica am I? Rank, size and the network's modules as the worker thread of an ``nn.DataParallel`` sees them.

Outside a worker thread every function here is the identity, so code that uses it needs no case for
one device. What makes a thread know its replica is in ``parallel``.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import Counter
from types import FrameType
from typing import Any, Callable, Dict, FrozenSet, List, Optional, Tuple, TypeVar

import torch
from torch import Tensor
from torch.nn import Module

from . import ranks
from .group import Group
from .rendezvous import Place

__all__ = ["Replica", "current", "is_replica", "local", "rank", "recomputing", "size"]

M = TypeVar("M", bound=Module)


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
    """Whether this forward runs inside a backward (activation checkpointing)."""
    return _called_by_backward() if _graph_task is None else _graph_task() != -1


_graph_task: Optional[Callable[[], int]] = getattr(torch._C, "_current_graph_task_id", None)  # torch >= 2.0


def _called_by_backward() -> bool:
    """What torch < 2.0 does not say its stack shows: the backward of a Function, or the hook of a checkpoint without one."""
    frame: Optional[FrameType] = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code is _BACKWARD or (code.co_name == "unpack" and frame.f_globals.get("__name__") == "torch.utils.checkpoint"):
            return True
        frame = frame.f_back
    return False


_BACKWARD = torch.autograd.function.BackwardCFunction.apply.__code__


class Replica:
    """One worker thread of a parallel forward: its module, its rank, its group."""

    def __init__(self, module: Module, network: Optional[Module], group: Group, rank: int) -> None:
        self.module = module
        self.network = network
        self.group = group
        self.rank = rank
        self.ranks = ranks.current()
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
            with ranks.within(self.ranks), torch.inference_mode() if self._inference else contextlib.nullcontext():
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
