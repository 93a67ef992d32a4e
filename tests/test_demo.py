"""The demo: real digits, three runs, a table and a picture."""

from __future__ import annotations

from pathlib import Path

import pytest
from cases import cases_for
from conftest import RELEASE

from nni_dataparallel import __main__ as command

pytestmark = pytest.mark.skipif(not cases_for(RELEASE), reason=f"NNI {RELEASE} has no QAT_Quantizer")
pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")
pytest.importorskip("rich")


def test_the_demo_trains_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Patched equals one device (exit status 0), virtual devices are said plainly, the picture is a PNG."""
    picture = tmp_path / "sub" / "range.png"
    assert command.main(["demo", "--epochs", "1", "--replicas", "3", "--output", str(picture)]) == 0
    shown = capsys.readouterr().out
    assert "virtual devices" in shown
    assert "equal state tensors" in shown
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--replicas", "1"], "at least 2 replicas"),
        (["--epochs", "0"], "and 1 epoch, not 4 and 0"),
        (["--output", "range.gif"], "must be a .png or .svg file, not 'range.gif'"),
    ],
)
def test_bad_arguments_are_told(arguments: list, text: str, capsys: pytest.CaptureFixture) -> None:
    """Exit status 2 and a sentence, no traceback."""
    assert command.main(["demo", *arguments]) == 2
    assert text in capsys.readouterr().err
