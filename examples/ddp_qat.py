"""Quantization-aware training with DistributedDataParallel, with NNI 2.5 - 2.10.1 and with NNI 3.0.

    torchrun --nproc_per_node=2 examples/ddp_qat.py              # three epochs
    torchrun --nproc_per_node=4 examples/ddp_qat.py --resume     # two more, from the checkpoint, on any number of processes

One process per GPU (nccl); without GPUs the processes share the CPU (gloo).
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import nni
import torch
from sklearn.datasets import load_digits
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import nni_dataparallel.auto  # noqa: F401  (the one line; its place among the imports does not matter)
from nni_dataparallel import load_quantizer_state_dict, quantizer_state_dict

CHECKPOINT = Path("ddp_qat.pth")
parser = argparse.ArgumentParser()
parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
resume = parser.parse_args().resume
epochs = 5 if resume else 3

cuda = torch.cuda.is_available()
distributed.init_process_group("nccl" if cuda else "gloo")
rank, world = distributed.get_rank(), distributed.get_world_size()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
if cuda:
    torch.cuda.set_device(device)

images, labels = load_digits(return_X_y=True)
x = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
y = torch.tensor(labels)
sampler = DistributedSampler(TensorDataset(x, y))  # pads, so that every rank has the same number of batches
loader = DataLoader(TensorDataset(x, y), batch_size=64 // world, sampler=sampler)
torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 10)).to(device)


def fit(net: nn.Module, optimizer: Any, quantizer: Any) -> None:
    """Train ``net``, which has its quantizer already: this is the place for DistributedDataParallel."""
    first = 0
    if resume:
        saved = torch.load(CHECKPOINT, map_location=device)
        net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        load_quantizer_state_dict(quantizer, saved["quantizer"])
        first = saved["epoch"] + 1
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
            state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            torch.save({**state, "quantizer": quantizer_state_dict(quantizer)}, CHECKPOINT)


def with_nni_2() -> Any:
    from nni.algorithms.compression.pytorch.quantization import QAT_Quantizer

    config = [{"quant_types": ["weight", "input", "output"], "quant_bits": 8, "op_types": ["Conv2d", "Linear"]}]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    quantizer = QAT_Quantizer(model, config, optimizer, dummy_input=x[:1].to(device))
    quantizer.compress()
    fit(model, optimizer, quantizer)
    if rank:
        return None  # the model is the same on all ranks: one of them exports
    calibration = quantizer.export_model("ddp_model.pth", "ddp_calibration.pth")
    return {name: sorted(entry) for name, entry in calibration.items()}


def with_nni_3() -> Any:
    from nni.compression.quantization import QATQuantizer
    from nni.compression.utils import TorchEvaluator

    layers = {"quant_dtype": "int8", "quant_scheme": "affine", "granularity": "default"}
    config = [{"op_types": ["Conv2d", "Linear"], "target_names": ["_input_", "weight", "_output_"], **layers}]
    optimizer = nni.trace(torch.optim.SGD)(model.parameters(), lr=0.05, momentum=0.9)
    evaluator = TorchEvaluator(lambda net, optimizer, *_: fit(net, optimizer, quantizer), optimizer, lambda batch, net: None)
    quantizer = QATQuantizer(model, config, evaluator)
    _, calibration = quantizer.compress(None, max_epochs=epochs)
    return {name: sorted(targets) for name, targets in calibration.items()}


calibrated = with_nni_3() if nni.__version__.startswith("3.") else with_nni_2()
if rank == 0:  # the others may leave: outside of DistributedDataParallel's forward nobody waits for anybody
    model.eval()
    with torch.no_grad():
        accuracy = (model(x.to(device)).argmax(1).cpu() == y).float().mean()
    print(f"quantised accuracy on the training images: {accuracy:.1%}")
    print("calibrated", calibrated)
distributed.destroy_process_group()
