"""A diagnosis as one HTML page: no script, no font, no picture from elsewhere; it opens from a file."""

from __future__ import annotations

from html import escape
from typing import Callable, List, Optional, Tuple

from .findings import Finding, Range, Results
from .text import heading, titles

__all__ = ["page"]

MOST_RANGES = 200
_COLUMNS = (("module", 14), ("what", 24), ("seen", 32), ("remedy", 30))
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem;
color: #1b1f24; background: #fff }
h1 { font-size: 1.4rem; margin-bottom: .2rem } h2 { font-size: 1.1rem; margin-top: 2rem }
.what { color: #57606a; margin-top: 0 } .verdict { padding: .7rem 1rem; border-left: 5px solid; font-weight: 600 }
.good { border-color: #1a7f37; background: #eefbf1 } .bad { border-color: #cf222e; background: #fff1f0 }
table { border-collapse: collapse; width: 100% } th, td { text-align: left; vertical-align: top; padding: .45rem .6rem;
border-bottom: 1px solid #d8dee4; overflow-wrap: anywhere } th { color: #57606a; font-weight: 600; font-size: .85rem }
td:first-child, code { font-family: ui-monospace, monospace; font-size: .9em } .place { color: #9a6700; display: block }
.more { color: #57606a } .legend span { margin-right: 1.5rem } .legend i { display: inline-block; width: 1.1rem; height: .6rem;
margin-right: .4rem } .wide { overflow-x: auto } svg text { font: 12px system-ui, sans-serif; fill: #1b1f24 }
"""
_RUNS = (
    ("one_device", "one device", "#1f77b4"),
    ("stock", "replicas, stock", "#d62728"),
    ("patched", "replicas, patched", "#2ca02c"),
)
_LEFT, _PLOT, _RIGHT, _BAR = 270, 560, 190, 14


def page(diagnosis: Results) -> str:
    """The page's text; everything in it that is the user's is escaped."""
    mood = "good" if diagnosis.healthy else "bad"
    body = [f"<h1>DataParallel and {_text(diagnosis.model)}</h1>", f'<p class="what">{_text(heading(diagnosis))}</p>']
    body.append(f'<p class="verdict {mood}">{_text(diagnosis.verdict)}</p>')
    for status, title in titles(diagnosis).items():
        findings = diagnosis.of(status)
        if findings:
            body += [f"<h2>{_text(title)}</h2>", _table(findings, status != "repaired")]
    if diagnosis.losses:
        rows = "".join(
            f"<tr><td>{_text(run)}</td><td>{'failed' if loss is None else f'{loss:.8g}'}</td></tr>"
            for run, loss in diagnosis.losses.items()
        )
        body += [f"<h2>Loss of the step{_text(diagnosis.conditions)}</h2>", f"<table>{rows}</table>"]
    if diagnosis.ranges:
        body += ["<h2>Tracked ranges after the step</h2>", _legend(diagnosis), f'<div class="wide">{_drawing(diagnosis)}</div>']
        if len(diagnosis.ranges) > MOST_RANGES:
            body.append(f'<p class="more">The first {MOST_RANGES} of {len(diagnosis.ranges)} ranges are drawn.</p>')
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>DataParallel and {_text(diagnosis.model)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def _text(value: object) -> str:
    return escape(str(value), quote=True)


def _table(findings: List[Finding], with_remedy: bool) -> str:
    columns = _COLUMNS if with_remedy else _COLUMNS[:-1]
    rows = []
    for finding in findings:
        place = f'<span class="place"><code>{_text(finding.place)}: {_text(finding.code)}</code></span>' if finding.place else ""
        name = f"<b>{_text(finding.title)}</b>" + (f"<br><code>{_text(', '.join(finding.names))}</code>" if finding.names else "")
        cells = (_text(finding.where), name, _text(finding.seen) + place, _text(finding.remedy))
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells[: len(columns)]) + "</tr>")
    head = "".join(f'<th style="width: {width}%">{name}</th>' for name, width in columns)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _runs(diagnosis: Results) -> List[Tuple[str, str, str]]:
    return [run for run in _RUNS if run[0] != "patched" or diagnosis.with_patch]


def _legend(diagnosis: Results) -> str:
    return (
        '<p class="legend">' + "".join(f'<span><i style="background: {c}"></i>{n}</span>' for _, n, c in _runs(diagnosis)) + "</p>"
    )


def _drawing(diagnosis: Results) -> str:
    """Bars from min to max: one group per range, one bar per run, each group on its own scale."""
    runs = _runs(diagnosis)
    height = len(runs) * _BAR + 22
    shown = diagnosis.ranges[:MOST_RANGES]
    width, total = _LEFT + _PLOT + _RIGHT, height * len(shown) + 10
    parts = [f'<svg role="img" viewBox="0 0 {width} {total}" width="{width}" height="{total}" aria-label="tracked ranges">']
    for i, one in enumerate(shown):
        parts += _group(one, runs, i * height + 10, height)
    return "\n".join([*parts, "</svg>"])


def _group(one: Range, runs: List[Tuple[str, str, str]], top: int, height: int) -> List[str]:
    ends = [getattr(one, run) for run, _, _ in runs]
    known: List[float] = [end for pair in ends if pair is not None for end in pair if abs(end) < float("inf")]
    low, high = min([0.0, *known]), max([0.0, *known])
    span = (high - low) or 1.0

    def x(value: float) -> float:
        return _LEFT + _PLOT * (min(max(value, low), high) - low) / span

    name = one.name.replace("tracked_min_", "").replace("_tracked_min", "").replace("_min", "").replace("min_", "").strip("_")
    label = f"{one.module}: {name}" if one.module else name
    short = label if len(label) <= 38 else f"...{label[-36:]}"
    middle = top + len(runs) * _BAR / 2 + 4
    parts = [f'<text x="{_LEFT - 12}" y="{middle:.1f}" text-anchor="end"><title>{_text(label)}</title>{_text(short)}</text>']
    parts.append(f'<line x1="{x(0):.1f}" x2="{x(0):.1f}" y1="{top - 3}" y2="{top + height - 18}" stroke="#8c959f"/>')
    for row, ((_, run, color), pair) in enumerate(zip(runs, ends)):
        parts.append(_bar(run, color, pair, x, top + row * _BAR))
    return parts


def _bar(run: str, color: str, pair: Optional[Tuple[float, float]], x: Callable[[float], float], top: int) -> str:
    if pair is None:
        return f'<text x="{_LEFT + 4}" y="{top + 10}" fill="{color}">{run}: failed</text>'
    left, right = x(pair[0]), x(pair[1])
    numbers = f"{pair[0]:.4g} to {pair[1]:.4g}"
    return (
        f'<rect x="{left:.1f}" y="{top}" width="{max(right - left, 1.5):.1f}" height="{_BAR - 3}" fill="{color}">'
        f"<title>{run}: {numbers}</title></rect>"
        f'<text x="{_LEFT + _PLOT + 12}" y="{top + 10}">{numbers}</text>'
    )
