"""Whose ranks share the batch of a forward: those of the DDP that it runs in, or those that the user names.

``DistributedDataParallel.forward`` is wrapped only to say, for the time it runs, which process group shares the batch. Engines
that do not go through it say so in words: :func:`merged_over`.
"""

from __future__ import annotations

import contextlib
import inspect
import weakref
import zlib
from typing import Any, Callable, Iterator, List, Optional, Tuple

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parameter import UninitializedParameter

from .notices import NNIDataParallelRuntimeWarning, warn
from .patching import Fix, is_live
from .ranks import Ranks, within

__all__ = ["FIXES", "merged_over"]


@contextlib.contextmanager
def merged_over(process_group: Any = None) -> Iterator[None]:
    """``with merged_over(): engine(batch)`` for an engine that does not call DDP's forward (DeepSpeed, FSDP, a loop of your own).

    Parameters
    ----------
    process_group : torch.distributed.ProcessGroup, optional
        The ranks that share the batch; None is the default group. Every rank of it has to run the block's forwards.

    Raises
    ------
    RuntimeError
        When there is no process group at all.
    TypeError
        When ``process_group`` is something else.
    ValueError
        When this rank is not in ``process_group``.

    Notes
    -----
    Gradients are the engine's business, and a backward need not be in the block. NNI has to be patched (``auto``, ``patch()``, a
    subclass of this package); a warning says so where it is not.

    Examples
    --------
    >>> import torch
    >>> import nni_dataparallel
    >>> store = torch.distributed.HashStore()
    >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)  # torchrun tells ranks theirs
    >>> engine = torch.nn.Linear(4, 3)
    >>> with nni_dataparallel.patched(), nni_dataparallel.merged_over():
    ...     loss = engine(torch.ones(8, 4)).square().mean()
    >>> loss.backward()
    >>> torch.distributed.destroy_process_group()
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "merged_over() needs a process group, and there is none: launch with torchrun and call "
            "torch.distributed.init_process_group(...) first. On one device leave merged_over() out."
        )
    if process_group is dist.distributed_c10d.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"merged_over(): rank {dist.get_rank()} is not in the process group: let its forward run without it, or over "
            "a group of its own."
        )
    if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
        raise TypeError(f"merged_over() takes a process group of torch.distributed, or None for all ranks, not {process_group!r}")
    if not is_live(FIXES[0]):
        warn(
            "merged_over() merges nothing: NNI is not patched. `import nni_dataparallel.auto`, call nni_dataparallel.patch(), or "
            "take the quantizer from nni_dataparallel.",
            NNIDataParallelRuntimeWarning,
        )
    with within(_of(process_group)):
        yield


def _of(group: Any, device: Optional[torch.device] = None) -> Optional[Ranks]:
    try:
        return Ranks(group, device) if dist.get_world_size(group) > 1 else None
    except (KeyError, RuntimeError, ValueError):
        return None  # the group is destroyed; DDP itself still evaluates


def _hosts(module: nn.Module) -> List[Any]:
    """The modules of a compressor's; a DDP without any is none of our business."""
    return [each for each in module.modules() if hasattr(type(each), "_recomputed_buffers")]


def _forward(stock: Callable[..., Any], self: Any, *inputs: Any, **kwargs: Any) -> Any:
    """``DistributedDataParallel.forward``: name the processes that share the batch."""
    if self in _joining and self._join_config.enable:
        if _hosts(self.module):
            warn(
                "inside DistributedDataParallel.join() ranks run different numbers of forwards, so statistics cannot be merged "
                "over them: each rank observes its own share. Give every rank the same number of batches (drop_last, or an empty "
                "shard) instead of join().",
                NNIDataParallelRuntimeWarning,
            )
        return stock(self, *inputs, **kwargs)
    if torch.is_grad_enabled():
        _require_known(self, _hosts(self.module))
    with within(_of(self.process_group, getattr(self, "device", None))):
        return stock(self, *inputs, **kwargs)


def _require_known(ddp: Any, hosts: List[Any]) -> None:
    """Refuse to train Parameters that a compressor has made after DDP was built: no rank would get the others' gradients."""
    listed = getattr(ddp, "_module_parameters", None)
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
    hosts = _hosts(module)
    if hosts:
        _init_around(hosts, stock, self, module, *args, **kwargs)
    else:
        stock(self, module, *args, **kwargs)
    if not hasattr(self, "_module_parameters"):  # torch < 2.0 keeps no list of what it knows
        self._module_parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]


def _init_around(hosts: List[Any], stock: Callable[..., None], self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
    _require_sizes(module, hosts)
    given = inspect.signature(stock).bind(self, module, *args, **kwargs).arguments
    if given.get("device_mesh") is None:
        _require_equal_buffers(module, _of(given.get("process_group")))
    recomputed = {id(buffer) for host in hosts for buffer in host._recomputed_buffers()}
    names = [name for name, buffer in module.named_buffers() if id(buffer) in recomputed]
    ignored: Any = getattr(module, _IGNORED, None)
    setattr(module, _IGNORED, sorted({*(ignored or ()), *names}))
    try:
        stock(self, module, *args, **kwargs)
    finally:
        # DDP has its own list now. When the quantizer is gone, the Parameters have these names: the next DDP must train them.
        if ignored is None:
            delattr(module, _IGNORED)
        else:
            setattr(module, _IGNORED, ignored)
    # Up to NNI 2.4 an evaluation uses the weights of the last training forward: those that rank 0 may have just loaded.
    buffers = [buffer for buffer in module.buffers() if id(buffer) in recomputed and buffer.numel()]
    if buffers and dist.get_world_size(self.process_group) > 1:
        self._distributed_broadcast_coalesced(buffers, self.broadcast_bucket_size, 0)


def _require_sizes(module: nn.Module, hosts: List[Any]) -> None:
    own = {id(parameter) for host in hosts for parameter in host.parameters(recurse=False) if parameter.requires_grad}
    named = [(name, p) for name, p in module.named_parameters() if id(p) in own and not isinstance(p, UninitializedParameter)]
    unsized = [name for name, parameter in named if not parameter.numel()]
    if unsized:
        raise ValueError(
            f"{', '.join(unsized)}: learned scales of activations whose size only a forward tells; DDP needs it now. Call "
            "quantizer.track_forward(batch) once, with a batch like those of the training, before DistributedDataParallel."
        )


def _require_equal_buffers(module: nn.Module, ranks: Optional[Ranks]) -> None:
    """Refuse what DDP would end the process for: ranges that exist, for having been loaded, on some ranks only."""
    if ranks is None:
        return
    shapes = ", ".join(f"{name} {tuple(buffer.shape)}" for name, buffer in module.named_buffers())
    found = ranks.gather_numbers([zlib.crc32(shapes.encode())])
    different = [rank for rank, own in enumerate(found) if own != found[0]]
    if different:
        raise RuntimeError(
            f"ranks {different} have buffers of other names or shapes than rank 0. NNI 1.x and 3.0 make a layer's ranges in its "
            "first forward, or when they are loaded: load the checkpoint on every rank before DistributedDataParallel, not on one."
        )


def _enter_join(stock: Callable[..., Any], self: Any) -> Any:
    """``Join.__enter__``: from here on ranks may run different numbers of forwards."""
    _joining.update(self._joinables)
    return stock(self)


def _exit_join(stock: Callable[..., Any], self: Any, *error: Any) -> Any:
    """``Join.__exit__``: they run the same number again (torch itself never takes back what it notes at the beginning)."""
    _joining.difference_update(self._joinables)
    return stock(self, *error)


_IGNORED = "_ddp_params_and_buffers_to_ignore"
_joining: weakref.WeakSet[Any] = weakref.WeakSet()
_JOIN = "torch.distributed.algorithms.join:Join"
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
    Fix(
        name="beginning of join()",
        target=f"{_JOIN}.__enter__",
        fix=_enter_join,
        reason="ranks that run different numbers of forwards must not wait for each other",
        expects=("self",),
    ),
    Fix(
        name="end of join()",
        target=f"{_JOIN}.__exit__",
        fix=_exit_join,
        reason="ranks that run the same number of forwards again merge their statistics again",
        expects=("self",),
    ),
)
