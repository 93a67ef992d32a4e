"""The texts: their links lead somewhere, what they name exists, their code runs, their sums are right."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Set

import pytest
import torch
from conftest import IS_MODERN, IS_NEW, RELEASE
from packaging.specifiers import SpecifierSet
from torch import nn

import nni_dataparallel

ROOT = Path(__file__).parent.parent
TEXTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
each_text = pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def prose(path: Path) -> str:
    """A text without its blocks of code."""
    return FENCE.sub("", path.read_text(encoding="utf-8"))


def anchors(path: Path) -> Set[str]:
    """The fragments that GitHub makes of a text's headings."""
    headings = re.findall(r"^#+ (.*)$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.once
@each_text
def test_links_lead_somewhere(path: Path) -> None:
    """Files, and headings in them."""
    broken = []
    for link in LINK.findall(prose(path)):
        if re.match(r"https?://|mailto:", link):
            continue
        file, _, fragment = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        if not target.exists() or (fragment and fragment not in anchors(target)):
            broken.append(link)
    assert not broken


@pytest.mark.once
@each_text
def test_what_is_named_exists(path: Path) -> None:
    """Files of this repository, in prose and in commands."""
    named = re.findall(r"(?<![\w/.])(?:tests|examples|docs|src|\.github|\.ci)/[\w./]*\w", path.read_text(encoding="utf-8"))
    assert not [name for name in named if not (ROOT / name).exists()]


@pytest.mark.once
def test_every_text_is_found() -> None:
    """Each of docs/ is linked from the README, which stays short."""
    readme = ROOT / "README.md"
    links = set(LINK.findall(prose(readme)))
    assert {f"docs/{path.name}" for path in TEXTS if path.parent.name == "docs"} <= links
    assert readme.read_text(encoding="utf-8").count("\n") <= 180
    assert all(path.read_text(encoding="utf-8").count("\n") <= 250 for path in TEXTS if path.parent.name == "docs")


@pytest.mark.once
def test_the_list_of_files_is_whole() -> None:
    """CONTRIBUTING.md says of every file of the package what it is for, and of no other."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    listing = next(block for _, _, block in FENCE.findall(text) if block.startswith("src/nni_dataparallel/"))
    named = re.findall(r"\w+\.(?:py|pth)", " ".join(re.findall(r"^ +((?:\w+\.(?:py|pth)(?:, )?)+)", listing, re.MULTILINE)))
    there = [path.name for path in (ROOT / "src").rglob("*.p*") if path.suffix in (".py", ".pth")]
    assert sorted(named) == sorted(name for name in there if name != "__init__.py")


@pytest.mark.once
def test_quoted_code_stands_there() -> None:
    """A block of CONTRIBUTING.md that begins with a file's name is in that file, as it is."""
    quoted = [block.code.partition("\n") for block in blocks(ROOT / "CONTRIBUTING.md")]
    assert len(quoted) == 3
    for place, _, code in quoted:
        assert code in (ROOT / place.lstrip("# ")).read_text(encoding="utf-8"), place


@pytest.mark.once
def test_the_readme_sums_up_the_tables() -> None:
    """Its figures are the sums of those in docs/."""
    pytest.importorskip("rich")
    import matrix

    tables = [matrix.read_table(name) for name in ("matrix", "pruners", "3.0")]
    assert matrix.read_table("summary") == matrix.summary(*tables)
    quantizers = tables[0].splitlines()[2:]
    patched = sum(int(count) for row in quantizers for count in re.findall(r"(\d+) of", " | ".join(row.split(" | ")[1:9])))
    assert sum(int(row.split(" | ")[2].split()[0]) for row in matrix.read_table("summary").splitlines()[2:6]) == patched


@pytest.mark.once
def test_the_commands_have_their_marks() -> None:
    """.ci/run takes them from there."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for command, part in (("demo", "nni_dataparallel demo"), ("tests", "-m pytest")):
        assert re.search(rf"^<!-- command: {command} -->\n```bash\n[^`]*{part}\n```$", text, re.MULTILINE)


class Block(NamedTuple):
    """A block of Python in a text; ``releases`` are those on which it runs as it stands there, after the blocks before it."""

    place: str
    code: str
    releases: str


def blocks(path: Path) -> Iterator[Block]:
    text = path.read_text(encoding="utf-8")
    for found in FENCE.finditer(text):
        if found[2] == "python":
            mark = re.search(r"<!-- runs on: (\S+) -->\n$", text[: found.start()])
            yield Block(f"{path.name}:{text[: found.start()].count(chr(10)) + 2}", found[3], mark[1] if mark else "")


@pytest.mark.once
@each_text
def test_code_compiles(path: Path) -> None:
    """Also where it needs GPUs, or another process."""
    for block in blocks(path):
        if path.name != "CONTRIBUTING.md":  # which quotes parts of files
            compile(block.code, block.place, "exec")


def names() -> Dict[str, Any]:
    """What the texts take as given: a script's model, its data and its quantizer."""
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    x, y = torch.randn(8, 1, 8, 8), torch.arange(8) % 3
    given: Dict[str, Any] = {"torch": torch, "model": model, "x": x, "loader": [(x, y), (x, y)]}
    given["training_step"] = lambda batch, net: nn.functional.cross_entropy(net(batch[0]), batch[1])
    if not IS_NEW:
        types = ["weight", "input", "output"] if IS_MODERN else ["weight"]
        given["config_list"] = [{"op_types": ["Conv2d", "Linear"], "quant_types": types, "quant_bits": 8}]
        given["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.05)
    return given


def trained(given: Dict[str, Any]) -> None:
    """One step with the quantizer, in DataParallel: where a checkpoint is written."""
    quantizer = nni_dataparallel.QAT_Quantizer(given["model"], given["config_list"], given["optimizer"], dummy_input=given["x"])
    quantizer.compress()
    given.update(quantizer=quantizer, model=nn.DataParallel(given["model"]))
    given["training_step"](given["loader"][0], given["model"]).backward()
    given["optimizer"].step()


RUNNING: List[Path] = [path for path in TEXTS if any(block.releases for block in blocks(path))]


@pytest.mark.parametrize("path", RUNNING, ids=lambda path: path.name)
@pytest.mark.filterwarnings("ignore::nni_dataparallel.NNIDataParallelWarning")
def test_code_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks that are marked for the installed NNI, each with a script's model."""
    monkeypatch.chdir(tmp_path)
    fitting = [b for b in blocks(path) if b.releases and SpecifierSet(b.releases).contains(RELEASE, prereleases=True)]
    if not fitting:
        pytest.skip(f"no code for NNI {RELEASE}")
    for block in fitting:
        torch.manual_seed(0)
        given = names()
        if path.name == "checkpoints.md":
            trained(given)
        exec(compile(block.code, block.place, "exec"), given)
