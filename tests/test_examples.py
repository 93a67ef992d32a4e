"""The scripts in examples/, as a user runs them, on the releases that they are for."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from conftest import IS_NEW, RELEASE
from packaging.specifiers import SpecifierSet

import nni_dataparallel

EXAMPLES = Path(__file__).parent.parent / "examples"
FOR = {
    "compare_compression": ">=1.4",
    "ddp_accelerate": ">=2.5,!=3.0rc1",
    "ddp_qat": ">=2.5,!=3.0rc1",
    "feathermap_int8": ">=1.4",
    "hf_trainer": ">=2.5,!=3.0rc1",
    "multi_gpu_pruning": ">=2.3,!=3.0rc1",
    "qat_dataparallel": ">=2.0,!=3.0rc1",
    "stop_and_resume": ">=2.5,!=3.0rc1",
    "subclass_in_training_script": ">=2.5,!=3.0rc1",
}


def run(name: str, folder: Path, *arguments: str, ranks: int = 0) -> str:
    if not SpecifierSet(FOR[name]).contains(RELEASE, prereleases=True):
        pytest.skip(f"for NNI {FOR[name]}")
    pytest.importorskip("sklearn")
    # The release under test first: an installed nni_dataparallel has another NNI beside it.
    paths = [os.environ.get("PYTHONPATH", ""), str(Path(nni_dataparallel.__file__).parents[1])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks else []
    command = [sys.executable, *launcher, str(EXAMPLES / f"{name}.py"), *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def percent(output: str, what: str) -> float:
    found = re.search(rf"{what}: ([0-9.]+)%", output)
    assert found, output
    return float(found[1])


def test_every_example_is_run_somewhere() -> None:
    """A new script in the folder gets a test."""
    assert sorted(FOR) == sorted(path.stem for path in EXAMPLES.glob("*.py"))


def test_examples_can_be_read_in_one_look() -> None:
    """Less than a hundred lines, what they share in a folder beside them, and the line that matters marked."""
    for path in EXAMPLES.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert text.count("\n") < (100 if path.parent == EXAMPLES else 150), path
        assert path.parent != EXAMPLES or path.stem == "compare_compression" or "<- the one line" in text, path


def test_qat_dataparallel(tmp_path: Path) -> None:
    """It trains."""
    output = run("qat_dataparallel", tmp_path)
    assert re.findall(r"epoch (\d): loss", output) == ["0", "1", "2"]
    assert percent(output, "quantised accuracy on the training images") > 85


@pytest.mark.once
def test_subclass_in_training_script(tmp_path: Path) -> None:
    """It trains with a class of ours, and NNI's own are what they were."""
    output = run("subclass_in_training_script", tmp_path)
    assert percent(output, "epoch 2: quantised accuracy on the test images") > 85
    assert re.search(r"trained with <class 'nni_dataparallel\.QAT_?Quantizer'> a subclass of <class 'nni\.", output)
    assert "NNI's own classes are patched: False" in output


def test_stop_and_resume(tmp_path: Path) -> None:
    """What was stopped and resumed ends in the same state."""
    output = run("stop_and_resume", tmp_path)
    assert re.findall(r"epoch (\d): loss", output) == ["0", "1", "2", "1", "2"]
    assert "the same state, to the bit: True" in output
    assert percent(output, "quantised accuracy on the training images") > 85


def test_multi_gpu_pruning(tmp_path: Path) -> None:
    """Three channels in ten are pruned, and fine-tuning brings the accuracy back."""
    output = run("multi_gpu_pruning", tmp_path)
    assert percent(output, "accuracy before pruning") > 90
    assert percent(output, "accuracy after fine-tuning") > 90
    assert percent(output, "sparsity") == 30


@pytest.mark.parametrize("ranks", [0, 2], ids=["by python", "by torchrun"])
def test_hf_trainer(ranks: int, tmp_path: Path) -> None:
    """Trainer trains in one process, and in two that share the batch."""
    for package in ("transformers", "accelerate"):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install '.[evaluators]'")
    output = run("hf_trainer", tmp_path, ranks=ranks)
    assert f"trained in {max(1, ranks)} processes" in output
    assert percent(output, "quantised accuracy on the training images") > 85


def test_ddp_accelerate(tmp_path: Path) -> None:
    """Under torchrun: two ranks train three epochs."""
    pytest.importorskip("accelerate")
    output = run("ddp_accelerate", tmp_path, ranks=2)
    assert re.findall(r"epoch (\d): loss of the last batch [0-9.]+ on (\d)", output) == [("0", "2"), ("1", "2"), ("2", "2")]
    assert percent(output, "quantised accuracy on the training images") > 85


def test_ddp_qat(tmp_path: Path) -> None:
    """Under torchrun: two ranks train three epochs, one process goes on for two more from their checkpoint."""
    output = run("ddp_qat", tmp_path, ranks=2)
    assert [int(epoch) for epoch in re.findall(r"epoch (\d): loss", output)] == [0, 1, 2]
    assert percent(output, "quantised accuracy on the training images") > 85
    again = run("ddp_qat", tmp_path, "--resume", ranks=1)
    assert [int(epoch) for epoch in re.findall(r"epoch (\d): loss", again)] == [3, 4]
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+)", output + again)]
    assert losses == sorted(losses, reverse=True)
    exported = tmp_path / "ddp_model.pth"
    assert exported.exists() is (not IS_NEW)  # NNI 3.0 exports nothing
    assert IS_NEW or sorted(torch.load(exported)) == ["0.bias", "0.weight", "3.bias", "3.weight"]


@pytest.mark.once
def test_feathermap_int8(tmp_path: Path) -> None:
    """What is deployed from the file predicts what training saw, in a quarter of the bytes and half a point of float's accuracy."""
    output = run("feathermap_int8", tmp_path)
    assert "factors in the file: torch.int8 torch.int8" in output
    assert "the same prediction on every test image: True" in output
    exact, shipped = percent(output, "float accuracy"), percent(output, "INT8 accuracy, deployed from the file")
    assert shipped == percent(output, "quantization-aware accuracy") > 95
    assert abs(shipped - exact) <= 0.5
    sizes = re.findall(r"(dense|float factors|INT8 factors) size: (\d+) bytes of tensors, (\d+) bytes of file", output)
    assert [name for name, _, _ in sizes] == ["dense", "float factors", "INT8 factors"]
    dense, factors, int8 = (int(tensors) for _, tensors, _ in sizes)
    assert dense / 10 < factors < dense / 8  # the norms are not hashed
    assert dense / 22 < int8 < dense / 20
    assert (tmp_path / "feathernet_int8.pth").stat().st_size == int(sizes[-1][2])


@pytest.mark.once
def test_compare_compression(tmp_path: Path) -> None:
    """Every method is there, at the bytes of its column; one epoch says nothing of accuracy."""
    pytest.importorskip("matplotlib")
    pytest.importorskip("rich")
    output = run("compare_compression", tmp_path, "--quick", "--output", "sizes.png")
    tables = [[line.strip("| ").split(" | ") for line in part.splitlines() if line[:2] == "| "] for part in output.split("\n\n")]
    accuracies, sizes = (table for table in tables if table)
    budgets = [int(head.split(" B ")[0].replace(",", "")) for head in sizes[0][1:]]
    assert budgets == [4624, 16784]
    names = {
        *("narrower dense net", "narrower dense net, INT8", "gradual pruning", "gradual pruning, INT8", "RigL"),
        *("FeatherNet", "FeatherNet, INT8", "FeatherNet, INT4", "FeatherNet, pruned", "FeatherNet, INT8, pruned"),
    }
    if SpecifierSet(">=2.7").contains(RELEASE, prereleases=True):
        names.add("gradual pruning, NNI")
    assert {row[0] for row in sizes[1:]} >= names
    assert [row[0] for row in accuracies] == ["accuracy, %", *(row[0] for row in sizes[1:])]
    for name, *stored in sizes[1:]:
        for number, budget in zip(stored, budgets):
            assert 0.97 * budget <= int(number.replace(",", "")) <= 1.01 * budget, name
    for _, *found in accuracies[1:]:
        assert all(0 <= float(cell.split()[0]) <= 100 for cell in found)
    assert (tmp_path / "sizes.png").read_bytes().startswith(b"\x89PNG")
