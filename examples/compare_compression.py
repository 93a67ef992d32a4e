"""FeatherNet, pruning, RigL and smaller nets at equal bytes: one CNN, scikit-learn's digits, the same epochs.

    python examples/compare_compression.py [--compress 0.02 0.05 0.1 0.25] [--seeds 3] [--epochs 12] [--output FILE.png]

A size is that of a float FeatherNet with ``--compress``; every other method gets the largest net that is not larger (by half a
per cent). A dash: the method cannot spend so much (``compress`` ends at 1). Bytes are those of the tensors that have to be
stored, batch norm's statistics included:

* dense tensors: 4 bytes a number;
* sparse weights: the kept values, and the cheapest of a bitmask (one bit for every weight) and 2-byte positions within the
  layer (4-byte ones where a layer has more than 65,536 weights). Biases and norms are not pruned;
* INT8: one byte a code and a 4-byte scale per tensor; INT4: half a byte (packed; the package itself stores one code a byte).

Pruning follows Zhu and Gupta, "To prune, or not to prune", 2017 (cubic schedule, here over all layers by one threshold), RigL
Evci et al., "Rigging the Lottery", 2020 (ERK densities). NNI's AGPPruner prunes too, layer by layer, where NNI is 2.7 - 3.0.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import math
import os
import statistics
import tempfile
import warnings
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

from nni_dataparallel.feathermap import FeatherNet

torch.set_num_threads(1)
WIDTHS = (32, 64, 64)
BATCH = 64
Tick = Callable[[], None]


def data(seed: int = 0) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training and test images in [0, 1], training and test classes."""
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16, torch.tensor(labels)
    train, test = train_test_split(range(len(y)), test_size=0.25, random_state=seed, stratify=labels)
    return x[train], x[test], y[train], y[test]


def cnn(widths: Tuple[int, int, int] = WIDTHS) -> nn.Module:
    """36,106 parameters as it is."""
    a, b, c = widths
    return nn.Sequential(
        *(nn.Conv2d(1, a, 3, padding=1), nn.BatchNorm2d(a), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(4 * b, c), nn.ReLU(), nn.Linear(c, 10)),
    )


class FakeQuantised(nn.Module):
    """A weight as INT8 stores it, straight-through: one scale, symmetric."""

    def forward(self, weight: Tensor) -> Tensor:
        scale = weight.detach().abs().max().clamp(min=1e-12) / 127
        return weight + (torch.round(weight / scale) * scale - weight).detach()


def targets(model: nn.Module) -> List[nn.Parameter]:
    """What is pruned and quantised: a FeatherNet's factors, else every weight of two or more dimensions."""
    if isinstance(model, FeatherNet):
        return [model.pool.V1.weight, model.pool.V2.weight]
    return [parameter for parameter in model.parameters() if parameter.dim() > 1]


def tensor_bytes(model: nn.Module) -> int:
    """Of all tensors in the state dict."""
    return sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())


def stored_bytes(model: nn.Module, bits: int = 32, kept: Optional[int] = None) -> int:
    """Bytes of the net when its targets are stored with ``bits``, and only ``kept`` of their entries if that is given."""
    weights = targets(model)
    count = sum(weight.numel() for weight in weights)
    rest = tensor_bytes(model) - 4 * count
    scales = 0 if bits == 32 else 4 * len(weights)
    positions = 0
    if kept is not None:
        width = 2 if max(weight.numel() for weight in weights) <= 65536 else 4
        positions = min(math.ceil(count / 8), width * kept)
    return rest + scales + positions + math.ceil((count if kept is None else kept) * bits / 8)


def largest(fits: Callable[[int], bool], limit: int) -> int:
    """The largest number up to ``limit`` that fits, by bisection; 0 if none does."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


class Pruning:
    """Zhu and Gupta's schedule: the sparsity rises with a cubic curve from step 0 to three quarters of training."""

    every = 10

    def __init__(self, model: nn.Module, kept: int, steps: int) -> None:
        self.weights, self.kept, self.end = targets(model), kept, max(1, int(0.75 * steps))
        self.masks = [torch.ones_like(weight) for weight in self.weights]

    def before(self, step: int) -> None:
        """Pruned weights get gradients, and are set to zero after the step."""

    @torch.no_grad()
    def after(self, step: int) -> None:
        if step == self.end or (step < self.end and step % self.every == 0):
            # One threshold for all layers. What was pruned is zero, so it stays pruned.
            sizes = torch.cat([weight.abs().reshape(-1) for weight in self.weights])
            kept = self.kept + int((len(sizes) - self.kept) * (1 - step / self.end) ** 3)
            chosen = torch.zeros_like(sizes).index_fill_(0, sizes.topk(kept).indices, 1.0)
            pieces = chosen.split([weight.numel() for weight in self.weights])
            self.masks = [piece.reshape(weight.shape) for piece, weight in zip(pieces, self.weights)]
        for weight, mask in zip(self.weights, self.masks):
            weight.mul_(mask)


class RigL:
    """A sparse net from the start: now and then its smallest weights go, and those with the largest gradients come."""

    every, fraction = 20, 0.3

    def __init__(self, model: nn.Module, kept: int, steps: int) -> None:
        self.weights, self.end = targets(model), int(0.75 * steps)
        self.masks = []
        for weight, count in zip(self.weights, self.erdos_renyi(kept)):
            mask = torch.zeros(weight.numel())
            mask[torch.randperm(weight.numel())[:count]] = 1
            self.masks.append(mask.reshape(weight.shape))
            weight.data.mul_(self.masks[-1])

    def erdos_renyi(self, kept: int) -> List[int]:
        """Numbers of weights per layer: density in proportion to (sum of the shape) / (product of the shape), 1 at most."""
        raw = [float(sum(weight.shape)) for weight in self.weights]  # density times size
        full = [False] * len(raw)
        while True:
            free = kept - sum(w.numel() for w, f in zip(self.weights, full) if f)
            factor = free / sum(r for r, f in zip(raw, full) if not f)
            over = [not f and factor * r > w.numel() for w, r, f in zip(self.weights, raw, full)]
            if not any(over):
                return [w.numel() if f else int(factor * r) for w, r, f in zip(self.weights, raw, full)]
            full = [f or o for f, o in zip(full, over)]

    @torch.no_grad()
    def before(self, step: int) -> None:
        """Drop and grow, then no gradient outside the mask."""
        for index, weight in enumerate(self.weights):
            mask = self.masks[index].reshape(-1)
            count = int(self.fraction / 2 * (1 + math.cos(math.pi * step / self.end)) * mask.sum())
            count = min(count, int((1 - mask).sum()))
            if 0 < step < self.end and step % self.every == 0 and count:
                size = weight.abs().reshape(-1).masked_fill(mask == 0, math.inf)
                gradient = weight.grad.abs().reshape(-1).masked_fill(mask == 1, -math.inf)  # type: ignore[union-attr]
                mask[size.topk(count, largest=False).indices] = 0
                mask[gradient.topk(count).indices] = 1
                weight.mul_(self.masks[index])  # the new ones are zero already
            weight.grad.mul_(self.masks[index])  # type: ignore[union-attr]

    @torch.no_grad()
    def after(self, step: int) -> None:
        """Adam's momentum moves dropped weights too."""
        for weight, mask in zip(self.weights, self.masks):
            weight.mul_(mask)


class Trainer:
    """Adam with a cosine schedule over all epochs, however many calls they come in."""

    def __init__(self, samples: Tuple[Tensor, ...], seed: int, epochs: int, lr: float, tick: Tick) -> None:
        self.lr = lr
        self.x, self.test_x, self.y, self.test_y = samples
        self.epochs, self.tick, self.step = epochs, tick, 0
        self.steps = epochs * math.ceil(len(self.x) / BATCH)
        self.generator = torch.Generator().manual_seed(seed)

    def train(self, model: nn.Module, sparse: Any = None, epochs: Optional[int] = None, optimizer: Any = None) -> None:
        if optimizer is None:
            hashed = isinstance(model, FeatherNet)  # the scalars have a rate of their own
            optimizer = torch.optim.Adam(model.param_groups(self.lr) if hashed else model.parameters(), lr=self.lr)
        rates = [group["lr"] for group in optimizer.param_groups]
        model.train()
        for _ in range(self.epochs if epochs is None else epochs):
            for batch in torch.randperm(len(self.x), generator=self.generator).split(BATCH):
                for group, rate in zip(optimizer.param_groups, rates):
                    group["lr"] = rate / 2 * (1 + math.cos(math.pi * self.step / self.steps))
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(self.x[batch]), self.y[batch]).backward()
                if sparse is not None:
                    sparse.before(self.step)
                optimizer.step()
                if sparse is not None:
                    sparse.after(self.step)
                self.step += 1
            self.tick()

    @torch.no_grad()
    def accuracy(self, model: nn.Module) -> float:
        return 100 * float((model.eval()(self.test_x).argmax(1) == self.test_y).float().mean())


Made = Optional[Tuple[nn.Module, int]]  # a trained net and its bytes; None where the method cannot use that many


def dense(trainer: Trainer, budget: int) -> Made:
    """The net as it is, whatever the budget."""
    model = cnn()
    trainer.train(model)
    return model, stored_bytes(model)


def narrow(trainer: Trainer, budget: int, bits: int = 32) -> Made:
    """Fewer channels, nearly in the same proportions; with 8 bits trained quantization-aware."""

    def size(widths: Tuple[int, int, int]) -> int:
        a, b, c = widths
        weights = 9 * a + 9 * a * b + 4 * b * c + 10 * c
        # Biases, batch norm's four vectors and counter of each; scales.
        return math.ceil(weights * bits / 8) + 4 * (a + b + c + 10 + 4 * (a + b)) + 16 + (0 if bits == 32 else 16)

    around = [(a, b, c) for a in range(1, 65) for b in range(a, 3 * a) for c in range(max(1, b - 3), b + 4)]
    # Of those within two per cent of the budget, the most alike in shape.
    close = [widths for widths in around if 0.98 * budget <= size(widths) <= budget]
    if not close:
        return None
    model = cnn(min(close, key=lambda w: abs(math.log(w[1] / w[0] / 2)) + abs(math.log(w[2] / w[1]))))
    quantise(model, bits)
    trainer.train(model)
    return model, stored_bytes(model, bits)


def quantise(model: nn.Module, bits: int) -> None:
    """Quantization-aware from now on, if ``bits`` says so."""
    if bits < 32 and isinstance(model, FeatherNet):
        model.prepare_qat(bits, per_row=False)  # a scale per row would cost as many bytes as four columns
    elif bits < 32:
        for layer in [layer for layer in model.modules() if isinstance(layer, (nn.Conv2d, nn.Linear))]:
            register_parametrization(layer, "weight", FakeQuantised())


def sparse(kind: Any, model: nn.Module, trainer: Trainer, budget: int, bits: int) -> Made:
    """``model`` with as many weights as the budget pays for."""
    quantise(model, bits)
    count = sum(weight.numel() for weight in targets(model))
    kept = largest(lambda number: stored_bytes(model, bits, number) <= budget, count)
    if stored_bytes(model, bits, kept) < 0.95 * budget:
        return None  # nothing to prune
    trainer.train(model, kind(model, kept, trainer.steps))
    assert sum(int((weight != 0).sum()) for weight in targets(model)) <= kept
    return model, stored_bytes(model, bits, kept)


def pruned(trainer: Trainer, budget: int, bits: int = 32) -> Made:
    return sparse(Pruning, cnn(), trainer, budget, bits)


def rigl(trainer: Trainer, budget: int) -> Made:
    return sparse(RigL, cnn(), trainer, budget, 32)


def feather(trainer: Trainer, budget: int, bits: int = 32, share: int = 1) -> Made:
    """The widest factors; with ``share`` 2 twice as wide, and pruned to the budget."""
    net = with_columns(1)
    half = (len(net.pool.V1.weight) + 1) // 2  # compress = 1
    columns = largest(lambda m: feather_bytes(net, m, bits) <= budget, half)
    if feather_bytes(net, columns, bits) < 0.95 * budget or share * columns > half + share:
        return None
    net = with_columns(min(half, share * columns))
    if share > 1:
        made = sparse(Pruning, net, trainer, budget, bits)
        if made is None:
            return None
        stored = made[1]
    else:
        quantise(net, bits)
        trainer.train(net)
        stored = stored_bytes(net, bits)
    if bits < 32:
        net.eval().convert()
        assert bits < 8 or share > 1 or stored == tensor_bytes(net)  # the sum above is that of the real codes and scales
    return net.deploy(), stored


def with_columns(m: int) -> FeatherNet:
    """A FeatherNet with factors of m columns: compress is their size over that of V."""
    n = len(FeatherNet(cnn(), 0.5).pool.V1.weight)
    return FeatherNet(cnn(), (2 * m - 1) / n)


def feather_bytes(one: FeatherNet, m: int, bits: int) -> int:
    """From the net of one column."""
    return stored_bytes(one, bits) + math.ceil((m - 1) * 2 * len(one.pool.V1.weight) * bits / 8)


def nni_agp(trainer: Trainer, budget: int) -> Made:
    """NNI's AGPPruner with its LevelPruner: the same curve, every layer to the same sparsity."""
    import nni_dataparallel.auto  # noqa: F401 - for several devices; on one it changes nothing

    logging.getLogger("nni").setLevel(logging.ERROR)
    model = cnn()
    count = sum(weight.numel() for weight in targets(model))
    kept = largest(lambda number: stored_bytes(model, kept=number) <= budget, count)
    if agp_release() == 3:
        model, kept = agp_of_nni3(trainer, model, 1 - kept / count)
    else:
        model, kept = agp_of_nni2(trainer, model, 1 - kept / count)
    return model, stored_bytes(cnn(), kept=kept)


def agp_release() -> int:
    """The line of NNI whose AGPPruner can be imported: 2 is 2.7 - 2.10.1, 0 is none."""
    for release, module in ((3, "nni.compression.pruning"), (2, "nni.compression.pytorch.pruning")):
        try:
            if hasattr(importlib.import_module(module), "AGPPruner"):
                return release
        except ImportError:
            continue
    return 0


def agp_of_nni2(trainer: Trainer, model: nn.Module, sparsity: float) -> Tuple[nn.Module, int]:
    """An epoch between two prunings, each with a model and so an optimizer of its own."""
    from nni.compression.pytorch.pruning import AGPPruner

    os.environ.setdefault("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # its own files, which torch 2.6 would not load otherwise
    rises = max(1, int(0.75 * trainer.epochs) - 1)
    left = [1] * rises + [trainer.epochs - rises]

    def finetune(net: nn.Module) -> None:
        trainer.train(net, epochs=left.pop(0))

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = [{"op_types": ["Conv2d", "Linear"], "total_sparsity": sparsity}]
        pruner = AGPPruner(model, config, "level", total_iteration=rises, log_dir=folder, finetuner=finetune)
        pruner.compress()
        _, model, *_ = pruner.get_best_result()
    return model, sum(int((weight != 0).sum()) for weight in targets(model))


def agp_of_nni3(trainer: Trainer, model: nn.Module, sparsity: float) -> Tuple[nn.Module, int]:
    """Pruned every few steps of one training."""
    import nni
    from nni.compression.pruning import AGPPruner, LevelPruner
    from nni.compression.utils import TorchEvaluator

    def fit(net: nn.Module, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        trainer.train(net, optimizer=optimizer)

    optimizer = nni.trace(torch.optim.Adam)(model.parameters(), lr=trainer.lr)
    evaluator = TorchEvaluator(fit, optimizer, lambda batch, net: net(batch))
    config = [{"op_types": ["Conv2d", "Linear"], "target_names": ["weight"], "sparse_ratio": sparsity}]
    pruner = LevelPruner(model, config, evaluator)
    times = max(1, int(0.75 * trainer.steps) // Pruning.every)
    model, masks = AGPPruner(pruner, Pruning.every, times).compress(None, trainer.epochs)
    return model, int(sum(mask["weight"].sum() for mask in masks.values()))


class Method(NamedTuple):
    """How to make a net, with Adam's rate: its family's, chosen from three or four on another seed and another split."""

    make: Callable[..., Made]
    lr: float
    options: Dict[str, int] = {}


METHODS: Dict[str, Method] = {
    "narrower dense net": Method(narrow, 0.01),
    "narrower dense net, INT8": Method(narrow, 0.01, {"bits": 8}),
    "gradual pruning": Method(pruned, 0.005),
    "gradual pruning, INT8": Method(pruned, 0.005, {"bits": 8}),
    "gradual pruning, NNI": Method(nni_agp, 0.005),
    "RigL": Method(rigl, 0.01),
    "FeatherNet": Method(feather, 0.02),
    "FeatherNet, INT8": Method(feather, 0.02, {"bits": 8}),
    "FeatherNet, INT4": Method(feather, 0.02, {"bits": 4}),
    "FeatherNet, pruned": Method(feather, 0.02, {"share": 2}),
    "FeatherNet, INT8, pruned": Method(feather, 0.02, {"bits": 8, "share": 2}),
}


def available() -> Dict[str, Method]:
    """All methods, NNI's pruner where there is one."""
    return {name: method for name, method in METHODS.items() if method.make is not nni_agp or agp_release()}


class Result(NamedTuple):
    """A method at a size: bytes, and the accuracy of each seed."""

    stored: int
    accuracies: List[float]

    def __str__(self) -> str:
        mean = statistics.mean(self.accuracies)
        return f"{mean:.1f} ({min(self.accuracies):.1f} - {max(self.accuracies):.1f})"


Results = Dict[str, List[Optional[Result]]]


def run(compress: List[float], seeds: int, epochs: int) -> Tuple[Result, List[int], Results]:
    """The dense net, the budgets, and every method at every budget."""
    samples, methods = data(), available()
    budgets = [stored_bytes(FeatherNet(cnn(), share)) for share in compress]
    columns = (TextColumn("{task.description:42}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        total = progress.add_task("all", total=seeds * epochs * (1 + len(methods) * len(budgets)))

        def result(name: str, method: Method, budget: int) -> Optional[Result]:
            task = progress.add_task(f"{name}, {budget:,} B", total=seeds * epochs)
            budget = int(1.005 * budget)  # a scale or two more shall not cost a column
            stored, accuracies = 0, []

            def tick() -> None:
                progress.advance(task)
                progress.advance(total)

            for seed in range(seeds):
                torch.manual_seed(seed)
                trainer = Trainer(samples, seed, epochs, method.lr, tick)
                made = method.make(trainer, budget, **method.options)
                if made is None:
                    progress.update(total, advance=seeds * epochs)
                    break
                stored = made[1]
                accuracies.append(trainer.accuracy(made[0]))
            progress.remove_task(task)
            return Result(stored, accuracies) if accuracies else None

        whole = result("dense", Method(dense, 0.005), stored_bytes(cnn()))
        assert whole is not None
        found = {name: [result(name, method, budget) for budget in budgets] for name, method in methods.items()}
    return whole, budgets, found


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
    show(*everything)
    plot(*everything, options.output)
    print("the picture:", options.output)
