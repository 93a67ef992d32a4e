"""Checkpoint files: resumed as if never stopped, written whole, and loaded whole or not at all."""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any, Callable, Dict, List

import numpy
import pytest
import torch
from cases import Case
from conftest import CASES, IS_NEW, RELEASE, needs_a_quantizer
from damage import SCALE, files_in, flipped, full_disk
from harness import advance, data, replicated, start_training, stock_class, whole_state
from test_files import Malicious
from torch import nn

from nni_dataparallel import load_checkpoint, load_quantizer_state_dict, patched, quantizer_state_dict, save_checkpoint

pytestmark = [needs_a_quantizer, pytest.mark.of_a_kind]
ONE_EACH: List[Case] = list({case.quantizer: case for case in reversed(CASES)}.values())
each_quantizer = pytest.mark.parametrize("case", ONE_EACH, ids=lambda case: case.quantizer)


def start(case: Case) -> Any:
    return start_training(stock_class(case.quantizer), case, RELEASE)


def state_of(net: nn.Module, optimizer: Any, quantizer: Any) -> Any:
    """All that a checkpoint holds, in every digit."""
    return _exactly((dict(net.state_dict()), optimizer.state_dict(), quantizer_state_dict(quantizer)))


def everything(net: nn.Module, optimizer: Any, quantizer: Any) -> Any:
    """All that loading could change."""
    marks = [
        sorted((name, str(value)) for name, value in vars(module).items() if name in ("calibrated", "started") and value)
        for module in net.modules()
    ]
    return [*state_of(net, optimizer, quantizer), marks]


def _exactly(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (value.shape, value.dtype, value.detach().numpy().tobytes())
    if isinstance(value, dict):
        return {key: _exactly(each) for key, each in value.items()}
    return [_exactly(each) for each in value] if isinstance(value, (list, tuple)) else value


@each_quantizer
def test_a_run_goes_on_from_its_file(case: Case, tmp_path: Path) -> None:
    """Saved from the replicas' DataParallel, loaded into a plain model: step for step what the run goes on with."""
    path = tmp_path / "checkpoint.pth"
    with patched():
        net, optimizer, quantizer = start(case)
        model = replicated(2)(net)
        advance(case, model, optimizer, data()[:2])
        save_checkpoint(path, model, optimizer, quantizer, epoch=2, random=torch.get_rng_state())
        fresh = start(case)
        rest = load_checkpoint(path, *fresh)
        assert state_of(*fresh) == state_of(net, optimizer, quantizer)
        assert rest["epoch"] == 2
        torch.set_rng_state(rest["random"])  # the gradients of 3.0's DoReFaQuantizer have noise
        losses = advance(case, model, optimizer, data()[2:4])
        torch.set_rng_state(rest["random"])
        assert advance(case, replicated(2)(fresh[0]), fresh[1], data()[2:4]) == losses
        assert str(whole_state(fresh[0], fresh[2])) == str(whole_state(net, quantizer))
    assert [path] == list(tmp_path.iterdir())


def _without(part: Dict[str, Any]) -> Dict[str, Any]:
    name = [name for name in part if name.endswith("bias")][-1]
    return {key: value for key, value in part.items() if key != name}


def _misshapen(part: Dict[str, Any]) -> Dict[str, Any]:
    name = [name for name, t in part.items() if t.numel() > 1][-1]
    return {**part, name: part[name].flatten()[1:]}


DAMAGES: Dict[str, Callable[[Dict[str, Any]], Dict[str, Any]]] = {
    "no model": lambda parts: {name: part for name, part in parts.items() if name != "model"},
    "no optimizer": lambda parts: {name: part for name, part in parts.items() if name != "optimizer"},
    "no quantizer": lambda parts: {name: part for name, part in parts.items() if name != "quantizer"},
    "a list": lambda parts: list(parts),  # type: ignore[dict-item,return-value]
    "a layer is missing": lambda parts: {**parts, "model": _without(parts["model"])},
    "a layer of another shape": lambda parts: {**parts, "model": _misshapen(parts["model"])},
    "no tensor": lambda parts: {**parts, "model": {**parts["model"], list(parts["model"])[-1]: "text"}},
    "model is no dict": lambda parts: {**parts, "model": [1]},
    "another optimizer": lambda parts: {**parts, "optimizer": {**parts["optimizer"], "param_groups": []}},
    "no optimizer's state": lambda parts: {**parts, "optimizer": {}},
    "another quantizer": lambda parts: {**parts, "quantizer": {"quantizer": "AnotherQuantizer"}},
    "more in the quantizer": lambda parts: {**parts, "quantizer": {**parts["quantizer"], "more": 1}},
}


@each_quantizer
def test_a_file_that_does_not_fit_changes_nothing(case: Case, tmp_path: Path) -> None:
    """Whichever part is wrong: one error that names the file and what is wrong; every number is as it was."""
    path = tmp_path / "checkpoint.pth"
    with patched():
        trained = start(case)
        advance(case, *trained[:2], data()[:2])
        save_checkpoint(path, *trained)
        parts = torch.load(path)
        fresh = start(case)
        advance(case, *fresh[:2], data()[3:4])
        before = everything(*fresh)
        for damage in DAMAGES.values():
            torch.save(damage(parts), path)
            with pytest.raises(ValueError, match=r"checkpoint\.pth.*nothing was loaded"):
                load_checkpoint(path, *fresh)
            assert everything(*fresh) == before
        losses = advance(case, *fresh[:2], data()[4:])
        again = start(case)
        advance(case, *again[:2], data()[3:4])
        assert advance(case, *again[:2], data()[4:]) == losses


WRONG: Dict[str, List[Any]] = {
    "steps": [-1, 2.5, None, True, "3", [1]],
    "layer_scale": [None, [1], {"elsewhere": torch.ones(())}, {"conv1": 1.0}, {"conv1": torch.ones(2)}, {"conv1": torch.tensor(1)}],
    "observers": [None, [1], {}, {"conv1/weight": {}}, {"conv1/weight": None}],
    "calibrated": [None, "conv1", [1], ["elsewhere"]],
    "current_step": [-1, 2.5, None, True, "3"],
    "is_init": [None, 1, "yes"],
    "is_compressed": [None, 1, "yes"],
}


@each_quantizer
def test_a_quantizers_state_that_makes_no_sense_is_told(case: Case) -> None:
    """Each entry of another type or shape: ValueError before anything is loaded."""
    with patched():
        net, optimizer, quantizer = start(case)
        advance(case, net, optimizer, data()[:2])
        state = quantizer_state_dict(quantizer)
        before = everything(net, optimizer, quantizer)
        wrong = [
            {**state, name: value} for name in {*state, *([] if IS_NEW else ["calibrated"])} & set(WRONG) for value in WRONG[name]
        ]
        for name in ("eps", "min_val") if "observers" in state else ():
            layer, own = list(state["observers"].items())[-1]  # those before it would have been loaded by then
            wrong.append({**state, "observers": {**state["observers"], layer: {**own, name: torch.ones(3, 3, 3)}}})
        for each in wrong:
            with pytest.raises(ValueError, match=r"nothing was loaded|different layers|in the state, not"):
                load_quantizer_state_dict(quantizer, each)
            assert everything(net, optimizer, quantizer) == before


@pytest.mark.once
def test_a_damaged_file_changes_nothing(tmp_path: Path, record_property: Callable[[str, Any], None]) -> None:
    """Hundreds of flipped bits and cut ends: told, or it does not matter; never half of it, never other numbers."""
    case = next(case for case in CASES if case.quantizer == ("QATQuantizer" if IS_NEW else "QAT_Quantizer"))
    path = tmp_path / "checkpoint.pth"
    with patched():
        trained = start(case)
        advance(case, *trained[:2], data()[:1])
        save_checkpoint(path, *trained, epoch=1)
        content, expected = path.read_bytes(), state_of(*trained)
        fresh = start(case)
        before = everything(*fresh)
        generator = random.Random(0)
        trials = 300 * SCALE
        damaged = [flipped(content, generator.randrange(len(content)), generator.randrange(8)) for _ in range(trials)]
        damaged += [content[: generator.randrange(len(content))] for _ in range(trials)]
        told = 0
        for each in damaged:
            try:
                assert load_checkpoint(io.BytesIO(each), *fresh) == {"epoch": 1}
            except ValueError:
                told += 1
            else:
                assert state_of(*fresh) == expected
                fresh = start(case)
        assert everything(*fresh) == before
    record_property("trials", len(damaged))
    assert told > trials


@each_quantizer
def test_a_checkpoint_is_written_whole(case: Case, tmp_path: Path) -> None:
    """On a full disk the old one stays, complete, and the error says so."""
    path = tmp_path / "checkpoint.pth"
    with patched():
        net, optimizer, quantizer = start(case)
        save_checkpoint(path, net, optimizer, quantizer)
        old = files_in(tmp_path)
        advance(case, net, optimizer, data()[:1])
        for size in (0, 2000):
            with full_disk(size), pytest.raises(
                OSError, match=r"the checkpoint was not written, what was there before.*checkpoint\.pth"
            ):
                save_checkpoint(path, net, optimizer, quantizer)
            assert files_in(tmp_path) == old
        load_checkpoint(path, net, optimizer, quantizer)


@pytest.mark.once
def test_what_could_not_be_loaded_is_not_saved(tmp_path: Path) -> None:
    """An object of a class, a pickle that would run something: told when it is saved, by its name."""
    net = nn.Linear(2, 2)
    for value in (Malicious(tmp_path / "ran"), nn.Linear(1, 1), {"loss": [numpy.random.default_rng()]}):
        with pytest.raises(
            ValueError, match=r"extra cannot be part of a checkpoint, nothing was written: a \w+ would not be loaded"
        ):
            save_checkpoint(tmp_path / "checkpoint.pth", net, extra=value)
    assert list(tmp_path.iterdir()) == []
    save_checkpoint(tmp_path / "checkpoint.pth", net, extra={"loss": [1.5], "name": "run", "best": torch.tensor(1.0), "none": None})
    assert load_checkpoint(tmp_path / "checkpoint.pth", net)["extra"]["loss"] == [1.5]


@pytest.mark.once
def test_a_checkpoint_has_checksums_whatever_torch_is_set_to(tmp_path: Path) -> None:
    """And torch's setting is as it was."""
    if not hasattr(torch.serialization, "set_crc32_options"):
        pytest.skip("this torch always computes them")
    path = tmp_path / "checkpoint.pth"
    torch.serialization.set_crc32_options(False)
    try:
        save_checkpoint(path, nn.Linear(50, 50))
        assert not torch.serialization.get_crc32_options()
    finally:
        torch.serialization.set_crc32_options(True)
    damaged = path.read_bytes().replace(b"\x3d", b"\x3e")  # the exponent of some of the weights
    with pytest.raises(ValueError, match="Bad CRC-32"):
        load_checkpoint(io.BytesIO(damaged), nn.Linear(50, 50))


def test_files_of_the_parts_saved_by_hand_load(tmp_path: Path) -> None:
    """The recipe of earlier versions of this package: torch.save of the three parts."""
    case = ONE_EACH[0]
    with patched():
        net, optimizer, quantizer = start(case)
        advance(case, net, optimizer, data()[:2])
        parts = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "quantizer": quantizer_state_dict(quantizer)}
        torch.save(parts, tmp_path / "by_hand.pth")
        fresh = start(case)
        assert load_checkpoint(tmp_path / "by_hand.pth", *fresh) == {}
        assert state_of(*fresh) == state_of(net, optimizer, quantizer)
