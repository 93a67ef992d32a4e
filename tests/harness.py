"""Train a QAT case, take down everything the contract speaks of, and compare two such records.

The reference is always stock NNI on one device with the whole batch (see references.py).
"""

from __future__ import annotations

import contextlib
import copy
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple
from unittest import mock

import new_line
import torch
from cases import Case, is_first, is_modern, is_new
from references import is_stock, reference_class
from torch import Tensor, nn

from nni_dataparallel import is_patched, patch, patched, quantizer_state_dict, rehearse, unpatch
from nni_dataparallel.fixes import installed_release, stock_quantizer

# What a layer computes for one sample must not depend on how many others are in the batch: "the same
# activations" is what the contract promises exact ranges for. oneDNN picks other kernels for other sizes.
torch.backends.mkldnn.enabled = False
torch.set_num_threads(1)

RTOL, ATOL = 2e-3, 2e-4  # after five steps, see the README; never wider
BATCHES = (8, 7, 5, 2, 1)  # uneven shards, and batches smaller than the number of replicas
LEARNING_RATE = 0.05


class Linear(nn.Linear):
    """A linear layer that sums each row by itself; matrix kernels change with the number of rows."""

    def forward(self, x: Tensor) -> Tensor:
        return (x.unsqueeze(1) * self.weight).sum(-1) + self.bias


class Net(nn.Module):
    """Two convolutions and a linear layer; with batch norm for the folding cases."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3, bias=not norm)
        self.bn1 = nn.BatchNorm2d(4) if norm else nn.Identity()
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(4, 6, 3)
        self.bn2 = nn.BatchNorm2d(6) if norm else nn.Identity()
        self.relu2 = nn.ReLU()
        self.fc = Linear(6 * 4 * 4, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu1(self.bn1(self.conv1(x)))
        x = self.relu2(self.bn2(self.conv2(x)))
        return self.fc(x.flatten(1))


# Precision of models and batches; see test_one_device_is_stock_in_double_precision.
DTYPE: List[torch.dtype] = [torch.float32]


def data(sizes: Tuple[int, ...] = BATCHES, seed: int = 1) -> List[Tuple[Tensor, Tensor]]:
    """Batches whose extreme values lie in the last shard: who sees only the first one is wrong."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for size in sizes:
        x = torch.randn(size, 1, 8, 8, generator=generator)
        x[-1] *= 3
        batches.append((x.to(DTYPE[0]), torch.randint(10, (size,), generator=generator)))
    return batches


def freeze_norms(model: nn.Module) -> None:
    """BatchNorm's batch statistics stay torch's, per shard: out of the comparison."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()


def make_net(case: Case, seed: int = 0) -> Net:
    torch.manual_seed(seed)
    net = Net(case.fold)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean, -0.5, 0.5)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
            nn.init.uniform_(module.weight, 0.5, 1.5)
    return net.to(DTYPE[0])


def make_quantizer(
    quantizer_class: Any, case: Case, net: nn.Module, optimizer: Any, release: str, shape: Tuple[int, ...] = (1, 1, 8, 8)
) -> Any:
    if not case.trains:
        net.eval()
    if is_new(release):
        return new_line.make(quantizer_class, case, net, optimizer)
    dummy = case.fold or (is_modern(release) and case.quantizer == "QAT_Quantizer")
    arguments = {"dummy_input": torch.randn(shape, dtype=DTYPE[0])} if dummy else {}
    untraced = contextlib.nullcontext()
    if dummy and not case.fold:
        # Half of a test's time goes into tracing the network for batch norms to fold; here there are none.
        untraced = mock.patch.object(quantizer_class, "find_conv_bn_patterns", return_value=None)
    optimizers = () if release == "1.4" else (optimizer,)
    with untraced:
        quantizer = quantizer_class(net, copy.deepcopy(case.config), *optimizers, **arguments)
    if case.trains:  # the others compress when they have seen enough
        quantizer.compress()
    if release == "1.4":  # the script adds the new parameters and calls step() itself
        known = {id(p) for group in optimizer.param_groups for p in group["params"]}
        optimizer.add_param_group({"params": [p for p in net.parameters() if id(p) not in known]})
        step_alone = optimizer.step
        optimizer.step = lambda: (step_alone(), quantizer.step())
    return quantizer


def wrappers(quantizer: Any) -> List[Any]:
    """The wrappers of a quantizer's layers."""
    if is_new(installed_release()):
        return list(quantizer._module_wrappers.values())
    return list(quantizer.get_modules_wrapper())


def complete(case: Case, quantizer: Any, model: nn.Module) -> None:
    """Where a quantizer only watches: quantise by what was seen."""
    if case.trains:
        return
    if is_new(installed_release()):
        new_line.complete(quantizer, lambda: [watch(model, batch) for batch in data()])
    else:
        quantizer.compress()


QAT = "QATQuantizer" if is_new(installed_release()) else "QAT_Quantizer"


def stock_class(name: str = QAT) -> Any:
    return stock_quantizer(name)


@dataclass
class Record:
    """What a training run left: everything the contract compares."""

    losses: List[float] = field(default_factory=list)
    first: Dict[str, Tensor] = field(default_factory=dict)
    state: Dict[str, Tensor] = field(default_factory=dict)
    evaluation: Optional[Tensor] = None
    export: Dict[str, Tensor] = field(default_factory=dict)
    calibration: Dict[str, Any] = field(default_factory=dict)
    reloaded: Dict[str, Tensor] = field(default_factory=dict)
    cannot_export: str = ""


def snapshot(model: nn.Module) -> Dict[str, Tensor]:
    return {name: t.detach().clone() for name, t in model.state_dict().items()}


def ranges(model: nn.Module) -> Dict[str, Tensor]:
    """The tracked ranges in the model's state."""
    return {name: t for name, t in snapshot(model).items() if "tracked" in name}


Wrap = Callable[[nn.Module], nn.Module]


def one_device(model: nn.Module) -> nn.Module:
    return model


def replicated(count: int, check: bool = True) -> Wrap:
    """``count`` virtual devices; the plain model for one."""
    return one_device if count == 1 else lambda model: rehearse(model, count, check=check)


def start_training(quantizer_class: Any, case: Case, release: str, lr: float = LEARNING_RATE) -> Tuple[Net, Any, Any]:
    net = make_net(case)
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    quantizer = make_quantizer(quantizer_class, case, net, optimizer, release)
    if case.quantizer == "LsqQuantizer" and not is_new(release):
        # Stock gives a scale the dtype of the first batch, ours keep that of the Parameter: here both are the model's.
        net.to(DTYPE[0])
    return net, optimizer, quantizer


def step(model: nn.Module, optimizer: Any, batch: Tuple[Tensor, Tensor]) -> float:
    x, target = batch
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), target)
    loss.backward()
    optimizer.step()
    return loss.item()


def watch(model: nn.Module, batch: Tuple[Tensor, Tensor]) -> float:
    """What takes the place of a step where a quantizer only watches."""
    with torch.no_grad():
        return nn.functional.cross_entropy(model(batch[0]), batch[1]).item()


def advance(case: Case, model: nn.Module, optimizer: Any, batches: List[Tuple[Tensor, Tensor]]) -> List[float]:
    """Train (or watch) the batches; the losses."""
    if not case.trains:
        model.eval()
        return [watch(model, batch) for batch in batches]
    model.train()
    freeze_norms(model)
    return [step(model, optimizer, batch) for batch in batches]


def whole_state(net: nn.Module, quantizer: Any) -> Dict[str, Tensor]:
    """The model's state and what the quantizer keeps beside it."""
    state = snapshot(net)
    for name, value in quantizer_state_dict(quantizer).items():
        if name == "quantizer":
            continue
        if isinstance(value, int):
            state[f"quantizer {name}"] = torch.tensor(int(value))
        elif name == "layer_scale":
            state.update({f"layer_scale of {layer}": scale for layer, scale in value.items()})
        else:
            state.update({f"observer {layer} {key}": t for layer, own in value.items() for key, t in own.items()})
    return state


def train(
    quantizer_class: Any,
    case: Case,
    release: str,
    wrap: Wrap = one_device,
    lr: float = LEARNING_RATE,
    resume: Optional[Resume] = None,
) -> Record:
    """Five steps (those after ``resume``); where something was learned, evaluation, export and reload, too."""
    net, optimizer, quantizer = start_training(quantizer_class, case, release, lr)
    model = wrap(net)
    record = Record()
    if resume is not None:
        net.load_state_dict(resume.model)
        with torch.no_grad():
            # Stock's `weight` shares storage with `old_weight`: loading it has just overwritten the latter.
            for name, parameter in net.named_parameters():
                parameter.copy_(resume.model[name])
        optimizer.load_state_dict(resume.optimizer)
        record.losses, record.first = list(resume.losses), resume.first
    for batch in data()[len(record.losses) :]:
        record.losses += advance(case, model, optimizer, [batch])
        if not record.first:
            record.first = ranges(net)
    record.state = whole_state(net, quantizer)
    if lr:
        finish(record, quantizer_class, quantizer, net, model, case, release)
    return record


@dataclass
class Resume:
    """Where a run stands after some steps."""

    model: Dict[str, Tensor]
    optimizer: Dict[str, Any]
    losses: List[float]
    first: Dict[str, Tensor]


def warm_up(quantizer_class: Any, case: Case, release: str) -> Resume:
    """The steps of ``case`` before its ``quant_start_step``, on one device."""
    net, optimizer, _ = start_training(quantizer_class, case, release)
    losses, first = [], {}
    for batch in data()[: case.start - 1]:
        losses += advance(case, net, optimizer, [batch])
        first = first or ranges(net)
    return Resume(snapshot(net), copy.deepcopy(optimizer.state_dict()), losses, first)


@contextlib.contextmanager
def stock_nni() -> Iterator[None]:
    """Stock NNI inside the block, whatever a test has patched around it."""
    before = is_patched()
    unpatch()
    try:
        yield
    finally:
        if before:
            patch()


_references: Dict[Any, Record] = {}


def reference(case: Case, release: str, lr: float = LEARNING_RATE) -> Record:
    """Stock NNI on one device.

    Before ``quant_start_step`` stock masks gradients by a scale that does not exist yet. There the
    reference takes the (separately tested) repaired steps and goes on with stock NNI.
    """
    key = (case, lr, DTYPE[0])
    if key not in _references:
        resume = None
        if case.start and lr and not is_first(release) and not is_new(release):
            with patched():
                resume = warm_up(stock_class(case.quantizer), case, release)
        with stock_nni():
            _references[key] = train(reference_class(stock_class(case.quantizer)), case, release, lr=lr, resume=resume)
    return _references[key]


def finish(record: Record, quantizer_class: Any, quantizer: Any, net: Any, model: Any, case: Case, release: str) -> None:
    """Evaluate, export, and load the export back into a fresh quantizer."""
    complete(case, quantizer, model)
    if not case.trains:
        record.state = {**record.state, **{f"compressed {n}": t for n, t in snapshot(net).items() if "old_weight" not in n}}
    model.eval()
    with torch.no_grad():
        record.evaluation = model(data((6,), seed=2)[0][0])
    if is_new(release):
        record.calibration = quantizer.get_calibration_config()
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pth"
        try:
            record.calibration = quantizer.export_model(str(path), str(Path(folder) / "calibration.pth"))
        except (NotImplementedError, AttributeError, KeyError, ValueError, RuntimeError) as error:
            # 1.x, 2.0 and 2.1 have no export; stock cannot export a per-channel range, nor LSQ without input.
            record.cannot_export = f"{type(error).__name__}: {error}"
            return
        record.export = torch.load(path)
        if is_stock(type(quantizer)):
            # A plain model has none of these; ours leaves them out.
            record.export = {k: t for k, t in record.export.items() if k.rpartition(".")[2] not in ("steps", "old_bias")}
    if case.quantizer == "QAT_Quantizer" and is_modern(release):
        fresh_net, _, fresh = start_training(quantizer_class, case, release)
        fresh.load_calibration_config(record.calibration)
        record.reloaded = ranges(fresh_net)


def load_file(file: Any) -> Any:
    """A file of tensors and numbers, by the loader that runs no code; before torch 2.0 it knows no Python floats."""
    return torch.load(file, weights_only=True) if hasattr(torch, "compile") else torch.load(file)


def can_export(quantizer: Any) -> bool:
    """Whether the release's quantizer has an export_model of its own; NaiveQuantizer never has."""
    export = getattr(type(quantizer), "export_model", None)
    return export is not None and export.__qualname__ != "Quantizer.export_model"


def unequal(name: str, a: Any, b: Any, rtol: float = 0.0, atol: float = 0.0) -> List[str]:
    """In words, where two dicts, tensors or numbers differ; shapes ``[]`` and ``[1]`` are the same."""
    if isinstance(a, dict):
        if set(a) != set(b):
            return [f"{name}: keys {sorted(set(a) ^ set(b))} on one side only"]
        return [line for key in a for line in unequal(f"{name}[{key}]", a[key], b[key], rtol, atol)]
    if isinstance(a, str) or a is None or b is None:
        return [] if a == b else [f"{name}: {a} and {b}"]
    a, b = (torch.as_tensor(v).detach().double() for v in (a, b))
    if a.numel() != b.numel():
        return [f"{name}: shapes {tuple(a.shape)} and {tuple(b.shape)}"]
    # Stock's rebound ranges drift to shape []; ours keep the shape at construction.
    a, b = a.flatten(), b.flatten()
    if not torch.isfinite(b).all():
        return [f"{name}: not finite"]
    if torch.allclose(a, b, rtol=rtol, atol=atol) if rtol or atol else torch.equal(a, b):
        return []
    return [f"{name}: off by {(a - b).abs().max().item():.3g}"]


def differences(reference: Record, record: Record, exact: bool = False) -> List[str]:
    """In words, what of ``record`` is not what the reference says; empty where all is equal."""
    rtol, atol = (0.0, 0.0) if exact else (RTOL, ATOL)
    lines = unequal("range after the first step", reference.first, record.first, 0.0, 0.0)
    exported = () if reference.cannot_export else ("export", "calibration", "reloaded")
    for name in ("state", *exported):
        lines += unequal(name, getattr(reference, name), getattr(record, name), rtol, atol)
    lines += unequal("loss per step", reference.losses, record.losses, rtol, atol)
    lines += unequal("evaluation", reference.evaluation, record.evaluation, rtol, atol)
    return lines
