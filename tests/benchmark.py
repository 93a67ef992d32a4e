"""Step time of patched NNI over stock NNI on one device: the ratio of medians in one process.

    python tests/benchmark.py [--steps 100] [--batch 64] [--width 32]
    python tests/benchmark.py --ranks 2     # DistributedDataParallel: processes over gloo, each with its share of the batch

Stock and patched steps alternate, so that a machine that slows down slows both. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import logging
import statistics
import tempfile
import time
import warnings
from typing import Any, List, Tuple

import new_line
import torch
from cases import Case, is_new
from packaging.version import Version
from torch import nn

from nni_dataparallel import patched, rehearse
from nni_dataparallel.fixes import installed_release, stock_quantizer


def network(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(16 * width, 10)),
    )


def prepare(width: int, x: torch.Tensor, modern: bool) -> Tuple[nn.Module, Any]:
    new = is_new(installed_release())
    quantizer_class = stock_quantizer("QATQuantizer" if new else "QAT_Quantizer")
    model = network(width).to(x.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    targets = ["weight", "input", "output"] if modern else ["weight", "output"]
    config = [{"quant_types": targets, "quant_bits": 8, "op_types": ["Conv2d", "Linear"]}]
    if new:
        new_line.make(quantizer_class, Case("", "", config, quantizer="QATQuantizer"), model, optimizer)
        return model, optimizer
    quantizer_class(model, config, optimizer, **({"dummy_input": x[:1]} if modern else {})).compress()
    return model, optimizer


def timed_step(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> float:
    begin = time.perf_counter()
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    if x.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def measure(steps: int, batch: int, width: int, replicas: int) -> Tuple[float, float]:
    """Median step time in seconds: stock, patched."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, y = torch.randn(batch, 3, 16, 16, device=device), torch.randint(10, (batch,), device=device)
    modern = Version(installed_release()) >= Version("2.5")
    ways: List[Any] = [contextlib.nullcontext, patched]
    trained = []
    for way in ways:
        with way():
            model, optimizer = prepare(width, x, modern)
            trained.append((model if replicas == 1 else rehearse(model, replicas, check=False), optimizer))
    times: List[List[float]] = [[], []]
    for step in range(steps + 5):
        for i, way in enumerate(ways):
            with way():
                seconds = timed_step(*trained[i], x, y)
            if step >= 5:
                times[i].append(seconds)
    return statistics.median(times[0]), statistics.median(times[1])


def measure_ranks(rank: int, ranks: int, folder: str, options: argparse.Namespace) -> None:
    """One rank: median step time of stock, patched, and patched with local statistics; rank 0 prints."""
    quiet()
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(f"{folder}/store", ranks)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=datetime.timedelta(seconds=120))
    x, y = torch.randn(options.batch // ranks, 3, 16, 16), torch.randint(10, (options.batch // ranks,))
    modern = Version(installed_release()) >= Version("2.5")
    ways: List[Any] = [contextlib.nullcontext, patched, lambda: patched(statistics="local")]
    trained = []
    for way in ways:
        with way():
            model, optimizer = prepare(options.width, x, modern)
            trained.append((nn.parallel.DistributedDataParallel(model), optimizer))
    times: List[List[float]] = [[] for _ in ways]
    for step in range(options.steps + 5):
        for i, way in enumerate(ways):
            with way():
                torch.distributed.barrier()
                seconds = timed_step(*trained[i], x, y)
            if step >= 5:
                times[i].append(seconds)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    if rank == 0:
        stock, fixed, local = (statistics.median(each) for each in times)
        for name, base, seconds in (("patched over stock", stock, fixed), ("patched over local", local, fixed)):
            print(f"{ranks} ranks, {name} {base * 1e3:7.2f} ms  patched {seconds * 1e3:7.2f} ms  ratio {seconds / base:.2f}")


def quiet() -> None:
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--ranks", type=int, default=0, help="measure DistributedDataParallel with so many processes instead")
    options = parser.parse_args()
    quiet()
    print(f"NNI {installed_release()}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    if options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(measure_ranks, (options.ranks, folder, options), options.ranks)
        return
    for replicas in (1, 2):
        stock, fixed = measure(options.steps, options.batch, options.width, replicas)
        name = "one device" if replicas == 1 else f"{replicas} virtual devices"
        print(f"{name:18} stock {stock * 1e3:7.2f} ms  patched {fixed * 1e3:7.2f} ms  ratio {fixed / stock:.2f}")


if __name__ == "__main__":
    main()
