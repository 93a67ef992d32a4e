"""Models with one fault each, and models without, for the doctor."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

CONSTANT = torch.arange(1.0, 4.0)


class Healthy(nn.Module):
    """A layer, a constant buffer, a constant attribute: nothing for the doctor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(5, 3)
        self.register_buffer("seen", torch.zeros(1))
        self.shift, self.sizes, self.calls, self.kept, self.hidden = CONSTANT.clone(), [5, 3], 0, [], None

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


class Moves(Healthy):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) + self.shift.to(x.device)


class Counts(Healthy):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.fc(x)


class Assigns(Healthy):
    def forward(self, x: Tensor) -> Tensor:
        self.seen = torch.maximum(self.seen, x.detach().max())
        return self.fc(x)


class AssignsAGraph(Healthy):
    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        self.seen = self.seen + y.mean()
        return y


class UpdatesInPlace(Healthy):
    def forward(self, x: Tensor) -> Tensor:
        self.seen.mul_(0.9).add_(0.1 * x.mean())
        return self.fc(x)


class MixesAnAttribute(Healthy):
    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        return y + self.shift  # here


class MixesAGlobal(Healthy):
    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        return y * CONSTANT  # here


class AsksForParameters(Healthy):
    def forward(self, x: Tensor) -> Tensor:
        norm = sum(p.detach().norm() for p in self.parameters())  # here
        return self.fc(x) + 0 * norm


class KeepsAnActivation(Healthy):
    def forward(self, x: Tensor) -> Tensor:
        self.hidden = x.detach() * 2
        return self.fc(x)


class Collects(Healthy):
    def forward(self, x: Tensor) -> Tensor:
        self.kept.append(float(x.sum()))
        return self.fc(x)


class Refuses(Healthy):
    def forward(self, x: Tensor) -> Tensor:
        if len(x) < 8:
            raise ValueError("eight rows, please")  # here
        return self.fc(x)


class Centres(Healthy):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x - x.mean(0))


class Float32Only(Healthy):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x + torch.zeros(5, 5, dtype=torch.float32).mm(torch.ones(5, 1)).to(x.dtype).sum()) @ torch.eye(3)


class Draws(Healthy):
    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn_like(x)
        self.seen.copy_(noise.max())
        return self.fc(x + noise)


def batch(rows: int = 8) -> Any:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, 5, generator=generator), torch.randint(3, (rows,), generator=generator)


def line_of(kind: type) -> int:
    lines, first = inspect.getsourcelines(kind)
    return first + next(i for i, line in enumerate(lines) if line.rstrip().endswith("# here"))


class Normalised(Healthy):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(5), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.drop(self.norm(x)))


class OwnLoss(Healthy):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        return {"loss": nn.functional.cross_entropy(self.fc(x), y).reshape(1)}


class Watching(Counts):
    def __init__(self) -> None:
        super().__init__()
        self.add_module("<script>alert('&')</script>", Counts())
        self.register_buffer("tracked_min", torch.zeros(1))
        self.register_buffer("tracked_max", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.tracked_min, self.tracked_max = x.detach().min(), x.detach().max()
        return super().forward(x) + self._modules["<script>alert('&')</script>"](x)
