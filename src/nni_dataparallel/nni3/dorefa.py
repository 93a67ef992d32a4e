"""``DoReFaQuantizer`` of NNI 3.0: the gradient's noise is drawn for the batch, not for a shard.

Zhou et al., "DoReFa-Net" (2016) quantise the gradient of a layer with uniform noise, one number per sample.
Whichever replica comes to a layer first in backward draws the whole batch's numbers, as one device would;
each takes those of its own rows. The ranks of DDP draw the batch's numbers each by itself: they are the same where all
ranks have the same seed, and noise all the same where not.
"""

from __future__ import annotations

import threading
from typing import Any, Callable, List, Optional, Tuple

import torch
from torch import Tensor

from .. import replicas
from ..rendezvous import Parcel
from ..replicas import Share
from ..statistics import smallest_divisor
from .ranges import extremes

__all__ = ["quant_dequant_gradient_hook", "update_scale_zp"]


class _Noise:
    """The numbers of one layer in one backward, drawn once in this process, on the device of its first replica."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._lock = device, threading.Lock()
        self._drawn: List[Parcel] = []

    def __reduce__(self) -> Any:
        return _Noise, (self._device,)  # of a model that is copied between forward and backward; a lock cannot be

    def of(self, index: int, rows: Share, peak: Tensor) -> Tensor:
        with self._lock:
            while len(self._drawn) <= index:  # one per gradient that the layer gets
                noise = peak.new_zeros((rows.length, *peak.shape[1:]), device=self._device).uniform_(-0.5, 0.5)
                self._drawn.append(Parcel(noise))
            return self._drawn[index].fetch(peak)[rows.first : rows.first + len(peak)]


def update_scale_zp(stock: Callable[..., None], self: Any, wrapper: Any, target_name: str, target: Any) -> None:
    """``DoReFaQuantizer.update_scale_zp``: the range of an input is the whole batch's; outputs agree on their noise."""
    if replicas.recomputing():
        return  # activation checkpointing: scale and noise are the forward's
    if target_name == "_output_0" and isinstance(target, Tensor) and wrapper.training:
        _agree_on_noise(wrapper, target)
    space = wrapper.quantization_target_spaces.get(target_name)
    if space is not None and space._target_type.value == "input" and self.check_target(wrapper, target_name):
        target = extremes(target, wrapper, space)
    stock(self, wrapper, target_name, target)


def _agree_on_noise(wrapper: Any, output: Tensor) -> None:
    module = wrapper.module
    if replicas.alone() or not output.dim() or not getattr(module, "_backward_pre_hooks", None):
        return
    if not torch.is_grad_enabled():
        return  # no backward will come for it
    rows = replicas.share_of(len(output), output.numel(), wrapper, "noise", _Noise(output.device))
    module.__dict__.setdefault("noise", []).append((len(output), (rows, rows.token)))


def quant_dequant_gradient_hook(stock: Callable[..., None], self: Any, target_space: Any) -> None:
    """``DoReFaQuantizer._quant_dequant_gradient_hook``: NNI's hook with that noise; a zero gradient stays zero."""
    module = target_space._wrapper.module
    known = set(module._backward_pre_hooks) if hasattr(module, "_backward_pre_hooks") else set()
    stock(self, target_space)
    init_scale_zp = stock.__globals__["init_scale_zp"]
    bits, qmin, qmax = target_space.quant_bits, target_space.qmin, target_space.qmax
    levels = 2**bits - 1

    def quantise(grad: Tensor, shared: Optional[Tuple[Share, _Noise]], index: int) -> Tensor:
        ends = torch.tensor([1.0 + 0.5 / levels, -0.5 / levels], device=grad.device)
        scale, zero_point = init_scale_zp(ends[0], ends[1], qmax, qmin, "affine")
        peak = grad.detach().abs().amax(tuple(range(1, grad.dim())), keepdim=True)
        noise = torch.zeros_like(peak).uniform_(-0.5, 0.5) if shared is None else shared[1].of(index, shared[0], peak)
        level = grad / (2 * peak.clamp(min=smallest_divisor(peak.dtype))) + 0.5 + noise / levels
        level = torch.round(torch.clamp(zero_point + level / scale, qmin, qmax))
        return ((level - zero_point) * scale - 0.5) * 2 * peak  # type: ignore[no-any-return]

    def hook(module: Any, grads: Tuple[Optional[Tensor], ...]) -> Tuple[Optional[Tensor], ...]:
        pending = module.__dict__.get("noise")
        rows = next((len(grad) for grad in grads if grad is not None and grad.dim()), None)
        # The latest forward of that size: backward may take several in any order.
        index = next((i for i in range(len(pending or ()) - 1, -1, -1) if rows in (None, pending[i][0])), None)
        shared = None if index is None else pending.pop(index)[1]
        return tuple(None if grad is None else quantise(grad, shared, i) for i, grad in enumerate(grads))

    for key in set(module._backward_pre_hooks) - known:
        module._backward_pre_hooks[key] = hook
