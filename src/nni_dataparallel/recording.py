"""A rebound buffer is written back into the tensor that was there.

Quantizers assign (``module.scale = scale``). On a replica the new tensor dies with the replica;
on one device it leaves a non-leaf tensor in ``_buffers`` that neither ``copy.deepcopy`` nor an
older list of buffers (DDP's, an EMA's) can cope with. Inside :func:`recorded` the forward computes
with the fresh tensors, so that nothing that backward saved is modified; afterwards their values
are copied into the buffers that were there, which keep identity, shape, dtype and device.
"""

from __future__ import annotations

from types import TracebackType
from typing import Dict, Optional, Type

import torch
from torch import Tensor
from torch.nn import Module

from . import replicas

__all__ = ["recorded"]


class recorded:
    """Context manager: assignments to buffers of ``module`` become in-place updates.

    When the body raises, the buffers that were there come back unchanged. On replicas other than
    0 nothing is copied: they are about to be dropped, and their fresh tensors serve a second use
    of the module in the same forward.
    """

    __slots__ = ("_before", "_module")

    def __init__(self, module: Module) -> None:
        self._module = module
        self._before: Dict[str, Optional[Tensor]] = {}

    def __enter__(self) -> None:
        self._before = dict(self._module._buffers)

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        buffers = self._module._buffers
        here = replicas.current()
        if kind is not None:
            buffers.update(self._before)
            return
        if here is not None:
            here.group.report(here, self._module)
            if here.rank > 0:
                return
        for name, buffer in self._before.items():
            fresh = buffers.get(name)
            if fresh is buffer or fresh is None or buffer is None or fresh.numel() != buffer.numel():
                continue
            with torch.no_grad():
                buffer.copy_(fresh.detach().reshape(buffer.shape))
            buffers[name] = buffer
