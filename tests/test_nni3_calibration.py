"""NNI 3.0: a calibration config goes out and comes back; what does not fit is told and changes nothing."""

from __future__ import annotations

import copy
import io
from typing import Any, List

import pytest
import torch
from cases import Case, cases_for
from conftest import CASES, IS_NEW, RELEASE
from harness import advance, complete, data, load_file, replicated, snapshot, start_training, stock_class, unequal

from nni_dataparallel import load_quantizer_state_dict, patched, quantizer_state_dict

if not IS_NEW:
    pytest.skip(f"NNI {RELEASE} is of the older line", allow_module_level=True)

each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)


def trained(case: Case, count: int = 1) -> Any:
    net, optimizer, quantizer = start_training(stock_class(case.quantizer), case, RELEASE)
    model = replicated(count)(net)
    advance(case, model, optimizer, data())
    complete(case, quantizer, model)
    return net, optimizer, quantizer


@each_case
def test_a_calibration_config_comes_back(case: Case) -> None:
    """From replicas into a fresh quantizer: the same config, the same evaluation with the same weights."""
    with patched():
        net, _, quantizer = trained(case, 3)
        config = quantizer.get_calibration_config()
        fresh_net, _, fresh = start_training(stock_class(case.quantizer), case, RELEASE)
        fresh.update_calibration_config(copy.deepcopy(config))
        assert unequal("config", dict(config), dict(fresh.get_calibration_config())) == []
        if case.start:
            return  # still in its warm-up, whose steps count from 0
        with torch.no_grad():
            own = dict(net.named_parameters())
            for name, parameter in fresh_net.named_parameters():
                if not name.endswith(("_scale", "_zero_point")):
                    parameter.copy_(own[name])
            net.eval(), fresh_net.eval()
            for name, buffer in net.named_buffers():
                if "running" in name:
                    dict(fresh_net.named_buffers())[name].copy_(buffer)
            assert torch.equal(fresh_net(data()[1][0]), net(data()[1][0]))
        if case.quantizer in ("LsqQuantizer", "LsqPlusQuantizer"):
            before = {name: t for name, t in snapshot(fresh_net).items() if name.endswith("_scale")}
            advance(case, fresh_net, torch.optim.SGD(fresh_net.parameters(), lr=0.0), data()[:1])
            assert unequal("scales", before, {name: snapshot(fresh_net)[name] for name in before}) == []  # not started anew


@each_case
def test_a_calibration_config_stays_what_it_was(case: Case) -> None:
    """Plain tensors, without a graph, that later steps do not change."""
    with patched():
        net, optimizer, quantizer = trained(case)
        config = quantizer.get_calibration_config()
        before = copy.deepcopy(config)
        advance(case, net, optimizer, data()[:2])
    assert unequal("config", dict(before), dict(config)) == []


def test_stock_does_not_load_ranges() -> None:
    """The fault: after update_calibration_config the next step starts its moving average anew."""
    case = next(case for case in cases_for(RELEASE, "QATQuantizer") if case.name == "affine int8")
    _, _, quantizer = trained(case)
    config = quantizer.get_calibration_config()
    _, _, fresh = start_training(stock_class(case.quantizer), case, RELEASE)
    fresh.update_calibration_config(copy.deepcopy(config))
    assert unequal("config", dict(config), dict(fresh.get_calibration_config())) != []


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda config: config.update(elsewhere={"weight": {}}), "elsewhere: weight is not quantised here"),
        (lambda config: config["conv1"].update(bias={}), "conv1: bias is not quantised here"),
        (lambda config: config["conv1"]["weight"].update(quant_bits=4), "conv1: weight has quant_bits 8 here, 4 in the config"),
        (lambda config: config["fc"]["weight"].pop("scale"), "fc: weight has no 'scale' in the config"),
        (lambda config: config.update(fc=None), "fc: expected a dict of targets, not NoneType"),
        (lambda config: config["fc"].update(weight=[1.0]), "fc: weight: expected a dict, not list"),
        (lambda config: config["fc"]["weight"].update(scale=[0.1]), "fc: weight: scale is a list, not a tensor"),
        (
            lambda config: config["fc"]["weight"].update(scale=torch.ones(10, 1)),
            "fc: weight: scale has shape (10, 1) in the config, () here",
        ),
    ],
    ids=["layer", "target", "bits", "scale", "no targets", "no config", "list", "granularity"],
)
def test_a_config_that_does_not_fit_changes_nothing(change: Any, text: str) -> None:
    """Every problem is named, with the remedy; no layer is loaded, not even those that fit."""
    case = next(case for case in cases_for(RELEASE, "QATQuantizer") if case.name == "weight")
    with patched():
        _, _, quantizer = trained(case)
        config = {name: {target: dict(entry) for target, entry in targets.items()}
                  for name, targets in quantizer.get_calibration_config().items()}  # fmt: skip
        change(config)
        net, _, fresh = start_training(stock_class(case.quantizer), case, RELEASE)
        before = snapshot(net)
        with pytest.raises(ValueError, match=r"nothing was loaded") as caught:
            fresh.update_calibration_config(config)
        assert text in str(caught.value)
        assert "Build the quantizer with the config_list" in str(caught.value)
        assert unequal("state", before, snapshot(net)) == []
        with pytest.raises(ValueError, match=r"expected what get_calibration_config\(\) returned, not str"):
            fresh.update_calibration_config("calibration.pth")


def test_a_config_of_other_widths_is_refused() -> None:
    """Per channel: the shape of a weight's scale is known before any forward."""
    case = next(case for case in cases_for(RELEASE, "QATQuantizer") if case.name == "per channel, out")
    with patched():
        _, _, quantizer = trained(case)
        config = copy.deepcopy(quantizer.get_calibration_config())
        config["conv2"]["weight"]["scale"] = torch.ones(5, 1, 1, 1)
        _, _, fresh = start_training(stock_class(case.quantizer), case, RELEASE)
        with pytest.raises(ValueError, match=r"conv2: weight: scale has shape \(5, 1, 1, 1\) in the config, \(6, 1, 1, 1\) here"):
            fresh.update_calibration_config(config)


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_the_warm_up_goes_on_where_it_stopped(steps: int) -> None:
    """quant_start_step counts from the loaded step, before, at and after the start; apply_method follows."""
    case = next(case for case in cases_for(RELEASE, "QATQuantizer") if case.start == 3)
    with patched():
        net, optimizer, quantizer = start_training(stock_class(case.quantizer), case, RELEASE)
        advance(case, net, optimizer, data()[:steps])
        state = quantizer_state_dict(quantizer)
        assert state["current_step"] == steps
        _, _, fresh = start_training(stock_class(case.quantizer), case, RELEASE)
        load_quantizer_state_dict(fresh, state)
        methods: List[List[str]] = [
            [space.apply_method for spaces in q._target_spaces.values() for space in spaces.values()] for q in (quantizer, fresh)
        ]
        assert set(methods[1]) == {"bypass" if steps < 2 else "qat_clamp_round"}
        assert methods[0] == methods[1]


def test_a_config_without_some_layers_is_told() -> None:
    """A warning names what stays as it is; the others are loaded."""
    case = next(case for case in cases_for(RELEASE, "QATQuantizer") if case.name == "weight")
    with patched():
        _, _, quantizer = trained(case)
        config = quantizer.get_calibration_config()
        del config["conv2"]
        _, _, fresh = start_training(stock_class(case.quantizer), case, RELEASE)
        with pytest.warns(UserWarning, match=r"no entry for conv2: weight: what is there stays as it is"):
            fresh.update_calibration_config(config)
        found = fresh.get_calibration_config()
    assert found["conv2"]["weight"]["scale"] is None
    assert torch.equal(found["fc"]["weight"]["scale"], config["fc"]["weight"]["scale"])


@each_case
def test_a_calibration_config_is_read_by_the_safe_loader(case: Case) -> None:
    """Dicts, tensors, numbers and strings only."""
    file = io.BytesIO()
    with patched():
        config = trained(case)[2].get_calibration_config()
    torch.save(config, file)
    file.seek(0)
    assert unequal("config", config, load_file(file)) == []


def test_a_checkpoint_of_another_granularity_is_refused() -> None:
    """torch's own size mismatch, in both directions, and the model is what it was."""
    finely, one = (
        next(case for case in cases_for(RELEASE, "QATQuantizer") if case.name == name) for name in ("per channel, out", "weight")
    )
    with patched():
        for mine, other in ((finely, one), (one, finely)):
            state = {name: t for name, t in trained(other)[0].state_dict().items() if "conv1" in name and "weight" in name}
            net = start_training(stock_class(), mine, RELEASE)[0]
            with pytest.raises(RuntimeError, match=r"size mismatch for conv1\._nni_wrapper\.weight_scale"):
                net.load_state_dict(state, strict=False)
