"""The built wheel, installed into a virtual environment of its own: what only an installation has.

The environment sees torch and NNI where this interpreter sees them, and this package in its own site-packages only.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import sysconfig
import time
import venv
import zipfile
from pathlib import Path
from typing import List, NamedTuple

import pytest
from conftest import RELEASE

import nni_dataparallel
from nni_dataparallel import fixes

ROOT = Path(__file__).parent.parent
WINDOWS = os.name == "nt"

CHILD = """
import multiprocessing, sys
def patched(queue):
    import HOME
    import nni_dataparallel
    queue.put((nni_dataparallel.__file__, nni_dataparallel.is_patched()))
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=patched, args=(queue,))
    child.start()
    print(*queue.get(), "torch" in sys.modules)
    child.join()
""".replace("HOME", fixes.home_of(RELEASE))


class Environment(NamedTuple):
    """A virtual environment with the wheel in it."""

    wheel: Path
    site: Path
    scripts: Path

    def run(self, *arguments: str, program: str = "python", **variables: str) -> subprocess.CompletedProcess:
        """A program of the environment's, without this interpreter's PYTHONPATH."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "NNI_DATAPARALLEL"))}
        command = [str(self.scripts / program), *arguments]
        return subprocess.run(command, capture_output=True, text=True, env={**kept, **variables}, timeout=300, check=False)


def build(kind: str, folder: Path) -> Path:
    """Build what pip would build, by the same backend."""
    code = f"import hatchling.build as backend; print(backend.build_{kind}({str(folder)!r}))"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)
    (built,) = folder.iterdir()
    return built


def environment(folder: Path, wheel: Path) -> Environment:
    """Install ``wheel`` into a fresh environment."""
    venv.create(folder, with_pip=False, symlinks=not WINDOWS)
    scheme = "nt" if WINDOWS else "posix_prefix"
    purelib, scripts = (
        Path(sysconfig.get_path(name, scheme, {"base": folder, "platbase": folder})) for name in ("purelib", "scripts")
    )
    python = str(scripts / "python")
    command = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(command, check=True, capture_output=True)
    outer = [path for path in sys.path if Path(path).is_dir() and Path(path).resolve() != (ROOT / "src").resolve()]
    (purelib / "outer.pth").write_text("\n".join(outer))  # behind the environment's own
    return Environment(wheel, purelib, scripts)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """The wheel, installed."""
    pytest.importorskip("hatchling", reason="builds the wheel")
    base = tmp_path_factory.mktemp("wheel")
    return environment(base / "environment", build("wheel", base / "dist"))


def test_the_wheel_holds_what_it_should(installed: Environment) -> None:
    """Types, the hook at its root and nowhere else, every source file, no tests."""
    names = set(zipfile.ZipFile(installed.wheel).namelist())
    source = ROOT / "src"
    expected = {str(path.relative_to(source).as_posix()) for path in source.rglob("*.py")}
    own = {name for name in names if ".dist-info/" not in name}
    assert own == expected | {"nni_dataparallel/py.typed", "nni_dataparallel.pth"}


def test_the_console_script_is_the_module(installed: Environment) -> None:
    """Same output, under its own name."""
    by_script, by_module = (
        installed.run("--version", program="nni-dataparallel"),
        installed.run("-m", "nni_dataparallel", "--version"),
    )
    assert by_script.stdout == by_module.stdout == f"nni_dataparallel {nni_dataparallel.__version__}\n"
    assert "usage: nni-dataparallel run" in installed.run("run", "--help", program="nni-dataparallel").stdout


@pytest.mark.parametrize("way", ["run", "variable"])
def test_spawned_processes_are_patched(installed: Environment, tmp_path: Path, way: str) -> None:
    """Not a line of the script knows of us; the parent, which needs neither, imports neither torch nor NNI."""
    (tmp_path / "train.py").write_text(CHILD)
    script = str(tmp_path / "train.py")
    if way == "run":
        result = installed.run("run", script, program="nni-dataparallel")
    else:
        result = installed.run(script, NNI_DATAPARALLEL="1")
    place, *rest = result.stdout.strip().splitlines()[-1].rsplit(" ", 2)
    assert (Path(place).parent.parent, rest) == (installed.site, ["True", "False"]), result.stderr


def test_an_interpreter_without_the_variable_pays_nothing(installed: Environment) -> None:
    """It imports nothing, and the line takes a small part of a millisecond."""
    loaded = "import sys; print([name for name in sys.modules if 'nni' in name])"
    assert installed.run("-c", loaded).stdout.strip() == "[]"
    assert "nni_dataparallel.startup" in installed.run("-c", loaded, NNI_DATAPARALLEL="1").stdout
    line = (installed.site / "nni_dataparallel.pth").read_text()
    assert "NNI_DATAPARALLEL" not in os.environ
    times: List[float] = []
    for _ in range(200):
        start = time.perf_counter()
        exec(line, {})
        times.append(time.perf_counter() - start)
    assert statistics.median(times) < 0.5e-3


def test_a_leftover_hook_is_silent(installed: Environment, tmp_path: Path) -> None:
    """The package is gone, its .pth file is not: nothing at all without the variable, one line with it."""
    away = installed.site / "nni_dataparallel"
    away.rename(tmp_path / "away")
    try:
        silent, told = (installed.run("-c", "pass", NNI_DATAPARALLEL=value) for value in ("", "1"))
    finally:
        (tmp_path / "away").rename(away)
    assert (silent.returncode, silent.stderr) == (0, "")
    assert told.returncode == 0
    assert told.stderr.count("\n") <= 1  # none where this interpreter has the package, too


def test_an_editable_installation_has_the_hook_too(tmp_path: Path) -> None:
    """What `pip install -e .` unpacks: its path file comes before the hook that needs it."""
    pytest.importorskip("hatchling", reason="builds the wheel")
    names = zipfile.ZipFile(build("editable", tmp_path / "dist")).namelist()
    paths = sorted(name for name in names if name.endswith(".pth"))
    assert len(paths) == 2
    assert paths[1] == "nni_dataparallel.pth"


def test_the_source_archive_builds_the_same(tmp_path: Path) -> None:
    """With tests, examples and what the build needs."""
    pytest.importorskip("hatchling", reason="builds the archive")
    import tarfile

    with tarfile.open(build("sdist", tmp_path / "dist")) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    needed = ("pyproject.toml", "README.md", "LICENSE", "tests/test_wheel.py", "examples/comparison/methods.py")
    assert {*needed, "src/nni_dataparallel/nni_dataparallel.pth", "src/nni_dataparallel/py.typed"} <= names
