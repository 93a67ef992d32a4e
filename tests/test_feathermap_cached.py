"""cached(): whose weights are kept, for how long, and what ends it."""

from __future__ import annotations

import copy
import threading
from typing import Any, Callable, Dict

import pytest
import torch
from torch import nn

from nni_dataparallel.feathermap import FeatherNet

X = torch.randn(2, 6)


def small_net(seed: int = 0) -> FeatherNet:
    torch.manual_seed(seed)
    return FeatherNet(nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 5)), 0.5).eval()


def doubled(net: FeatherNet) -> None:
    with torch.no_grad():
        net.pool.V1.weight.mul_(2)


def test_overlapping_blocks_of_two_threads_leave_nothing() -> None:
    """A enters, B enters, A leaves, B leaves: afterwards updates are seen in every mode."""
    net = small_net()
    first_open, second_open, first_left = (threading.Event() for _ in range(3))

    def first() -> None:
        with net.cached():
            first_open.set()
            second_open.wait(60)
        first_left.set()

    def second() -> None:
        first_open.wait(60)
        with net.cached():
            second_open.set()
            first_left.wait(60)
            kept.append(net.pool.cache is not None)

    kept: list = []
    threads = [threading.Thread(target=each) for each in (first, second)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert kept == [True]
    assert net.pool.cache is None
    before = net(X)
    doubled(net)
    assert not torch.equal(net(X), before)
    assert not torch.equal(net.materialized()(X), before)
    assert not torch.equal(net.deploy()(X), before)


def test_what_is_computed_inside_a_block_is_todays() -> None:
    """materialized() and an inner block do not answer with the outer block's weights; forwards do."""
    net = small_net()
    with torch.no_grad(), net.cached():
        before = net(X)
        doubled(net)
        wanted = copy.deepcopy(net)(X)
        assert torch.equal(net(X), before)
        torch.testing.assert_close(net.materialized()(X), wanted)
        with net.cached():
            torch.testing.assert_close(net(X), wanted)


CHANGES: Dict[str, Callable[[FeatherNet], Any]] = {
    "load": lambda net: net.load_state_dict(small_net(1).state_dict()),
    "load INT8": lambda net: net.load_state_dict(small_net(1).convert(3).state_dict()),
    "load in a parent": lambda net: nn.Sequential(net).load_state_dict(nn.Sequential(small_net(1)).state_dict()),
    "convert": lambda net: net.convert(3),
    "prepare_qat": lambda net: net.prepare_qat(3),
    "train": lambda net: (net.train(), doubled(net), net.eval()),
    "double": lambda net: net.double(),
    "double, the model only": lambda net: net.module.double(),
    "half and back": lambda net: net.half().float(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_the_net_ends_the_kept_weights(change: str) -> None:
    """Inside the block the net computes what it computes outside of it."""
    net = small_net()
    with torch.no_grad(), net.cached():
        CHANGES[change](net)
        x = X.to(net.module[0].weight_p.dtype)
        torch.testing.assert_close(net(x), copy.deepcopy(net)(x))
    assert net.pool.cache is None
