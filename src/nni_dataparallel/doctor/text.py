"""A diagnosis in the terminal: a table of ``rich``, or plain text."""

from __future__ import annotations

import textwrap
from typing import Any, Dict, List, Tuple

from .findings import Finding, Results
from .remedies import PATCH

__all__ = ["heading", "plain_text", "rich_table", "shortened"]

WIDTH = 100
MOST = 6  # of one kind: a big model has a row for each of its layers
TITLES = {"remains": "Remains with the patch", "repaired": f"Repaired by the patch ({PATCH})", "note": "Worth knowing"}
ALONE = {**TITLES, "remains": "Found"}


def heading(diagnosis: Results) -> str:
    """What was examined, in a line."""
    nni = f"NNI {diagnosis.nni}" if diagnosis.nni else "no NNI"
    return f"{diagnosis.model} on {diagnosis.replicas} virtual devices, {nni}, torch {diagnosis.torch}"


def losses(diagnosis: Results) -> str:
    """The loss of each run, in a line."""
    return "; ".join(f"{run}: {'failed' if loss is None else f'{loss:.6g}'}" for run, loss in diagnosis.losses.items())


def shortened(findings: List[Finding]) -> List[Tuple[Finding, int]]:
    """The findings, a few of each kind; and with the last of a kind how many more there are."""
    groups: Dict[str, List[Finding]] = {}
    for finding in findings:
        groups.setdefault(finding.kind, []).append(finding)
    shown = []
    for group in groups.values():
        kept = group if len(group) <= MOST else group[: MOST - 1]
        shown += [(finding, len(group) - len(kept) if finding is kept[-1] else 0) for finding in kept]
    return shown


def titles(diagnosis: Results) -> Dict[str, str]:
    """Status -> heading."""
    return TITLES if diagnosis.with_patch else ALONE


def plain_text(diagnosis: Results) -> str:
    """A diagnosis for a file, a pipe, or a terminal without ``rich``."""
    lines = [heading(diagnosis)]
    for status, title in titles(diagnosis).items():
        findings = diagnosis.of(status)
        if not findings:
            continue
        lines += ["", f"{title}:"]
        remedy = ""
        for finding, more in shortened(findings):
            lines += _wrapped(f"{finding.where}: {finding.what}", "  ", "    ")
            lines += _wrapped(finding.seen, "    ", "    ")
            if finding.place:
                lines.append(f"    at {finding.place}: {finding.code}")
            if status != "repaired" and finding.remedy != remedy:
                lines += _wrapped(f"-> {finding.remedy}", "    ", "       ")
            remedy = finding.remedy
            if more:
                lines.append(f"  ... and {more} more modules with this (--json or --html lists them)")
    if diagnosis.losses:
        lines += ["", f"loss of the step{diagnosis.conditions}: {losses(diagnosis)}"]
    return "\n".join([*lines, diagnosis.verdict])


def _wrapped(text: str, first: str, further: str) -> List[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=further, break_long_words=False)


def rich_table(diagnosis: Results) -> Any:
    """A diagnosis as a ``rich`` renderable."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    parts: List[Any] = [Text(heading(diagnosis), style="bold")]
    colors = {"remains": "red", "repaired": "green", "note": "cyan"}
    for status, title in titles(diagnosis).items():
        findings = diagnosis.of(status)
        if not findings:
            continue
        table = Table(title=Text(title, style=f"bold {colors[status]}"), title_justify="left", expand=True)
        table.show_lines = status != "repaired"
        table.add_column("module", ratio=2, overflow="fold")
        table.add_column("what", ratio=4, overflow="fold")
        table.add_column("seen", ratio=5, overflow="fold")
        if status != "repaired":
            table.add_column("remedy", ratio=5, overflow="fold")
        for finding, more in shortened(findings):
            seen = Text(finding.seen)
            if finding.place:
                seen.append(f"\n{finding.place}: {finding.code}", style="yellow")
            cells = [Text(finding.where), Text(finding.what), seen]
            table.add_row(*cells, *([Text(finding.remedy)] if status != "repaired" else []))
            if more:
                table.add_row(Text(f"and {more} more"), Text("the same (--json or --html lists them)"))
        parts.append(table)
    if diagnosis.losses:
        parts.append(Text(f"loss of the step{diagnosis.conditions}: {losses(diagnosis)}"))
    parts.append(Text(diagnosis.verdict, style="bold green" if diagnosis.healthy else "bold red"))
    return Group(*parts)
