"""The replicas of one forward: where they meet, and what is left to do when all of them are done."""

from __future__ import annotations

from typing import Any, Callable, Dict, FrozenSet, List, Tuple

import torch
from torch import Tensor
from torch.nn import Module

from .rendezvous import Place, Rendezvous

__all__ = ["Group"]

Settle = Callable[[List[Any]], None]


class Group(Rendezvous):
    """A rendezvous that also collects what the main thread has to settle after the forward."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.updated: Dict[int, List[Tuple[int, Module, FrozenSet[str]]]] = {}
        self._deferred: Dict[Place, Tuple[Settle, Dict[int, Any]]] = {}

    def defer(self, rank: int, place: Place, value: Any, settle: Settle) -> None:
        with self.changed:
            self._deferred.setdefault(place, (settle, {}))[1][rank] = value

    def settle(self, network: Module) -> None:
        """Give the network the updates that replica 0 could not make, and do what was deferred."""
        originals: List[Module] = []
        for position, reports in self.updated.items():
            if position >= 0:
                originals = originals or list(network.modules())
                _settle_buffers(originals[position], reports)
        for _, (settle, values) in sorted(self._deferred.items(), key=lambda item: item[0]):
            settle([values[rank] for rank in sorted(values)])


def _settle_buffers(original: Module, reports: List[Tuple[int, Module, FrozenSet[str]]]) -> None:
    """Replica 0's buffers alias the original's, so what it copied is there already.

    Where only other replicas ran a layer, their (equal) state would die with them; so would
    every buffer that was None before this forward.
    """
    rank, source, names = min(reports, key=lambda report: report[0])
    with torch.no_grad():
        for name in names:
            buffer, newer = original._buffers.get(name), source._buffers.get(name)
            if newer is None or name not in original._buffers:
                continue
            if buffer is None:
                with torch.inference_mode(False):  # an inference tensor could not be updated by later forwards
                    original._buffers[name] = newer.detach().to(_device(original, newer), copy=True)
            elif rank != 0 and newer.numel() == buffer.numel():
                buffer.copy_(newer.detach().reshape(buffer.shape))


def _device(module: Module, default: Tensor) -> torch.device:
    for tensor in (*module.parameters(), *module.buffers()):
        return tensor.device
    return default.device
