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
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Dict, List, Tuple

from nni_dataparallel.fixes import RELEASES, covered_releases

TESTS = Path(__file__).parent
FILES = ["equivalence", "gradient", "patching", "shapes_of_use", "ways_in"]
# The first release of each version of QAT_Quantizer's code; slower tests run on these.
FIRST_OF_THEIR_KIND = {"2.0": ["state"], "2.2": ["state"], "2.4": ["state"], "2.5": ["state"]}
BEGIN, END = "<!-- matrix: begin -->", "<!-- matrix: end -->"


def install(release: str, cache: Path) -> Path:
    """The folder of an NNI release; installed there once, complete or not at all."""
    folder = cache / release
    if not folder.exists():
        partial = cache / f"{release}.partial"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target", str(partial)]
        subprocess.run([*command, f"nni=={release}"], check=True, stdout=subprocess.DEVNULL)
        partial.rename(folder)
    return folder


def test(release: str, cache: Path) -> Tuple[str, int, Path]:
    """Run the tests on one release; its exit status and report."""
    folder, report = install(release, cache), cache / f"{release}.xml"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
    files = [str(TESTS / f"test_{name}.py") for name in FILES + FIRST_OF_THEIR_KIND.get(release, [])]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={report}", *files]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=TESTS.parent, check=False)
    last = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr.strip()[-200:]
    print(f"NNI {release:7} {last}", flush=True)
    if done.returncode:
        print(done.stdout[-6000:], done.stderr[-2000:], flush=True)
    return release, done.returncode, report


def cells(report: Path) -> Dict[str, Tuple[int, int, int, int]]:
    """Case -> cells equal with patched NNI, all such cells, cells equal with stock NNI, all such cells."""
    found: Dict[str, Tuple[int, int, int, int]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name, _, parameters = case.get("name", "").partition("[")
        passed = all(child.tag not in ("failure", "error", "skipped") for child in case)
        identity = re.sub(r"^(patched-|subclass-)?\d+-|\]$", "", parameters)
        equal, total, stock, stock_total = found.get(identity, (0, 0, 0, 0))
        if name == "test_replicas_equal_one_device":
            found[identity] = equal + passed, total + 1, stock, stock_total
        elif name == "test_stock_replicas_equal_one_device":
            found[identity] = equal, total, stock + passed, stock_total + 1
    return found


def table(reports: Dict[str, Path]) -> str:
    """The README's table, from the reports alone."""
    lines = [
        "| NNI | quantizer | cases | patched: equal cells | stock: equal cells |",
        "|---|---|---|---|---|",
    ]
    for release in RELEASES:
        if release not in reports:
            why = "not run" if release in covered_releases() else "not covered yet"
            lines.append(f"| {release} | - | {why} | | |")
            continue
        by_case = cells(reports[release])
        equal, total = (sum(entry[i] for entry in by_case.values()) for i in (0, 1))
        stock, stock_total = (sum(entry[i] for entry in by_case.values()) for i in (2, 3))
        lines.append(f"| {release} | `QAT_Quantizer` | {len(by_case)} | {equal} of {total} | {stock} of {stock_total} |")
    return "\n".join(lines)


def write_table(readme: Path, text: str) -> None:
    """Replace what stands between the marks in the README."""
    before, _, rest = readme.read_text(encoding="utf-8").partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise SystemExit(f"{readme} has no {BEGIN} ... {END}")
    readme.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("releases", nargs="*", help="default: every covered release")
    parser.add_argument("--cache", type=Path, default=Path(".releases"))
    parser.add_argument("--jobs", type=int, default=2)
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
    for release in releases:
        install(release, cache)
    with ThreadPoolExecutor(options.jobs) as pool:
        results = list(pool.map(lambda release: test(release, cache), releases))
    reports = {release: report for release, _, report in results}
    print(table(reports))
    if options.readme:
        write_table(options.readme, table(reports))
    failed = [release for release, status, _ in results if status]
    print(f"{len(results) - len(failed)} passed, {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
