"""The ways in: auto before or after NNI, subclasses, the command line, and what cannot work."""

from __future__ import annotations

import pickle
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import cases_for
from conftest import IS_MODERN, IS_NEW, RELEASE
from harness import QAT, data, differences, reference, replicated, start_training, step, stock_class, train, wrappers
from interpreters import last_line, python
from torch import nn

import nni_dataparallel
from nni_dataparallel import fixes, patching

CASES = cases_for(RELEASE, QAT)
pytestmark = pytest.mark.skipif(not CASES, reason=f"NNI {RELEASE} has no quantizer")
HOME = fixes.home_of(RELEASE) if CASES else "nni"
METHOD = "track_min_max_val" if IS_NEW else "quantize_weight"
IMPORT = f"from {HOME} import {QAT}"
AUTO = "import nni_dataparallel.auto"
CHECK = f"""
import nni_dataparallel
import {HOME}
assert nni_dataparallel.is_patched(), nni_dataparallel.patch_map()
assert hasattr({QAT}.{METHOD}, '__nni_dataparallel__')
print('patched')
"""
RELOAD = ("import importlib", f"importlib.reload({AUTO.split()[1]})")


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param((AUTO, IMPORT), id="auto first"),
        pytest.param((IMPORT, AUTO), id="nni first"),
        pytest.param(("import nni", AUTO, IMPORT), id="nni bare first", marks=pytest.mark.of_a_kind),
        pytest.param((AUTO, "import torch", "import nni", IMPORT), id="auto, torch, nni", marks=pytest.mark.of_a_kind),
        pytest.param((IMPORT, AUTO, *RELOAD, AUTO), id="twice", marks=pytest.mark.of_a_kind),
    ],
)
def test_auto_works_in_any_order(lines: Any) -> None:
    """Before NNI, after it, between its parts, and twice: stock classes are repaired."""
    result = python(*lines, CHECK)
    assert result.returncode == 0, result.stderr
    assert last_line(result) == "patched"


@pytest.mark.of_a_kind
@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ((AUTO, "import nni_dataparallel as nd", "with nd.patched(): pass", IMPORT), True),
        ((AUTO, "import nni_dataparallel as nd", "nd.unpatch()", IMPORT), False),
        ((AUTO, "import nni_dataparallel as nd", "nd.unpatch()", "nd.patch()", IMPORT), True),
    ],
    ids=["patched", "unpatch", "unpatch and patch"],
)
def test_auto_and_the_others_agree_on_one_state(lines: Any, expected: bool) -> None:
    """All fixes or none, whatever is called while NNI is not imported yet."""
    result = python(*lines, f"import {HOME}", "print(set(nd.patch_map().values()))")
    assert last_line(result) == str({expected}), result.stderr


@pytest.mark.parametrize("lines", [("nni_dataparallel.patch()",), ("import nni_dataparallel.auto",)], ids=["patch", "auto"])
def test_pruners_are_patched_when_they_are_imported(lines: Any) -> None:
    """Neither loaded nor forgotten by patch(): every row of theirs is live after the import."""
    modules = sorted({row.module for row in fixes.rows_for(RELEASE) if row.on_import})
    if not modules:
        pytest.skip("no rows for pruners")
    result = python("import nni_dataparallel", *lines, *(f"import {module}" for module in modules), f"import {HOME}", """
        rows = [row for row in nni_dataparallel.fixes.rows_for(nni_dataparallel.fixes.installed_release()) if row.on_import]
        print(len(rows), all(nni_dataparallel.patching.is_live(row) for row in rows), nni_dataparallel.is_patched())
    """.replace("\n        ", "\n"))  # fmt: skip
    rows = [row for row in fixes.rows_for(RELEASE) if row.on_import]
    assert last_line(result) == f"{len(rows)} True True", result.stderr


def test_auto_does_not_import_nni() -> None:
    """A script that never uses the compressors does not pay for them."""
    result = python(AUTO, "import sys; print([m for m in sys.modules if m.startswith('nni.')])")
    assert last_line(result) == "[]", result.stderr


SCRIPT = f"""
import sys
{IMPORT}
import neighbour
print('script', __name__, sys.argv[1:], hasattr({QAT}.{METHOD}, '__nni_dataparallel__'))
sys.exit(int(sys.argv[1]))
"""


def test_run_leaves_the_script_as_it_is(tmp_path: Path) -> None:
    """python -m nni_dataparallel run: same arguments, same __main__, same exit status, NNI repaired."""
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "neighbour.py").write_text("")
    result = python(arguments=["-m", "nni_dataparallel", "run", str(tmp_path / "train.py"), "3", "--lr", "1"])
    assert result.returncode == 3, result.stderr
    assert "script __main__ ['3', '--lr', '1'] True" in result.stdout


@pytest.mark.once
def test_run_shows_the_scripts_own_errors(tmp_path: Path) -> None:
    """Also one of the kind that the command line raises itself."""
    (tmp_path / "train.py").write_text("raise FileNotFoundError('dataset missing')")
    result = python(arguments=["-m", "nni_dataparallel", "run", str(tmp_path / "train.py")])
    assert result.returncode == 1
    assert "Traceback" in result.stderr
    assert "FileNotFoundError: dataset missing" in result.stderr


@pytest.mark.once
def test_run_of_a_missing_script_is_told() -> None:
    """The path, and exit status 2."""
    result = python(arguments=["-m", "nni_dataparallel", "run", "no/such/train.py"])
    assert result.returncode == 2
    assert "there is no script 'no/such/train.py'" in result.stderr


SHOW_MODE = ["import nni_dataparallel.replicas", "print(nni_dataparallel.replicas.merged_statistics())"]


@pytest.mark.once
@pytest.mark.parametrize("given", ["", "global", "local"])
def test_the_environment_chooses_the_statistics(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: str) -> None:
    """NNI_DATAPARALLEL_STATISTICS, for ``auto`` and for ``run``."""
    monkeypatch.setenv("NNI_DATAPARALLEL_STATISTICS", given)
    (tmp_path / "train.py").write_text("\n".join([IMPORT, *SHOW_MODE]))
    by_run = python(arguments=["-m", "nni_dataparallel", "run", str(tmp_path / "train.py")])
    assert [last_line(python(AUTO, IMPORT, *SHOW_MODE)), last_line(by_run)] == [given or "global"] * 2


@pytest.mark.once
def test_an_unknown_choice_in_the_environment_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The name of the variable and what it may be, before the script starts."""
    monkeypatch.setenv("NNI_DATAPARALLEL_STATISTICS", "none")
    (tmp_path / "train.py").write_text("print('started')")
    by_run = python(arguments=["-m", "nni_dataparallel", "run", str(tmp_path / "train.py")])
    by_auto = python(AUTO, "print('started')")
    assert (by_run.returncode, by_auto.returncode) == (2, 1)
    for result in (by_run, by_auto):
        assert "started" not in result.stdout
        assert "the environment variable NNI_DATAPARALLEL_STATISTICS" in result.stderr
        assert '"local"' in result.stderr
    assert "Traceback" not in by_run.stderr


@pytest.mark.once
def test_a_missing_nni_is_told(tmp_path: Path) -> None:
    """Error from patch(), warning from auto, both with the command to install it."""
    blocked = """
        import importlib.util, importlib.abc, sys
        find = importlib.util.find_spec
        importlib.util.find_spec = lambda name, *a: None if name == 'nni' else find(name, *a)
    """
    result = python(textwrap.dedent(blocked), AUTO, "print('goes on')", "import nni_dataparallel", "nni_dataparallel.patch()")
    assert "goes on" in result.stdout
    assert "PatchWarning: NNI is not installed" in result.stderr
    assert "UnsupportedReleaseError: NNI is not installed" in result.stderr
    assert "pip install nni==" in result.stderr


@pytest.mark.once
def test_an_unknown_release_leaves_nni_alone(tmp_path: Path) -> None:
    """auto warns and the script goes on with stock NNI."""
    fake = tmp_path / "nni"
    fake.mkdir()
    (fake / "__init__.py").write_text("__version__ = '9.9'\n")
    result = python("import nni", AUTO, "print('goes on')", path=[tmp_path])
    assert "goes on" in result.stdout, result.stderr
    assert "NNI 9.9 is unknown to nni_dataparallel; nothing was patched" in result.stderr


@pytest.mark.parametrize("name", sorted(name for name in fixes.QUANTIZERS if not fixes.ships(RELEASE, name)))
def test_a_quantizer_that_the_release_lacks_is_told(name: str) -> None:
    """ImportError with what there is instead; other names stay AttributeErrors."""
    with pytest.raises(ImportError, match=rf"no {name} for NNI {RELEASE}; it exists for NNI .* NNI {RELEASE} has: "):
        __import__("nni_dataparallel", fromlist=[name]).__getattr__(name)
    assert not hasattr(nni_dataparallel, "NoSuchThing")


@pytest.mark.once
def test_star_imports_what_every_release_has() -> None:
    """The quantizers are asked for by name."""
    result = python("from nni_dataparallel import *", "print(sorted(n for n in dir() if 'Quantizer' in n), callable(patch))")
    assert last_line(result) == "[] True", result.stderr


def test_subclass_and_patch_together_fix_once() -> None:
    """The subclass on top of patched stock classes trains like the subclass alone."""
    case = CASES[-1]
    expected = reference(case, RELEASE)
    nni_dataparallel.patch()
    record = train(ours(), case, RELEASE, replicated(2))
    assert differences(expected, record) == []


def ours() -> Any:
    return getattr(nni_dataparallel, QAT)


def stock_wrapper() -> Any:
    if IS_NEW:
        return sys.modules[base_quantizer().__module__].ModuleWrapper
    return sys.modules[base_quantizer().__module__].QuantizerModuleWrapper


def base_quantizer() -> Any:
    return next(base for base in stock_class().__mro__ if base.__name__ == "Quantizer")


def test_the_subclass_is_a_stock_quantizer() -> None:
    """isinstance holds for the quantizer, its wrappers and its autograd function."""
    _, _, quantizer = start_training(ours(), CASES[0], RELEASE)
    assert isinstance(quantizer, stock_class())
    assert all(isinstance(w, stock_wrapper()) for w in wrappers(quantizer))
    assert ours() is ours()


def test_classes_survive_pickle() -> None:
    """The fixed classes are found again under their names."""
    from nni_dataparallel.subclasses import fixed_class

    for cls in (ours(), fixed_class(stock_wrapper())):
        assert pickle.loads(pickle.dumps(cls)) is cls


@pytest.mark.parametrize("count", [1, 2])
def test_a_quantizer_built_before_patch_is_mended_too(count: int) -> None:
    """Patched in the middle of a script: every step is one device's, the first one included."""
    case = CASES[0]
    expected_net, expected_optimizer, _ = start_training(stock_class(), case, RELEASE)
    net, optimizer, _ = start_training(stock_class(), case, RELEASE)
    model = replicated(count)(net)
    for batch in data()[:2]:
        expected_net.train()
        step(expected_net, expected_optimizer, batch)
        with nni_dataparallel.patched():
            model.train()
            step(model, optimizer, batch)
        for name, tensor in expected_net.state_dict().items():
            torch.testing.assert_close(net.state_dict()[name], tensor, rtol=2e-3, atol=2e-4, msg=name)


@pytest.mark.skipif(IS_NEW, reason="what NNI 3.0 leaves to a quantizer of the user's own works on replicas by itself")
def test_an_uncovered_quantizer_on_replicas_is_told() -> None:
    """A quantizer of the user's own may keep state anywhere: said at its first forward under DataParallel."""

    class OwnQuantizer(base_quantizer()):
        def quantize_weight(self, *args: Any, **kwargs: Any) -> Any:
            given = [value for value in args if isinstance(value, torch.Tensor)]  # not from 1.9 on
            return given[0] if given else args[0].module.weight

    net = nn.Sequential(nn.Conv2d(1, 1, 3), nn.ReLU())
    config = [{"quant_types": ["weight"], "quant_bits": 8, "op_types": ["Conv2d"]}]
    with nni_dataparallel.patched():
        OwnQuantizer(net, config).compress()
        with pytest.warns(RuntimeWarning, match=r"OwnQuantizer is not covered under DataParallel.*Covered: BNNQuantizer, "):
            replicated(2, check=False)(net)(torch.randn(2, 1, 8, 8))


def test_a_config_that_matches_nothing_is_told() -> None:
    """The warning names the config and the layers there are."""
    net = nn.Sequential(nn.Conv2d(1, 1, 3), nn.ReLU())
    if IS_NEW:
        pytest.skip("has a test of its own")
    config = [{"quant_types": ["output"], "quant_bits": 8, "op_names": ["convv"]}]
    optimizers = () if RELEASE == "1.4" else (torch.optim.SGD(net.parameters(), lr=0.1),)
    with nni_dataparallel.patched(), pytest.warns(UserWarning, match=r"quantises nothing.*convv.*0 \(Conv2d\), 1 \(ReLU\)"):
        stock_class()(net, config, *optimizers).compress()


@pytest.mark.parametrize("way", ["patched", "subclass"])
def test_a_model_in_distributed_data_parallel_is_told(way: str) -> None:
    """One warning, with the order that works."""
    if IS_NEW:
        pytest.skip("has a test of its own")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        net = nn.Sequential(nn.Conv2d(1, 1, 3), nn.ReLU())
        model = nn.parallel.DistributedDataParallel(net)
        config = [{"quant_types": ["output"], "quant_bits": 8, "op_types": ["ReLU"]}]
        more = {"dummy_input": torch.zeros(1, 1, 8, 8)} if IS_MODERN else {}
        optimizers = () if RELEASE == "1.4" else (torch.optim.SGD(net.parameters(), lr=0.1),)
        if way == "patched":
            nni_dataparallel.patch()
        quantizer_class = stock_class() if way == "patched" else ours()
        with pytest.warns(UserWarning, match="Build the quantizer on the plain model first, then wrap it") as caught:
            quantizer_class(model, config, *optimizers, **more)
        (told,) = (str(w.message) for w in caught if "was given a DistributedDataParallel" in str(w.message))
        places = [told.index(part) for part in ("the optimizer of", "quantizer = ", "quantizer.compress()", "after it the Distrib")]
        order = [1, 2, 0, 3] if RELEASE == "1.4" else [0, 1, 2, 3]  # the optimizer of 1.4 needs the Parameters of compress()
        assert [places[i] for i in order] == sorted(places), told
    finally:
        torch.distributed.destroy_process_group()


def test_torch_functions_stay_wrapped_for_subclasses_after_unpatch() -> None:
    """unpatch() takes back what patch() did, not what a subclass in use needs."""
    assert ours()
    nni_dataparallel.patch()
    nni_dataparallel.unpatch()
    rows = [fix for fix in fixes.FIXES if not fix.releases]
    assert all(patching.is_live(fix) for fix in rows)
