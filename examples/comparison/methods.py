"""The methods: each takes a trainer and a number of bytes, and returns a trained net and the bytes that it takes."""

from __future__ import annotations

import math
from typing import Any, Callable, Dict, NamedTuple, Optional, Tuple

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

from nni_dataparallel.feathermap import FeatherNet

from .sizes import largest, stored_bytes, targets, tensor_bytes
from .sparsity import Pruning, RigL
from .training import Trainer, cnn

Made = Optional[Tuple[nn.Module, int]]  # a trained net and its bytes; None where the method cannot use that many


class Method(NamedTuple):
    """How to make a net, with Adam's rate: its family's, chosen from three or four on another seed and another split."""

    make: Callable[..., Made]
    lr: float
    options: Dict[str, Any] = {}


class FakeQuantised(nn.Module):
    """A weight as INT8 stores it, straight-through: one scale, symmetric."""

    def forward(self, weight: Tensor) -> Tensor:
        scale = weight.detach().abs().max().clamp(min=1e-12) / 127
        return weight + (torch.round(weight / scale) * scale - weight).detach()


def dense(trainer: Trainer, budget: int) -> Made:
    """The net as it is, whatever the budget."""
    model = cnn()
    trainer.train(model)
    return model, stored_bytes(model)


def narrow(trainer: Trainer, budget: int, bits: int = 32) -> Made:
    """Fewer channels, nearly in the same proportions; with 8 bits trained quantization-aware."""

    def size(widths: Tuple[int, int, int]) -> int:
        a, b, c = widths
        weights = 9 * a + 9 * a * b + 4 * b * c + 10 * c
        # Biases, batch norm's four vectors and counter of each; scales.
        return math.ceil(weights * bits / 8) + 4 * (a + b + c + 10 + 4 * (a + b)) + 16 + (0 if bits == 32 else 16)

    around = [(a, b, c) for a in range(1, 65) for b in range(a, 3 * a) for c in range(max(1, b - 3), b + 4)]
    # Of those within two per cent of the budget, the most alike in shape.
    close = [widths for widths in around if 0.98 * budget <= size(widths) <= budget]
    if not close:
        return None
    model = cnn(min(close, key=lambda w: abs(math.log(w[1] / w[0] / 2)) + abs(math.log(w[2] / w[1]))))
    quantise(model, bits)
    trainer.train(model)
    return model, stored_bytes(model, bits)


def quantise(model: nn.Module, bits: int) -> None:
    """Quantization-aware from now on, if ``bits`` says so."""
    if bits < 32 and isinstance(model, FeatherNet):
        model.prepare_qat(bits, per_row=False)  # a scale per row would cost as many bytes as four columns
    elif bits < 32:
        for layer in [layer for layer in model.modules() if isinstance(layer, (nn.Conv2d, nn.Linear))]:
            register_parametrization(layer, "weight", FakeQuantised())


def sparse(kind: Any, model: nn.Module, trainer: Trainer, budget: int, bits: int) -> Made:
    """``model`` with as many weights as the budget pays for."""
    quantise(model, bits)
    count = sum(weight.numel() for weight in targets(model))
    kept = largest(lambda number: stored_bytes(model, bits, number) <= budget, count)
    if stored_bytes(model, bits, kept) < 0.95 * budget:
        return None  # nothing to prune
    trainer.train(model, kind(model, kept, trainer.steps))
    assert sum(int((weight != 0).sum()) for weight in targets(model)) <= kept
    return model, stored_bytes(model, bits, kept)


def pruned(trainer: Trainer, budget: int, bits: int = 32) -> Made:
    return sparse(Pruning, cnn(), trainer, budget, bits)


def rigl(trainer: Trainer, budget: int) -> Made:
    return sparse(RigL, cnn(), trainer, budget, 32)


def feather(trainer: Trainer, budget: int, bits: int = 32, share: int = 1) -> Made:
    """The widest factors; with ``share`` 2 twice as wide, and pruned to the budget."""
    net = with_columns(1)
    half = (len(net.pool.V1.weight) + 1) // 2  # compress = 1
    columns = largest(lambda m: feather_bytes(net, m, bits) <= budget, half)
    if feather_bytes(net, columns, bits) < 0.95 * budget or share * columns > half + share:
        return None
    net = with_columns(min(half, share * columns))
    if share > 1:
        made = sparse(Pruning, net, trainer, budget, bits)
        if made is None:
            return None
        stored = made[1]
    else:
        quantise(net, bits)
        trainer.train(net)
        stored = stored_bytes(net, bits)
    if bits < 32:
        net.eval().convert()
        assert bits < 8 or share > 1 or stored == tensor_bytes(net)  # the sum above is that of the real codes and scales
    return net.deploy(), stored


def with_columns(m: int) -> FeatherNet:
    """A FeatherNet with factors of m columns: compress is their size over that of V."""
    n = len(FeatherNet(cnn(), 0.5).pool.V1.weight)
    return FeatherNet(cnn(), (2 * m - 1) / n)


def feather_bytes(one: FeatherNet, m: int, bits: int) -> int:
    """From the net of one column."""
    return stored_bytes(one, bits) + math.ceil((m - 1) * 2 * len(one.pool.V1.weight) * bits / 8)
