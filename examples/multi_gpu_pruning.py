"""SlimPruner on all GPUs, with NNI 2.3 - 2.10.1 and with NNI 3.0: a port of NNI 1.4's examples/model_compress/multi_gpu.py.

    python examples/multi_gpu_pruning.py

Without two GPUs it rehearses on two virtual devices in CPU memory.
"""

from __future__ import annotations

from typing import Any, Callable, Dict

import nni
import torch
from sklearn.datasets import load_digits
from torch import nn

import nni_dataparallel.auto  # <- the one line; its place among the imports does not matter

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16, torch.tensor(labels)
train_rows, test_rows = torch.randperm(len(x)).split([1500, len(x) - 1500])
device = "cuda" if torch.cuda.device_count() > 1 else "cpu"
STEPS_PER_EPOCH = -(-len(train_rows) // 64)


def block(channels_in: int, channels: int) -> list[nn.Module]:
    return [nn.Conv2d(channels_in, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU()]


layers = [*block(1, 16), *block(16, 32), nn.MaxPool2d(2), *block(32, 32), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 10)]
model = nn.Sequential(*layers).to(device)


def on_all_gpus(net: nn.Module) -> nn.Module:
    """First the pruner, then DataParallel: around the model that the pruner hands to the training function."""
    return nn.DataParallel(net) if device == "cuda" else nni_dataparallel.rehearse(net, replicas=2)


def cross_entropy(batch: torch.Tensor, net: nn.Module) -> torch.Tensor:
    return nn.functional.cross_entropy(net(x[batch].to(device)), y[batch].to(device))


def train(net: nn.Module, optimizer: torch.optim.Optimizer, epochs: int, loss_of: Callable[..., Any] = cross_entropy) -> None:
    parallel = on_all_gpus(net).train()
    for _ in range(epochs):
        for batch in train_rows[torch.randperm(len(train_rows))].split(64):
            optimizer.zero_grad()
            loss_of(batch, parallel).backward()
            optimizer.step()


def accuracy(net: nn.Module) -> str:
    with torch.no_grad():
        found = on_all_gpus(net).eval()(x[test_rows].to(device)).argmax(1).cpu()
    return f"{(found == y[test_rows]).float().mean():.1%}"


def prune_with_nni_2() -> Dict[str, Any]:
    """Three channels in ten go: those whose batch norm scale a penalty has driven to zero, in epochs by the function below."""
    from nni.algorithms.compression.pytorch.pruning import SlimPruner

    def train_epoch(net: nn.Module, optimizer: torch.optim.Optimizer, criterion: nn.Module, epoch: int) -> None:
        train(net, optimizer, 1, lambda batch, net: criterion(net(x[batch].to(device)), y[batch].to(device)))

    config = [{"sparsity": 0.3, "op_types": ["BatchNorm2d"]}]
    pruner = SlimPruner(model, config, optimizer, train_epoch, nn.CrossEntropyLoss(), sparsifying_training_epochs=3, scale=0.01)
    pruner.compress()
    pruner.export_model("slim_model.pth", "slim_masks.pth")
    return torch.load("slim_masks.pth")


def prune_with_nni_3() -> Dict[str, Any]:
    """The same, with the penalty in the loss that NNI hands to the training function."""
    from nni.compression.pruning import SlimPruner
    from nni.compression.utils import TorchEvaluator

    def training(net: nn.Module, optimizer: Any, training_step: Any, scheduler: Any, max_steps: Any, max_epochs: Any) -> None:
        train(net, optimizer, max_steps // STEPS_PER_EPOCH, training_step)

    config = [{"op_types": ["BatchNorm2d"], "sparse_ratio": 0.3, "global_group_id": "all"}]
    evaluator = TorchEvaluator(training, optimizer, cross_entropy)
    _, masks = SlimPruner(model, config, evaluator, training_steps=3 * STEPS_PER_EPOCH, regular_scale=0.03).compress()
    return masks


new = nni.__version__.startswith("3.")
optimizer = (nni.trace(torch.optim.SGD) if new else torch.optim.SGD)(model.parameters(), lr=0.05, momentum=0.9)
train(model, optimizer, epochs=3)
print("accuracy before pruning:", accuracy(model))
masks = prune_with_nni_3() if new else prune_with_nni_2()
print("accuracy of the pruned net:", accuracy(model))
train(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), epochs=2)
print("accuracy after fine-tuning:", accuracy(model))
kept = {name: int(mask["weight"].sum()) for name, mask in sorted(masks.items())}
channels = sum(mask["weight"].numel() for mask in masks.values())
print(f"sparsity: {1 - sum(kept.values()) / channels:.1%} of {channels} channels, kept per layer: {kept}")
