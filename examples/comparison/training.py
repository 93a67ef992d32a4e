"""The digits, the net, and how every method trains it."""

from __future__ import annotations

import math
from typing import Any, Callable, Optional, Tuple

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

from nni_dataparallel.feathermap import FeatherNet

torch.set_num_threads(1)
WIDTHS = (32, 64, 64)
BATCH = 64
Tick = Callable[[], None]


def data(seed: int = 0) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training and test images in [0, 1], training and test classes."""
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16, torch.tensor(labels)
    train, test = train_test_split(range(len(y)), test_size=0.25, random_state=seed, stratify=labels)
    return x[train], x[test], y[train], y[test]


def cnn(widths: Tuple[int, int, int] = WIDTHS) -> nn.Module:
    """36,106 parameters as it is."""
    a, b, c = widths
    return nn.Sequential(
        *(nn.Conv2d(1, a, 3, padding=1), nn.BatchNorm2d(a), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(4 * b, c), nn.ReLU(), nn.Linear(c, 10)),
    )


class Trainer:
    """Adam with a cosine schedule over all epochs, however many calls they come in."""

    def __init__(self, samples: Tuple[Tensor, ...], seed: int, epochs: int, lr: float, tick: Tick) -> None:
        self.lr = lr
        self.x, self.test_x, self.y, self.test_y = samples
        self.epochs, self.tick, self.step = epochs, tick, 0
        self.steps = epochs * math.ceil(len(self.x) / BATCH)
        self.generator = torch.Generator().manual_seed(seed)

    def train(self, model: nn.Module, sparse: Any = None, epochs: Optional[int] = None, optimizer: Any = None) -> None:
        if optimizer is None:
            hashed = isinstance(model, FeatherNet)  # the scalars have a rate of their own
            optimizer = torch.optim.Adam(model.param_groups(self.lr) if hashed else model.parameters(), lr=self.lr)
        rates = [group["lr"] for group in optimizer.param_groups]
        model.train()
        for _ in range(self.epochs if epochs is None else epochs):
            for batch in torch.randperm(len(self.x), generator=self.generator).split(BATCH):
                for group, rate in zip(optimizer.param_groups, rates):
                    group["lr"] = rate / 2 * (1 + math.cos(math.pi * self.step / self.steps))
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(self.x[batch]), self.y[batch]).backward()
                if sparse is not None:
                    sparse.before(self.step)
                optimizer.step()
                if sparse is not None:
                    sparse.after(self.step)
                self.step += 1
            self.tick()

    @torch.no_grad()
    def accuracy(self, model: nn.Module) -> float:
        return 100 * float((model.eval()(self.test_x).argmax(1) == self.test_y).float().mean())
