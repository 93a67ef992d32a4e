"""SlimPruner on all GPUs with NNI 2.3 - 2.10.1: a port of NNI 1.4's examples/model_compress/multi_gpu.py.

    python examples/slim_pruner_nni2.py

Without two GPUs it rehearses on virtual devices in CPU memory.
"""

from __future__ import annotations

import torch
from nni.algorithms.compression.pytorch.pruning import SlimPruner
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


def block(channels_in: int, channels: int) -> list[nn.Module]:
    return [nn.Conv2d(channels_in, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU()]


model = nn.Sequential(
    *block(1, 16), *block(16, 32), nn.MaxPool2d(2), *block(32, 32), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 10)
).to(device)


def on_all_gpus(net: nn.Module) -> nn.Module:
    return nn.DataParallel(net) if torch.cuda.device_count() > 1 else nni_dataparallel.rehearse(net, replicas=2)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, criterion: nn.Module, epoch: int) -> None:
    parallel = on_all_gpus(net)
    parallel.train()
    for batch in train_rows[torch.randperm(len(train_rows))].split(64):
        optimizer.zero_grad()
        criterion(parallel(x[batch].to(device)), y[batch].to(device)).backward()
        optimizer.step()


def accuracy(net: nn.Module) -> float:
    parallel = on_all_gpus(net)
    parallel.eval()
    with torch.no_grad():
        found = parallel(x[test_rows].to(device)).argmax(1).cpu()
    return (found == y[test_rows]).float().mean().item()


optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
criterion = nn.CrossEntropyLoss()
for epoch in range(3):
    train(model, optimizer, criterion, epoch)
print(f"accuracy before pruning: {accuracy(model):.1%}")

# Three channels in ten go: those whose batch norm scale the penalty has driven to zero.
config = [{"sparsity": 0.3, "op_types": ["BatchNorm2d"]}]
pruner = SlimPruner(model, config, optimizer, train, criterion, sparsifying_training_epochs=3, scale=0.01)
pruner.compress()  # trains with the penalty, by the function above, and prunes
print(f"accuracy of the pruned net: {accuracy(model):.1%}")
for epoch in range(2):
    train(model, optimizer, criterion, epoch)
print(f"accuracy after fine-tuning: {accuracy(model):.1%}")

pruner.export_model("slim_model.pth", "slim_masks.pth")
masks = torch.load("slim_masks.pth")
kept = [int(mask["weight"].sum()) for _, mask in sorted(masks.items())]
channels = sum(mask["weight"].numel() for mask in masks.values())
print(f"sparsity: {1 - sum(kept) / channels:.1%} of {channels} channels, kept per layer: {kept}")
