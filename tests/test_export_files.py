"""export_model of quantizers and pruners: all files or none, the model as it was if there is none, the log as NNI's."""

from __future__ import annotations

import contextlib
import importlib
import logging
from pathlib import Path
from typing import Any, Callable, Dict, List
from unittest import mock

import pytest
import torch
from conftest import CASES, IS_NEW, RELEASE
from damage import files_in, full_disk
from harness import (
    advance,
    complete,
    data,
    load_file,
    make_net,
    snapshot,
    start_training,
    stock_class,
    stock_nni,
)
from packaging.version import Version

from nni_dataparallel import patch, patch_map, patched, subclasses

pytestmark = [pytest.mark.of_a_kind, pytest.mark.skipif(IS_NEW, reason="NNI 3.0 has no export")]
QUANTIZERS = [
    case
    for case in {case.quantizer: case for case in CASES}.values()
    if not IS_NEW and Version(RELEASE) >= Version("2.2") and case.quantizer != "NaiveQuantizer"
]
each_quantizer = pytest.mark.parametrize("case", QUANTIZERS, ids=lambda case: case.quantizer)
NAMES = ("model.pth", "calibration.pth", "net.onnx")
OLD = b"an export of before"


def trained(case: Any, quantizer_class: Any = None) -> Any:
    net, optimizer, quantizer = start_training(quantizer_class or stock_class(case.quantizer), case, RELEASE)
    advance(case, net, optimizer, data()[:2])
    complete(case, quantizer, net)
    return net, optimizer, quantizer


def half_an_onnx(model: Any, inputs: Any, path: str) -> None:
    Path(path).write_text("half")
    raise RuntimeError("unsupported operator")


def whole_onnx(model: Any, inputs: Any, path: str) -> None:
    Path(path).write_text(f"{Path(path).name} {tuple(inputs.shape)}")


def _second_save(kind: Any) -> Any:
    real: Callable[..., None] = torch.save
    done: List[Any] = []

    def save(value: Any, path: Any) -> None:
        if done:
            Path(path).write_text("half")
            raise kind
        done.append(path)
        real(value, path)

    return mock.patch("torch.save", save)


FAULTS: Dict[str, Callable[[], Any]] = {
    "the disk is full": lambda: full_disk(1000),
    "it fails at the second file": lambda: _second_save(OSError),
    "it is interrupted at the second file": lambda: _second_save(KeyboardInterrupt),
    "ONNX cannot do it": lambda: mock.patch("torch.onnx.export", half_an_onnx),
}


def export(quantizer: Any, folder: Path) -> Any:
    """All three files."""
    return quantizer.export_model(*(str(folder / name) for name in NAMES), input_shape=(1, 1, 8, 8))


def onnx() -> Any:
    """An exporter that takes no seconds."""
    return mock.patch("torch.onnx.export", whole_onnx)


@each_quantizer
@pytest.mark.parametrize("way", ["patched", "subclass"])
def test_an_export_that_fails_leaves_files_and_model_as_they_were(case: Any, way: str, tmp_path: Path) -> None:
    """Wherever it fails, no file is new or half, the model is still quantised, trains on, and can be exported."""
    with patched() if way == "patched" else contextlib.nullcontext():
        kind = stock_class(case.quantizer) if way == "patched" else subclasses.quantizer(case.quantizer)
        net, optimizer, quantizer = trained(case, kind)
        before = snapshot(net)
        (tmp_path / NAMES[1]).write_bytes(OLD)
        for fault in FAULTS.values():
            with onnx(), fault(), pytest.raises((OSError, RuntimeError, KeyboardInterrupt)):
                export(quantizer, tmp_path)
            assert files_in(tmp_path) == {NAMES[1]: OLD}
            assert list(snapshot(net)) == list(before)
            assert all(torch.equal(snapshot(net)[name], tensor) for name, tensor in before.items())
            assert "export_model_save" not in vars(quantizer)
        untouched = trained(case, kind)
        if case.trains:
            assert advance(case, net, optimizer, data()[2:3]) == advance(case, *untouched[:2], data()[2:3])
        with onnx():
            calibration = export(quantizer, tmp_path)
        plain = make_net(case)
        plain.load_state_dict(load_file(tmp_path / NAMES[0]))
        assert str(load_file(tmp_path / NAMES[1])) == str(calibration)
        assert (tmp_path / NAMES[2]).read_text() == "net.onnx (1, 1, 8, 8)"
        assert set(files_in(tmp_path)) == set(NAMES)


@pytest.mark.skipif(not QUANTIZERS, reason="has no export")
@pytest.mark.parametrize("name", FAULTS)
def test_stock_leaves_half_of_it(name: str, tmp_path: Path) -> None:
    """What the fix is for: a file without the other, half a file, a model that is unwrapped."""
    case = next(case for case in QUANTIZERS if case.quantizer == "DoReFaQuantizer")
    net, _, quantizer = trained(case)
    before = list(snapshot(net))
    with onnx(), FAULTS[name](), pytest.raises((OSError, RuntimeError, KeyboardInterrupt)):
        export(quantizer, tmp_path)
    assert files_in(tmp_path)
    assert list(snapshot(net)) != before


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.said: List[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


@each_quantizer
def test_the_log_says_where_the_files_are(case: Any, tmp_path: Path) -> None:
    """NNI's own words with the paths that the user gave; its logger is as it was."""
    home = importlib.import_module("nni.compression.pytorch.compressor")._logger
    level, lines = home.level, _Lines()
    home.setLevel(logging.INFO)
    home.addHandler(lines)
    try:
        with patched(), onnx():
            export(trained(case)[2], tmp_path)
    finally:
        home.removeHandler(lines)
        home.setLevel(level)
    assert len(lines.said) == len(NAMES)
    assert all(line.endswith(f" saved to {tmp_path / name}") for name, line in zip(NAMES, lines.said))
    assert not home.filters


def test_the_files_of_an_export_are_found_by_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths without a folder, pathlib's, and by keyword; an open file is the user's to complete."""
    if not QUANTIZERS:
        pytest.skip("has no export")
    case = next(case for case in QUANTIZERS if case.quantizer == "DoReFaQuantizer")
    monkeypatch.chdir(tmp_path)
    with patched():
        trained(case)[2].export_model("model.pth", calibration_path=Path("calibration.pth"))
        with open("open.pth", "wb") as opened:
            trained(case)[2].export_model(model_path=opened)
    assert load_file(tmp_path / "model.pth").keys() == load_file(tmp_path / "open.pth").keys()
    assert set(files_in(tmp_path)) == {"model.pth", "calibration.pth", "open.pth"}


def _pruner_homes() -> List[str]:
    if IS_NEW:
        return []
    first = "nni.compression.torch" if Version(RELEASE) < Version("2.0") else "nni.algorithms.compression.pytorch.pruning"
    second = "nni.algorithms.compression.v2.pytorch.pruning"
    if RELEASE == "3.0rc1":
        return ["nni.compression.pytorch.pruning"]
    return [first, second] if Version(RELEASE) >= Version("2.5") else [first]


def _pruned(home: str, net: torch.nn.Module) -> Any:
    config = [{"sparsity": 0.5, "op_types": ["Conv2d"]}]
    pruner = importlib.import_module(home).LevelPruner(net, config)
    pruner.compress()
    return pruner


@pytest.mark.parametrize("home", _pruner_homes())
def test_a_pruners_export_is_whole_too(home: str, tmp_path: Path) -> None:
    """Both of NNI's pruning APIs: files and model, the masks still on it."""
    case = CASES[0]
    importlib.import_module(home)
    with patched():
        net = make_net(case)
        pruner = _pruned(home, net)
        output = net(data()[0][0])
        before = snapshot(net)
        (tmp_path / "masks.pth").write_bytes(OLD)
        paths = (str(tmp_path / "model.pth"), str(tmp_path / "masks.pth"))
        for fault in list(FAULTS.values())[:3]:
            with fault(), pytest.raises((OSError, RuntimeError, KeyboardInterrupt)):
                pruner.export_model(*paths)
            assert files_in(tmp_path) == {"masks.pth": OLD}
            assert list(snapshot(net)) == list(before)
            assert all(torch.equal(snapshot(net)[name], tensor) for name, tensor in before.items())
            assert torch.equal(net(data()[0][0]), output)
        with pytest.raises(FileNotFoundError, match=r"mask_path: there is no folder .*the model is unchanged"):
            pruner.export_model(paths[0], str(tmp_path / "no" / "masks.pth"))
        pruner.export_model(*paths)
    with stock_nni():
        (tmp_path / "stock").mkdir()
        net = make_net(case)
        pruner = _pruned(home, net)
        net(data()[0][0])  # 1.4 masks then
        pruner.export_model(str(tmp_path / "stock" / "model.pth"), str(tmp_path / "stock" / "masks.pth"))
    for name in ("model.pth", "masks.pth"):
        assert str(load_file(tmp_path / name)) == str(load_file(tmp_path / "stock" / name))
    assert len(files_in(tmp_path)) == 4


def test_every_export_of_the_release_has_its_row() -> None:
    """Where NNI defines an export that writes, the table has a fix for it."""
    for home in _pruner_homes():
        importlib.import_module(home)
    patch()
    targets = [target for target, live in patch_map().items() if live and "export_model" in target]
    assert sum("Pruner.export_model" in target for target in targets) >= len(_pruner_homes())
    assert any("export_model_save" in target for target in targets) == bool(QUANTIZERS)
