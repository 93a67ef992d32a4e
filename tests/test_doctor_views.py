"""The doctor's views of a diagnosis, and its command line."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, List

import pytest
from doctor_models import Watching, batch

from nni_dataparallel import Diagnosis, diagnose
from nni_dataparallel import __main__ as command

pytestmark = pytest.mark.of_a_kind


class Strict(HTMLParser):
    """Tags of a page that are opened and closed in order; attributes that point elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: List[str] = []
        self.seen: List[str] = []
        self.outside: List[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.seen.append(tag)
        self.outside += [name for name, _ in attrs if name in ("src", "href", "xlink:href", "onclick")]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def parsed(page: str) -> Strict:
    parser = Strict()
    parser.feed(page)
    parser.close()
    return parser


def test_the_page_stands_alone_and_escapes() -> None:
    """Well-formed, nothing from elsewhere, the user's names are text; ranges are drawn."""
    page = diagnose(Watching(), batch()).html()
    found = parsed(page)
    assert found.open == []
    assert found.outside == []
    assert "script" not in found.seen
    assert {"svg", "rect", "table", "style"} <= set(found.seen)
    assert "&lt;script&gt;alert(&#x27;&amp;&#x27;)&lt;/script&gt;" in page
    assert "http" not in page
    assert "url(" not in page


def test_json_and_text_say_the_same() -> None:
    """JSON is complete and can be read back; the rich table has the text's words."""
    diagnosis = diagnose(Watching(), batch())
    read = json.loads(diagnosis.to_json())
    assert isinstance(diagnosis, Diagnosis)
    assert read["healthy"] is False
    assert [finding["kind"] for finding in read["findings"]] == [finding.kind for finding in diagnosis.findings]
    assert read["ranges"][0]["stock"] is not None
    assert all(finding.title in str(diagnosis) for finding in diagnosis.findings)
    console = pytest.importorskip("rich.console")
    from nni_dataparallel.doctor.text import rich_table

    shown = console.Console(width=200, record=True, file=io.StringIO())
    shown.print(rich_table(diagnosis))
    text = shown.export_text()
    assert "attribute lost on the replicas" in text
    assert diagnosis.verdict in text


SCRIPT = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.calls = nn.Linear(5, 3), 0

    def forward(self, x):
        self.calls += 1
        return self.fc(x)

def faulty():
    print("building")
    return Net(), torch.randn(8, 5)

def healthy():
    return nn.Linear(5, 3), torch.randn(8, 5)

def loss(model, batch):
    return model(batch).sum()

def broken():
    raise OSError("no such file: data")

if __name__ == "__main__":
    raise SystemExit("must not run")
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "own_script.py"
    path.write_text(SCRIPT)
    return str(path)


def test_the_command_line(script: str, tmp_path: Path) -> None:
    """In a process of its own: status 1 and a table where something remains, a page where it was asked for."""
    page = tmp_path / "sub" / "report.html"
    call = [sys.executable, "-m", "nni_dataparallel", "doctor", f"{script}:faulty", "--html", str(page)]
    done = subprocess.run(call, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1, done.stderr
    assert "attribute lost on the replicas: calls" in done.stdout
    assert f"Written: {page}" in done.stdout
    assert set(done.stderr.split()) == {"building"}
    assert parsed(page.read_text(encoding="utf-8")).open == []


def test_the_exit_status_and_json(script: str, capsys: pytest.CaptureFixture) -> None:
    """0 where nothing remains; --json prints JSON and nothing else; the script's loss is used."""
    assert command.main(["doctor", f"{script}:healthy", "--json", "--replicas", "3"]) == 0
    read = json.loads(capsys.readouterr().out)
    assert (read["replicas"], read["findings"]) == (3, [])
    assert command.main(["doctor", f"{script}:faulty", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["healthy"] is False


@pytest.mark.parametrize(
    ("target", "more", "text"),
    [
        ("{}", [], "does not name a function: script.py:make_model"),
        ("nowhere.py:make", [], "there is no script 'nowhere.py'"),
        ("{}:make", [], "has no function 'make'; it has Net, broken, faulty, healthy, loss"),
        ("{}:broken", [], "broken() raised OSError: no such file: data"),
        ("{}:faulty", ["--replicas", "1"], "there is nothing to compare"),
        ("{}:healthy", ["--replicas", "9"], "9 replicas need at least 9 rows"),
        ("{}:healthy", ["--html", os.devnull + "/report.html"], "cannot write"),
    ],
)
def test_bad_arguments_are_told(script: str, target: str, more: List[str], text: str, capsys: pytest.CaptureFixture) -> None:
    """Status 2 and one line; a traceback with --debug only."""
    target = target.format(script)
    assert command.main(["doctor", target, *more]) == 2
    error = capsys.readouterr().err
    assert text in error
    assert error.count("\n") == 1
    assert command.main(["doctor", target, *more, "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err
