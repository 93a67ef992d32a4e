"""FeatherNet, pruning, RigL and smaller nets at equal bytes: one CNN, scikit-learn's digits, the same epochs.

    python examples/compare_compression.py [--compress 0.02 0.05 0.1 0.25] [--seeds 3] [--epochs 12] [--output FILE.png]

A size is that of a float FeatherNet with ``--compress``; every other method gets the largest net that is not larger (by half a
per cent). A dash: the method cannot spend so much (``compress`` ends at 1). Bytes are those of the tensors that have to be
stored, batch norm's statistics included: dense tensors 4 a number; sparse weights the kept values, and the cheapest of a bitmask
and positions within the layer (2 bytes each; 4 where a layer has more than 65,536 weights; biases and norms are not pruned); INT8
a byte a code and a 4-byte scale per tensor; INT4 half a byte (packed, which the package itself does not do).

The methods are in the folder comparison/. They run in one CPU thread, on no GPU.

Pruning follows Zhu and Gupta, "To prune, or not to prune", 2017 (cubic schedule, here over all layers by one threshold), RigL
Evci et al., "Rigging the Lottery", 2020 (ERK densities). NNI's AGPPruner prunes too, layer by layer, where NNI is 2.7 - 3.0.
"""

from __future__ import annotations

import argparse
from typing import Dict, List, Optional, Tuple

import torch
from comparison import methods, nni_pruner, results, sizes, training
from comparison.methods import Method
from comparison.results import Result, Results
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from nni_dataparallel.feathermap import FeatherNet

METHODS: Dict[str, Method] = {
    "narrower dense net": Method(methods.narrow, 0.01),
    "narrower dense net, INT8": Method(methods.narrow, 0.01, {"bits": 8}),
    "gradual pruning": Method(methods.pruned, 0.005),
    "gradual pruning, INT8": Method(methods.pruned, 0.005, {"bits": 8}),
    "gradual pruning, NNI": Method(nni_pruner.nni_agp, 0.005),
    "RigL": Method(methods.rigl, 0.01),
    "FeatherNet": Method(methods.feather, 0.02),
    "FeatherNet, INT8": Method(methods.feather, 0.02, {"bits": 8}),
    "FeatherNet, INT4": Method(methods.feather, 0.02, {"bits": 4}),
    "FeatherNet, pruned": Method(methods.feather, 0.02, {"share": 2}),
    "FeatherNet, INT8, pruned": Method(methods.feather, 0.02, {"bits": 8, "share": 2}),
}
if not nni_pruner.agp_release():
    del METHODS["gradual pruning, NNI"]


def run(compress: List[float], seeds: int, epochs: int) -> Tuple[Result, List[int], Results]:
    """The dense net, the budgets, and every method at every budget."""
    samples, budgets = training.data(), [sizes.stored_bytes(FeatherNet(training.cnn(), share)) for share in compress]
    columns = (TextColumn("{task.description:42}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        total = progress.add_task("all", total=seeds * epochs * (1 + len(METHODS) * len(budgets)))

        def result(name: str, method: Method, budget: int) -> Optional[Result]:
            task = progress.add_task(f"{name}, {budget:,} B", total=seeds * epochs)
            stored, accuracies = 0, []

            def tick() -> None:
                progress.advance(task)
                progress.advance(total)

            for seed in range(seeds):
                torch.manual_seed(seed)
                trainer = training.Trainer(samples, seed, epochs, method.lr, tick)
                made = method.make(trainer, int(1.005 * budget), **method.options)  # a scale or two more shall not cost a column
                if made is None:
                    progress.update(total, advance=seeds * epochs)
                    break
                stored = made[1]
                accuracies.append(trainer.accuracy(made[0]))
            progress.remove_task(task)
            return Result(stored, accuracies) if accuracies else None

        whole = result("dense", Method(methods.dense, 0.005), sizes.stored_bytes(training.cnn()))
        assert whole is not None
        return whole, budgets, {name: [result(name, method, size) for size in budgets] for name, method in METHODS.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compress", type=float, nargs="+", default=[0.02, 0.05, 0.1, 0.25], help="sizes")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--quick", action="store_true", help="two sizes, one seed, one epoch: whether it runs")
    parser.add_argument("--output", default="compare_compression.png")
    options = parser.parse_args()
    if options.quick:
        options.compress, options.seeds, options.epochs = [0.02, 0.1], 1, 1
    everything = run(options.compress, options.seeds, options.epochs)
    results.show(*everything)
    results.plot(*everything, options.output)
    print("the picture:", options.output)
