"""SlimPruner on all GPUs with NNI 3.0: a port of NNI 1.4's examples/model_compress/multi_gpu.py.

    python examples/slim_pruner_nni3.py

Without two GPUs it rehearses on virtual devices in CPU memory.
"""

from __future__ import annotations

from typing import Any

import nni
import torch
from nni.compression.pruning import SlimPruner
from nni.compression.utils import TorchEvaluator
from sklearn.datasets import load_digits
from torch import nn

import nni_dataparallel.auto  # the one line; its place among the imports does not matter

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
x = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
y = torch.tensor(labels)
shuffled = torch.randperm(len(x))
train_rows, test_rows = shuffled[:1500], shuffled[1500:]
device = "cuda" if torch.cuda.is_available() else "cpu"
STEPS_PER_EPOCH = -(-len(train_rows) // 64)


def block(channels_in: int, channels: int) -> list[nn.Module]:
    return [nn.Conv2d(channels_in, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU()]


net = nn.Sequential(
    *block(1, 16), *block(16, 32), nn.MaxPool2d(2), *block(32, 32), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 10)
).to(device)
model = nn.DataParallel(net) if torch.cuda.device_count() > 1 else nni_dataparallel.rehearse(net, replicas=2)


def training_step(batch: torch.Tensor, model: nn.Module) -> torch.Tensor:
    return nn.functional.cross_entropy(model(x[batch].to(device)), y[batch].to(device))


def train(model: nn.Module, optimizer: Any, training_step: Any, scheduler: Any = None, max_steps: Any = None, max_epochs: Any = 1):
    model.train()
    for _ in range(max_steps // STEPS_PER_EPOCH if max_steps else max_epochs):
        for batch in train_rows[torch.randperm(len(train_rows))].split(64):
            optimizer.zero_grad()
            training_step(batch, model).backward()
            optimizer.step()


def accuracy(model: nn.Module) -> float:
    model.eval()
    with torch.no_grad():
        found = model(x[test_rows].to(device)).argmax(1).cpu()
    return (found == y[test_rows]).float().mean().item()


optimizer = nni.trace(torch.optim.SGD)(model.parameters(), lr=0.05, momentum=0.9)
train(model, optimizer, training_step, max_epochs=3)
print(f"accuracy before pruning: {accuracy(model):.1%}")

# Three channels in ten go: those whose scale the penalty has driven down. The DataParallel comes back from compress().
config = [{"op_types": ["BatchNorm2d"], "sparse_ratio": 0.3, "global_group_id": "all"}]
evaluator = TorchEvaluator(train, optimizer, training_step)
pruner = SlimPruner(model, config, evaluator, training_steps=3 * STEPS_PER_EPOCH, regular_scale=0.03)
model, masks = pruner.compress()
print(f"accuracy of the pruned net: {accuracy(model):.1%}")
fine_tuning = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
train(model, fine_tuning, training_step, max_epochs=2)
print(f"accuracy after fine-tuning: {accuracy(model):.1%}")

torch.save({"model": net.state_dict(), "masks": masks}, "slim_model.pth")
kept = [int(mask["weight"].sum()) for _, mask in sorted(masks.items())]
channels = sum(mask["weight"].numel() for mask in masks.values())
print(f"sparsity: {1 - sum(kept) / channels:.1%} of {channels} channels, kept per layer: {kept}")
