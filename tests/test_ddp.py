"""``DistributedDataParallel`` over gloo, every case: all ranks end with the numbers of one device.

What DDP can do besides is in ``test_ddp_options.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import ddp_runs
import ddp_scenarios as scenarios
import harness
import pytest
import torch
from cases import Case
from conftest import CASES, IS_NEW, RELEASE, each_case, needs_a_quantizer
from ddp_runs import Ranks, faults
from harness import reference
from packaging.specifiers import SpecifierSet

pytestmark = [
    needs_a_quantizer,
    pytest.mark.of_a_kind,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed"),
]

# 2.2 - 2.4 observe the input of a layer whose weight is quantised.
OBSERVING = [case for case in CASES if case.quantizer == "QAT_Quantizer" and SpecifierSet(">=2.2,<2.5").contains(RELEASE)]
# What stock NNI trains right with DDP: quantizers that observe no activation.
RIGHT_ON_STOCK = [
    case
    for case in CASES
    # (3.0's DoReFa has noise in its gradients, drawn by each rank for its own rows.)
    if case.quantizer in ("BNNQuantizer", "NaiveQuantizer", "" if IS_NEW else "DoReFaQuantizer")
    or (case.name == "weight" and case.quantizer not in ("PtqQuantizer", "DoReFaQuantizer") and case not in OBSERVING)
]


@pytest.fixture
def two(runs: Path) -> Ranks:
    """Two patched ranks, every case."""
    return ddp_runs.once(runs, "two", lambda folder: ddp_runs.run(2, folder, "patched", *(case.id for case in CASES)))


@pytest.fixture
def stock(runs: Path) -> Ranks:
    """Two ranks of stock NNI, with batches that they share evenly."""
    return ddp_runs.once(runs, "stock", lambda folder: ddp_runs.run(2, folder, "stock", *(case.id for case in CASES)))


@each_case
def test_ranks_equal_one_device(two: Ranks, case: Case) -> None:
    """Losses, state, evaluation and export of both ranks are those of stock NNI on one device, with an empty shard among them."""
    assert not faults(reference(case, RELEASE), [left[case.id] for left in two])


def _of_stock(case: Case) -> Any:
    wrong = pytest.mark.xfail(reason="every rank observes its own share", strict=True)
    return pytest.param(case, id=case.id, marks=[] if case in RIGHT_ON_STOCK else [wrong])


@pytest.mark.parametrize("case", [_of_stock(case) for case in CASES])
def test_stock_ranks_equal_one_device(stock: Ranks, case: Case) -> None:
    """Only where no activation is observed: strict expected failures otherwise."""
    with mock.patch.object(harness, "data", scenarios.even_data), mock.patch.dict(harness._references, clear=True):
        expected = reference(case, RELEASE)
    assert not faults(expected, [left[case.id] for left in stock])
