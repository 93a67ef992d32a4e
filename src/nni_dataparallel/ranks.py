"""The process group over which a forward's statistics are merged: that of the DDP forward it runs in.

``DistributedDataParallel.forward`` is wrapped only to say, for the time it runs, which process group shares the
batch. Outside it (validation on rank 0, ``ddp.module(x)``) nothing communicates, so nothing can hang. Engines
that do not go through it say so in words: :func:`merged_over`.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any, Callable, Iterable, Iterator, List, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn
from torch import distributed as dist

from .notices import NNIDataParallelRuntimeWarning, warn
from .patching import Fix

__all__ = ["FIXES", "Ranks", "current", "merged_over", "within"]


class _Here(threading.local):
    ranks: Optional[Ranks] = None


_here = _Here()


class Ranks:
    """The processes that share a batch."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.size: int = dist.get_world_size(group)
        self.rank: int = dist.get_rank(group)

    def _sent(self, tensor: Tensor) -> Tensor:
        """``tensor`` where the backend can read it."""
        if dist.get_backend(self._group) == "nccl" and not tensor.is_cuda:
            return tensor.to("cuda")
        return tensor

    def all_reduce(self, tensor: Tensor, op: str) -> Tensor:
        """``tensor`` of all ranks, combined elementwise: ``"max"``, ``"min"`` or ``"sum"``; one collective."""
        sent = self._sent(tensor.detach()).clone(memory_format=torch.contiguous_format)
        dist.all_reduce(sent, getattr(dist.ReduceOp, op.upper()), group=self._group)
        return sent.to(tensor.device)

    def gather_numbers(self, numbers: Sequence[int]) -> List[Tuple[int, ...]]:
        """A few integers of every rank, by rank; one collective."""
        mine = self._sent(torch.tensor(list(numbers), dtype=torch.int64))
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(parts, mine, group=self._group)
        return [tuple(part.tolist()) for part in parts]

    def gather(self, tensor: Tensor) -> List[Tensor]:
        """A tensor of every rank, by rank, of the same dtype and number of dimensions; shapes may differ: two collectives."""
        shapes = self.gather_numbers(tensor.shape)
        sent = self._sent(tensor.detach()).contiguous().flatten()
        longest = max(_numel(shape) for shape in shapes)
        padded = torch.cat([sent, sent.new_zeros(longest - sent.numel())])
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded, group=self._group)
        return [part[: _numel(shape)].reshape(shape).to(tensor.device) for part, shape in zip(parts, shapes)]


def _numel(shape: Sequence[int]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count


def current() -> Optional[Ranks]:
    """The processes that share the batch of this thread's forward; None outside DDP."""
    return _here.ranks


@contextlib.contextmanager
def within(ranks: Optional[Ranks]) -> Iterator[None]:
    """Statistics of forwards in the block are merged over ``ranks``; over none with None."""
    outer = _here.ranks
    _here.ranks = ranks
    try:
        yield
    finally:
        _here.ranks = outer


@contextlib.contextmanager
def merged_over(process_group: Any = None) -> Iterator[None]:
    """``with merged_over(): engine(batch)`` for an engine that does not call DDP's forward (DeepSpeed, FSDP, a loop of your own).

    Parameters
    ----------
    process_group
        The ranks that share the batch; None is the default group. Every rank of it has to run the block's forwards.

    Raises
    ------
    RuntimeError
        When there is no process group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "merged_over() needs a process group, and there is none: launch with torchrun and call "
            "torch.distributed.init_process_group(...) first. On one device leave merged_over() out."
        )
    with within(_of(process_group)):
        yield


def _of(group: Any) -> Optional[Ranks]:
    # Not kept: a reference would hold the sockets of a destroyed group open, and the other ranks waiting.
    return Ranks(group) if dist.get_world_size(group) > 1 else None


def _forward(stock: Callable[..., Any], self: Any, *inputs: Any, **kwargs: Any) -> Any:
    """``DistributedDataParallel.forward``: name the processes that share the batch."""
    if getattr(getattr(self, "_join_config", None), "enable", False):
        warn(
            "inside DistributedDataParallel.join() ranks run different numbers of forwards, so statistics cannot be merged "
            "over them: each rank observes its own share, and rank 0's is kept. Give every rank the same number of batches "
            "(drop_last, or an empty shard) instead of join().",
            NNIDataParallelRuntimeWarning,
        )
        return stock(self, *inputs, **kwargs)
    if torch.is_grad_enabled():
        _require_known(self)
    with within(_of(self.process_group)):
        return stock(self, *inputs, **kwargs)


def _require_known(ddp: Any) -> None:
    """Refuse to train Parameters that a compressor has made after DDP was built: no rank would get the others' gradients."""
    listed = getattr(ddp, "_module_parameters", None)
    hosts = [module for module in ddp.module.modules() if hasattr(type(module), "_recomputed_buffers")]
    if listed is None or not hosts:
        return
    known = {id(parameter) for parameter in listed}
    made = {id(p) for host in hosts for p in host.parameters() if p.requires_grad and id(p) not in known}
    if not made:
        return
    names = [name for name, parameter in ddp.module.named_parameters() if id(parameter) in made]
    names = [name for name in names if name not in getattr(ddp, "parameters_to_ignore", ())]
    if names:
        raise RuntimeError(
            f"{type(ddp).__name__} was built before the quantizer: it does not know {', '.join(names[:4])}"
            f"{', ...' if len(names) > 4 else ''}, so that every rank would train them by itself. Build the quantizer on the plain "
            f"model first (and compress(); in NNI 3.0 the place is the training function), then {type(ddp).__name__}(model)."
        )


def _init(stock: Callable[..., None], self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
    """``DistributedDataParallel.__init__``: buffers that every forward computes anew are not broadcast before it."""
    unsized = [name for name, parameter in module.named_parameters() if parameter.requires_grad and not parameter.numel()]
    if unsized:
        raise ValueError(
            f"{', '.join(unsized)}: learned scales of activations whose size only a forward tells; DDP needs it now. Call "
            "quantizer.track_forward(batch) once, with a batch like those of the training, before DistributedDataParallel."
        )
    recomputed = {id(buffer) for host in module.modules() for buffer in _recomputed(host)}
    names = [name for name, buffer in module.named_buffers() if id(buffer) in recomputed]
    if names:
        ignored: Any = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
        module._ddp_params_and_buffers_to_ignore = sorted({*ignored, *names})  # type: ignore[assignment]
    stock(self, module, *args, **kwargs)


def _recomputed(module: nn.Module) -> Iterable[Tensor]:
    """What a module says of itself by a method ``_recomputed_buffers``."""
    method = getattr(type(module), "_recomputed_buffers", None)
    return () if method is None else method(module)


_DDP = "torch.nn.parallel.distributed:DistributedDataParallel"

FIXES: Tuple[Fix, ...] = (
    Fix(
        name="forward of DistributedDataParallel",
        target=f"{_DDP}.forward",
        fix=_forward,
        reason="observers do not know the process group that shares the batch",
        expects=("self",),
    ),
    Fix(
        name="construction of DistributedDataParallel",
        target=f"{_DDP}.__init__",
        fix=_init,
        reason="quantised weights, which every forward computes anew, are broadcast before it",
        expects=("self", "module"),
    ),
)
