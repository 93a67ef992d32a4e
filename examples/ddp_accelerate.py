"""Quantization-aware training with Hugging Face Accelerate, with NNI 2.5 - 2.10.1 and with NNI 3.0.

    torchrun --nproc_per_node=2 examples/ddp_accelerate.py    # or, with GPUs: accelerate launch --multi_gpu ...

Where there are fewer GPUs than processes, they share the CPU.
"""

from __future__ import annotations

import os

import nni
import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import nni_dataparallel.auto  # noqa: F401 <- the one line; its place among the imports does not matter

accelerator = Accelerator(cpu=torch.cuda.device_count() < int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16, torch.tensor(labels)
torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 10)).to(accelerator.device)
loader = DataLoader(TensorDataset(x, y), batch_size=64 // accelerator.num_processes, shuffle=True)
settings = {"lr": 0.05, "momentum": 0.9}


def fit(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Train ``net``, which has its quantizer already: this is the place for ``prepare``."""
    parallel, optimizer, batches = accelerator.prepare(net, optimizer, loader)
    for epoch in range(3):
        parallel.train()
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(parallel(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
        last = accelerator.gather(loss.detach()[None])
        accelerator.print(f"epoch {epoch}: loss of the last batch {last.mean().item():.4f} on {len(last)} processes")


if nni.__version__.startswith("3."):
    from nni.compression.quantization import QATQuantizer
    from nni.compression.utils import TorchEvaluator

    config = [{"op_types": ["Conv2d", "Linear"], "target_names": ["_input_", "weight", "_output_"], "quant_dtype": "int8"}]
    traced = nni.trace(torch.optim.SGD)(model.parameters(), **settings)
    evaluator = TorchEvaluator(lambda net, optimizer, *_: fit(net, optimizer), traced, lambda batch, net: None)
    QATQuantizer(model, config, evaluator).compress(None, max_epochs=3)
else:
    from nni.algorithms.compression.pytorch.quantization import QAT_Quantizer

    config = [{"quant_types": ["weight", "input", "output"], "quant_bits": 8, "op_types": ["Conv2d", "Linear"]}]
    optimizer = torch.optim.SGD(model.parameters(), **settings)
    QAT_Quantizer(model, config, optimizer, dummy_input=x[:1].to(accelerator.device)).compress()
    fit(model, optimizer)

model.eval()
with torch.no_grad():
    accuracy = (model(x.to(accelerator.device)).argmax(1).cpu() == y).float().mean()
accelerator.print(f"quantised accuracy on the training images: {accuracy:.1%}")
