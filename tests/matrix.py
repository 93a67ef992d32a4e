"""Run the step-equivalence tests on every covered NNI release and write down what holds.

    python tests/matrix.py                      # all covered releases, two at a time
    python tests/matrix.py 2.3 2.10.1           # some
    python tests/matrix.py --readme README.md   # and put the table into the README

Each release is installed once into a cache folder (``--cache``, default ``.releases``) without its
dependencies, and tested in a process of its own beside the dependencies of the installed NNI.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Dict, List, Tuple

from cases import is_new
from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn

from nni_dataparallel.fixes import RELEASES, covered_releases

TESTS = Path(__file__).parent
FILES = ["equivalence", "patching", "quantizers", "resume"]
# What the code of a release decides, and not its place or name, is tested on the first release with that code.
KIND_FILES = ["copies", "ddp", "gradient", "numbers", "placement", "shapes_of_use", "state"]
# 2.5 - 2.10.1 are one kind, of which 2.10.1 has the whole suite.
FIRST_OF_THEIR_KIND = ("1.4", "1.5", "1.9", "2.0", "2.2", "2.3", "2.4")
# NNI 3.0 is driven by an evaluator; its wrapper, pruners and distillers have tests of their own.
NEW_FILES = [
    *("equivalence", "patching", "quantizers", "resume", "gradient", "numbers", "placement", "shapes_of_use", "ways_in"),
    *("status", "doctor", "feathermap_toolkits"),
    *("nni3_wrapper", "nni3_edges", "nni3_calibration", "nni3_pruners", "nni3_distillers", "nni3_hidden_states"),
    *("nni3_construction", "nni3_evaluators", "examples", "ddp", "ddp_options", "ddp_pruners", "local_statistics"),
]
# The ways in start many interpreters: one release for each place where NNI keeps its classes (2.10.1 has the whole suite).
WAYS_IN = ("1.4", "1.7", "2.0", "3.0rc1")
PRUNERS = ("2.0", "2.5", "2.10.1")
BEGIN, END = "<!-- matrix: begin -->", "<!-- matrix: end -->"
PRUNERS_BEGIN, PRUNERS_END = "<!-- pruners: begin -->", "<!-- pruners: end -->"
NEW_BEGIN, NEW_END = "<!-- 3.0: begin -->", "<!-- 3.0: end -->"


def install(release: str, cache: Path) -> Path:
    """The folder of an NNI release; installed there once, complete or not at all."""
    folder = cache / release
    if not folder.exists():
        partial = cache / f"{release}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        # Without --upgrade: the wheels of 1.x hold `nni` twice, and it would put the lesser one in the place of the other.
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(partial)]
        subprocess.run([*command, f"nni=={release}"], check=True, stdout=subprocess.DEVNULL)
        partial.rename(folder)
    return folder


def test(release: str, cache: Path) -> Tuple[str, int, Path]:
    """Run the tests on one release; its exit status and report."""
    folder, report = install(release, cache), cache / f"{release}.xml"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
    first = is_new(release) or release in FIRST_OF_THEIR_KIND
    names = FILES + (KIND_FILES if first else [])
    few = (("ways_in", WAYS_IN), ("status", WAYS_IN[:1]), ("pruners", PRUNERS))
    few += (("feathermap_toolkits", ("2.3",)),)
    names += [name for name, releases in few if release in releases]
    if is_new(release):
        names = NEW_FILES
    files = [str(TESTS / f"test_{name}.py") for name in names]
    selected = ["-m", "not once" if first else "not once and not of_a_kind"]
    command = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", f"--junitxml={report}", *selected, *files]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=TESTS.parent, check=False)
    last = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr.strip()[-200:]
    print(f"NNI {release:7} {last}", flush=True)
    if done.returncode:
        print(done.stdout[-6000:], done.stderr[-2000:], flush=True)
    return release, done.returncode, report


Cells = Dict[str, List[int]]
TESTED = {
    "test_replicas_equal_one_device": 0,
    "test_stock_replicas_equal_one_device": 2,
    "test_a_resumed_run_equals_one_that_never_stopped": 4,
    "test_an_export_loads_into_the_plain_model": 6,
    "test_pruned_on_replicas_equals_one_device": 0,
    "test_stock_pruner_on_replicas": 2,
    "test_distilled_on_replicas_equals_one_device": 0,
    "test_stock_distiller_on_replicas": 2,
    "test_ranks_equal_one_device": 8,
    "test_stock_ranks_equal_one_device": 10,
    "test_pruned_or_distilled_on_ranks_equals_one_device": 8,
    "test_stock_pruner_or_distiller_on_ranks": 10,
}
"""Test -> where its count of passed cells stands; the count of all its cells stands behind it."""


def cells(report: Path, pruners: bool = False) -> Cells:
    """Quantizer (or pruner) -> passed and all cells, for each of ``TESTED``."""
    found: Cells = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name, _, parameters = case.get("name", "").partition("[")
        if name not in TESTED or ("prune" in name or "distil" in name) is not pruners:
            continue
        subject = re.sub(r"^(patched-|subclass-)?\d+-|( \(.*)?\]$", "", parameters).partition(":")[0]
        counts = found.setdefault(subject, [0] * 12)
        if not any(child.tag == "skipped" and "pytest.skip" in child.get("type", "") for child in case):
            counts[TESTED[name]] += all(child.tag not in ("failure", "error", "skipped") for child in case)
            counts[TESTED[name] + 1] += 1
    return found


QUANTIZERS = (
    ("QAT", "QAT_Quantizer", "QATQuantizer"),
    *((name, f"{name}Quantizer") for name in ("Lsq", "LsqPlus", "DoReFa", "BNN", "Naive", "Observer", "Ptq")),
)
"""Column -> the quantizers in it."""


DDP = ("2 ranks of DDP", "stock")


def kind_of(release: str) -> str:
    """The release whose code this one has, as far as quantizers go: the first of its kind, or 2.10.1."""
    before = [first for first in FIRST_OF_THEIR_KIND if RELEASES.index(first) <= RELEASES.index(release)]
    return before[-1] if RELEASES.index(release) < RELEASES.index("2.5") else "2.10.1"


def _of(passed: int, every: int, none: str = "-") -> str:
    return f"{passed} of {every}" if every else none


def table(reports: Dict[str, Path]) -> str:
    """The README's table of quantizers, from the reports alone."""
    heads = ["NNI", *(column for column, *_ in QUANTIZERS), "stock: all of these", "resumed", "export loads", *DDP]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for release in RELEASES:
        if release not in reports:
            lines.append(f"| {release} | not run |" + " |" * (len(heads) - 2))
            continue
        found = cells(reports[release])
        sums = [sum(counts[i] for counts in found.values()) for i in range(12)]
        counts = [next((found[name] for name in names if name in found), None) for _, *names in QUANTIZERS]
        equal = ["-" if count is None else _of(*count[:2]) for count in counts]
        more = [_of(*sums[2:4]), _of(*sums[4:6]), _of(*sums[6:8], "NNI has none")]
        more += [_of(*sums[i : i + 2], f"as {kind_of(release)}") for i in (8, 10)]
        lines.append("| " + " | ".join([release, *equal, *more]) + " |")
    return "\n".join(lines)


def compressor_table(reports: Dict[str, Path], releases: Tuple[str, ...], kind: str) -> str:
    """The README's tables of pruners and distillers: one line for each, a column per release."""
    runs = {release: cells(reports[release], pruners=True) for release in releases if release in reports}
    heads = [f"{release}: patched | stock" for release in runs]
    # DDP is tested with the last release of the table.
    heads.append("2 ranks of DDP | stock")
    lines = [f"| {kind} | " + " | ".join(heads) + " |", "|---" * (1 + 2 * len(heads)) + "|"]
    for pruner in sorted({name for run in runs.values() for name in run}):
        counts = [run.get(pruner, [0] * 12) for run in runs.values()]
        pairs = [count[:4] for count in counts] + [counts[-1][8:]]
        lines.append(f"| `{pruner}` | " + " | ".join(f"{_of(*c[:2])} | {_of(*c[2:])}" for c in pairs) + " |")
    return "\n".join(lines)


def write_table(readme: Path, text: str, begin: str, end: str) -> None:
    """Replace what stands between the marks in the README."""
    before, _, rest = readme.read_text(encoding="utf-8").partition(begin)
    _, mark, after = rest.partition(end)
    if not mark:
        raise SystemExit(f"{readme} has no {begin} ... {end}")
    readme.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("releases", nargs="*", help="default: every covered release")
    parser.add_argument("--cache", type=Path, default=Path(".releases"))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--reuse", action="append", default=[], help="take this release's report as an earlier run left it")
    parser.add_argument("--readme", type=Path, help="write the table into this file (needs all releases)")
    options = parser.parse_args()
    options.cache.mkdir(parents=True, exist_ok=True)
    releases: List[str] = options.releases or covered_releases()
    unknown = sorted(set(releases) - set(covered_releases()))
    if unknown:
        parser.error(f"not covered: {', '.join(unknown)}; covered: {', '.join(covered_releases())}")
    if options.readme and set(releases) != set(covered_releases()):
        parser.error("--readme needs a run of all releases")
    cache = options.cache.resolve()
    fresh = [release for release in releases if release not in options.reuse]
    for release in fresh:
        install(release, cache)
    # The longest first, or one core waits for the other in the end.
    fresh.sort(key=lambda release: 2 * is_new(release) + (release in FIRST_OF_THEIR_KIND), reverse=True)
    console = Console(stderr=True)
    bar = Progress(*Progress.get_default_columns(), TimeElapsedColumn(), console=console, disable=not console.is_terminal)
    with bar, ThreadPoolExecutor(options.jobs) as pool:
        results = list(bar.track(pool.map(lambda release: test(release, cache), fresh), len(fresh), description="releases"))
    reports = {release: cache / f"{release}.xml" for release in releases}
    tables = {
        (BEGIN, END): table(reports),
        (PRUNERS_BEGIN, PRUNERS_END): compressor_table(reports, PRUNERS, "pruner"),
        (NEW_BEGIN, NEW_END): compressor_table(reports, ("3.0",), "pruner or distiller"),
    }
    print(*tables.values(), sep="\n\n")
    if options.readme:
        for (begin, end), text in tables.items():
            write_table(options.readme, text, begin, end)
    failed = [release for release, status, _ in results if status]
    print(f"{len(results) - len(failed)} passed, {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
