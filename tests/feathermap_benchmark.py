"""ResNet-18 (11.17 M weights): dense against FeatherNet, in bytes, milliseconds and megabytes.

    python tests/feathermap_benchmark.py [--compress 0.1] [--steps 5] [--threads 1]

Times are the median of interleaved rounds, so that a busy machine burdens both alike; memory is a process' peak in
deployed inference, each model in a process of its own.
"""

from __future__ import annotations

import argparse
import io
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Dict, List

import torch
from feathermap_nets import resnet18
from torch import nn

from nni_dataparallel.feathermap import FeatherNet


def file_bytes(model: nn.Module) -> int:
    """Size of the file that ``torch.save`` makes of the state dict."""
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    return len(file.getvalue())


def interleaved(calls: Dict[str, Callable[[], Any]], rounds: int) -> Dict[str, float]:
    """Median milliseconds of each call, taking turns."""
    times: Dict[str, List[float]] = {name: [] for name in calls}
    for index in range(rounds + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if index:  # the first round warms up
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in times.items()}


def step(model: nn.Module, batch: int = 8) -> Callable[[], None]:
    """One training step."""
    x, y = torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def run() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return run


def forward(model: nn.Module, batch: int) -> Callable[[], None]:
    """One forward without gradients."""
    x = torch.randn(batch, 3, 32, 32)

    def run() -> None:
        with torch.no_grad():
            model(x)

    return run


def peak(file: str, compress: float, batch: int) -> float:
    """Megabytes that a deployed net, loaded from ``file``, adds to this process; ``dense`` for the dense one."""
    forward(nn.Conv2d(3, 3, 3), 1)()
    with torch.device("meta"):
        model = resnet18().eval()
    if file != "dense":
        model = FeatherNet(model, compress, clone=False).deploy()
    before = resident("VmRSS")  # no weights yet
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.01)  # untouched memory would not count
    if file != "dense":
        model.load_state_dict(torch.load(file))
    for _ in range(2):
        forward(model, batch)()
    return resident("VmHWM") - before


def resident(which: str) -> float:
    """Megabytes: VmRSS now, VmHWM at most (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) / 1024 for line in lines if line.startswith(which))


def onnx_figures(net: FeatherNet, dynamo: bool) -> str:
    """Size of the ONNX file of a deployed net, and the largest difference to torch under onnxruntime."""
    import onnxruntime

    x = torch.randn(2, 3, 32, 32)
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "net.onnx")
        options: Dict[str, Any] = {"dynamo": True, "external_data": False} if dynamo else {"do_constant_folding": False}
        if not dynamo and hasattr(torch.onnx, "ONNXProgram"):
            options["dynamo"] = False
        torch.onnx.export(net, (x,), file, opset_version=18, **options)
        settings = onnxruntime.SessionOptions()
        settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        session = onnxruntime.InferenceSession(file, settings, providers=["CPUExecutionProvider"])
        (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        with torch.no_grad():
            difference = float((torch.from_numpy(found) - net(x)).abs().max())
        return f"{os.path.getsize(file) / 1e6:.2f} MB, largest difference {difference:.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compress", type=float, default=0.1)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--peak", nargs=2, metavar=("FILE", "BATCH"))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.peak:
        print(peak(arguments.peak[0], arguments.compress, int(arguments.peak[1])))
        return
    torch.manual_seed(0)
    dense = resnet18()
    net = FeatherNet(resnet18(), arguments.compress)
    aware = FeatherNet(resnet18(), arguments.compress).prepare_qat()
    times = interleaved({"dense": step(dense), "FeatherNet": step(net), "FeatherNet, QAT": step(aware)}, arguments.steps)
    print("training step, batch 8 [ms]: " + ", ".join(f"{k} {v:.0f} ({v / times['dense']:.2f} x)" for k, v in times.items()))
    deployed = FeatherNet(resnet18(), arguments.compress).deploy()
    shipped = FeatherNet(resnet18(), arguments.compress).convert().deploy()
    dense.eval()
    for batch in (1, 32):
        models = {"dense": dense, "float deployed": deployed, "INT8 deployed": shipped}
        times = interleaved({name: forward(model, batch) for name, model in models.items()}, arguments.steps)
        print(f"forward, batch {batch} [ms]: " + ", ".join(f"{k} {v:.0f} ({v / times['dense']:.2f} x)" for k, v in times.items()))
    print(
        f"file [MB]: dense {file_bytes(dense) / 1e6:.2f}, float {file_bytes(net) / 1e6:.2f}, INT8 {file_bytes(shipped) / 1e6:.3f}"
    )
    with tempfile.TemporaryDirectory() as folder:
        files = {"dense": "dense", "float": os.path.join(folder, "float.pth"), "INT8": os.path.join(folder, "int8.pth")}
        torch.save(deployed.state_dict(), files["float"])
        torch.save(shipped.state_dict(), files["INT8"])
        for batch in (1, 32):
            found = {}
            for kind, file in files.items():
                command = [sys.executable, __file__, "--compress", str(arguments.compress), "--peak", file, str(batch)]
                found[kind] = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            print(f"peak memory, batch {batch} [MB]: " + ", ".join(f"{k} {v:.0f}" for k, v in found.items()))
    for dynamo in (False, True):
        try:
            print(f"ONNX, INT8 deployed, dynamo={dynamo}: {onnx_figures(shipped, dynamo)}")
        except ImportError as error:
            print(f"ONNX, dynamo={dynamo}: {error}")


if __name__ == "__main__":
    main()
