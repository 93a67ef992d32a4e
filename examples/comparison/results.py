"""What was measured: two tables, and a picture."""

from __future__ import annotations

import statistics
from typing import Dict, List, NamedTuple, Optional


class Result(NamedTuple):
    """A method at a size: bytes, and the accuracy of each seed."""

    stored: int
    accuracies: List[float]

    def __str__(self) -> str:
        mean = statistics.mean(self.accuracies)
        return f"{mean:.1f} ({min(self.accuracies):.1f} - {max(self.accuracies):.1f})"


Results = Dict[str, List[Optional[Result]]]


def show(whole: Result, budgets: List[int], found: Results) -> None:
    """Two tables, in Markdown: accuracies, and bytes."""
    heads = [f"{budget:,} B ({budget / whole.stored:.1%})" for budget in budgets]
    print(f"dense: {whole} % in {whole.stored:,} B\n")
    for title, cell in (("accuracy, %", str), ("bytes", lambda result: f"{result.stored:,}")):
        print("| " + " | ".join([title, *heads]) + " |\n" + "|---" * (1 + len(heads)) + "|")
        for name, results in found.items():
            print("| " + " | ".join([name, *("-" if result is None else cell(result) for result in results)]) + " |")
        print()


def plot(whole: Result, budgets: List[int], found: Results, output: str) -> None:
    """Test error over bytes, both logarithmic, the spread of the seeds as bars; FeatherNets are drawn through."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    def errors(result: Result) -> List[float]:
        return [max(0.1, 100 - accuracy) for accuracy in result.accuracies]  # zero has no place on such an axis

    figure, axes = pyplot.subplots(figsize=(8, 5.5), constrained_layout=True)
    for index, (name, results) in enumerate(found.items()):
        shown = [(result.stored, errors(result)) for result in results if result is not None]
        if not shown:
            continue
        means = [statistics.mean(each) for _, each in shown]
        bars = [[mean - min(each), max(each) - mean] for mean, (_, each) in zip(means, shown)]
        style = {"fmt": "o-" if name.startswith("FeatherNet") else "o--", "color": "black" if index == 10 else f"C{index}"}
        # A little apart, so that the bars can be told from each other.
        places = [stored * 1.012 ** (index - len(found) / 2) for stored, _ in shown]
        axes.errorbar(places, means, list(zip(*bars)), label=name, markersize=4, linewidth=1.2, capsize=2, **style)
    axes.axhline(statistics.mean(errors(whole)), color="grey", linewidth=0.8, label=f"dense, {whole.stored:,} B")
    axes.set(
        xscale="log", yscale="log", xlabel="bytes", ylabel="test error, %", title="scikit-learn's digits, equal bytes and epochs"
    )
    axes.set_xticks(budgets, [f"{budget:,}" for budget in budgets])
    axes.set_yticks([0.5, 1, 2, 5, 10, 20, 50, 90], ["0.5", "1", "2", "5", "10", "20", "50", "90"])
    axes.minorticks_off()
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.savefig(output, dpi=85)
