"""Frameworks that wrap the model in ``DistributedDataParallel`` themselves: Accelerate, transformers' Trainer, Lightning's ddp.

Two ranks over gloo, started as torchrun does it (and by Lightning), end with the numbers of one device on the whole batch.
The scripts are in ``ddp_frameworks_worker.py``.
"""

from __future__ import annotations

import functools
import pickle
import socket
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Dict, List

import ddp_runs
import pytest
import torch
from conftest import IS_MODERN, IS_NEW
from ddp_runs import Ranks, faults
from harness import Record, differences
from packaging.version import Version

if not (IS_MODERN or IS_NEW):
    pytest.skip("quantizers that observe inputs: NNI 2.5 and later", allow_module_level=True)
if not torch.distributed.is_available():
    pytest.skip("torch without distributed", allow_module_level=True)

import ddp_frameworks_worker as worker
from ddp_frameworks_worker import QUANTIZERS

pytestmark = pytest.mark.of_a_kind
WORKER = Path(worker.__file__)
PACKAGES = {"accelerate": "accelerate", "trainer": "transformers", "lightning": "pytorch_lightning"}


def _missing(framework: str) -> str:
    package = PACKAGES[framework]
    if find_spec(package) is None:
        return f"{package} is not installed: pip install '.[evaluators]'"
    if framework == "trainer" and IS_NEW and Version(version(package)) >= Version("4.31"):
        return "stock NNI 3.0 trains with no Trainer since transformers 4.31"
    return ""


HERE = [framework for framework in PACKAGES if not _missing(framework)]
each_framework = pytest.mark.parametrize(
    "framework", [pytest.param(f, marks=pytest.mark.skipif(bool(_missing(f)), reason=_missing(f) or "here")) for f in PACKAGES]
)
each_quantizer = pytest.mark.parametrize("name", QUANTIZERS)


def _free_ports(count: int) -> List[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def _as_torchrun(way: str, folder: Path) -> Ranks:
    jobs = [f"{framework}:{port}" for framework, port in zip(HERE, _free_ports(len(HERE)))]
    return ddp_runs.run(2, folder, way, *jobs, worker=WORKER)


def _by_lightning(folder: Path) -> Ranks:
    ddp_runs.run(1, folder, "patched", "lightning:0", worker=WORKER)
    return [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(2)]


@functools.lru_cache(maxsize=None)
def reference(framework: str) -> Dict[str, Record]:
    """Stock NNI with the framework on one device."""
    return worker.train(framework)


@each_framework
@each_quantizer
def test_ranks_equal_one_device(framework: str, name: str, runs: Path) -> None:
    """Losses, the whole state and the calibration config; both ranks have the same bits."""
    left = ddp_runs.once(runs, "frameworks", functools.partial(_as_torchrun, "patched"))
    ranks = [rank[framework][name] for rank in left]
    expected = reference(framework)[name]
    assert len(expected.losses) == worker.STEPS
    assert not faults(expected, ranks)
    assert not differences(*ranks, exact=True)


@pytest.mark.skipif(bool(_missing("lightning")), reason=_missing("lightning") or "here")
@each_quantizer
def test_ranks_that_lightning_starts_equal_one_device(name: str, runs: Path) -> None:
    """Without torchrun Lightning runs the script once more for the second rank."""
    left = ddp_runs.once(runs, "lightnings", _by_lightning)
    ranks = [rank["lightning"][name] for rank in left]
    assert not faults(reference("lightning")[name], ranks)
    assert not differences(*ranks, exact=True)


@each_framework
@pytest.mark.xfail(reason="every rank observes its own share", strict=True, raises=AssertionError)
def test_stock_ranks_equal_one_device(framework: str, runs: Path) -> None:
    """What the frameworks do with stock NNI's QAT."""
    left = ddp_runs.once(runs, "frameworks of stock", functools.partial(_as_torchrun, "stock"))
    assert not faults(reference(framework)[QUANTIZERS[0]], [rank[framework][QUANTIZERS[0]] for rank in left])
