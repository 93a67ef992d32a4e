"""The pruners: activations are collected once per batch, and a pruned model can be copied.

NNI's hooks append what a layer returned to one list that all replicas share, and take its length (or
a counter kept in it) for the number of batches. Under DataParallel a shard counts as a batch, and the
order is that of the threads. Here the shards are put together when the replicas are done, and the
stock hook sees the batch. Under DDP it sees the batch of all ranks, and so do the hooks on gradients.
"""

from __future__ import annotations

from typing import Any, Callable, FrozenSet, List

import torch
from torch import Tensor
from torch.nn import Module

from .. import replicas
from ..recording import recorded
from ..sharing import note_ranks, ranks_of
from ..statistics import cut_dimension
from .wrapping import note_other_names

__all__ = ["add_activation_collector", "collector", "forward", "taylor_collector", "weight_to_buffer", "wrap_modules"]

Hook = Callable[[Module, Any, Tensor], Any]
MASKED: FrozenSet[str] = frozenset(["weight", "bias"])
"""The buffers that the wrapper of the second pruning API assigns in a forward."""


def _whole(shards: List[Tensor]) -> Tensor:
    """The batch that ``nn.DataParallel`` had cut: along the dimension in which the shards differ, else the first."""
    first = shards[0]
    return torch.cat([shard.to(first.device) for shard in shards], cut_dimension([shard.shape for shard in shards]))


def once_per_batch(hook: Hook) -> Hook:
    """A forward hook for which the replicas of one forward are one call."""

    def collect(module: Module, inputs: Any, output: Tensor) -> Any:
        if replicas.recomputing():  # activation checkpointing: this batch was collected in the forward
            return None
        if replicas.alone() and replicas.current() is None:
            return hook(module, inputs, output)
        here = replicas.current()
        original = None if here is None else here.original(module)
        layer = module if original is None else original

        def settle(shards: List[Tensor]) -> None:
            hook(layer, (), _whole(shards))

        # A copy, since an in-place activation behind this layer writes into what was seen here.
        replicas.defer(output.detach().clone(), module, "activation", settle, _whole)
        return None

    return collect


def add_activation_collector(stock: Callable[..., int], self: Any, *pruner: Any) -> int:
    """``_add_activation_collector`` of the first pruning API: every hook it registers is called once per batch."""
    hook_id = stock(self, *pruner)
    owner = pruner[0] if pruner else self  # 1.5 and 1.6: the pruner itself has the hooks
    for handle in owner._fwd_hook_handles[hook_id]:
        hooks = handle.hooks_dict_ref()
        hooks[handle.id] = once_per_batch(hooks[handle.id])
    return hook_id


def collector(stock: Callable[..., Hook], self: Any, buffer: List[Any]) -> Hook:
    """``ActivationPruner._collector`` of the second pruning API: as above."""
    return once_per_batch(stock(self, buffer))


def taylor_collector(
    stock: Callable[..., Callable[[Tensor], None]], self: Any, buffer: List[Any], weight_tensor: Tensor
) -> Callable[[Tensor], None]:
    """``TaylorFOWeightPruner._collector``: square the gradient of the whole batch, which is the mean of the ranks'.

    A hook on a Parameter sees the gradient before DDP reduces it. Here there is no later place to do so: every rank's
    backward has to come by the same layers.
    """
    collect = stock(self, buffer, weight_tensor)

    def collect_mean(grad: Tensor) -> None:
        done = replicas.merged_statistics() == "local" or buffer[0] >= self.training_steps
        group = None if done else ranks_of(self.get_modules_wrapper().values(), trained=True)
        collect(grad if group is None else group.all_reduce(grad, "sum") / group.size)

    return collect_mean


def wrap_modules(stock: Callable[..., Any], self: Any, layer: Any, config: Any) -> Any:
    """``_wrap_modules`` of the second pruning API: by another name the model uses the masked weight the wrapper left."""
    wrapper = stock(self, layer, config)
    note_other_names(wrapper, self.bound_model)
    return wrapper


def weight_to_buffer(stock: Callable[..., None], self: Any) -> None:
    """``PrunerModuleWrapper._weight2buffer``: the masked weight gets storage of its own.

    Stock's shares it with the trained weight, which recording the masked one would overwrite: what a
    mask hides has to survive, since the next mask may show it again.
    """
    stock(self)
    buffers = self.module._buffers
    buffers.update({name: buffers[name].clone() for name in MASKED.intersection(buffers) if buffers[name] is not None})
    self.has_own_buffers = True


def forward(stock: Callable[..., Any], self: Any, *inputs: Any) -> Any:
    """``PrunerModuleWrapper.forward``: record the masked weight that it assigns."""
    note_ranks(self)
    if not self.__dict__.get("has_own_buffers"):  # wrapped before the fixes were installed
        return stock(self, *inputs)
    with recorded(self.module, MASKED, keep=self.__dict__.get("has_other_names", False)):
        return stock(self, *inputs)
