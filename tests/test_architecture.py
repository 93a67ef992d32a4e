"""The house: imports run downwards, files stay small, nothing speaks of where it was made."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Dict, List, Set

import pytest

import nni_dataparallel
from nni_dataparallel import fixes

PACKAGE = Path(nni_dataparallel.__file__).parent
# From the ground up. A file imports from floors below its own, or earlier on its own floor.
FLOORS: List[Set[str]] = [
    {"descriptions", "environment", "files", "hook", "notices", "rollback"},
    {"given", "patching", "releases", "statistics", "ownership", "rendezvous"},
    {"group", "ranks", "virtual"},
    {"worker", "ddp"},
    {"replicas"},
    {"parallel", "recording", "rehearsal", "sharing"},
    {"nni2", "nni3", "feathermap"},
    {"fixes", "checkpoints"},
    {"api", "subclasses"},
    {"doctor"},
    {"overview", "startup"},
    {"auto", "__init__"},
    {"demo"},
    {"cli"},
    {"__main__"},
]
FLOOR_OF: Dict[str, int] = {name: level for level, names in enumerate(FLOORS) for name in names}
FILES = sorted(PACKAGE.rglob("*.py"))


def part(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].replace(".py", "")


def imported(path: Path) -> Set[str]:
    """The package's own parts that a file imports, wherever in the file."""
    found = set()
    depth = len(path.relative_to(PACKAGE).parts) - 1
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level == depth + 1:
            found |= {node.module.split(".")[0]} if node.module else {alias.name for alias in node.names}
    return {name if name in FLOOR_OF else "__init__" for name in found}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_run_downwards_only(path: Path) -> None:
    """A file knows the floors below it and nothing above."""
    own = FLOOR_OF[part(path)]
    allowed = {"__init__"} if part(path) == "__main__" else set()
    wrong = {name for name in imported(path) if FLOOR_OF[name] >= own and name not in allowed}
    assert not wrong


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_stay_small_and_explained(path: Path) -> None:
    """One idea per file: a docstring, and at most 300 lines."""
    text = path.read_text(encoding="utf-8")
    assert ast.get_docstring(ast.parse(text))
    assert text.count("\n") <= 300


def test_the_machinery_knows_neither_torch_nor_nni() -> None:
    """patching.py could patch anything; replicas.py knows torch, not NNI."""
    names = {n.name for n in ast.walk(ast.parse((PACKAGE / "patching.py").read_text())) if isinstance(n, ast.alias)}
    assert not {name for name in names if name.split(".")[0] in ("torch", "nni")}
    assert "import nni" not in (PACKAGE / "replicas.py").read_text()


def test_public_names_exist() -> None:
    """Everything in __all__ can be imported."""
    for name in nni_dataparallel.__all__:
        assert getattr(nni_dataparallel, name)
    assert not set(fixes.QUANTIZERS) & set(nni_dataparallel.__all__)  # these depend on the installed NNI
    assert set(fixes.QUANTIZERS) < set(dir(nni_dataparallel))
