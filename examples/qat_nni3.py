"""Quantization-aware training on all GPUs with NNI 3.0, stopped half way and resumed.

    python examples/qat_nni3.py

Without two GPUs it rehearses on virtual devices in CPU memory.
"""

from __future__ import annotations

from typing import Any

import nni
import torch
from nni.compression.quantization import QATQuantizer
from nni.compression.utils import TorchEvaluator
from sklearn.datasets import load_digits
from torch import nn

import nni_dataparallel.auto  # the one line; its place among the imports does not matter
from nni_dataparallel import load_quantizer_state_dict, quantizer_state_dict

images, labels = load_digits(return_X_y=True)
x = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
y = torch.tensor(labels)
device = "cuda" if torch.cuda.is_available() else "cpu"
LAYERS = {"quant_dtype": "int8", "quant_scheme": "affine", "granularity": "default"}
CONFIG = [
    {"op_types": ["Conv2d", "Linear"], "target_names": ["_input_", "weight"], **LAYERS},
    {"op_types": ["ReLU"], "target_names": ["_output_"], **LAYERS},
]


def training_step(batch: torch.Tensor, model: nn.Module) -> torch.Tensor:
    return nn.functional.cross_entropy(model(x[batch].to(device)), y[batch].to(device))


class Script:
    """Model, optimizer, evaluator and quantizer, as at every start of the program."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 10)).to(device)
        self.model = nn.DataParallel(net) if torch.cuda.device_count() > 1 else nni_dataparallel.rehearse(net, replicas=2)
        self.checkpoint: Any = None
        optimizer = nni.trace(torch.optim.SGD)(self.model.parameters(), lr=0.05, momentum=0.9)
        evaluator = TorchEvaluator(self.train, optimizer, training_step)
        self.quantizer = QATQuantizer(self.model, CONFIG, evaluator, quant_start_step=10)

    def train(self, model: Any, optimizer: Any, step: Any, scheduler: Any, max_steps: Any, max_epochs: int) -> None:
        """What NNI calls: ``model`` is the DataParallel, ``optimizer`` the one that NNI has made anew."""
        first = 0
        if self.checkpoint is not None:
            model.module.load_state_dict(self.checkpoint["model"])
            optimizer.load_state_dict(self.checkpoint["optimizer"])
            load_quantizer_state_dict(self.quantizer, self.checkpoint["quantizer"])
            first = self.checkpoint["epoch"] + 1
        model.train()
        for epoch in range(first, max_epochs):
            shuffled = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
            for batch in shuffled.split(64):
                optimizer.zero_grad()
                loss = step(batch, model)
                loss.backward()
                optimizer.step()
            print(f"epoch {epoch}: loss {loss.item():.6f}")
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            torch.save({**state, "quantizer": quantizer_state_dict(self.quantizer)}, f"qat_{epoch}.pth")


model, calibration = Script().quantizer.compress(None, max_epochs=3)

print("and once more, from the file of the first epoch:")
resumed = Script()
resumed.checkpoint = torch.load("qat_0.pth")
again, _ = resumed.quantizer.compress(None, max_epochs=3)
ours, theirs = again.module.state_dict(), model.module.state_dict()
print("the same state, to the bit:", all(torch.equal(ours[name], theirs[name]) for name in theirs))

model.eval()
with torch.no_grad():
    accuracy = (model(x.to(device)).argmax(1).cpu() == y).float().mean()
print(f"quantised accuracy on the training images: {accuracy:.1%}")
print("calibrated", {name: sorted(targets) for name, targets in calibration.items()})
