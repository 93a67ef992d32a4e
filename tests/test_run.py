"""``run`` beside Python itself: what a script sees and what a user sees of it, compared with ``python script``.

The scripts import neither torch nor NNI, and so does ``run``: each test is two short processes.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import List

import pytest
from interpreters import last_line, python

from nni_dataparallel import __main__ as command

RUN = ["-m", "nni_dataparallel", "run"]

FACTS = """
import json, pickle, sys
class Thing: "of the script"
names = {name: repr(type(value)) for name, value in sorted(globals().items()) if name.startswith("__")}
print(json.dumps({
    "argv": sys.argv, "path": sys.path[0], "file": globals().get("__file__"), "spec": getattr(__spec__, "name", None),
    "package": __package__, "names": names, "main": vars(sys.modules["__main__"]) is globals(),
    "pickle": type(pickle.loads(pickle.dumps(Thing()))) is Thing, "torch": "torch" in sys.modules,
}))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The same script as a file, module, package, folder and archive."""
    for place in ("facts.py", "package/module.py", "package/__main__.py", "folder/__main__.py"):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        (tmp_path / place).write_text(FACTS)
    (tmp_path / "package" / "__init__.py").write_text("")
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
        archive.write(tmp_path / "facts.py", "__main__.py")
    return tmp_path


@pytest.mark.parametrize(
    "arguments",
    [
        ["facts.py"],
        ["facts.py", "--help", "-m", "--", "-q", "--epochs=10"],
        ["./folder/../facts.py", "x"],
        ["-m", "package.module", "--quiet"],
        ["-m", "package", "-c"],
        ["folder", "x"],
        ["archive.zip", "x"],
        ["-c", FACTS, "-x"],
        ["-", "x"],
    ],
    ids=lambda arguments: " ".join(arguments)[:20].strip(),
)
def test_a_script_sees_what_it_sees_without_us(folder: Path, arguments: List[str]) -> None:
    """argv, the first entry of the path, every name of ``__main__``, pickle; and torch is not imported before it."""
    given = FACTS if arguments[0] == "-" else ""
    plain = python(arguments=arguments, cwd=folder, given=given)
    ours = python(arguments=[*RUN, *arguments], cwd=folder, given=given)
    assert '"torch": false' in plain.stdout, plain.stderr
    assert (ours.stdout, ours.stderr, ours.returncode) == (plain.stdout, plain.stderr, plain.returncode)


ENDS = {
    "chained": "def f():\n  try:\n    {}['x']\n  except KeyError as error:\n    raise ValueError('boom') from error\nf()",
    "syntax error": "x = = 1",
    "no such module": "import no_such_module",
    "exit None": "import sys; sys.exit(None)",
    "exit 7": "import sys; sys.exit(7)",
    "exit with words": "import sys; sys.exit('words')",
    "Ctrl-C": "raise KeyboardInterrupt",
    "own excepthook": "import sys\nsys.excepthook = lambda kind, value, tb: print(kind.__name__, tb.tb_lineno, tb.tb_next)\n1 / 0",
    "atexit": "import atexit, sys\natexit.register(lambda: print('end', sys.last_traceback.tb_lineno))\n\n1 / 0",
    "latin": "# -*- coding: latin-1 -*-\nprint(ascii('\xe4'))",
}


@pytest.mark.parametrize("name", ENDS)
def test_a_script_ends_as_it_does_without_us(tmp_path: Path, name: str) -> None:
    """Exit status, output and traceback, to the letter: none of our frames in it."""
    (tmp_path / "ends.py").write_bytes(ENDS[name].encode("latin-1"))
    plain, ours = (python(arguments=[*before, "ends.py"], cwd=tmp_path) for before in ([], RUN))
    assert (ours.returncode, ours.stdout, ours.stderr) == (plain.returncode, plain.stdout, plain.stderr)


def test_a_modules_traceback_begins_with_the_module(tmp_path: Path) -> None:
    """Not even runpy's frames are there, which Python itself shows."""
    (tmp_path / "module.py").write_text("1 / 0")
    result = python(arguments=[*RUN, "-m", "module"], cwd=tmp_path)
    assert result.returncode == 1
    assert result.stderr.count("  File ") == 1
    assert "ZeroDivisionError" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["run"], 2, "run: which script?"),
        (["run", "--quiet"], 2, "run: which script?"),
        (["run", "no/such.py"], 2, "there is no script 'no/such.py'"),
        (["run", "--epochs", "3"], 2, "unknown option '--epochs'; the script's own options follow the script"),
        (["run", "-m"], 2, "-m needs a module after it"),
        (["run", "-m", "no_such.module"], 1, "No module named 'no_such'"),
        (["run", "-m", "wheel_of_nobody"], 1, "No module named wheel_of_nobody"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_cannot_be_run_is_told_in_a_line(
    arguments: List[str], status: int, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """What is wrong, and the exit status of Python itself."""
    monkeypatch.setattr("sys.argv", ["nni-dataparallel"])
    monkeypatch.setattr("sys.path", ["", *__import__("sys").path])
    monkeypatch.setenv("NNI_DATAPARALLEL", "")
    assert command.main(arguments) == status
    told = capsys.readouterr().err
    assert text in told
    assert told.count("\n") == 1


def test_debug_shows_where_an_error_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """The traceback in place of the line."""
    from nni_dataparallel.cli.errors import CommandError

    monkeypatch.setenv("NNI_DATAPARALLEL", "")
    with pytest.raises(CommandError, match="there is no script"):
        command.main(["run", "--debug", "no/such.py"])


@pytest.mark.parametrize("name", ["run", "status", "demo"])
def test_every_command_has_help_with_examples(name: str, capsys: pytest.CaptureFixture) -> None:
    """``--help`` prints options and command lines to copy."""
    with pytest.raises(SystemExit) as ended:
        command.main([name, "--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0
    assert "examples:" in text
    assert f" {name} " in text
    assert "--quiet" in text


def test_run_leaves_its_mark_for_child_processes(tmp_path: Path) -> None:
    """NNI_DATAPARALLEL=1 for what the script starts; nothing where NNI_DATAPARALLEL_DISABLE is set."""
    code = "import os; print(os.environ.get('NNI_DATAPARALLEL'))"
    marks = [last_line(python(arguments=[*RUN, "-c", code], env={"NNI_DATAPARALLEL_DISABLE": off})) for off in ("", "1")]
    assert marks == ["1", "None"]
