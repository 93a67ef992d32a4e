"""Copies of a trained, wrapped model: deepcopy, pickle, an average of models."""

from __future__ import annotations

import copy
import io
from typing import Any, Tuple

import pytest
import torch
from cases import Case, cases_for
from conftest import RELEASE
from harness import advance, data, replicated, start_training, stock_class, whole_state
from test_resume import assert_equal
from torch.optim.swa_utils import AveragedModel

import nni_dataparallel
from nni_dataparallel import patched

CASES = cases_for(RELEASE)
pytestmark = pytest.mark.skipif(not CASES, reason=f"NNI {RELEASE} has no quantizer")
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)


def pickled(trained: Any) -> Any:
    file = io.BytesIO()
    torch.save(trained, file)
    file.seek(0)
    return torch.load(file, **({"weights_only": False} if hasattr(torch, "compile") else {}))


def quantizer_of(net: Any) -> Any:
    return next(module for module in net.modules() if type(module).__name__ == "QuantizerModuleWrapper").quantizer


def trained(case: Case, count: int, quantizer_class: Any) -> Tuple[Any, Any, Any, Any]:
    net, optimizer, quantizer = start_training(quantizer_class, case, RELEASE)
    model = replicated(count)(net)
    advance(case, model, optimizer, data()[:3])
    if case.trains:
        model(data()[0][0])  # a training forward without its backward: the graph must not be in the way
    return net, optimizer, quantizer, model


@each_case
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled], ids=["deepcopy", "torch.save"])
def test_a_copy_trains_on_by_itself(case: Case, count: int, duplicate: Any) -> None:
    """Equal at first; then both train on, each with its own quantizer and step counter, to the same end."""
    with patched():
        net, optimizer, quantizer, model = trained(case, count, stock_class(case.quantizer))
        twin, twin_optimizer = duplicate((net, optimizer))
        own = quantizer_of(twin)
        assert own is not quantizer
        assert own.bound_model is twin
        assert all(wrapper.quantizer is own for wrapper in own.get_modules_wrapper())
        assert {id(w) for w in own.get_modules_wrapper()} <= {id(m) for m in twin.modules()}
        assert_equal(whole_state(twin, own), whole_state(net, quantizer))
        if RELEASE == "1.4":  # the script steps the quantizer itself
            step = twin_optimizer.step
            twin_optimizer.step = lambda: (step(), own.step())
        else:
            assert twin_optimizer is own.optimizer or not case.trains
        before = whole_state(twin, own)
        losses = advance(case, model, optimizer, data()[3:])
        assert_equal(whole_state(twin, own), before)
        assert advance(case, replicated(count)(twin), twin_optimizer, data()[3:]) == losses
        assert_equal(whole_state(twin, own), whole_state(net, quantizer))


@pytest.mark.parametrize("case", [case for case in CASES if case.trains], ids=lambda case: case.id)
def test_a_copy_of_a_model_with_a_fixed_subclass_trains_on(case: Case) -> None:
    """The same for the classes of nni_dataparallel, whose names pickle has to find again."""
    net, _, quantizer, _ = trained(case, 1, getattr(nni_dataparallel, case.quantizer))
    for duplicate in (copy.deepcopy, pickled):
        twin = duplicate(net)
        own = quantizer_of(twin)
        assert type(own) is type(quantizer)
        assert own.bound_model is twin
        assert_equal(whole_state(twin, own), whole_state(net, quantizer))


@pytest.mark.parametrize("case", [case for case in CASES if case.trains], ids=lambda case: case.id)
@pytest.mark.parametrize("count", [1, 2])
def test_an_averaged_model_follows_and_stays_apart(case: Case, count: int) -> None:
    """torch's AveragedModel: its parameters are the mean, evaluating it leaves the trained model alone."""
    with patched():
        net, optimizer, quantizer, model = trained(case, count, stock_class(case.quantizer))
        average = AveragedModel(net)
        assert quantizer_of(average) is not quantizer
        average.update_parameters(net)
        first = {name: p.detach().clone() for name, p in net.named_parameters()}
        advance(case, model, optimizer, data()[3:4])
        average.update_parameters(net)
        for name, parameter in average.module.named_parameters():
            expected = (first[name] + dict(net.named_parameters())[name]) / 2
            assert torch.allclose(parameter, expected, atol=1e-6), name
        before = whole_state(net, quantizer)
        average.eval()
        with torch.no_grad():
            assert torch.isfinite(average(data()[0][0])).all()
        assert_equal(whole_state(net, quantizer), before)
