"""What an observer sees: the whole batch's range, merged before the moving average."""

from __future__ import annotations

import functools
import math
from typing import Any, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor

from .. import replicas
from ..statistics import batch_range, fake_quantize, moving_average

__all__ = ["merged_range", "overridden", "rounded_by_layer", "track"]


def overridden(quantizer: Any) -> bool:
    """Whether a subclass of the user's own has another ``_quantize`` or ``_dequantize`` than NNI."""
    return _overridden(type(quantizer))  # type: ignore[arg-type]


@functools.lru_cache(maxsize=None)
def _overridden(quantizer_class: Any) -> bool:
    methods = (getattr(quantizer_class, name) for name in ("_quantize", "_dequantize"))
    return not all(method.__module__.startswith("nni.") for method in methods)


def rounded_by_layer(self: Any, x: Tensor, module: Any, bits: int) -> Tensor:
    """Fake quantisation by the one scale that a layer has up to 2.4.

    Through the user's own ``_quantize`` and ``_dequantize`` if a subclass has them.
    """
    if overridden(self):
        return self._dequantize(module, self._quantize(bits, module, x))  # type: ignore[no-any-return]
    return fake_quantize(x, module.scale, module.zero_point, 0, (1 << bits) - 1)


def merged_range(x: Tensor, wrapper: Any, slot: str, dims: Optional[Sequence[int]] = None) -> Tuple[Tensor, Tensor]:
    """Range of the whole batch, of which ``x`` is this replica's shard: one collective for both ends."""
    if replicas.alone():
        return batch_range(x, dims)
    if x.numel():
        low, high = batch_range(x, dims)
    else:
        # Nothing of the batch came here, for example of a selection: any other shard decides.
        shape = [] if dims is None else [1 if d in dims else size for d, size in enumerate(x.shape)]
        low, high = x.new_full(shape, math.inf), x.new_full(shape, -math.inf)
    ends = replicas.all_reduce(torch.stack((-low, high)), "max", wrapper, slot)
    if not x.numel() and bool((ends[1] == -math.inf).all()):
        return batch_range(x, dims)  # the whole batch is empty: what one device says to that
    return -ends[0], ends[1]


def _shaped_like(new: Tensor, old: Tensor) -> Tensor:
    new = new.to(old.dtype)
    return new.reshape(old.shape) if new.numel() == old.numel() else new.expand(old.shape)


def track(
    x: Tensor,
    wrapper: Any,
    slot: str,
    names: Tuple[str, str],
    decay: Union[float, Tensor],
    first: bool = False,
    average: bool = True,
    dims: Optional[Sequence[int]] = None,
) -> Tuple[Tensor, Tensor]:
    """Update the tracked range ``names`` of ``wrapper.module`` with the batch and return it.

    Parameters
    ----------
    first
        Start the moving average at this batch's range.
    average
        False replaces the range instead of averaging it.

    Returns
    -------
    (Tensor, Tensor)
        The new range, in the shape of the buffers. A forward that recomputes activations inside
        a backward has seen this batch before: the range stays as it is.
    """
    module = wrapper.module
    tracked = tuple(module._buffers[name] for name in names)
    if replicas.recomputing():
        return tracked[0], tracked[1]
    current = merged_range(x, wrapper, slot, dims)
    updated = []
    for name, old, new in zip(names, tracked, current):
        if average:
            # In the dtypes that NNI's own copies go through: first the buffer's, then the batch's.
            start = _shaped_like(new, old) if first else old
            new = moving_average(start, new, decay)
        if new.dtype != old.dtype or new.shape != old.shape:
            new = _shaped_like(new, old)
        # Assigned, not copied: backward may hold what the last forward left here.
        module._buffers[name] = new
        updated.append(new)
    return updated[0], updated[1]
