"""NNI's own gradual pruning, of whichever release is installed."""

from __future__ import annotations

import importlib
import logging
import os
import tempfile
import warnings
from typing import Any, Tuple

import torch
from torch import nn

from .methods import Made
from .sizes import largest, stored_bytes, targets
from .sparsity import Pruning
from .training import Trainer, cnn


def nni_agp(trainer: Trainer, budget: int) -> Made:
    """NNI's AGPPruner with its LevelPruner: the same curve, every layer to the same sparsity."""
    import nni_dataparallel.auto  # noqa: F401 - for several devices; on one it changes nothing

    logging.getLogger("nni").setLevel(logging.ERROR)
    model = cnn()
    count = sum(weight.numel() for weight in targets(model))
    kept = largest(lambda number: stored_bytes(model, kept=number) <= budget, count)
    if agp_release() == 3:
        model, kept = agp_of_nni3(trainer, model, 1 - kept / count)
    else:
        model, kept = agp_of_nni2(trainer, model, 1 - kept / count)
    return model, stored_bytes(cnn(), kept=kept)


def agp_release() -> int:
    """The line of NNI whose AGPPruner can be imported: 2 is 2.7 - 2.10.1, 0 is none."""
    for release, module in ((3, "nni.compression.pruning"), (2, "nni.compression.pytorch.pruning")):
        try:
            if hasattr(importlib.import_module(module), "AGPPruner"):
                return release
        except ImportError:
            continue
    return 0


def agp_of_nni2(trainer: Trainer, model: nn.Module, sparsity: float) -> Tuple[nn.Module, int]:
    """An epoch between two prunings, each with a model and so an optimizer of its own."""
    from nni.compression.pytorch.pruning import AGPPruner

    os.environ.setdefault("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # its own files, which torch 2.6 would not load otherwise
    rises = max(1, int(0.75 * trainer.epochs) - 1)
    left = [1] * rises + [trainer.epochs - rises]

    def finetune(net: nn.Module) -> None:
        trainer.train(net, epochs=left.pop(0))

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = [{"op_types": ["Conv2d", "Linear"], "total_sparsity": sparsity}]
        pruner = AGPPruner(model, config, "level", total_iteration=rises, log_dir=folder, finetuner=finetune)
        pruner.compress()
        _, model, *_ = pruner.get_best_result()
    return model, sum(int((weight != 0).sum()) for weight in targets(model))


def agp_of_nni3(trainer: Trainer, model: nn.Module, sparsity: float) -> Tuple[nn.Module, int]:
    """Pruned every few steps of one training."""
    import nni
    from nni.compression.pruning import AGPPruner, LevelPruner
    from nni.compression.utils import TorchEvaluator

    def fit(net: nn.Module, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        trainer.train(net, optimizer=optimizer)

    optimizer = nni.trace(torch.optim.Adam)(model.parameters(), lr=trainer.lr)
    evaluator = TorchEvaluator(fit, optimizer, lambda batch, net: net(batch))
    config = [{"op_types": ["Conv2d", "Linear"], "target_names": ["weight"], "sparse_ratio": sparsity}]
    pruner = LevelPruner(model, config, evaluator)
    times = max(1, int(0.75 * trainer.steps) // Pruning.every)
    model, masks = AGPPruner(pruner, Pruning.every, times).compress(None, trainer.epochs)
    return model, int(sum(mask["weight"].sum() for mask in masks.values()))
