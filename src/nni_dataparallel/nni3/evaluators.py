"""The evaluators of NNI 3.0 for Hugging Face's Trainer and for Lightning.

Both work with the releases of mid 2023 only; with later ones there would be no training to run on DataParallel.
"""

from __future__ import annotations

import types
from typing import Any, Callable, List

from torch import Tensor

__all__ = ["patch_loss", "patch_loss_lightning", "patch_optimizer_step", "revert_loss_lightning", "train_lightning"]

Tasks = List[Callable[[], Any]]


def patch_optimizer_step(stock: Callable[..., None], self: Any, before_step_tasks: Tasks, after_step_tasks: Tasks) -> None:
    """``TransformersEvaluator.patch_optimizer_step``: with any Trainer, and for more than one caller.

    NNI keeps the tasks in the class of its callback, where the last caller's take the place of all others, and are
    run once per caller (``SlimPruner`` alone calls twice). It takes a Trainer with an attribute ``deepspeed``
    for one that trains with DeepSpeed; from transformers 4.31 on every Trainer has it.
    """
    callback: Any = stock.__globals__["TrainerCallback"]()
    trainer = self.trainer

    def on_train_begin(*_: Any, **__: Any) -> None:
        _around_step(getattr(trainer, "deepspeed", None) or trainer.callback_handler.optimizer, before_step_tasks, after_step_tasks)

    callback.on_train_begin = on_train_begin
    trainer.add_callback(callback)


def _around_step(optimizer: Any, before: Tasks, after: Tasks) -> None:
    step = optimizer.step

    def with_tasks(_: Any, *args: Any, **kwargs: Any) -> Any:
        for task in before:
            task()
        output = step(*args, **kwargs)
        for task in after:
            task()
        return output

    optimizer.step = types.MethodType(with_tasks, optimizer)


def patch_loss(stock: Callable[..., None], self: Any, patch: Callable[[Tensor, Any], Tensor]) -> None:
    """``TransformersEvaluator.patch_loss``: whatever else a Trainer gives to its ``compute_loss``."""
    compute_loss = self.trainer.compute_loss

    def patched(_: Any, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
        result = compute_loss(model, inputs, return_outputs, **more)
        return (patch(result[0], inputs), result[1]) if return_outputs else patch(result, inputs)

    self.trainer.compute_loss = types.MethodType(patched, self.trainer)


def train_lightning(stock: Callable[..., None], self: Any, max_steps: Any = None, max_epochs: Any = None) -> None:
    """``LightningEvaluator.train``: ``max_steps`` with Lightning 2.x, whose loop of epochs has no such setting of its own."""
    pl = stock.__globals__["pl"]
    if not max_steps or int(pl.__version__.partition(".")[0]) < 2:
        stock(self, max_steps, max_epochs)
        return
    traced = self.trainer
    arguments = traced.trace_kwargs
    traced.trace_kwargs = {**arguments, "max_steps": max_steps}
    try:
        stock(self, None, max_epochs)
    finally:
        traced.trace_kwargs = arguments


def patch_loss_lightning(stock: Callable[..., None], self: Any, patch: Callable[[Tensor, Any], Tensor]) -> None:
    """``LightningEvaluator.patch_loss``: under Lightning 1.x' ``dp`` the loss is computed by the replicas, one per shard.

    Raises
    ------
    NotImplementedError
        Where what is to be added to the loss would be computed by every replica, from what is not its own.
    """
    if type(self.trainer.strategy).__name__ == "DataParallelStrategy":
        raise NotImplementedError(
            "SlimPruner, MovementPruner and the distillers add to the loss, which Lightning's strategy 'dp' computes once on "
            "every replica: this is not covered. Use TorchEvaluator with nn.DataParallel, or Lightning on one device."
        )
    stock(self, patch)


def revert_loss_lightning(stock: Callable[..., None], self: Any) -> None:
    """``LightningEvaluator.revert_loss``: leave no method in the model, which every replica would call on the original."""
    stock(self)
    own = vars(self.model)
    if getattr(own.get("training_step"), "__func__", None) is type(self.model).training_step:
        del own["training_step"]
