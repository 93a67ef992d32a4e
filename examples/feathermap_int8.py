"""A small CNN as FeatherNet on scikit-learn's digits: trained quantization-aware, shipped as INT8, deployed from the file.

    python examples/feathermap_int8.py [--compress 0.1] [--bits 8] [--epochs 12]

On plain torch: NNI need not be installed. Writes feathernet_int8.pth to the current folder.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

from nni_dataparallel.feathermap import FeatherNet

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--compress", type=float, default=0.1, help="size of the factors over the number of weights")
parser.add_argument("--bits", type=int, default=8, help="of the factors, 2 to 8")
parser.add_argument("--epochs", type=int, default=12)
options = parser.parse_args()

torch.manual_seed(0)
torch.set_num_threads(1)
images, labels = load_digits(return_X_y=True)
x = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
y = torch.tensor(labels)
train_rows, test_rows = torch.randperm(len(x)).split([1347, 450])


def cnn() -> nn.Module:
    """36,106 parameters."""
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


@torch.no_grad()
def predictions(model: nn.Module) -> torch.Tensor:
    return model(x[test_rows]).argmax(1)


def accuracy(predicted: torch.Tensor) -> str:
    return f"{(predicted == y[test_rows]).float().mean():.2%}"


def size(model: nn.Module) -> str:
    """Of the tensors, and of the file with its headers (more than a kilobyte, much for so small a net)."""
    file = Path("feathernet_int8.pth")
    torch.save(model.state_dict(), file)
    tensors = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
    return f"{tensors} bytes of tensors, {file.stat().st_size} bytes of file"


# FeatherNet first, quantization after: what is shipped are the factors, so they are what has to be quantised.
net = FeatherNet(cnn(), options.compress).prepare_qat(options.bits)
optimizer = torch.optim.Adam(net.param_groups(lr=0.02))  # layers' scalars at a tenth of it
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs * math.ceil(len(train_rows) / 64))
for epoch in range(options.epochs):
    for batch in train_rows[torch.randperm(len(train_rows))].split(64):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x[batch]), y[batch])
        loss.backward()
        optimizer.step()
        schedule.step()
    print(f"epoch {epoch}: loss {loss.item():.4f}")
net.eval()
print(net.compression_report())

# The float weights behind the fake quantization, in a net that does not quantise; the file says which form it has.
float_net = FeatherNet(cnn(), options.compress).eval()
float_net.load_state_dict(net.state_dict())
trained = predictions(net)  # as training saw it: fake-quantised factors
print("dense size:", size(cnn()))
print("float factors size:", size(float_net))
print("INT8 factors size:", size(net.convert()))  # the last to be written: the file that is shipped

shipped = FeatherNet(cnn(), options.compress).deploy()  # elsewhere: no weight of the dense net is kept in memory
shipped.load_state_dict(torch.load("feathernet_int8.pth"))
print("factors in the file:", shipped.state_dict()["pool.V1.qweight"].dtype, shipped.state_dict()["pool.V2.qweight"].dtype)
print("float accuracy:", accuracy(predictions(float_net)))
print("quantization-aware accuracy:", accuracy(trained))
print("INT8 accuracy, deployed from the file:", accuracy(predictions(shipped)))
print("the same prediction on every test image:", torch.equal(predictions(shipped), trained))
