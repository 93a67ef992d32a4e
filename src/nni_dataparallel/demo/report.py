"""What a run of the demo left, how it compares with another, the table and the picture."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

import torch
from torch import Tensor

from ..files import written_whole

__all__ = ["Run", "compare", "picture", "table"]

RTOL, ATOL = 2e-3, 2e-4

_STYLES: Tuple[Dict[str, Any], ...] = (
    {"color": "#1f77b4", "linewidth": 4.0, "alpha": 0.45},
    {"color": "#d62728", "linewidth": 1.6},
    {"color": "black", "linewidth": 1.4, "linestyle": (0, (4, 3))},
)


@dataclass
class Run:
    """What one training left."""

    kind: str
    layer: str = ""
    ranges: List[Tuple[float, float]] = field(default_factory=list)
    loss: float = float("nan")
    accuracy: Optional[float] = None
    state: Dict[str, Tensor] = field(default_factory=dict)
    error: str = ""


def compare(reference: Run, run: Run) -> Tuple[int, int]:
    """How many state tensors equal the reference's (rtol 2e-3, atol 2e-4), and of how many."""
    equal = 0
    for name, expected in reference.state.items():
        found = run.state.get(name)
        if found is not None and found.numel() == expected.numel():
            equal += torch.allclose(found.double().flatten(), expected.double().flatten(), rtol=RTOL, atol=ATOL)
    return equal, len(reference.state)


def table(runs: List[Run]) -> Any:
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
    with written_whole(path) as (draft,):
        figure.savefig(draft, dpi=150)
    return path
