"""The demo's table and picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, List, Tuple

if TYPE_CHECKING:
    from .demo import Run

__all__ = ["picture", "table"]

_STYLES = (
    {"color": "#1f77b4", "linewidth": 4.0, "alpha": 0.45},
    {"color": "#d62728", "linewidth": 1.6},
    {"color": "black", "linewidth": 1.4, "linestyle": (0, (4, 3))},
)


def table(runs: List[Run], compare: Callable[[Run, Run], Tuple[int, int]]) -> Any:
    """A ``rich`` table with one column per run."""
    from rich.table import Table

    shown = Table(title="The same data in the same order, three times")
    shown.add_column("")
    for run in runs:
        shown.add_column(run.kind.replace(", ", "\n"), justify="right")
    if any(run.error for run in runs):
        shown.add_row("crashed with", *(run.error[:60] or "-" for run in runs))
    shown.add_row("last loss", *(f"{run.loss:.6f}" for run in runs))
    shown.add_row("int8 accuracy", *("-" if run.accuracy is None else f"{run.accuracy:.1%}" for run in runs))
    last = [run.ranges[-1] if run.ranges else (float("nan"),) * 2 for run in runs]
    shown.add_row(f"{runs[0].layer}: tracked min", *(f"{low:.5f}" for low, _ in last))
    shown.add_row(f"{runs[0].layer}: tracked max", *(f"{high:.5f}" for _, high in last))
    counts = [compare(runs[0], run) for run in runs]
    shown.add_row("equal state tensors", *(f"{equal} of {total}" for equal, total in counts))
    return shown


def picture(runs: List[Run], release: str, replicas: int, output: str) -> Path:
    """Draw a layer's tracked range over the steps of every run; PNG or SVG by the file's suffix."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axes = figure.subplots()
    for run, style in zip(runs, _STYLES):
        steps = range(1, len(run.ranges) + 1)
        axes.plot(steps, [high for _, high in run.ranges], label=run.kind, **style)
        axes.plot(steps, [low for low, _ in run.ranges], **style)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(f"tracked output range of {runs[0].layer} (min and max)")
    axes.set_title(f"QAT_Quantizer of NNI {release} on handwritten digits, {replicas} replicas", fontsize=11)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    path = Path(output)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path
