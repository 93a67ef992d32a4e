"""``status``: the live attributes, in this process and by the command."""

from __future__ import annotations

import json
from typing import Any, Dict, List

import pytest
from conftest import RELEASE
from interpreters import python

import nni_dataparallel
from nni_dataparallel import __main__ as command
from nni_dataparallel import api, fixes, hook, overview, patching, startup

ROWS = fixes.rows_for(RELEASE)
KEYS = {
    *("schema", "nni_dataparallel", "nni", "torch", "python", "platform", "devices", "armed", "statistics"),
    *("environment", "hook", "counts", "fixes"),
}


def states(found: Dict[str, Any]) -> List[str]:
    """The states of NNI's targets; torch's stay wrapped for a subclass in use."""
    return sorted({fix["state"] for fix in found["fixes"] if fix["target"].startswith("nni.")})


def test_status_is_read_from_the_live_attributes() -> None:
    """Stock, patched, replaced by other code, stock again."""
    patching.require(ROWS)
    assert states(nni_dataparallel.status()) == ["not applied"]
    nni_dataparallel.patch()
    found = nni_dataparallel.status()
    assert states(found) == ["applied"]
    assert found["counts"]["applied"] == len(ROWS) == len(found["fixes"])
    row = next(row for row in ROWS if row.releases)
    owner, name = patching._locate(row)
    ours = vars(owner)[name]
    setattr(owner, name, lambda *args: None)
    try:
        (replaced,) = (fix for fix in nni_dataparallel.status()["fixes"] if fix["state"] != "applied")
    finally:
        setattr(owner, name, ours)
    assert (replaced["target"], replaced["state"]) == (row.target, "not applied")
    assert "other code" in replaced["why"]
    nni_dataparallel.unpatch()
    assert states(nni_dataparallel.status()) == ["not applied"]


def test_a_skipped_fix_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """What auto warned of is still there to be read."""
    patching.require(ROWS)
    row = next(row for row in ROWS if row.expects and row.releases and not row.inherited)
    owner, name = patching._locate(row)
    monkeypatch.setattr(owner, name, lambda other: None)
    with pytest.warns(nni_dataparallel.PatchWarning, match="skipped the fix"):
        api.arm()
    (skipped,) = (fix for fix in nni_dataparallel.status()["fixes"] if fix["state"] == "skipped")
    assert skipped["target"] == row.target
    assert "takes (other), not" in skipped["why"]


def test_while_nni_is_not_imported_its_fixes_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Armed, and not yet asked for."""
    hook.watch(frozenset({"no_such_module"}), lambda: None)
    found = nni_dataparallel.status()
    assert found["armed"]
    assert states(found) == ["waiting for import"]


def test_the_structure_is_plain_and_stable() -> None:
    """Its keys are documented, it survives JSON, and the fixes of other releases are listed on demand."""
    found = nni_dataparallel.status(every=True)
    assert set(found) == KEYS
    assert all(f"``{key}``" in overview.status.__doc__ for key in KEYS)
    assert json.loads(json.dumps(found)) == found
    assert len(found["fixes"]) == len(fixes.FIXES) == sum(found["counts"].values())
    assert found["nni"] == {"version": RELEASE, "problem": None}
    others = {fix["state"] for fix in found["fixes"]} - {"applied", "not applied"}
    assert others <= {"not needed in this release"}


def test_issues_have_addresses() -> None:
    """Of NNI's tracker; fixes of faults that nobody reported have none."""
    assert fixes.upstream("nni#3626") == "https://github.com/microsoft/nni/issues/3626"
    assert fixes.upstream("") is None
    assert all(fix.issue == "" or str(fixes.upstream(fix.issue)).startswith("https://") for fix in fixes.FIXES)


def test_the_command_arms_and_shows_every_fix() -> None:
    """JSON is all there is on standard output; the exit status is 0 where all are applied."""
    result = python(arguments=["-m", "nni_dataparallel", "status", "--json"])
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads(result.stdout)
    assert states(found) == ["applied"]
    assert [fix["target"] for fix in found["fixes"]] == [row.target for row in ROWS]
    assert found["armed"]


def test_text_has_targets_reasons_and_links(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """No colours where standard output is no terminal; colours where it is one, unless NO_COLOR is set."""
    assert command.main(["status"]) == 0
    text = capsys.readouterr().out
    assert f"NNI {RELEASE}, nni_dataparallel {nni_dataparallel.__version__}, torch " in text
    assert f"{len(ROWS)} of {len(ROWS)} fixes applied, global statistics" in text
    assert all(row.target in text and row.reason in text for row in ROWS)
    assert "(https://github.com/microsoft/nni/issues/" in text
    assert "\033" not in text
    for variable, painted in (("", True), ("1", False)):
        monkeypatch.setenv("NO_COLOR", variable)
        monkeypatch.setenv("TERM", "xterm")
        with monkeypatch.context() as terminal:
            terminal.setattr("sys.stdout.isatty", lambda: True, raising=False)
            command.main(["status"])
        assert ("\033[" in capsys.readouterr().out) is painted


def test_exit_status_tells_scripts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """1 where it is switched off, 2 where NNI is missing, both without a word if asked so."""
    monkeypatch.setenv("NNI_DATAPARALLEL_DISABLE", "1")
    assert command.main(["status", "--quiet"]) == 1
    monkeypatch.setenv("NNI_DATAPARALLEL_DISABLE", "sometimes")
    assert command.main(["status"]) == 2
    assert "NNI_DATAPARALLEL_DISABLE is 1, true" in capsys.readouterr().err
    monkeypatch.delenv("NNI_DATAPARALLEL_DISABLE")

    def missing() -> str:
        raise fixes.UnsupportedReleaseError("NNI is not installed in this environment.")

    monkeypatch.setattr(fixes, "installed_release", missing)
    monkeypatch.setattr(startup, "start", lambda: True)
    assert command.main(["status", "--quiet"]) == 2
    assert capsys.readouterr().out == ""
    assert command.main(["status"]) == 2
    assert "NNI missing" in capsys.readouterr().out
