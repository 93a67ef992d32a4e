"""Numbers at the edge: zero ranges, evaluation before training, half precision."""

from __future__ import annotations

from typing import Any, List, Tuple

import pytest
import torch
from cases import Case, cases_for
from conftest import RELEASE, each_case, needs_a_quantizer
from harness import (
    QAT,
    Net,
    advance,
    complete,
    data,
    make_net,
    make_quantizer,
    replicated,
    start_training,
    stock_class,
    unequal,
    whole_state,
)
from torch import Tensor, nn

from nni_dataparallel import patched

pytestmark = needs_a_quantizer
Batches = List[Tuple[Tensor, Tensor]]


def all_zero() -> Batches:
    return [(torch.zeros_like(x), y) for x, y in data()]


def dead_on_one_shard() -> Batches:
    """The first rows are so dark that every ReLU behind the first convolution is dead there."""
    batches = data()
    for x, _ in batches:
        x[: (len(x) + 2) // 3] = 0.0
    return batches


def zeroed(net: nn.Module) -> None:
    for name, parameter in net.named_parameters():
        if "fc" not in name:
            parameter.zero_()


def darkened(net: Any) -> None:
    if net.conv1.bias is not None:
        net.conv1.bias.fill_(-0.1)


SITUATIONS = {
    "all-zero weights and biases": (zeroed, data),
    "all-zero batches": (lambda net: None, all_zero),
    "a ReLU dead on one shard": (darkened, dead_on_one_shard),
}


def run(case: Case, situation: str, count: int) -> Any:
    change, batches = SITUATIONS[situation]
    net = make_net(case)
    with torch.no_grad():
        change(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    quantizer = make_quantizer(stock_class(case.quantizer), case, net, optimizer, RELEASE)
    model = replicated(count)(net)
    losses = advance(case, model, optimizer, batches())
    state = whole_state(net, quantizer)
    complete(case, quantizer, model)
    model.eval()
    with torch.no_grad():
        return losses, state, model(batches()[0][0])


@each_case
@pytest.mark.parametrize("situation", SITUATIONS)
def test_a_zero_range_gives_no_nan(case: Case, situation: str) -> None:
    """Everything stays finite, and three replicas, one of them all dead, are one device."""
    with patched():
        losses, state, evaluation = run(case, situation, 1)
        values = {**state, "evaluation": evaluation, "losses": torch.tensor(losses)}
        # An observer that saw nothing yet starts at an infinite range.
        bad = [n for n, t in values.items() if not torch.isfinite(t.double()).all() and not n.startswith("observer")]
        assert bad == []
        other_losses, other_state, other_evaluation = run(case, situation, 3)
    others = {**other_state, "evaluation": other_evaluation, "losses": torch.tensor(other_losses)}
    finite = {name: t for name, t in values.items() if torch.isfinite(t.double()).all()}
    assert unequal("state", finite, {name: others[name] for name in finite}, rtol=2e-3, atol=2e-4) == []


@pytest.mark.parametrize("case", cases_for(RELEASE, QAT), ids=lambda case: case.id)
@pytest.mark.parametrize("count", [1, 2])
def test_evaluation_before_quantisation_is_the_float_model(case: Case, count: int) -> None:
    """Before the first training step, and during the warm-up: not a constant, as with stock 2.5 and later."""
    x = data((6,), seed=2)[0][0]
    with patched():
        net, optimizer, _ = start_training(stock_class(), case, RELEASE)
        float_net = make_net(case).eval()
        model = replicated(count)(net)
        model.eval()
        if not case.start and RELEASE.startswith("1."):
            pytest.skip("1.x quantises evaluations by their own range")
        expected = float_net(x)
        assert torch.allclose(model(x), expected, atol=1e-5)
        if case.start > 2:
            advance(case, model, optimizer, data()[:1])
            model.eval()
            trained = {
                name.replace("module.old_weight", "weight").replace("module.", "").replace("_nni_wrapper.", ""): p
                for name, p in net.named_parameters()
            }
            float_net.load_state_dict({**float_net.state_dict(), **trained})
            assert torch.allclose(model(x), float_net(x), atol=1e-5)


class Autocast(nn.Module):
    """The network in bfloat16, as a script under DataParallel does it: autocast inside forward."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.net(x).float()


@each_case
def test_autocast_keeps_the_statistics_in_float32(case: Case) -> None:
    """Every entry of the state keeps its dtype, is finite, and does not depend on the number of replicas."""
    if not hasattr(torch, "compile") and "put" in str(case.config) and not case.trains:
        pytest.skip("torch's histograms take float32 only before torch 2.0")
    states = []
    with patched():
        for count in (1, 3):
            # At learning rate 0: what is observed, and what LSQ's scales start with, not what bfloat16 makes of gradients.
            net, optimizer, quantizer = start_training(stock_class(case.quantizer), case, RELEASE, lr=0.0)
            before = {name: t.dtype for name, t in net.state_dict().items()}
            advance(case, replicated(count)(Autocast(net)), optimizer, data()[:1])
            state = whole_state(net, quantizer)
            assert {name: t.dtype for name, t in state.items() if name in before} == before
            states.append({name: t for name, t in state.items() if "tracked" in name or name.endswith("put_scale")})
    assert all(torch.isfinite(t).all() for t in states[0].values())
    assert unequal("state", *states, rtol=1e-6) == []
