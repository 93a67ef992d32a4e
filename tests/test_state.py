"""Checkpoints, copies, the step counter and the number of meetings of a patched quantizer."""

from __future__ import annotations

import copy
import io
from typing import Any, List

import pytest
import torch
from cases import Case, cases_for
from conftest import IS_MODERN, RELEASE
from harness import data, freeze_norms, replicated, snapshot, start_training, step, stock_class

from nni_dataparallel import patched
from nni_dataparallel.group import Group

CASES = cases_for(RELEASE)
pytestmark = pytest.mark.skipif(not CASES, reason=f"NNI {RELEASE} has no QAT_Quantizer")
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def trained(case: Case, count: int, steps: int = 3) -> Any:
    net, optimizer, quantizer = start_training(stock_class(), case, RELEASE)
    model = replicated(count)(net)
    model.train()
    freeze_norms(model)
    for batch in data()[:steps]:
        step(model, optimizer, batch)
    return net, optimizer, quantizer, model


@each_case
@pytest.mark.parametrize("count", [1, 2])
def test_a_model_can_be_copied_after_a_training_forward(case: Case, count: int) -> None:
    """copy.deepcopy, as an EMA or a best-model snapshot needs it: equal, and independent."""
    with patched():
        net, optimizer, _, model = trained(case, count)
        model(data()[0][0])
        twin = copy.deepcopy(net)
        before = snapshot(twin)
        assert all(torch.equal(t, snapshot(net)[name]) for name, t in before.items())
        step(model, optimizer, data()[3])
        assert all(torch.equal(t, before[name]) for name, t in snapshot(twin).items())


@each_case
def test_a_checkpoint_restores_the_trained_weights(case: Case) -> None:
    """Loading does not overwrite the trained weight with the quantised one, and goes on as never stopped."""
    with patched():
        net, optimizer, _, model = trained(case, 2)
        file = io.BytesIO()
        torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.seek(0)
        saved = torch.load(file)
        fresh, fresh_optimizer, _ = start_training(stock_class(), case, RELEASE)
        fresh.load_state_dict(saved["model"])
        fresh_optimizer.load_state_dict(saved["optimizer"])
        assert all(torch.equal(t, saved["model"][name]) for name, t in snapshot(fresh).items())
        resumed = replicated(2)(fresh)
        resumed.train()
        freeze_norms(resumed)
        for batch in data()[3:]:
            assert step(resumed, fresh_optimizer, batch) == step(model, optimizer, batch)
        assert all(torch.equal(t, snapshot(net)[name]) for name, t in snapshot(fresh).items())


@pytest.mark.parametrize("count", [1, 3])
def test_the_step_counter_is_not_read_per_layer(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first step no layer asks the device for it; a changed counter is noticed all the same."""
    reads: List[int] = []
    convert = torch.Tensor.__int__
    with patched():
        net, optimizer, _, model = trained(next(c for c in CASES if c.name == "start step"), count)
        monkeypatch.setattr(torch.Tensor, "__int__", lambda t: reads.append(1) or convert(t))
        step(model, optimizer, data()[0])
        step(model, optimizer, data()[1])
        assert reads == []
        net.steps.fill_(1)
        model(data()[2][0])
        assert len(reads) == 1
    assert int(net.steps) == 1


@each_case
def test_one_meeting_per_observer_and_forward(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Minimum and maximum travel together; evaluation needs no meeting at all."""
    places: List[Any] = []
    exchange = Group.exchange
    monkeypatch.setattr(
        Group,
        "exchange",
        lambda self, rank, place, value: places.append((rank, place)) or exchange(self, rank, place, value),
    )
    with patched():
        net, _, _, model = trained(case, 2, steps=0)
        model(data()[0][0])
        observers = sum("tracked_min_" in name for name in net.state_dict())
        assert len(places) == 2 * observers
        assert len(set(places)) == len(places)
        warm = case.start > 1 and not IS_MODERN
        places.clear()
        model.eval()
        model(data()[0][0])
        assert places == [] or warm  # legacy releases track the range in evaluation too before they quantise
