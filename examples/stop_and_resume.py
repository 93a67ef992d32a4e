"""Quantization-aware training on all GPUs, stopped and resumed to the same bits, with NNI 2.5 - 2.10.1 and with NNI 3.0.

    python examples/stop_and_resume.py

Without two GPUs it rehearses on two virtual devices in CPU memory.
"""

from __future__ import annotations

from typing import Any

import nni
import torch
from sklearn.datasets import load_digits
from torch import nn

import nni_dataparallel.auto  # <- the one line; its place among the imports does not matter
from nni_dataparallel import load_checkpoint, save_checkpoint

images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16, torch.tensor(labels)
device = "cuda" if torch.cuda.device_count() > 1 else "cpu"
EPOCHS = 3


def fit(net: nn.Module, optimizer: Any, quantizer: Any, checkpoint: str) -> None:
    """Load, then train, then save: in NNI 3.0 all of it inside the training function."""
    first = 0
    if checkpoint:
        # <- all three parts, or nothing: what a quantizer keeps is in neither of the other two
        first = load_checkpoint(checkpoint, net, optimizer, quantizer)["epoch"] + 1
    parallel = nn.DataParallel(net) if device == "cuda" else nni_dataparallel.rehearse(net, replicas=2)
    parallel.train()
    for epoch in range(first, EPOCHS):
        for batch in torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch)).split(64):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(parallel(x[batch].to(device)), y[batch].to(device))
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.6f}")
        save_checkpoint(f"qat_{epoch}.pth", net, optimizer, quantizer, epoch=epoch)


def run(checkpoint: str = "") -> nn.Module:
    """Build model, optimizer and quantizer, as at every start of the program, and train."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 10)).to(device)
    settings = {"lr": 0.05, "momentum": 0.9}
    if nni.__version__.startswith("3."):
        from nni.compression.quantization import QATQuantizer
        from nni.compression.utils import TorchEvaluator

        config = [{"op_types": ["Conv2d", "Linear"], "target_names": ["_input_", "weight"], "quant_dtype": "int8"}]
        traced = nni.trace(torch.optim.SGD)(net.parameters(), **settings)  # NNI hands another one to the training function
        evaluator = TorchEvaluator(lambda model, own, *_: fit(model, own, quantizer, checkpoint), traced, lambda batch, net: None)
        quantizer = QATQuantizer(net, config, evaluator, quant_start_step=10)
        quantizer.compress(None, max_epochs=EPOCHS)
    else:
        from nni.algorithms.compression.pytorch.quantization import QAT_Quantizer

        config = [{"op_types": ["Conv2d", "Linear"], "quant_types": ["input", "weight"], "quant_bits": 8, "quant_start_step": 10}]
        optimizer = torch.optim.SGD(net.parameters(), **settings)
        quantizer = QAT_Quantizer(net, config, optimizer, dummy_input=x[:1].to(device))
        quantizer.compress()
        fit(net, optimizer, quantizer, checkpoint)
    return net


model = run()
print("and once more, from the file of the first epoch:")
again = run("qat_0.pth")
ours, theirs = again.state_dict(), model.state_dict()
print("the same state, to the bit:", all(torch.equal(ours[name], theirs[name]) for name in theirs))
model.eval()
with torch.no_grad():
    accuracy = (model(x.to(device)).argmax(1).cpu() == y).float().mean()
print(f"quantised accuracy on the training images: {accuracy:.1%}")
