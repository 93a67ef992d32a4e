"""Run the step-equivalence tests on every covered NNI release and write down what holds.

    python tests/matrix.py                      # all covered releases, two at a time
    python tests/matrix.py 2.3 2.10.1           # some
    python tests/matrix.py --write              # and put the tables into README.md and docs/

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
from typing import Any, Dict, List, Tuple

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
PLACES = {"summary": "README.md", "matrix": "docs/releases.md", "pruners": "docs/pruners.md", "3.0": "docs/pruners.md"}
"""Table -> the file in which it stands, between <!-- table: begin --> and <!-- table: end -->."""


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
    """The table of quantizers, from the reports alone."""
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
    """The tables of pruners and distillers: one line for each, a column per release."""
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


LINES = (("1.4 - 1.9", "1.4"), ("2.0 - 2.4", "2.0"), ("2.5 - 2.10.1, 3.0rc1", "2.5"), ("3.0", "3.0"))
"""Releases that are summed up, and the first of them."""


def _counts(text: str) -> List[Dict[str, Any]]:
    """The rows of a table, heading -> "passed of all" as two numbers; headings that are there twice have a number."""
    rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in text.splitlines() if not line.startswith("|---")]
    heads = [f"{head} {rows[0][:i].count(head)}" if head in rows[0][:i] else head for i, head in enumerate(rows[0])]
    return [
        {head: tuple(map(int, cell.split(" of "))) if re.fullmatch(r"\d+ of \d+", cell) else cell for head, cell in zip(heads, row)}
        for row in rows[1:]
    ]


def _sum(rows: List[Dict[str, Any]], *heads: str) -> str:
    pairs = [row[head] for row in rows for head in heads if isinstance(row.get(head), tuple)]
    return _of(sum(passed for passed, _ in pairs), sum(every for _, every in pairs))


def summary(quantizers: str, pruners: str, new: str) -> str:
    """The README's table: the sums of the three others."""
    heads = ("NNI", "trained with", "on 2 - 4 replicas", "stock", "stopped and resumed", "on 2 ranks of DDP", "stock")
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    columns = [column for column, *_ in QUANTIZERS]
    groups: Dict[str, List[Dict[str, Any]]] = {}
    for row in _counts(quantizers):
        first = [name for name, since in LINES if RELEASES.index(since) <= RELEASES.index(row["NNI"])]
        groups.setdefault(LINES[2][0] if row["NNI"] == "3.0rc1" else first[-1], []).append(row)
    for name, rows in groups.items():
        ours = (_sum(rows, *columns), _sum(rows, "stock: all of these"), _sum(rows, "resumed"))
        lines.append("| " + " | ".join((name, "quantizers", *ours, *(_sum(rows, head) for head in (DDP[0], "stock")))) + " |")
    for name, kind, text, ddp_stock in (
        (", ".join(PRUNERS), "pruners", pruners, f"stock {len(PRUNERS)}"),
        ("3.0", "pruners, distillers", new, "stock 1"),
    ):
        rows = _counts(text)
        patched = [head for head in rows[0] if head.endswith(": patched")]
        stock = [head for head in rows[0] if head.startswith("stock") and head != ddp_stock]
        cells = (_sum(rows, *patched), _sum(rows, *stock), "-", _sum(rows, DDP[0]), _sum(rows, ddp_stock))
        lines.append("| " + " | ".join((name, kind, *cells)) + " |")
    return "\n".join(lines)


def read_table(name: str, root: Path = TESTS.parent) -> str:
    """What stands between the marks of a table."""
    text = (root / PLACES[name]).read_text(encoding="utf-8")
    found = re.search(rf"<!-- {re.escape(name)}: begin -->\n(.*?)\n<!-- {re.escape(name)}: end -->", text, re.DOTALL)
    if not found:
        raise SystemExit(f"{PLACES[name]} has no <!-- {name}: begin --> ... <!-- {name}: end -->")
    return found[1]


def write_table(name: str, table: str, root: Path = TESTS.parent) -> None:
    """Replace what stands between the marks of a table."""
    file = root / PLACES[name]
    old, begin = read_table(name, root), f"<!-- {name}: begin -->\n"
    file.write_text(file.read_text(encoding="utf-8").replace(begin + old, begin + table), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("releases", nargs="*", help="default: every covered release")
    parser.add_argument("--cache", type=Path, default=Path(".releases"))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--reuse", action="append", default=[], help="take this release's report as an earlier run left it")
    parser.add_argument("--write", action="store_true", help="write the tables into README.md and docs/ (needs all releases)")
    options = parser.parse_args()
    options.cache.mkdir(parents=True, exist_ok=True)
    releases: List[str] = options.releases or covered_releases()
    unknown = sorted(set(releases) - set(covered_releases()))
    if unknown:
        parser.error(f"not covered: {', '.join(unknown)}; covered: {', '.join(covered_releases())}")
    if options.write and set(releases) != set(covered_releases()):
        parser.error("--write needs a run of all releases")
    cache = options.cache.resolve()
    fresh = [release for release in releases if release not in options.reuse]
    # The longest first, or one core waits for the other in the end.
    fresh.sort(key=lambda release: 2 * is_new(release) + (release in FIRST_OF_THEIR_KIND), reverse=True)
    console = Console(stderr=True)
    bar = Progress(*Progress.get_default_columns(), TimeElapsedColumn(), console=console, disable=not console.is_terminal)
    with bar, ThreadPoolExecutor(options.jobs) as pool:
        results = list(bar.track(pool.map(lambda release: test(release, cache), fresh), len(fresh), description="releases"))
    reports = {release: cache / f"{release}.xml" for release in releases}
    tables = {
        "matrix": table(reports),
        "pruners": compressor_table(reports, PRUNERS, "pruner"),
        "3.0": compressor_table(reports, ("3.0",), "pruner or distiller"),
    }
    if options.write:
        tables["summary"] = summary(*tables.values())
        for name, text in tables.items():
            write_table(name, text)
    print(*tables.values(), sep="\n\n")
    failed = [release for release, status, _ in results if status]
    print(f"{len(results) - len(failed)} passed, {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
