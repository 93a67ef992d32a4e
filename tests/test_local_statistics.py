"""``statistics="local"``: replica 0's share of the batch counts, and nobody waits for anybody. Ranks of DDP: test_ddp.py."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
from cases import Case
from conftest import CASES, RELEASE, each_case, needs_a_quantizer
from harness import data, start_training, stock_class, unequal, whole_state
from torch import nn

import nni_dataparallel
from nni_dataparallel import is_patched, patch, patched, rehearse, replicas, unpatch
from nni_dataparallel.rendezvous import Rendezvous

pytestmark = [needs_a_quantizer, pytest.mark.of_a_kind]


@each_case
def test_replica_0_observes_alone(case: Case) -> None:
    """One forward on two replicas leaves what one device leaves that is given the first half of the batch."""
    x = data()[0][0]
    patch(statistics="local")
    states = []
    for shard, replicated in ((x[: len(x) // 2], False), (x, True)):
        net, _, quantizer = start_training(stock_class(case.quantizer), case, RELEASE)
        model: nn.Module = rehearse(net, 2) if replicated else net
        with mock.patch.object(Rendezvous, "exchange", side_effect=AssertionError("a replica waits")):
            model(shard)
        states.append(whole_state(net, quantizer))
    assert not unequal("state", *states)


def test_the_whole_batch_is_the_default() -> None:
    """The same forward without ``statistics`` has another range where anything is observed: the extremes lie in the last shard."""
    case = next(case for case in CASES if case.name in ("output", "weight and output"))
    states = []
    for mode in ("local", "global"):
        patch(statistics=mode)
        net, _, quantizer = start_training(stock_class(case.quantizer), case, RELEASE)
        rehearse(net, 2)(data()[0][0])
        states.append(whole_state(net, quantizer))
    assert unequal("state", *states)


def test_unpatch_returns_to_the_whole_batch() -> None:
    """A later patch() does not inherit it; patch() in between leaves it."""
    patch(statistics="local")
    patch()
    assert replicas.merged_statistics() == "local"
    unpatch()
    assert replicas.merged_statistics() == "global"


def test_patched_leaves_the_mode_that_was_there() -> None:
    """Inside the block its own, behind it the outer one, also after an error."""
    patch(statistics="local")
    with pytest.raises(ZeroDivisionError), patched(statistics="global"):
        assert replicas.merged_statistics() == "global"
        raise ZeroDivisionError
    assert replicas.merged_statistics() == "local"
    unpatch()
    with patched(statistics="local"):
        assert replicas.merged_statistics() == "local"
    assert replicas.merged_statistics() == "global"
    assert not is_patched()


@pytest.mark.parametrize("mode", ["both", "", "Local", 0])
def test_another_mode_is_refused(mode: Any) -> None:
    """The two that there are, in words; nothing is patched."""
    with pytest.raises(ValueError, match=f'"global" .* or "local" .*, not {mode!r}'):
        nni_dataparallel.patch(statistics=mode)
    assert not is_patched()
    assert replicas.merged_statistics() == "global"


def test_a_copy_of_the_model_and_a_second_forward_go_on() -> None:
    """Local statistics of several forwards: a moving average of first shards, on the original and on a copy."""
    case = next(case for case in CASES if case.name in ("output", "weight and output"))
    patch(statistics="local")
    one, _, _ = start_training(stock_class(case.quantizer), case, RELEASE)
    two, _, _ = start_training(stock_class(case.quantizer), case, RELEASE)
    for model, halve in ((one, True), (rehearse(two, 2), False)):
        for x, _ in data()[:2]:
            model(x[: (len(x) + 1) // 2] if halve else x)
    assert not unequal("state", one.state_dict(), copy.deepcopy(two).state_dict())
    assert all(torch.isfinite(t).all() for t in two.state_dict().values())
