"""The environment's say, and what the start of an interpreter costs and does."""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path
from typing import Any, Iterator

import pytest
from conftest import RELEASE
from interpreters import last_line, python

import nni_dataparallel
from nni_dataparallel import api, environment, fixes, hook, notices, startup

HOOK = Path(__file__).parent.parent / "src" / "nni_dataparallel" / "nni_dataparallel.pth"  # a wheel has it elsewhere
SHOW = f"import sys, {fixes.home_of(RELEASE)}; import nni_dataparallel; print(nni_dataparallel.is_patched())"
PLAIN = "import sys; print([name for name in sys.modules if name.partition('.')[0] in ('torch', 'nni', 'wrapt', 'packaging')])"


@pytest.mark.parametrize(
    ("value", "meant"), [("1", True), ("Yes", True), (" on ", True), ("0", False), ("OFF", False), ("", False)]
)
def test_variables_say_yes_or_no(monkeypatch: pytest.MonkeyPatch, value: str, meant: bool) -> None:
    """In any case of letters; empty is as good as unset."""
    monkeypatch.setenv("NNI_DATAPARALLEL", value)
    monkeypatch.setenv("NNI_DATAPARALLEL_DISABLE", value)
    assert (environment.enabled(), environment.disabled()) == (meant, meant)


def test_another_value_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the variable's name, its value and what it may be."""
    monkeypatch.setenv("NNI_DATAPARALLEL_DISABLE", "2")
    with pytest.raises(ValueError, match=r"variable NNI_DATAPARALLEL_DISABLE is 1, true, .*, not '2'"):
        startup.start()


def test_every_row_lies_in_a_package_that_is_watched() -> None:
    """Else its module could be imported while nothing is armed."""
    modules = {row.module for row in fixes.FIXES if row.releases}
    assert modules
    assert not {m for m in modules if not m.startswith(tuple(f"{package}." for package in startup.COMPRESSORS))}


@pytest.fixture
def a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a module that nobody has imported."""
    (tmp_path / "watched_module.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "watched_module"
    hook.stop()
    sys.modules.pop("watched_module", None)


def test_the_hook_fires_once_before_the_import(a_module: str) -> None:
    """And the import goes on."""
    seen = []
    hook.watch(frozenset({a_module}), lambda: seen.append(a_module in sys.modules))
    assert hook.waiting()
    for _ in range(2):
        __import__(a_module)
        sys.modules.pop(a_module)
    assert seen == [False]
    assert not hook.waiting()


def test_the_hook_does_not_wait_for_what_is_there(a_module: str) -> None:
    """An imported module fires at once; stop() makes it forget."""
    seen = []
    hook.watch(frozenset({a_module}), lambda: seen.append("late"))
    hook.stop()
    __import__(a_module)
    hook.watch(frozenset({a_module, "no_such_module"}), lambda: seen.append("at once"))
    assert seen == ["at once"]


def test_the_line_of_the_pth_file_does_nothing_without_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """No module is imported; with the variable it arms, once."""
    called = []
    monkeypatch.setattr(startup, "at_interpreter_start", lambda: called.append(1))
    (line,) = HOOK.read_text().splitlines()  # site executes lines that begin with "import"
    assert line.startswith("import ")
    monkeypatch.delenv("NNI_DATAPARALLEL", raising=False)
    before = set(sys.modules)
    exec(line, {})
    assert (called, set(sys.modules)) == ([], before)
    monkeypatch.setenv("NNI_DATAPARALLEL", "1")
    exec(line, {})
    assert called == [1]


def test_a_package_that_is_gone_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """Only where the variable is set, and without a traceback."""
    monkeypatch.setitem(sys.modules, "nni_dataparallel.startup", None)
    monkeypatch.delattr(sys, "_nni_dataparallel_told", raising=False)
    for value in ("", "1", "1"):
        monkeypatch.setenv("NNI_DATAPARALLEL", value)
        exec(HOOK.read_text(), {})
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "NNI_DATAPARALLEL is set, but the package cannot be imported" in told
    del sys._nni_dataparallel_told


def test_the_start_of_an_interpreter_imports_nothing_of_torch_or_nni(tmp_path: Path) -> None:
    """Armed all the same: the compressors are patched when they come."""
    arm = "import nni_dataparallel.startup as startup; startup.at_interpreter_start()"
    result = python(arm, PLAIN, SHOW, env={"NNI_DATAPARALLEL": "1"})
    assert result.stdout.splitlines()[0] == "[]", result.stderr
    assert last_line(result) == "True", result.stderr


def test_auto_imports_nothing_of_torch_or_nni() -> None:
    """A script may still set OMP_NUM_THREADS before its `import torch`."""
    assert last_line(python("import nni_dataparallel.auto", PLAIN)) == "[]"


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"NNI_DATAPARALLEL": "maybe"}, "variable NNI_DATAPARALLEL is 1, true"),
        ({"NNI_DATAPARALLEL": "1", "NNI_DATAPARALLEL_DISABLE": "x"}, "variable NNI_DATAPARALLEL_DISABLE is 1, true"),
        ({"NNI_DATAPARALLEL": "1", "NNI_DATAPARALLEL_STATISTICS": "x"}, 'STATISTICS is "global" or "local"'),
        ({"NNI_DATAPARALLEL": "0"}, ""),
        ({"NNI_DATAPARALLEL": "1", "NNI_DATAPARALLEL_DISABLE": "true"}, ""),
    ],
    ids=["enable", "disable", "statistics", "no", "disabled"],
)
def test_an_interpreter_starts_whatever_the_variables_say(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, values: Any, text: str
) -> None:
    """One line for a value that makes no sense; nothing is armed."""
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(startup, "_told", False)
    for _ in range(2):  # in a virtual environment Python reads .pth files twice
        startup.at_interpreter_start()
    told = capsys.readouterr().err
    assert not hook.waiting()
    assert told.count("\n") == bool(text)
    assert text in told


def test_disable_wins_over_auto_but_not_over_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """What code asks for in so many words is done."""
    monkeypatch.setenv("NNI_DATAPARALLEL_DISABLE", "1")
    assert startup.start() is False
    assert not api.is_armed()
    nni_dataparallel.patch()
    assert nni_dataparallel.is_patched()


def test_a_failure_while_nni_is_imported_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script's `import nni...` goes on."""
    monkeypatch.setattr(api, "arm", lambda: 1 / 0)
    with pytest.warns(nni_dataparallel.PatchWarning, match="stays as it is: ZeroDivisionError"):
        startup._arm()


def test_one_line_in_the_log_when_patched(caplog: pytest.LogCaptureFixture) -> None:
    """At level INFO, from the logger `nni_dataparallel`, which prints nothing by itself."""
    caplog.set_level(logging.INFO, "nni_dataparallel")
    nni_dataparallel.patch()
    nni_dataparallel.patch()
    told = [record.getMessage() for record in caplog.records if record.name == "nni_dataparallel"]
    assert len(told) == 1
    assert told[0].startswith(f"NNI {RELEASE} patched: ")
    assert any(isinstance(handler, logging.NullHandler) for handler in logging.getLogger("nni_dataparallel").handlers)


def test_every_warning_is_of_our_class_and_at_the_callers_line() -> None:
    """Frames of NNI, torch and this package are passed over; a second time at the same line says nothing."""
    assert issubclass(notices.NNIDataParallelRuntimeWarning, RuntimeWarning)
    assert issubclass(nni_dataparallel.PatchWarning, nni_dataparallel.NNIDataParallelWarning)
    place = {"__name__": "nni.somewhere", "warn": notices.warn}
    exec("def inner():\n    warn('look here', __import__('nni_dataparallel').NNIDataParallelRuntimeWarning)", place)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(2):
            place["inner"]()
    (told,) = caught
    assert told.filename == __file__
    assert issubclass(told.category, RuntimeWarning)


def test_no_file_warns_by_itself() -> None:
    """Else a warning has another class, or another line."""
    package = Path(nni_dataparallel.__file__).parent
    assert [path.name for path in package.rglob("*.py") if "warnings.warn(" in path.read_text()] == ["virtual.py"]  # as torch does
