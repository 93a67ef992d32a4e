"""``python -m nni_dataparallel demo``: the fault and its repair, on real digits.

A small convolutional net is trained with ``QAT_Quantizer`` three times, with the same data in the
same order: by stock NNI on one device, by stock NNI under ``nn.DataParallel``, and by patched NNI
under ``nn.DataParallel``.

The default is double precision: sums over shards round otherwise than sums over the batch, and
fake quantisation turns a last digit now and then into a whole level. In double precision what is
left to see is what the quantizer does.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
import warnings
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, Tuple

import torch
from packaging.version import Version
from torch import Tensor, nn

from .. import patching
from ..api import patched, unpatch
from ..fixes import installed_release, rows_for, stock_quantizer
from ..rehearsal import rehearse
from .report import Run, compare, picture, table
from .simulation import simulate_export

__all__ = ["main", "train"]

LAYERS = ("conv2", "relu2")  # the first whose output is tracked is in the picture
KINDS = ("one device, stock", "DataParallel, stock", "DataParallel, patched")


class Net(nn.Module):
    """Two convolutions and a linear layer for 8 x 8 grey images."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.relu2 = nn.ReLU()
        self.fc = nn.Linear(32 * 16, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (N, 10) of images (N, 1, 8, 8)."""
        x = self.relu2(self.conv2(self.relu1(self.conv1(x))))
        return self.fc(nn.functional.max_pool2d(x, 2).flatten(1))  # type: ignore[no-any-return]


def digits() -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """scikit-learn's handwritten digits: 1437 images to train with, 360 to test with."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    y = torch.tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, test = order[:1437], order[1437:]
    return x[train], y[train], x[test], y[test]


def _since(release: str, first: str) -> bool:
    return Version(release) >= Version(first)


def _quantizer(model: nn.Module, release: str, like: Tensor, steps: int) -> Tuple[Any, torch.optim.Optimizer]:
    quantizer_class = stock_quantizer("QAT_Quantizer")
    more: Dict[str, Any] = {}
    if _since(release, "2.5"):
        layers: Dict[str, Any] = {"quant_types": ["weight", "input", "output"], "quant_bits": 8}
        more, start = {"dummy_input": torch.zeros_like(like[:1])}, 0
    else:
        # 2.0 - 2.4 let a range grow from 0, a hundredth at a step: they need a warm-up.
        layers, start = {"quant_types": ["weight"], "quant_bits": 8}, steps // 3
    config = [
        {**layers, "op_types": ["Conv2d", "Linear"], "quant_start_step": start},
        {"quant_types": ["output"], "quant_bits": 8, "op_types": ["ReLU"], "quant_start_step": start},
    ]
    if release == "1.4":  # knows no optimizer, and wants to be first
        quantizer = quantizer_class(model, config)
        quantizer.compress()
        return quantizer, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    quantizer = quantizer_class(model, config, optimizer, **more)
    quantizer.compress()
    return quantizer, optimizer


def _range(model: nn.Module) -> Tuple[str, float, float]:
    """A layer and its tracked output range, whatever the release calls it."""
    state = model.state_dict()
    for layer in LAYERS:
        for ends in ("tracked_{}_output", "tracked_{}_activation", "tracked_{}_biased"):
            low, high = (f"{layer}.module.{ends.format(end)}" for end in ("min", "max"))
            if low in state:
                return layer, state[low].item(), state[high].item()
    raise KeyError(f"no tracked range of {LAYERS} in {sorted(state)}")


def train(kind: str, replicas: int, epochs: int, samples: Tuple[Tensor, ...], steps: int, tick: Callable[[], None]) -> Run:
    """One of the three runs. A crash of stock NNI is a result, not the end of the demo."""
    release = installed_release()
    x, y, test_x, test_y = samples
    torch.manual_seed(0)
    net = Net().to(x)
    quantizer, optimizer = _quantizer(net, release, x, steps)
    model: nn.Module = net
    if kind != KINDS[0]:
        model = nn.DataParallel(net) if x.is_cuda else rehearse(net, replicas, check=kind == KINDS[2])
    run = Run(kind)
    generator = torch.Generator().manual_seed(1)
    try:
        for _ in range(epochs):
            for batch in torch.randperm(len(x), generator=generator).split(64):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                if release == "1.4":  # later ones count with the optimizer
                    quantizer.step()
                run.loss = loss.item()
                run.layer, *ends = _range(net)
                run.ranges.append((ends[0], ends[1]))
                tick()
        run.state = {name: tensor.detach().cpu().clone() for name, tensor in net.state_dict().items()}
        if _since(release, "2.2"):  # earlier ones cannot export
            with tempfile.TemporaryDirectory() as folder:
                path = str(Path(folder) / "model.pth")
                calibration = quantizer.export_model(path)
                deployed = simulate_export(Net().to(x.dtype), torch.load(path, map_location="cpu"), calibration)
            with torch.no_grad():
                run.accuracy = (deployed(test_x.cpu()).argmax(1) == test_y.cpu()).float().mean().item()
    except Exception as error:
        run.error = f"{type(error).__name__}: {error}"
    return run


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence NNI's and torch's asides; the demo's own words stay."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def main(replicas: int, epochs: int, output: str, dtype: torch.dtype = torch.float64, quiet: bool = False) -> int:
    """Run the demo, print the table, write the picture; the exit status is 0 if patched equals one device."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(quiet=quiet)
    release = installed_release()
    patching.require(row for row in rows_for(release) if row.due)
    gpus = torch.cuda.device_count()
    device = torch.device("cuda" if gpus > 1 else "cpu")
    if gpus > 1:
        replicas = gpus
        console.print(f"NNI {release}, torch {torch.__version__}, {gpus} GPUs.")
    else:
        console.print(
            f"NNI {release}, torch {torch.__version__}. There are not two GPUs here: DataParallel runs on {replicas} "
            "[bold]virtual devices[/bold] in CPU memory (torch's own forward, replication and threads)."
        )
    unpatch()
    x, y, test_x, test_y = (t.to(device) for t in digits())
    samples = (x.to(dtype), y, test_x.to(dtype), test_y)
    steps = epochs * -(-len(samples[0]) // 64)
    columns = (TextColumn("{task.description:22}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    runs = []
    with Progress(*columns, console=console) as progress, _quiet():
        for kind in KINDS:
            task = progress.add_task(kind, total=steps)
            with patched() if kind == KINDS[2] else contextlib.nullcontext():
                runs.append(train(kind, replicas, epochs, samples, steps, lambda task=task: progress.advance(task)))  # type: ignore[misc]
    console.print(table(runs))
    written = picture(runs, release, replicas, output)
    console.print(f"Picture of {runs[0].layer}'s tracked range over the steps: {written}")
    equal, total = compare(runs[0], runs[2])
    return 0 if total and equal == total else 1
