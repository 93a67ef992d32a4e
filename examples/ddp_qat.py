"""Quantization-aware training with DistributedDataParallel, with NNI 2.5 - 2.10.1 and with NNI 3.0.

    torchrun --nproc_per_node=2 examples/ddp_qat.py              # three epochs
    torchrun --nproc_per_node=4 examples/ddp_qat.py --resume     # two more, from the checkpoint, on any number of processes

One process per GPU (nccl); where there are fewer GPUs than processes, they share the CPU (gloo).
"""

from __future__ import annotations

import os
import sys
from typing import Any

import nni
import torch
from sklearn.datasets import load_digits
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import nni_dataparallel.auto  # noqa: F401 <- the one line; its place among the imports does not matter
from nni_dataparallel import load_checkpoint, save_checkpoint

CHECKPOINT = "ddp_qat.pth"
resume = "--resume" in sys.argv
epochs = 5 if resume else 3

cuda = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
distributed.init_process_group("nccl" if cuda else "gloo")
rank, world = distributed.get_rank(), distributed.get_world_size()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
if cuda:
    torch.cuda.set_device(device)

images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16, torch.tensor(labels)
sampler = DistributedSampler(TensorDataset(x, y))  # pads, so that every rank has the same number of batches
loader = DataLoader(TensorDataset(x, y), batch_size=64 // world, sampler=sampler)
torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 10)).to(device)


def fit(net: nn.Module, optimizer: Any, quantizer: Any) -> None:
    """Train ``net``, which has its quantizer already: this is the place for DistributedDataParallel."""
    first = 0
    if resume:  # on every rank
        first = load_checkpoint(CHECKPOINT, net, optimizer, quantizer)["epoch"] + 1
    parallel = DistributedDataParallel(net, device_ids=[device] if cuda else None)
    parallel.train()
    for epoch in range(first, epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros((), device=device)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(parallel(inputs.to(device)), targets.to(device))
            loss.backward()
            optimizer.step()
            total += loss.detach() / len(loader) / world
        distributed.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: loss {total.item():.4f}", flush=True)
            save_checkpoint(CHECKPOINT, net, optimizer, quantizer, epoch=epoch)


settings = {"lr": 0.05, "momentum": 0.9}
if nni.__version__.startswith("3."):
    from nni.compression.quantization import QATQuantizer
    from nni.compression.utils import TorchEvaluator

    config = [{"op_types": ["Conv2d", "Linear"], "target_names": ["_input_", "weight", "_output_"], "quant_dtype": "int8"}]
    traced = nni.trace(torch.optim.SGD)(model.parameters(), **settings)
    evaluator = TorchEvaluator(lambda net, own, *_: fit(net, own, quantizer), traced, lambda batch, net: None)
    quantizer = QATQuantizer(model, config, evaluator)
    quantizer.compress(None, max_epochs=epochs)
else:
    from nni.algorithms.compression.pytorch.quantization import QAT_Quantizer

    config = [{"op_types": ["Conv2d", "Linear"], "quant_types": ["weight", "input", "output"], "quant_bits": 8}]
    optimizer = torch.optim.SGD(model.parameters(), **settings)
    quantizer = QAT_Quantizer(model, config, optimizer, dummy_input=x[:1].to(device))
    quantizer.compress()
    fit(model, optimizer, quantizer)

if rank == 0:  # alone: outside of DistributedDataParallel's forward nobody waits for anybody
    model.eval()
    with torch.no_grad():
        print(f"quantised accuracy on the training images: {(model(x.to(device)).argmax(1).cpu() == y).float().mean():.1%}")
    if hasattr(quantizer, "export_model"):  # NNI 3.0 has none
        quantizer.export_model("ddp_model.pth", "ddp_calibration.pth")  # the plain model's keys
distributed.barrier()
distributed.destroy_process_group()
