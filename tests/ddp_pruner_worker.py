"""One rank of a DDP run of the pruners and distillers over gloo, case by case.

    python tests/ddp_pruner_worker.py RANK WORLD FOLDER stock

Started by ``test_ddp_pruners.py``: all cases with stock NNI, and then again with the fixes, in the same processes. The
scripts of the other tests are run as they are, on this rank's rows.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Iterator, List, Tuple

import ddp_worker
import torch
from ddp_pruner_cases import CASES, DdpCase, in_place, scripts
from ddp_worker import RANK, WORLD
from torch import Tensor, distributed, nn

import nni_dataparallel

cross_entropy, manual_seed = nn.functional.cross_entropy, torch.manual_seed


def shard(x: Tensor) -> Tensor:
    """This rank's rows; none where there are fewer rows than ranks."""
    return x.tensor_split(WORLD)[RANK]


def share_of_loss(output: Tensor, target: Tensor) -> Tensor:
    """This rank's part of the whole batch's mean. DDP takes the mean of the gradients: the parts have to be as large."""
    rows = torch.tensor(len(target))
    distributed.all_reduce(rows)
    return cross_entropy(output, target, reduction="sum") * WORLD / rows


def seed(number: int) -> torch.Generator:
    """Ranks of one script draw different numbers; models come from a file, so that they are the same."""
    return manual_seed(number + 100 * RANK if number == 7 else number)


def run(case: DdpCase) -> object:
    whole = scripts.data

    def rows(*sizes: Any, **seed: Any) -> List[Tuple[Tensor, Tensor]]:
        return [(shard(x), shard(target)) for x, target in whole(*(sizes or (case.sizes,)), **seed)]

    loss = cross_entropy if case.even else share_of_loss
    with in_place(scripts, "data", rows), in_place(nn.functional, "cross_entropy", loss), in_place(torch, "manual_seed", seed):
        outcome = case.run(lambda net: nn.parallel.DistributedDataParallel(net))
    outcome.__dict__.pop("model", None)
    return outcome


def both_ways() -> Iterator[Tuple[str, Callable[[], Any]]]:
    for way in ("stock", "patched"):
        if way == "patched":
            nni_dataparallel.patch()
        for case in CASES:
            yield f"{way}: {case.name}", functools.partial(run, case)


if __name__ == "__main__":
    ddp_worker.main(both_ways())
