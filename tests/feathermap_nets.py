"""Nets, data and hand-written formulas that the tests of nni_dataparallel.feathermap share."""

from __future__ import annotations

import math
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
from torch import Tensor, nn

from nni_dataparallel.feathermap import FeatherNet

torch.set_num_threads(1)


class Attention(nn.Module):
    """Self-attention and a projection."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, **options)
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.attention(x, x, x)[0])


class Tied(nn.Module):
    """A language model's tie: the embedding is the output layer's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.hidden = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.hidden(self.embedding(x))))


class Recurrent(nn.Module):
    """An LSTM, which stays dense, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 6, batch_first=True)
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(x)[0][:, -1])


class Own(nn.Module):
    """A layer of the user's with a weight and a bias, and a Parameter of another name."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(3, 5)), nn.Parameter(torch.zeros(3))
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias) * self.temperature


class Two(nn.Module):
    """Two inputs, one of them by keyword, and a dict of outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Bilinear(4, 5, 3)

    def forward(self, a: Tensor, *, b: Tensor) -> Dict[str, Tensor]:
        return {"out": self.mix(a, b)}


def _cut(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers)


# Every kind of layer: how to make a net of it, and its inputs.
ZOO: Dict[str, Tuple[Callable[[], nn.Module], Callable[[], Tuple[Tensor, ...]]]] = {
    "linear": (lambda: _cut(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 2)), lambda: (torch.randn(4, 5),)),
    "one layer": (lambda: nn.Linear(5, 3), lambda: (torch.randn(4, 5),)),
    "conv1d": (lambda: _cut(nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), nn.PReLU(4)), lambda: (torch.randn(4, 3, 8),)),
    "conv2d": (lambda: _cut(nn.Conv2d(2, 4, 3, groups=2), nn.BatchNorm2d(4)), lambda: (torch.randn(4, 2, 6, 6),)),
    "conv3d": (lambda: _cut(nn.Conv3d(1, 2, 2), nn.InstanceNorm3d(2, affine=True)), lambda: (torch.randn(2, 1, 4, 4, 4),)),
    "transposed": (lambda: _cut(nn.ConvTranspose2d(2, 3, 3), nn.GroupNorm(1, 3)), lambda: (torch.randn(2, 2, 5, 5),)),
    "layer norm": (lambda: _cut(nn.Linear(5, 6), nn.LayerNorm([6])), lambda: (torch.randn(4, 5),)),
    "embedding": (lambda: _cut(nn.Embedding(9, 4), nn.Linear(4, 2)), lambda: (torch.randint(9, (3, 5)),)),
    "padded embedding": (lambda: _cut(nn.Embedding(9, 4, padding_idx=2), nn.Linear(4, 2)), lambda: (torch.randint(9, (3, 5)),)),
    "bag": (lambda: _cut(nn.EmbeddingBag(9, 4), nn.Linear(4, 2)), lambda: (torch.randint(9, (3, 5)),)),
    "attention": (Attention, lambda: (torch.randn(2, 5, 8),)),
    "attention kv": (lambda: Attention(kdim=8, vdim=8, add_bias_kv=True), lambda: (torch.randn(2, 5, 8),)),
    "transformer": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 2),
        lambda: (torch.randn(2, 5, 8),),
    ),
    "tied": (Tied, lambda: (torch.randint(11, (3, 4)),)),
    "lstm": (Recurrent, lambda: (torch.randn(3, 4, 5),)),
    "gru": (lambda: _cut(nn.Linear(5, 5), nn.GRUCell(5, 4)), lambda: (torch.randn(3, 5),)),
    "own layer": (Own, lambda: (torch.randn(3, 5),)),
}

if hasattr(torch, "compile"):  # torch 1.12 lets no parametrised module be copied
    ZOO["spectral norm"] = (
        lambda: _cut(nn.utils.parametrizations.spectral_norm(nn.Linear(5, 4)), nn.Linear(4, 2)),
        lambda: (torch.randn(3, 5),),
    )

if hasattr(nn.utils.parametrizations, "weight_norm"):  # the one before torch 2.0 cannot be copied after a forward
    ZOO["weight norm"] = (
        lambda: _cut(nn.utils.parametrizations.weight_norm(nn.Linear(5, 4)), nn.Linear(4, 2)),
        lambda: (torch.randn(3, 5),),
    )


def made(kind: str, seed: int = 0) -> Tuple[nn.Module, Tuple[Tensor, ...]]:
    """A fresh net of the zoo and a batch for it."""
    torch.manual_seed(seed)
    make, inputs = ZOO[kind]
    return make(), inputs()


def by_hand(net: FeatherNet) -> Dict[str, Tensor]:
    """The hashed tensors of a float net by the paper's formulas, one entry of V at a time where it matters.

    Independent of the package: only the names, shapes and the order in the report are taken from it, and the order
    is checked elsewhere.
    """
    v1, v2 = net.pool.V1.weight.detach().double(), net.pool.V2.weight.detach().double()
    return hand_cut(net, v1 @ v2.t())


def hand_cut(net: FeatherNet, v: Tensor) -> Dict[str, Tensor]:
    """The hashed tensors of a net whose V is given: cut one after the other and scaled."""
    entries, offset, found = v.reshape(-1), 0, {}
    scalars = dict(net.module.named_parameters())
    for name, shape in net.compression_report().hashed:
        count = math.prod(shape)
        found[name] = entries[offset : offset + count].reshape(shape) * scalars[name + "_p"].detach().double()
        offset += count
    return found


def quantised_by_hand(matrix: Tensor, bits: int, per_row: bool) -> Tensor:
    """Symmetric fake quantization, written out with Python loops over the rows."""
    largest = 2 ** (bits - 1) - 1
    rows: List[Tensor] = []
    for row in matrix.detach().double():
        scale = float((row if per_row else matrix.detach().double()).abs().max()) / largest
        rows.append(torch.zeros_like(row) if scale == 0 else torch.round(row / scale) * scale)
    return torch.stack(rows)


class Digits(nn.Module):
    """The convolutional net for scikit-learn's digits: 36,106 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32)
        self.conv2, self.bn2 = nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64)
        self.fc1 = nn.Linear(64 * 4, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.max_pool2d(nn.functional.relu(self.bn1(self.conv1(x))), 2)
        x = nn.functional.max_pool2d(nn.functional.relu(self.bn2(self.conv2(x))), 2)
        return self.fc2(nn.functional.relu(self.fc1(x.flatten(1))))


def digits() -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training and test half of scikit-learn's digits: images (N, 1, 8, 8) in [0, 1] and classes."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    data = load_digits()
    images = (data.images / 16.0).astype("float32")[:, None]
    parts = train_test_split(images, data.target, test_size=0.25, random_state=0, stratify=data.target)
    return tuple(torch.as_tensor(part) for part in (parts[0], parts[2], parts[1], parts[3]))  # type: ignore[return-value]


def trained_on_digits(
    net: FeatherNet, seed: int, epochs: int, lr: float = 1e-2, scale_lr: Optional[float] = None, batch: int = 64
) -> FeatherNet:
    """``net`` after ``epochs`` epochs of Adam with a cosine schedule."""
    x, y, _, _ = digits()
    optimizer = torch.optim.Adam(net.param_groups(lr, lr if scale_lr is None else scale_lr))
    steps = epochs * math.ceil(len(x) / batch)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(seed)
    net.train()
    for _ in range(epochs):
        for indices in torch.randperm(len(x), generator=generator).split(batch):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x[indices]), y[indices]).backward()
            optimizer.step()
            schedule.step()
    return net.eval()


def predictions(model: nn.Module) -> Tensor:
    """Predicted classes of the test half."""
    with torch.no_grad():
        return model(digits()[2]).argmax(1)  # type: ignore[no-any-return]


def accuracy(model: nn.Module) -> float:
    """Per cent of the test half."""
    return 100 * float((predictions(model) == digits()[3]).float().mean())


class Block(nn.Module):
    """ResNet's basic block."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(nn.functional.relu(self.bn1(self.conv1(x)))))
        return nn.functional.relu(y + self.shortcut(x))


def resnet18() -> nn.Module:
    """ResNet-18 for CIFAR-10: 11.17 M weights."""
    layers: List[nn.Module] = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    width = 64
    for outputs, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [Block(width, outputs, stride), Block(outputs, outputs, 1)]
        width = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))
