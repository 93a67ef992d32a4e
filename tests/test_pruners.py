"""The pruners of NNI 2.0, 2.5 and 2.10.1 under nn.DataParallel: masks and weights of one device."""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from typing import Any, Callable, Iterator, List

import harness
import pytest
import torch
from conftest import RELEASE
from harness import Wrap, one_device, replicated
from pruners import LAYERS, SECOND, Outcome, PrunerCase, Script, _class, apart, pruner_cases
from torch import Tensor, nn

from nni_dataparallel import is_patched, patched, rehearse
from nni_dataparallel.nni2.pruning import once_per_batch

CASES = pruner_cases(RELEASE)
REBINDS = RELEASE == "2.10.1"  # since 2.7 a wrapper of the second API assigns the masked weight

pytestmark = [
    pytest.mark.skipif(not CASES, reason=f"pruners are not tested with NNI {RELEASE}"),
    pytest.mark.filterwarnings("ignore:Environment variable TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"),
]
masked_weight = pytest.mark.skipif(not REBINDS, reason=f"NNI {RELEASE} masks the weight in place")
each_count = pytest.mark.parametrize("count", [2, 3])
each_pruner = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@functools.lru_cache(maxsize=None)
def reference(case: PrunerCase) -> Outcome:
    """Stock NNI on one device."""
    assert not is_patched()
    return case.run(one_device)


class InTurn(nn.Module):
    """Lets one replica run at a time. Stock then fails in every run, not only in those that lose a race."""

    lock = threading.Lock()

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        with self.lock:
            return self.net(x)


def in_turn(count: int) -> Wrap:
    # Unchecked: a copy from one virtual device to another by .to() is none, since both are the CPU.
    return lambda model: rehearse(InTurn(model), count, check=False)


@each_pruner
@each_count
def test_pruned_on_replicas_equals_one_device(count: int, case: PrunerCase) -> None:
    """Masks, metrics, trained weights, losses and evaluation are those of stock NNI on one device."""
    on_one = reference(case)
    with patched():
        assert apart(on_one, case.run(replicated(count))) == []


@each_pruner
def test_pruned_on_one_device_is_stock(case: PrunerCase) -> None:
    """On one device nothing changes, not the last bit."""
    on_one = reference(case)
    with patched():
        outcome = case.run(one_device)
    assert apart(on_one, outcome, exact=True) == []
    assert harness.unequal("state", on_one.model.state_dict(), outcome.model.state_dict()) == []


def _stock_params(cases: List[PrunerCase]) -> List[Any]:
    def marks(case: PrunerCase) -> Any:
        return [pytest.mark.xfail(strict=True, raises=AssertionError, reason=case.wrong)] if case.wrong else []

    return [pytest.param(case, marks=marks(case), id=case.name) for case in cases]


@pytest.mark.parametrize("case", _stock_params(CASES))
def test_stock_pruner_on_replicas(case: PrunerCase) -> None:
    """Without the fixes: the pruners that collect activations take a shard for a batch, the others are right."""
    on_one = reference(case)
    assert apart(on_one, case.run(in_turn(2))) == []


@contextlib.contextmanager
def stock() -> Iterator[None]:
    yield


each_nni = pytest.mark.parametrize(
    "nni_is",
    [pytest.param(stock, marks=pytest.mark.xfail(REBINDS, strict=True, reason="the masked weight is rebound")), patched],
)
SECOND_API = [case for case in CASES if case.name in ("v2.LevelPruner", "v2.MovementPruner")]


@each_nni
@pytest.mark.parametrize("case", SECOND_API, ids=lambda case: case.name)
def test_a_pruned_model_can_be_copied(case: PrunerCase, nni_is: Callable[[], Any]) -> None:
    """copy.deepcopy works after a training forward on one device, and the copy computes the same."""
    with nni_is():
        script = Script(one_device)
        outcome = case.run(one_device)
        script.train(outcome.model, script.sgd(outcome.model))
        twin = copy.deepcopy(outcome.model)
        x = harness.data((4,))[0][0]
        assert torch.equal(outcome.model(x), twin(x))


@each_nni
@pytest.mark.parametrize("case", SECOND_API, ids=lambda case: case.name)
def test_the_whole_state_is_that_of_one_device(case: PrunerCase, nni_is: Callable[[], Any]) -> None:
    """After training on replicas state_dict() has the masked weights, too; stock leaves the unmasked ones there."""
    on_one = reference(case).model.state_dict()
    with nni_is():
        state = case.run(replicated(2)).model.state_dict()
    assert harness.unequal("state", on_one, state, harness.RTOL, harness.ATOL) == []


@masked_weight
@each_count
def test_a_pruner_from_before_the_patch_trains_as_stock(count: int) -> None:
    """A wrapper made by stock shares the masked weight's storage with the trained weight, which stays unharmed."""

    def run(wrap: Wrap, train_in: Callable[[], Any]) -> Outcome:
        script = Script(wrap)
        pruner = _class(SECOND, "LevelPruner")(script.net, [dict(entry) for entry in LAYERS])
        model, masks = pruner.compress()
        with train_in():
            script.fine_tune(model)
            return script.outcome(model, {f"{name}.weight": own["weight"] for name, own in masks.items()})

    on_one = run(one_device, stock)
    assert apart(on_one, run(one_device, patched), exact=True) == []
    assert apart(on_one, run(replicated(count), patched)) == []


class Tied(nn.Module):
    """One layer under two names, of which NNI wraps the first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = harness.Linear(64, 64)
        self.second = self.first
        self.fc = harness.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.second(torch.tanh(self.first(x.flatten(1)))))


@masked_weight
@each_count
def test_a_layer_with_two_names_gets_the_gradient_of_both_uses(count: int) -> None:
    """The use by the name that is not wrapped has the masked weight, and its gradient reaches the trained one."""

    def run(wrap: Wrap) -> Outcome:
        script = Script(wrap)
        script.net = Tied()
        pruner = _class(SECOND, "LevelPruner")(script.net, [{"sparsity": 0.5, "op_types": ["Linear"]}])
        model, _ = pruner.compress()
        script.fine_tune(model)
        return script.outcome(model, {})

    on_one = run(one_device)
    with patched():
        assert apart(on_one, run(one_device), exact=True) == []
        assert apart(on_one, run(replicated(count))) == []


@masked_weight
def test_a_masked_weight_survives() -> None:
    """What a mask hides is not overwritten with zeros: the next mask may show it again."""
    with patched():
        script = Script(replicated(2))
        pruner = _class(SECOND, "LevelPruner")(script.net, [dict(entry) for entry in LAYERS])
        before = {name: wrapper.weight.detach().clone() for name, wrapper in pruner.get_modules_wrapper().items()}
        model, masks = pruner.compress()
        script.fine_tune(model)
        for name, wrapper in pruner.get_modules_wrapper().items():
            hidden = masks[name]["weight"] == 0
            assert hidden.any()
            assert torch.equal(wrapper.weight[hidden], before[name][hidden])
            assert wrapper.module.weight[hidden].abs().max() == 0


def test_a_hook_sees_what_the_layer_returned(worker_contexts: None) -> None:
    """An in-place ReLU behind it changes the tensor before the replicas are done, not what is collected."""
    seen: List[Tensor] = []
    net = nn.Sequential(harness.Linear(4, 4), nn.ReLU(inplace=True))
    net[0].register_forward_hook(once_per_batch(lambda module, inputs, output: seen.append(output.detach().clone())))
    with torch.no_grad():
        x = torch.randn(6, 4)
        rehearse(net, 3)(x)
        net(x)
    assert len(seen) == 2
    assert seen[0].min() < 0
    assert torch.equal(*seen)
