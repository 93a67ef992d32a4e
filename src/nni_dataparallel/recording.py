"""A rebound buffer is written back into the tensor that was there.

Quantizers assign (``module.scale = scale``). On a replica the new tensor dies with the replica;
on one device it leaves a non-leaf tensor in ``_buffers`` that neither ``copy.deepcopy`` nor an
older list of buffers (DDP's, an EMA's) can cope with. Inside :class:`recorded` the forward computes
with the fresh tensors, so that nothing that backward saved is modified; afterwards their values
are copied into the buffers that were there, which keep identity, shape, dtype and device.
"""

from __future__ import annotations

from types import TracebackType
from typing import Dict, FrozenSet, List, Optional, Tuple, Type

import torch
from torch import Tensor
from torch.nn import Module

from . import replicas

__all__ = ["recorded"]


class recorded:
    """Context manager: assignments to the buffers ``names`` of ``module`` become in-place updates.

    When the body raises, the buffers that were there come back unchanged.

    Parameters
    ----------
    module
        The module whose buffers are assigned.
    names
        The buffers to record; others are the user's own and stay as the body left them.
    keep
        Leave the fresh tensors in place until the next recording, for a module that is used again
        outside it in the same forward. Always so on replicas, where only the values of replica 0
        are copied: its buffers alias the original's.
    """

    __slots__ = ("_before", "_keep", "_module", "_names")

    def __init__(self, module: Module, names: FrozenSet[str], keep: bool = False) -> None:
        self._module, self._names, self._keep = module, names, keep
        self._before: Dict[str, Optional[Tensor]] = {}

    def __enter__(self) -> None:
        buffers = self._module._buffers
        kept = self._module.__dict__.get("_recorded_into")
        if kept and not replicas.is_replica(self._module):
            buffers.update(kept)
            kept.clear()
        self._before = {name: buffer for name, buffer in buffers.items() if name in self._names}

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        buffers = self._module._buffers
        if kind is not None:
            buffers.update(self._before)
            return
        here = replicas.current()
        if here is None and replicas.is_replica(self._module):
            return  # recomputed in backward: the forward's values are recorded already
        changed: List[Tuple[str, Tensor, Tensor]] = []
        for name, old in self._before.items():
            new = buffers[name]
            if old is not None and new is not None and new is not old and new.numel() == old.numel():
                changed.append((name, old, new))
        if here is not None:
            here.note_update(self._module, self._names)
            if here.rank == 0:
                # A second use of the module in this forward finds the fresh tensors, with their graph.
                homes = here.homes.setdefault(id(self._module), {})
                for name, new_born in self._new_born():
                    homes.setdefault(name, new_born)  # the original adopts it when the replicas are done
                _copy([(homes.setdefault(name, old), new) for name, old, new in changed])
            return
        _copy([(old, new) for _, old, new in changed])
        buffers.update(self._new_born())
        if self._keep:
            self._module.__dict__.setdefault("_recorded_into", {}).update({n: old for n, old, _ in changed})
        else:
            buffers.update({name: old for name, old, _ in changed})

    def _new_born(self) -> List[Tuple[str, Tensor]]:
        """Plain copies of the buffers that were None before, as NNI 1.x registers some."""
        now = [(name, self._module._buffers[name]) for name, old in self._before.items() if old is None]
        with torch.inference_mode(False):  # an inference tensor could not be updated by a later training forward
            return [(name, new.detach().clone()) for name, new in now if new is not None]


def _copy(pairs: List[Tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for old, new in pairs:
            old.copy_(new if new.shape == old.shape else new.reshape(old.shape))
