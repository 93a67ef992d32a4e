"""Copies of a trained, wrapped model: deepcopy, pickle, an average of models."""

from __future__ import annotations

import copy
import io
from typing import Any, Tuple

import pytest
import torch
from cases import Case
from conftest import CASES, IS_FIRST, IS_NEW, RELEASE, each_case, needs_a_quantizer
from harness import advance, data, replicated, start_training, stock_class, whole_state
from test_resume import assert_equal
from torch.optim.swa_utils import AveragedModel

import nni_dataparallel
from nni_dataparallel import patched

pytestmark = [needs_a_quantizer, pytest.mark.skipif(IS_NEW, reason="copies of NNI 3.0's wrappers have tests of their own")]


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


# Those whose state is in the model as a whole.
IN_BUFFERS = [
    c for c in CASES if c.trains and c.quantizer != "NaiveQuantizer" and not (IS_FIRST and c.quantizer == "QAT_Quantizer")
]


@pytest.mark.parametrize("case", IN_BUFFERS, ids=lambda case: case.id)
def test_a_copy_that_follows_the_buffers_evaluates_like_the_model(case: Case) -> None:
    """An average of models is copied before the training and gets parameters and buffers only: no forward of its own."""
    with patched():
        net, optimizer, _ = start_training(stock_class(case.quantizer), case, RELEASE)
        follower = copy.deepcopy(net)
        advance(case, net, optimizer, data())
        with torch.no_grad():
            own = follower.state_dict()
            for name, tensor in net.state_dict().items():
                if name in own:
                    own[name].copy_(tensor.reshape(own[name].shape))
        net.eval(), follower.eval()
        with torch.no_grad():
            assert torch.equal(follower(data()[0][0]), net(data()[0][0]))


@pytest.mark.parametrize("case", [case for case in CASES if case.trains], ids=lambda case: case.id)
@pytest.mark.parametrize("count", [1, 2])
def test_a_model_that_stock_trained_can_be_copied_after_a_patched_step(case: Case, count: int) -> None:
    """Patched in the middle of a script: what stock left in the graph does not stay there."""
    if IS_FIRST and case.start and count > 1:
        pytest.skip("1.x leaves a view of the trained weight there, which torch refuses to broadcast after the step")
    net, optimizer, _ = start_training(stock_class(case.quantizer), case, RELEASE)
    advance(case, net, optimizer, data()[:2])
    with patched():
        advance(case, replicated(count)(net), optimizer, data()[2:3])
        twin = copy.deepcopy(net)
    assert_equal(twin.state_dict(), net.state_dict())


def test_a_users_subclass_with_slots_can_be_copied() -> None:
    """Its state comes in two parts."""
    case = next(case for case in CASES if case.quantizer == "DoReFaQuantizer")

    class Slotted(stock_class(case.quantizer)):
        __slots__ = ("note",)

    with patched():
        net, _, quantizer = start_training(Slotted, case, RELEASE)
        quantizer.note = "kept"
        own = quantizer_of(copy.deepcopy(net))
    assert own is not quantizer
    assert own.note == "kept"


@pytest.mark.parametrize("case", [case for case in CASES if case.trains], ids=lambda case: case.id)
@pytest.mark.parametrize("count", [1, 2])
def test_a_forward_in_inference_mode_is_in_nobodys_way(case: Case, count: int) -> None:
    """Before the first training step and after it, alone and on replicas."""
    with patched():
        net, optimizer, _ = start_training(stock_class(case.quantizer), case, RELEASE)
        model = replicated(count)(net)
        for batch in data()[:2]:
            model.eval()
            with torch.inference_mode():
                assert torch.isfinite(model(batch[0])).all()
            advance(case, model, optimizer, [batch])
        copy.deepcopy(net)


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
