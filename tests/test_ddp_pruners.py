"""The pruners and distillers under DistributedDataParallel: one device on the joined batch, the same on all ranks."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, Dict, List

import ddp_runs
import pytest
import torch
from conftest import RELEASE

if RELEASE not in ("2.10.1", "3.0"):
    pytest.skip(f"DDP is not tested with the pruners of NNI {RELEASE}", allow_module_level=True)

import harness
from ddp_pruner_cases import CASES, DdpCase, on_one_device, scripts

from nni_dataparallel import is_patched

WORLD = 2
WORKER = Path(__file__).parent / "ddp_pruner_worker.py"


@functools.lru_cache(maxsize=None)
def reference(case: DdpCase) -> Any:
    """Stock NNI on one device."""
    assert not is_patched()
    return on_one_device(case)


@functools.lru_cache(maxsize=None)
def ranks(way: str) -> List[Dict[str, Any]]:
    """What every rank of one run over all cases left."""
    return ddp_runs.run(WORLD, way, WORKER, limit=120.0)


def mean(values: List[Any]) -> Any:
    return torch.as_tensor(values).double().mean().item()


def joined(outcomes: List[Any]) -> Any:
    """What the ranks left together: the losses are parts of a mean, each evaluates its own rows."""
    first = outcomes[0]
    first.losses = [mean(step) for step in zip(*(outcome.losses for outcome in outcomes))]
    first.evaluation = torch.cat([outcome.evaluation for outcome in outcomes])
    more = getattr(first, "more", {})
    more.update({name: mean([own.more[name] for own in outcomes]) for name in more if name.startswith("distillation loss")})
    return first


def apart_of_ranks(outcomes: List[Any]) -> List[str]:
    """In words, where what all ranks hold is not the same to the last bit."""
    lines: List[str] = []
    for rank, other in enumerate(outcomes[1:], 1):
        for name in ("masks", "state", "plain", "weights", "metrics", "more"):
            mine, yours = (vars(outcome).get(name, {}) for outcome in (outcomes[0], other))
            if name == "more":
                mine, yours = ({k: v for k, v in more.items() if not k.startswith("distillation loss")} for more in (mine, yours))
            lines += harness.unequal(f"{name} of rank 0 and rank {rank}", mine, yours)
    return lines


def apart_from_one_device(case: DdpCase, outcomes: List[Any]) -> List[str]:
    """In words, where the ranks differ from each other or from one device."""
    errors = [f"rank {rank}: {outcome}" for rank, outcome in enumerate(outcomes) if isinstance(outcome, str)]
    return errors or [*apart_of_ranks(outcomes), *scripts.apart(reference(case), joined(outcomes))]
