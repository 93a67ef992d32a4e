"""What ranks of a DDP run can do wrong, and what must not change: run by ``ddp_worker.py`` as ``ddp_scenarios.py`` is."""

from __future__ import annotations

import gc
import math
import weakref
from pathlib import Path
from typing import Any, Callable, Dict, List

import harness
import torch
from conftest import IS_NEW, RELEASE
from ddp_scenarios import SUBJECTS, share_of_loss, step
from harness import data, stock_class
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from nni_dataparallel import ranks


def _error_of(work: Callable[[], Any]) -> str:
    """In words; both ranks come back here."""
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def another_place(folder: Path) -> List[str]:
    """Each rank reduces a number of a layer of its own; what it hears of it."""
    group = ranks.Ranks(distributed.group.WORLD)
    own = torch.ones(2, dtype=torch.float64) * group.rank
    found = []
    for op in ("max", "min", "sum"):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            found.append(_error_of(lambda op=op, dtype=dtype: group.all_reduce(own.to(dtype), op, f"input of layer{group.rank}")))
    found.append(_error_of(lambda: group.gather_numbers([3], f"rows of layer{group.rank}")))
    return found


def nan_of_one_rank(folder: Path) -> List[bool]:
    """Whether a NaN that one rank alone has is seen by this one, and whether the other numbers are right."""
    group = ranks.Ranks(distributed.group.WORLD)
    found = []
    for owner in range(group.size):
        for op in ("max", "min"):
            own = torch.tensor([float(group.rank), math.inf, 1.0])
            if group.rank == owner:
                own[2] = math.nan
            result = group.all_reduce(own, op, "anywhere").tolist()
            edge = float(group.size - 1 if op == "max" else 0)
            found.append(result[:2] == [edge, math.inf] and math.isnan(result[2]))
    return found


def half_precision(folder: Path) -> Dict[str, Any]:
    """Two steps of LSQ of 3.0 in a half precision model: the gradient that each rank has for the learned scales."""
    case = next(case for case in SUBJECTS if case.quantizer == "LsqQuantizer")
    net = harness.make_net(case).bfloat16()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    harness.make_quantizer(stock_class(case.quantizer), case, net, optimizer, RELEASE)
    model = DistributedDataParallel(net)
    for x, target in data()[:2]:
        optimizer.zero_grad()
        share_of_loss(model, (x.bfloat16(), target)).backward()
        optimizer.step()
    return {name: p.grad.clone() for name, p in net.named_parameters() if name.endswith("_scale") and p.grad is not None}


def loaded_by_one(folder: Path) -> str:
    """Rank 0 has the ranges of a trained model, the other has none: what building DDP says."""
    case = SUBJECTS[0]
    net, _, _ = harness.start_training(stock_class(case.quantizer), case, RELEASE)
    if distributed.get_rank() == 0:
        net(data()[0][0])
    return _error_of(lambda: DistributedDataParallel(net))


def none_of_our_business(folder: Path) -> Dict[str, Any]:
    """A model without a compressor, with what the fixes look at: an empty Parameter, join(), no process group any more."""
    net = nn.Sequential(nn.Linear(2, 2))
    net.register_parameter("empty", nn.Parameter(torch.empty(0)))  # (0, 2) is too much for torch 1.12's own DDP
    model = DistributedDataParallel(net, find_unused_parameters=True)
    model(torch.ones(3, 2)).sum().backward()
    lazy = _error_of(lambda: DistributedDataParallel(nn.LazyLinear(3)))
    return {"gradient": net[0].weight.grad.clone(), "lazy": lazy}


def after_the_group(folder: Path) -> Dict[str, Any]:
    """A quantised model trains in DDP over a group; the group is destroyed, the model evaluates, and nothing keeps the group."""
    net, optimizer, _ = harness.start_training(stock_class(SUBJECTS[0].quantizer), SUBJECTS[0], RELEASE)
    group = distributed.new_group()
    model = DistributedDataParallel(net, process_group=group)
    step(model, optimizer, data()[0])
    reference = weakref.ref(group)
    del model
    distributed.destroy_process_group(group)
    del group
    gc.collect()
    net.eval()
    with torch.no_grad():
        net(data()[0][0])
    return {"alive": reference() is not None}


FOR_NEW = ["half_precision", "loaded_by_one"] if IS_NEW else []
EDGES = ["another_place", "nan_of_one_rank", "none_of_our_business", "after_the_group", *FOR_NEW]
