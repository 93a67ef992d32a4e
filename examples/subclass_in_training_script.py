"""A training script that imports its quantizer from nni_dataparallel; NNI's own classes stay as they are.

    python examples/subclass_in_training_script.py [--epochs 3] [--lr 0.05] [--replicas 2]

For NNI 2.5 - 2.10.1 and 3.0. Trains on all GPUs; without two of them on virtual devices in CPU memory.
"""

from __future__ import annotations

import argparse
from typing import Any, Callable

import nni
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import nni_dataparallel

if nni.__version__.startswith("3."):
    from nni.compression.utils import TorchEvaluator

    from nni_dataparallel import QATQuantizer  # <- the one line: it was `from nni.compression.quantization import ...`
else:
    from nni_dataparallel import QAT_Quantizer  # <- the one line: it was `from nni.algorithms.compression... import ...`


def loaders() -> tuple[DataLoader, DataLoader]:
    """Batches of training and test images."""
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16, torch.tensor(labels))
    train, test = train_test_split(range(len(data)), test_size=0.25, random_state=0, stratify=labels)
    shuffled = DataLoader(data, batch_size=64, sampler=torch.utils.data.SubsetRandomSampler(train))
    return shuffled, DataLoader(torch.utils.data.Subset(data, test), batch_size=256)


@torch.no_grad()
def accuracy(model: nn.Module, batches: DataLoader, device: str) -> float:
    model.eval()
    right = [(model(inputs.to(device)).argmax(1).cpu() == targets).float() for inputs, targets in batches]
    model.train()
    return torch.cat(right).mean().item()


def quantise_2(model: nn.Module, fit: Callable[..., None], lr: float, device: str) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    config = [{"op_types": ["Conv2d", "Linear"], "quant_types": ["weight", "input"], "quant_bits": 8}]
    quantizer = QAT_Quantizer(model, config, optimizer, dummy_input=torch.zeros(1, 1, 8, 8, device=device))
    quantizer.compress()
    fit(model, optimizer)
    return quantizer


def quantise_3(model: nn.Module, fit: Callable[..., None], lr: float, device: str) -> Any:
    optimizer = nni.trace(torch.optim.SGD)(model.parameters(), lr=lr, momentum=0.9)
    config = [{"op_types": ["Conv2d", "Linear"], "target_names": ["_input_", "weight"], "quant_dtype": "int8"}]
    evaluator = TorchEvaluator(lambda net, optimizer, *_: fit(net, optimizer), optimizer, lambda batch, net: None)
    quantizer = QATQuantizer(model, config, evaluator)
    quantizer.compress(None, max_epochs=1)
    return quantizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--replicas", type=int, default=2, help="virtual devices, where there are no two GPUs")
    options = parser.parse_args()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.device_count() > 1 else "cpu"
    train, test = loaders()
    model = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 10)).to(device)

    def fit(net: nn.Module, optimizer: Any) -> None:
        """The script's own loop, around the model that has its quantizer."""
        parallel = nn.DataParallel(net) if device == "cuda" else nni_dataparallel.rehearse(net, options.replicas)
        for epoch in range(options.epochs):
            for inputs, targets in train:
                optimizer.zero_grad()
                nn.functional.cross_entropy(parallel(inputs.to(device)), targets.to(device)).backward()
                optimizer.step()
            print(f"epoch {epoch}: quantised accuracy on the test images: {accuracy(parallel, test, device):.1%}")

    quantise = quantise_3 if nni.__version__.startswith("3.") else quantise_2
    quantizer = quantise(model, fit, options.lr, device)
    print("trained with", type(quantizer), "a subclass of", type(quantizer).__mro__[1])
    print("NNI's own classes are patched:", nni_dataparallel.is_patched())


if __name__ == "__main__":
    main()
