"""Save, load, resume: a stopped run goes on as if it had never stopped, and files go both ways with stock NNI."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, Dict, List, Tuple

import pytest
import torch
from cases import Case, cases_for
from conftest import CASES, IS_FIRST, IS_MODERN, IS_NEW, RELEASE, each_case, needs_a_quantizer
from harness import (
    Net,
    Record,
    advance,
    can_export,
    complete,
    data,
    differences,
    finish,
    load_file,
    make_net,
    make_quantizer,
    reference,
    replicated,
    snapshot,
    start_training,
    stock_class,
    unequal,
    whole_state,
)
from references import reference_class
from torch import Tensor

from nni_dataparallel import load_quantizer_state_dict, patched, quantizer_state_dict

pytestmark = needs_a_quantizer
STOP = 3
Trained = Tuple[Net, Any, Any]


def start(case: Case, quantizer_class: Any = None) -> Trained:
    return start_training(quantizer_class or stock_class(case.quantizer), case, RELEASE)


def save(net: Any, optimizer: Any, quantizer: Any) -> io.BytesIO:
    file = io.BytesIO()
    state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "quantizer": quantizer_state_dict(quantizer)}
    state["order"] = order(net, optimizer)
    state["random"] = torch.get_rng_state()  # the gradients of 3.0's DoReFaQuantizer have noise
    torch.save(state, file)
    file.seek(0)
    return file


def order(net: Any, optimizer: Any) -> List[str]:
    """The names of the Parameters, in the optimizer's order."""
    names = {id(p): name for name, p in net.named_parameters()}
    return [names.get(id(p), "") for group in optimizer.param_groups for p in group["params"]]


def reordered(saved: Dict[str, Any], names: List[str]) -> Dict[str, Any]:
    """The optimizer's state for another order of the Parameters: stock 3.0 has learned scales in that of a set."""
    state = dict(saved["optimizer"])
    places = {name: place for place, name in enumerate(saved["order"])}
    state["state"] = {i: state["state"][places[name]] for i, name in enumerate(names) if places[name] in state["state"]}
    return state


def load(file: io.BytesIO, net: Any, optimizer: Any, quantizer: Any, strict: bool = True) -> Dict[str, Any]:
    saved: Dict[str, Any] = load_file(file)
    net.load_state_dict(saved["model"], strict=strict)
    optimizer.load_state_dict(reordered(saved, order(net, optimizer)) if IS_NEW else saved["optimizer"])
    load_quantizer_state_dict(quantizer, saved["quantizer"])
    torch.set_rng_state(saved["random"])
    return saved


def assert_equal(state: Dict[str, Tensor], expected: Dict[str, Tensor]) -> None:
    assert set(state) == set(expected)
    different = [name for name, tensor in expected.items() if not torch.equal(state[name], tensor)]
    assert different == []


@each_case
@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.of_a_kind), 3])
def test_a_resumed_run_equals_one_that_never_stopped(case: Case, count: int) -> None:
    """Model, optimizer and quantizer_state_dict, in a file that weights_only reads: step for step the same."""
    with patched():
        net, optimizer, quantizer = start(case)
        model = replicated(count)(net)
        advance(case, model, optimizer, data()[:STOP])
        file = save(net, optimizer, quantizer)
        fresh, fresh_optimizer, fresh_quantizer = start(case)
        saved = load(file, fresh, fresh_optimizer, fresh_quantizer)
        assert_equal(snapshot(fresh), saved["model"])  # nothing overwrote the trained weights
        losses = advance(case, model, optimizer, data()[STOP:])
        torch.set_rng_state(saved["random"])
        assert advance(case, replicated(count)(fresh), fresh_optimizer, data()[STOP:]) == losses
        assert_equal(whole_state(fresh, fresh_quantizer), whole_state(net, quantizer))


@each_case
def test_a_checkpoint_of_stock_nni_goes_on_in_patched_nni(case: Case) -> None:
    """Stock trains, patched NNI loads its file, in the shapes that stock left, and ends where stock ends."""
    if case.start and not IS_FIRST:
        pytest.skip("stock's own steps before quant_start_step are wrong")
    net, optimizer, quantizer = start(case, reference_class(stock_class(case.quantizer)))
    advance(case, net, optimizer, data()[:STOP])
    file = save(net, optimizer, quantizer)
    expected = reference(case, RELEASE)
    with patched():
        fresh, fresh_optimizer, fresh_quantizer = start(case)
        load(file, fresh, fresh_optimizer, fresh_quantizer)
        record = Record(first=expected.first, losses=expected.losses[:STOP])
        record.losses += advance(case, fresh, fresh_optimizer, data()[STOP:])
        record.state = whole_state(fresh, fresh_quantizer)
        finish(record, stock_class(case.quantizer), fresh_quantizer, fresh, fresh, case, RELEASE)
    assert differences(expected, record, exact=True) == []


@each_case
def test_a_checkpoint_of_patched_nni_loads_into_stock_nni(case: Case) -> None:
    """Every key and shape is one that stock expects; what stock's aliasing weight overwrites is restored by hand."""
    if case.start and not IS_FIRST:
        pytest.skip("stock's own steps before quant_start_step are wrong")
    with patched():
        net, optimizer, quantizer = start(case)
        advance(case, net, optimizer, data()[:STOP])
        file = save(net, optimizer, quantizer)
    fresh, fresh_optimizer, fresh_quantizer = start(case, reference_class(stock_class(case.quantizer)))
    if IS_NEW:  # a fresh quantizer of stock 3.0 refuses every file before its first forward
        advance(case, fresh, torch.optim.SGD(fresh.parameters(), lr=0.0), data()[:1])
        if hasattr(fresh_quantizer, "is_init"):
            fresh_quantizer.is_init = True
    # A fresh 1.x quantizer of stock NNI has None for scale and zero point, and refuses its own files for it.
    strict = not (IS_FIRST and case.quantizer == "QAT_Quantizer")
    saved = load(file, fresh, fresh_optimizer, fresh_quantizer, strict)
    with torch.no_grad():
        for name, parameter in fresh.named_parameters():
            parameter.copy_(saved["model"][name])
    advance(case, fresh, fresh_optimizer, data()[STOP:])
    expected = {name: t for name, t in reference(case, RELEASE).state.items() if not name.startswith("compressed")}
    assert unequal("state", expected, whole_state(fresh, fresh_quantizer)) == []


@each_case
def test_an_export_loads_into_the_plain_model(case: Case, tmp_path: Path) -> None:
    """After training on replicas: exactly the keys of the model that the user built, quantised or trained weights."""
    with patched():
        net, optimizer, quantizer = start(case)
        advance(case, replicated(2)(net), optimizer, data()[:STOP])
        if not can_export(quantizer):
            pytest.skip(f"{case.quantizer} of NNI {RELEASE} cannot export a quantised model on one device either")
        complete(case, quantizer, net)
        calibration = quantizer.export_model(str(tmp_path / "model.pth"), str(tmp_path / "calibration.pth"))
    exported = load_file(tmp_path / "model.pth")
    plain = make_net(case)
    plain.load_state_dict(exported)
    assert all(torch.isfinite(t).all() for t in exported.values())
    assert calibration
    assert {name.partition(".")[0] for name in calibration} <= {name for name, _ in plain.named_children()}
    stored = load_file(tmp_path / "calibration.pth")
    assert str(stored) == str(calibration)


@pytest.mark.of_a_kind
@pytest.mark.skipif(not IS_MODERN, reason="load_calibration_config came with 2.5")
@pytest.mark.parametrize("case", cases_for(RELEASE, "QAT_Quantizer") + cases_for(RELEASE, "LsqQuantizer"), ids=lambda case: case.id)
def test_a_quantizer_goes_on_from_its_own_export(case: Case, tmp_path: Path) -> None:
    """Ranges and scales are those exported, an evaluation uses them, and the first step does not discard them."""
    with patched():
        net, optimizer, quantizer = start(case)
        advance(case, net, optimizer, data())
        net(data()[0][0])  # scales of the final weights
        net.eval()
        evaluation = net(data()[1][0]).detach()
        scales = {name: t for name, t in snapshot(net).items() if name.endswith(("put_scale", "put_zero_point"))}
        calibration = quantizer.export_model(str(tmp_path / "model.pth"))
        fresh = make_net(case)
        fresh.load_state_dict(load_file(tmp_path / "model.pth"))
        fresh_optimizer = torch.optim.SGD(fresh.parameters(), lr=0.0)
        again = make_quantizer(stock_class(case.quantizer), case, fresh, fresh_optimizer, RELEASE)
        again.load_calibration_config(calibration)
        for name, scale in scales.items():
            assert torch.allclose(snapshot(fresh)[name], scale, rtol=1e-6), name
        if case.quantizer == "QAT_Quantizer" and case.start < 2:
            fresh.eval()
            assert torch.allclose(fresh(data()[1][0]), evaluation, atol=1e-5)
        moved = {name: t for name, t in snapshot(fresh).items() if "tracked_m" in name or name.endswith("put_scale")}
        advance(case, fresh, fresh_optimizer, data()[:1])
        for name, before in moved.items():
            if case.quantizer == "LsqQuantizer":
                assert torch.equal(snapshot(fresh)[name], before), name
            elif "tracked_m" in name:
                assert ((snapshot(fresh)[name] - before).abs() <= 0.011 * (before.abs() + 30)).all(), name


@pytest.mark.skipif(not cases_for(RELEASE, "LsqQuantizer"), reason="LSQ came with 2.3")
def test_stock_lsq_cannot_export_without_input(tmp_path: Path) -> None:
    """The fault that test_an_export_loads_into_the_plain_model finds repaired."""
    case = next(case for case in cases_for(RELEASE, "LsqQuantizer") if case.name == "weight")
    _, _, quantizer = start(case)
    with pytest.raises((AttributeError, KeyError)):
        quantizer.export_model(str(tmp_path / "model.pth"))


def test_the_state_of_another_quantizer_is_refused() -> None:
    """The error says what was found and what is expected; the quantizer keeps its own state."""
    names = ("PtqQuantizer" if IS_NEW else "NaiveQuantizer", "DoReFaQuantizer")
    with patched():
        quantizers = [start(next(case for case in CASES if case.quantizer == name))[2] for name in names]
        held = "is_compressed, quantizer" if IS_NEW else "layer_scale, quantizer"
        match = rf"the state of {names[0]} .*{held}.*, the quantizer is DoReFaQuantizer"
        with pytest.raises(ValueError, match=match):
            load_quantizer_state_dict(quantizers[1], quantizer_state_dict(quantizers[0]))
        for wrong in (None, {}, [1], {"layer_scale": {}}):
            with pytest.raises(ValueError, match=r"expected what quantizer_state_dict.quantizer. returned, not "):
                load_quantizer_state_dict(quantizers[0], wrong)


@pytest.mark.skipif(not IS_MODERN, reason="load_calibration_config came with 2.5")
@pytest.mark.parametrize("name", ["QAT_Quantizer", "LsqQuantizer"])
def test_a_checkpoint_decides_whether_ranges_count(name: str, tmp_path: Path) -> None:
    """Loaded ranges are resumed with; an untrained checkpoint loaded over them starts anew."""
    case = next(case for case in cases_for(RELEASE, name) if case.name in ("all", "per_tensor_affine int"))
    with patched():
        net, optimizer, quantizer = start(case)
        untrained = save(net, optimizer, quantizer)
        advance(case, net, optimizer, data()[:2])
        calibration = quantizer.export_model(str(tmp_path / "model.pth"))

        calibrated = start(case)
        calibrated[2].load_calibration_config(calibration)
        resumed = start(case)
        load(save(*calibrated), *resumed)
        assert advance(case, *resumed[:2], data()) == advance(case, *calibrated[:2], data())

        overwritten = start(case)
        overwritten[2].load_calibration_config(calibration)
        load(untrained, *overwritten)
        fresh = start(case)
        assert advance(case, *overwritten[:2], data()) == advance(case, *fresh[:2], data())


@pytest.mark.skipif(not IS_MODERN, reason="load_calibration_config came with 2.5")
@pytest.mark.parametrize("name", ["QAT_Quantizer", "LsqQuantizer"])
def test_a_calibration_config_of_something_else_is_told(name: str) -> None:
    """A path in place of the dict; entries that match no layer."""
    case = cases_for(RELEASE, name)[0]
    with patched():
        _, _, quantizer = start(case)
        with pytest.raises(TypeError, match=r"expected the dict that export_model\(\) returned .*not str"):
            quantizer.load_calibration_config("calibration.pth")
        with pytest.warns(UserWarning, match=r"entries of layers that are not quantised here: \['elsewhere'\]"):
            quantizer.load_calibration_config({"elsewhere": {}})


@pytest.mark.skipif(not IS_FIRST and not IS_NEW, reason="2.x has a scale from the start")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_file_from_before_the_first_forward_loads_into_a_model_that_ran(case: Case) -> None:
    """Scale and zero point are None again, as in the file, and training is that of a fresh model."""
    with patched():
        net, optimizer, quantizer = start(case)
        file = save(net, optimizer, quantizer)
        losses = advance(case, net, optimizer, data()[:2])
        load(file, net, optimizer, quantizer)
        assert_equal(net.state_dict(), start(case)[0].state_dict())
        torch.set_rng_state(load_file(io.BytesIO(file.getvalue()))["random"])
        assert advance(case, net, optimizer, data()[:2]) == losses


@pytest.mark.skipif(IS_FIRST or RELEASE in ("2.0", "2.1", "3.0"), reason="has no export")
def test_an_export_that_cannot_work_leaves_the_model_as_it_is(tmp_path: Path) -> None:
    """No such folder, a folder for a file, ONNX without a shape: told before anything is unwrapped."""
    case = next(case for case in CASES if case.quantizer == "DoReFaQuantizer")
    with patched():
        net, optimizer, quantizer = start(case)
        advance(case, net, optimizer, data()[:1])
        before = snapshot(net)
        for path in (str(tmp_path), ""):
            with pytest.raises(IsADirectoryError, match=r"model_path: .* is a folder.*the model is unchanged"):
                quantizer.export_model(path)
        with pytest.raises(FileNotFoundError, match=r"calibration_path: there is no folder .*the model is unchanged"):
            quantizer.export_model(str(tmp_path / "m.pth"), str(tmp_path / "no" / "c.pth"))
        with pytest.raises(AssertionError, match=r"input_shape must be specified .*the model is unchanged"):
            quantizer.export_model(str(tmp_path / "m.pth"), onnx_path=str(tmp_path / "m.onnx"))
    assert_equal(snapshot(net), before)
    assert list(tmp_path.iterdir()) == []


def test_something_else_than_a_quantizer_is_refused() -> None:
    """A model given by mistake has a state of its own; nothing would be saved of it here."""
    with pytest.raises(TypeError, match=r"expected an NNI quantizer .*not Linear; a model's own state is model\.state_dict\(\)"):
        quantizer_state_dict(torch.nn.Linear(1, 1))


@pytest.mark.skipif(IS_NEW, reason="there the state has no layers")
def test_the_state_of_other_layers_is_refused() -> None:
    """Nothing is loaded; the layers are named."""
    case = next(case for case in CASES if case.quantizer == "NaiveQuantizer")
    with patched():
        net, optimizer, quantizer = start(case)
        advance(case, net, optimizer, data()[:1])
        before = quantizer_state_dict(quantizer)
        with pytest.raises(ValueError, match="different layers; on one side only: elsewhere"):
            load_quantizer_state_dict(quantizer, {"quantizer": "NaiveQuantizer", "layer_scale": {"elsewhere": torch.ones(())}})
        assert str(quantizer_state_dict(quantizer)) == str(before)


def test_what_else_a_checkpoint_needs_is_what_the_docstring_says() -> None:
    """Each quantizer's third part of a checkpoint."""
    held: Dict[str, List[str]] = {}
    with patched():
        for case in CASES:
            net, optimizer, quantizer = start(case)
            advance(case, net, optimizer, data()[:1])
            held[case.quantizer] = sorted(quantizer_state_dict(quantizer))
    if IS_NEW:
        own = {"QATQuantizer": "current_step", "PtqQuantizer": "is_compressed"}
        assert held == {name: sorted(["quantizer", own.get(name, "is_init")]) for name in held}
        return
    assert held.pop("QAT_Quantizer") == ["quantizer", *(["steps"] if IS_FIRST else [])]
    assert held.pop("NaiveQuantizer") == ["layer_scale", "quantizer"]
    assert held.pop("ObserverQuantizer", ["observers", "quantizer"]) == ["observers", "quantizer"]
    assert all(parts == ["quantizer"] for parts in held.values())
