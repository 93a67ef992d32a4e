"""One rank of a DDP run over gloo: trains every case on its share of each batch and writes down what is left.

    python tests/ddp_worker.py RANK WORLD FOLDER (patched | stock)

Started by ``ddp_runs.py``, which compares. A loss is divided by the whole batch, so that uneven and empty shards add up.
"""

from __future__ import annotations

import datetime
import functools
import sys
import warnings
from pathlib import Path
from typing import Any, Callable, Iterable, List, Tuple

import harness
import torch
from cases import Case
from conftest import CASES, IS_NEW, RELEASE
from references import reference_class
from torch import Tensor, distributed, nn

import nni_dataparallel

RANK, WORLD, FOLDER, WAY = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]


def shard(x: Tensor) -> Tensor:
    """This rank's rows; none where there are fewer rows than ranks."""
    return x.tensor_split(WORLD)[RANK]


def share_of_loss(model: nn.Module, batch: Tuple[Tensor, Tensor]) -> Tensor:
    x, target = batch
    return nn.functional.cross_entropy(model(shard(x)), shard(target), reduction="sum") / len(x)


def summed(loss: Tensor) -> float:
    total = loss.detach().clone()
    distributed.all_reduce(total)
    return total.item()


def step(model: nn.Module, optimizer: Any, batch: Tuple[Tensor, Tensor]) -> float:
    optimizer.zero_grad()
    loss = share_of_loss(model, batch)
    (loss * WORLD).backward()  # DDP takes the mean of the gradients
    optimizer.step()
    return summed(loss)


def watch(model: nn.Module, batch: Tuple[Tensor, Tensor]) -> float:
    with torch.no_grad():
        return summed(share_of_loss(model, batch))


def train(case: Case) -> Any:
    quantizer_class = harness.stock_class(case.quantizer)
    if WAY == "stock":
        quantizer_class = reference_class(quantizer_class)
    return harness.train(quantizer_class, case, RELEASE, lambda net: wrapped(case, net))


def wrapped(case: Case, net: nn.Module) -> nn.Module:
    """As the user has to, where NNI 3.0 detaches a folded bias, or learns scales of activations per channel."""
    if WAY == "patched" and any(not p.numel() for p in net.parameters()):
        net(harness.data()[0][0])
    return nn.parallel.DistributedDataParallel(net, find_unused_parameters=IS_NEW and case.fold)


def main(cases: Iterable[Tuple[str, Callable[[], Any]]], limit: float = 60.0) -> None:
    """Run the cases one after the other; a rank that waits longer than ``limit`` seconds for another gives up."""
    warnings.simplefilter("ignore")
    store = distributed.FileStore(str(FOLDER / "store"), WORLD)
    timeout = datetime.timedelta(seconds=limit)
    distributed.init_process_group("gloo", store=store, rank=RANK, world_size=WORLD, timeout=timeout)
    if WAY == "patched":
        nni_dataparallel.patch()
    found: List[Tuple[str, Any]] = []
    for name, run in cases:
        try:
            found.append((name, run()))
        except Exception as error:
            found.append((name, f"{type(error).__name__}: {error}"))
        torch.save(found, FOLDER / f"{RANK}.pt")
        distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    harness.step, harness.watch = step, watch
    main((case.id, functools.partial(train, case)) for case in CASES)
