"""TaylorPruner of NNI 3.0 under DDP: the gradients of all ranks, in layers that all ranks go through in one order.

A hook on a Parameter sees the gradient before DDP reduces it. Nothing communicates in the hook, by which ranks might come
in another order, but after the optimizer's step, in the order of names.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional

import torch
from torch import Tensor

from .. import replicas
from ..ranks import Ranks
from ..sharing import ranks_of

__all__ = ["by_name", "in_order", "register_hooks"]


def by_name(compressor: Any) -> None:
    """Where there are other processes, go through the layers in the same order as they do.

    NNI takes layers from a set of names, whose order differs from process to process. It decides the threshold of a
    global group (so masks differ), and the sums of what is added to a loss.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    for one in (*compressor.fused_compressors, compressor.__dict__.get("bound_pruner")):
        for layers in () if one is None else (one._target_spaces, one._module_wrappers):
            in_order(layers)


def in_order(layers: Dict[str, Any]) -> None:
    """Sort a dict by its keys, in place."""
    items = sorted(layers.items())
    layers.clear()
    layers.update(items)


class _Term:
    """The hook of one target: what it saw of this rank's gradients since the last step."""

    def __init__(self, hook: Any) -> None:
        self._hook, self._factory = hook, hook.hook_factory
        self.own: List[Tensor] = []

    def install(self, merged: Callable[[], Any]) -> None:
        def make(buffer: List[Tensor]) -> Callable[[Tensor], None]:
            collect = self._factory(buffer)

            def collect_or_keep(grad: Tensor) -> None:
                if merged() is None:
                    collect(grad)
                else:  # with this step's weight: the step will change it
                    self.own.append(self._hook.target.detach() * grad.detach())

            return collect_or_keep

        self._hook.hook_factory = make

    def settle(self, calls: int, group: Ranks) -> None:
        """Square the mean over the ranks, one per call; a rank without a gradient has a part in the mean."""
        buffer = self._hook.buffer
        for call in range(calls):
            own = self.own[call] if call < len(self.own) else torch.zeros_like(self._hook.target)
            if not buffer:
                buffer.append(torch.zeros_like(own))
            buffer[0] += (group.all_reduce(own, "sum") / group.size).pow(2)
        self.own.clear()


class _Evaluator:
    """An evaluator as far as a pruner registers hooks with it."""

    def __init__(self) -> None:
        self.hooks: List[Any] = []

    def register_hooks(self, hooks: List[Any]) -> None:
        self.hooks += hooks


def register_hooks(stock: Callable[..., None], self: Any, evaluator: Any) -> None:
    """``TaylorPruner._register_hooks``: square the gradient of the whole batch, which is the mean of the ranks'."""
    asked = _Evaluator()
    stock(self, asked)
    names = {id(hook): (name, target) for name, own in self.hooks.items() for target, hook in own.items()}
    terms = [_Term(hook) for hook in sorted(asked.hooks, key=lambda hook: names[id(hook)])]
    wrappers = [self._module_wrappers[name] for name in self._target_spaces]

    def merged() -> Optional[Ranks]:
        collecting = self._current_step < self.training_steps and replicas.merged_statistics() == "global"
        return ranks_of(wrappers, trained=True) if collecting else None

    for term in terms:
        term.install(merged)
    evaluator.register_hooks(asked.hooks)

    def settle() -> None:
        group = merged()
        if group is not None:
            counts = group.gather_numbers([len(term.own) for term in terms])
            for term, calls in zip(terms, zip(*counts)):
                term.settle(max(calls), group)

    # After the step, since Lightning's runs the backward within it; before the pruner's own task, which reads the terms.
    evaluator.patch_optimizer_step(before_step_tasks=[], after_step_tasks=[settle])
