"""What a tracker of NNI 3.0 sees on a replica: the whole batch's extremes, merged before its moving average.

NNI's own tracking functions stay in use. Instead of this replica's shard they are given a small tensor with
the same extremes as the whole batch (or, where every sample has a range of its own, the whole batch).
"""

from __future__ import annotations

import functools
import math
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
from torch import Tensor

from .. import replicas
from ..replicas import Share
from .views import is_parameter

__all__ = [
    "extremes",
    "has_shape",
    "kernel_of",
    "positional",
    "rows_of",
    "scale_shape",
    "tracked_once_per_batch",
    "whole_shape",
]


def kernel_of(space: Any, dims: int) -> List[int]:
    """The block of a ``dims``-dimensional tensor that shares one scale; -1 is the whole of a dimension."""
    scaler = space._scaler
    padding = [scaler.kernel_padding_val] * (dims - len(scaler.kernel_size))
    kernel = list(scaler.kernel_size)
    return padding + kernel if scaler.kernel_padding_mode == "front" else kernel + padding


def positional(space: Any, dims: int) -> bool:
    """Whether the samples of a batch have scales of their own (a granularity that leaves the batch dimension out)."""
    return space._scaler is not None and dims > 0 and kernel_of(space, dims)[0] != -1


def scale_shape(space: Any) -> Optional[Tuple[int, ...]]:
    """The shape of a target's scale, () for a single number; None where no forward has told it."""
    if space._scaler is None:
        return ()
    if space._target_type.value == "parameter" and space.target is not None:
        return tuple(space._scaler.shrink(space.target.detach(), keepdim=True).shape)
    known = [t for t in (space.scale, space.tracked_max) if t is not None and t.numel()]
    return tuple(known[0].shape) if known else None


def has_shape(value: Tensor, expected: Optional[Tuple[int, ...]]) -> bool:
    """Whether ``value`` can be a scale of the shape that :func:`scale_shape` gave; a single number may be ``()`` or ``(1,)``."""
    return expected is None or (value.numel() == 1 if expected == () else tuple(value.shape) == expected)


def rows_of(wrapper: Any, name: str, x: Tensor) -> Optional[Share]:
    """Where ``x``, the target ``name`` as this thread sees it, lies in its batch; None on one device."""
    known: Dict[Tuple[str, Tuple[int, ...]], Share] = wrapper.__dict__.setdefault("known_rows", {})
    key = (name, tuple(x.shape))
    if replicas.alone():
        # A forward that is recomputed in backward knows what the forward was told.
        recomputed = replicas.recomputing() or (replicas.current() is None and replicas.is_replica(wrapper))
        if not recomputed:
            known.pop(key, None)
        return known.get(key)
    known[key] = replicas.share_of(x.shape[0] if x.dim() else 0, x.numel(), wrapper, f"rows of {name}")
    return known[key]


def whole_shape(wrapper: Any, name: str, x: Tensor) -> Tuple[int, ...]:
    """The shape of the batch that ``x`` is a shard of."""
    rows = rows_of(wrapper, name, x)
    return tuple(x.shape) if rows is None or not x.dim() else (rows.length, *x.shape[1:])


def extremes(x: Tensor, wrapper: Any, space: Any) -> Tensor:
    """A tensor with the extremes of the whole batch, by the blocks that share a scale; ``x`` itself on one device."""
    if replicas.alone() or is_parameter(space):
        return x
    name, x = space._target_name, x.detach()
    if not x.is_floating_point():
        x = x.to(torch.get_default_dtype())  # a negated minimum would wrap around
    if positional(space, x.dim()):
        return torch.cat(replicas.all_gather(x, wrapper, name))
    scaler = space._scaler
    low, high = (_reduced(x, scaler, end) for end in (torch.amin, torch.amax))
    ends = replicas.all_reduce(torch.stack((-low, high)), "max", wrapper, name)
    if not x.numel() and bool((ends[1] == -math.inf).all()):
        return x  # the whole batch is empty: what one device says to that
    if scaler is None or not x.dim():
        return torch.stack((-ends[0], ends[1]))
    return torch.cat([scaler.expand(end, [1, *x.shape[1:]], keepdim=True) for end in (-ends[0], ends[1])])


def _reduced(x: Tensor, scaler: Any, end: Callable[..., Tensor]) -> Tensor:
    if not x.numel():
        # Nothing of the batch came here: any other shard decides.
        like = x.new_zeros(()) if scaler is None else scaler.shrink(x.new_zeros([1, *x.shape[1:]]), keepdim=True)
        return torch.full_like(like, math.inf if end is torch.amin else -math.inf)
    if scaler is None:
        return end(x)
    return scaler.shrink(x, functools.partial(end, dim=-1), keepdim=True)  # type: ignore[no-any-return]


def tracked_once_per_batch(wanted: Callable[[Any, Any, str], bool]) -> Callable[..., None]:
    """A fix for a tracking function ``(self, wrapper, target_name, target)``.

    ``wanted(quantizer, wrapper, target_name)`` says whether NNI's function takes notice of this forward at
    all: where it does not, no replica should wait for the others.
    """

    def track(stock: Callable[..., None], self: Any, wrapper: Any, target_name: str, target: Any) -> None:
        if replicas.recomputing():
            return  # activation checkpointing: this batch was tracked in the forward
        space = wrapper.quantization_target_spaces.get(target_name)
        if space is not None and isinstance(target, Tensor) and wanted(self, wrapper, target_name):
            target = extremes(target, wrapper, space)
        stock(self, wrapper, target_name, target)

    return track
