"""Quantization-aware training on all GPUs with NNI 2.5 - 2.10.1: the script of one GPU, and one line.

    python examples/qat_dataparallel.py

Without two GPUs it rehearses on virtual devices in CPU memory.
"""

from __future__ import annotations

import torch
from nni.algorithms.compression.pytorch.quantization import QAT_Quantizer
from sklearn.datasets import load_digits
from torch import nn

import nni_dataparallel.auto  # the one line; its place among the imports does not matter

images, labels = load_digits(return_X_y=True)
x = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
y = torch.tensor(labels)
device = "cuda" if torch.cuda.is_available() else "cpu"

model = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 10)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
config = [{"quant_types": ["weight", "input", "output"], "quant_bits": 8, "op_types": ["Conv2d", "Linear"]}]

# First the quantizer, on the plain model; then DataParallel.
quantizer = QAT_Quantizer(model, config, optimizer, dummy_input=x[:1].to(device))
quantizer.compress()
parallel = nn.DataParallel(model) if torch.cuda.device_count() > 1 else nni_dataparallel.rehearse(model, replicas=2)

for epoch in range(3):
    for batch in torch.randperm(len(x)).split(64):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(parallel(x[batch].to(device)), y[batch].to(device))
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: loss {loss.item():.4f}")

parallel.eval()
with torch.no_grad():
    accuracy = (parallel(x.to(device)).argmax(1).cpu() == y).float().mean()
print(f"quantised accuracy on the training images: {accuracy:.1%}")
calibration = quantizer.export_model("qat_model.pth", "qat_calibration.pth")
print("exported", {name: sorted(entry) for name, entry in calibration.items()})
