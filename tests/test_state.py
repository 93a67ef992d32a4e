"""The step counter and the number of meetings of a patched quantizer."""

from __future__ import annotations

import threading
from typing import Any, List

import pytest
import torch
from cases import Case
from conftest import CASES, IS_FIRST, IS_MODERN, IS_NEW, RELEASE, each_case, needs_a_quantizer
from harness import advance, data, replicated, start_training, step, stock_class

from nni_dataparallel import patched
from nni_dataparallel.group import Group
from nni_dataparallel.nni2.steps import read_steps

pytestmark = [needs_a_quantizer, pytest.mark.skipif(IS_NEW, reason="NNI 3.0 has neither; its meetings have a test of their own")]


def trained(case: Case, count: int, steps: int = 3) -> Any:
    net, optimizer, quantizer = start_training(stock_class(case.quantizer), case, RELEASE)
    model = replicated(count)(net)
    advance(case, model, optimizer, data()[:steps])
    return net, optimizer, quantizer, model


@pytest.mark.skipif(IS_FIRST, reason="1.x counts in a Python number")
@pytest.mark.parametrize("count", [1, 3])
def test_the_step_counter_is_not_read_per_layer(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first step no layer asks the device for it; a changed counter is noticed all the same."""
    reads: List[int] = []
    convert = torch.Tensor.__int__
    asking = threading.local()

    def noting(t: torch.Tensor) -> int:
        if getattr(asking, "now", False):
            return convert(t)  # the watch over virtual devices calls it a second time
        reads.append(1)
        asking.now = True
        try:
            return convert(t)
        finally:
            asking.now = False

    with patched():
        net, optimizer, _, model = trained(next(c for c in CASES if c.name == "start step"), count)
        monkeypatch.setattr(torch.Tensor, "__int__", noting)
        step(model, optimizer, data()[0])
        step(model, optimizer, data()[1])
        assert reads == []
        net.steps.fill_(1)
        model(data()[2][0])
        assert len(reads) == 1
    assert int(net.steps) == 1


@pytest.mark.skipif(IS_FIRST, reason="1.x counts in a Python number")
def test_a_step_counter_restored_through_data_is_noticed() -> None:
    """.data leaves no trace; during the warm-up, where the number matters, the next step finds it."""
    with patched():
        net, optimizer, quantizer, model = trained(next(c for c in CASES if c.name == "start step"), 1, steps=1)
        net.steps.data.fill_(11)
        step(model, optimizer, data()[1])
        step(model, optimizer, data()[2])
        assert int(net.steps) == 13
        assert read_steps(quantizer) == 13


@each_case
def test_one_meeting_per_observer_and_forward(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Minimum and maximum travel together; evaluation needs no meeting where nothing is measured."""
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
        if IS_FIRST and case.start > 1:
            observers = 0  # 1.x does not watch before it quantises
        if case.quantizer == "LsqQuantizer":
            observers = sum(name.endswith(("input_scale", "output_scale")) for name in net.state_dict())
        assert len(places) == 2 * observers
        assert len(set(places)) == len(places)
        warm = case.start > 1 and not IS_MODERN
        places.clear()
        model.eval()
        model(data()[0][0])
        # 1.x tracks in evaluation, too, and 2.0 - 2.4 do before they quantise; LSQ counts the batch's elements.
        assert places == [] or warm or IS_FIRST or case.quantizer == "LsqQuantizer"
