"""Quantization-aware training on all GPUs, with NNI 2.x and with NNI 3.0: the script of one GPU, and one line.

    python examples/qat_dataparallel.py

Without two GPUs it rehearses on two virtual devices in CPU memory.
"""

from __future__ import annotations

import inspect
from typing import Any

import nni
import torch
from sklearn.datasets import load_digits
from torch import nn

import nni_dataparallel.auto  # <- the one line; its place among the imports does not matter

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16, torch.tensor(labels)
device = "cuda" if torch.cuda.device_count() > 1 else "cpu"
model = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 10)).to(device)


def training_step(batch: torch.Tensor, net: nn.Module) -> torch.Tensor:
    return nn.functional.cross_entropy(net(x[batch].to(device)), y[batch].to(device))


def fit(net: nn.Module, optimizer: Any) -> None:
    """Train ``net``, which has its quantizer already: first the quantizer, then DataParallel."""
    parallel = nn.DataParallel(net) if device == "cuda" else nni_dataparallel.rehearse(net, replicas=2)
    parallel.train()
    for epoch in range(3):
        for batch in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            loss = training_step(batch, parallel)
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.4f}")


def with_nni_2() -> None:
    from nni.algorithms.compression.pytorch.quantization import QAT_Quantizer

    config = [
        {"op_types": ["Conv2d", "Linear"], "quant_types": ["weight"], "quant_bits": 8},
        {"op_types": ["ReLU"], "quant_types": ["output"], "quant_bits": 8, "quant_start_step": 10},
    ]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    # NNI traces the model to find batch norms to fold: from 2.5 on that is a must.
    traces = "dummy_input" in inspect.signature(QAT_Quantizer).parameters
    quantizer = QAT_Quantizer(model, config, optimizer, **({"dummy_input": x[:1].to(device)} if traces else {}))
    quantizer.compress()
    fit(model, optimizer)


def with_nni_3() -> None:
    """NNI 3.0 trains inside ``compress()``: DataParallel belongs in the training function, around the model that NNI hands over."""
    from nni.compression.quantization import QATQuantizer
    from nni.compression.utils import TorchEvaluator

    int8 = {"quant_dtype": "int8", "quant_scheme": "affine", "granularity": "default"}
    config = [
        {"op_types": ["Conv2d", "Linear"], "target_names": ["_input_", "weight"], **int8},
        {"op_types": ["ReLU"], "target_names": ["_output_"], **int8},
    ]
    optimizer = nni.trace(torch.optim.SGD)(model.parameters(), lr=0.05, momentum=0.9)  # NNI makes its own from it
    evaluator = TorchEvaluator(lambda net, optimizer, *_: fit(net, optimizer), optimizer, training_step)
    _, calibration = QATQuantizer(model, config, evaluator).compress(None, max_epochs=3)
    print("calibrated:", {name: sorted(targets) for name, targets in calibration.items()})


with_nni_3() if nni.__version__.startswith("3.") else with_nni_2()
model.eval()
with torch.no_grad():
    accuracy = (model(x.to(device)).argmax(1).cpu() == y).float().mean()
print(f"quantised accuracy on the training images: {accuracy:.1%}")
