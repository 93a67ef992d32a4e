"""Scripts for NNI 3.0's compressors with a TorchEvaluator, what a run of one leaves, and how two runs differ."""

from __future__ import annotations

import copy
import types
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, List, NamedTuple

import nni
import torch
from harness import ATOL, LEARNING_RATE, RTOL, Linear, data, snapshot, unequal
from nni.compression.distillation import DynamicLayerwiseDistiller
from nni.compression.pruning import AGPPruner, L1NormPruner, SlimPruner, TaylorPruner
from nni.compression.utils import TorchEvaluator
from torch import Tensor, nn

import nni_dataparallel
from nni_dataparallel import rehearse
from nni_dataparallel.fixes import QUANTIZERS, stock_quantizer
from nni_dataparallel.rehearsal import Rehearsal

Wrap = Callable[[nn.Module], nn.Module]
STEPS = 5
ACTIVATIONS = ["_input_", "_output_"]
INT8 = {"quant_dtype": "int8", "quant_scheme": "symmetric", "granularity": "default"}
Config = List[Dict[str, Any]]


@dataclass
class Left:
    """Losses, the model's state, and what compress() returned beside the model."""

    losses: List[float] = field(default_factory=list)
    metrics: List[float] = field(default_factory=list)
    state: Dict[str, Tensor] = field(default_factory=dict)
    config: Dict[str, Any] = field(default_factory=dict)

    def finish(self, compressor: Any, config: Any) -> Left:
        self.state = snapshot(compressor.bound_model)
        self.config = {layer: {target: numbers(of) for target, of in targets.items()} for layer, targets in config.items()}
        return self


def numbers(value: Any) -> Any:
    """A mask, or the tensors and bits of a calibration config's entry."""
    if isinstance(value, dict):
        return {key: v for key, v in value.items() if isinstance(v, (Tensor, int))}
    return value


def differences(expected: Left, found: Left) -> List[str]:
    """In words, where ``found`` is not what one device left."""
    lines = [
        line for name in ("losses", "metrics") for line in unequal(name, *(getattr(r, name) for r in (expected, found)), RTOL, ATOL)
    ]
    lines += unequal("state", expected.state, found.state, RTOL, ATOL)
    return lines + unequal("config", expected.config, found.config, RTOL, ATOL)


def replicas_in(namespace: Any, count: int) -> Any:
    """A copy of ``torch.nn`` as a third party's module sees it, whose DataParallel is a rehearsal on ``count`` devices."""

    class DataParallel(Rehearsal):
        def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
            super().__init__(module, count)

    shown = types.ModuleType("torch.nn")
    vars(shown).update({**vars(namespace), "DataParallel": DataParallel})
    return shown


def replicated(count: int) -> Wrap:
    return lambda model: rehearse(model, count)


class Net(nn.Module):
    """A convolution, its batch norm to fold, another convolution, a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1, self.relu1 = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU()
        self.conv2, self.relu2, self.fc = nn.Conv2d(4, 6, 3), nn.ReLU(), Linear(6 * 16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu1(self.bn1(self.conv1(x)))
        return self.fc(self.relu2(self.conv2(x)).flatten(1))


def make_net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    net = Net()
    nn.init.uniform_(net.bn1.running_mean, -0.5, 0.5)
    return net


def whole(model: nn.Module) -> nn.Module:
    return model


class Script:
    """A user's training script: its functions, and where it wraps the model."""

    def __init__(self, inside: Callable[[nn.Module], nn.Module] = whole, before: Callable[[nn.Module], nn.Module] = whole) -> None:
        self.left, self.inside = Left(), inside
        self.no_grad: Any = torch.no_grad
        self.net = make_net()
        self.model = before(self.net)
        self.seen: List[nn.Module] = []

    def training_step(self, batch: Any, model: nn.Module) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def train(self, model: nn.Module, optimizer: Any, step: Any, scheduler: Any, max_steps: Any, max_epochs: Any) -> None:
        self.seen.append(model)
        model = self.inside(model)
        model.train()
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()  # batch statistics are torch's, per shard
        for batch in data()[:max_steps]:
            optimizer.zero_grad()
            loss = step(batch, model)
            loss.backward()
            optimizer.step()
            self.left.losses.append(loss.item())

    def evaluate(self, model: nn.Module) -> float:
        self.seen.append(model)
        model = self.inside(model)
        model.eval()
        with self.no_grad():
            self.left.metrics += [self.training_step(batch, model).item() for batch in data(seed=2)]
        return self.left.metrics[-1]

    def evaluator(self, of: Any = None) -> Any:
        parameters = (self.model if of is None else of).parameters()
        optimizer = nni.trace(torch.optim.SGD)(parameters, lr=LEARNING_RATE, momentum=0.9)
        return TorchEvaluator(self.train, optimizer, self.training_step, evaluating_func=self.evaluate)


class Subject(NamedTuple):
    """A compressor to build: a quantizer by its name, or a function of a script and a config."""

    name: str
    config: Config
    build: Callable[[Any, Script, Config], Any] = lambda cls, script, config: cls(script.model, config, script.evaluator())
    steps: Any = STEPS


def _layers(targets: List[str], *kinds: str, **more: Any) -> Config:
    return [{"op_types": list(kinds) or ["Conv2d", "Linear"], "target_names": targets, **INT8, **more}]


def _pruned(**more: Any) -> Config:
    return [{"op_types": ["Conv2d"], "sparse_ratio": 0.5, **more}]


def _teacher() -> nn.Module:
    return make_net(7).eval()


def _predict(batch: Any, teacher: nn.Module) -> Tensor:
    return teacher(batch[0])


def _distiller(_: Any, script: Script, config: Config) -> Any:
    return DynamicLayerwiseDistiller(script.model, config, script.evaluator(), _teacher(), _predict)


def _agp(_: Any, script: Script, config: Config) -> Any:
    return AGPPruner(L1NormPruner(script.model, config), interval_steps=1, total_times=3, evaluator=script.evaluator())


FUSED = [
    {**_layers(["weight", "_output_"], "Conv2d")[0], "op_names": ["conv1"], "fuse_names": [("conv1", "bn1")]},
    *_layers(["weight", "_input_"], "Linear"),
]
SUBJECTS = [
    Subject("QATQuantizer", _layers(["weight", *ACTIVATIONS])),
    Subject("QATQuantizer", FUSED),
    Subject("LsqQuantizer", _layers(["weight", *ACTIVATIONS])),
    Subject("PtqQuantizer", _layers(["weight", *ACTIVATIONS])),
    Subject("SlimPruner", _pruned(), lambda _, s, config: SlimPruner(s.model, config, s.evaluator(), STEPS - 2), None),
    Subject("TaylorPruner", _pruned(), lambda _, s, config: TaylorPruner(s.model, config, s.evaluator(), STEPS - 2), None),
    Subject("AGPPruner", _pruned(), _agp),
    Subject(
        "DynamicLayerwiseDistiller", [{"op_types": ["Linear"], "target_names": ["_output_"], "apply_method": "kl"}], _distiller
    ),
]
QUANTIZER_SUBJECTS = [subject for subject in SUBJECTS if subject.name in QUANTIZERS]


def stock(subject: Subject) -> Any:
    return stock_quantizer(subject.name) if subject.name in QUANTIZERS else None


def run(subject: Subject, cls: Any, script: Script, config: Any = None) -> Any:
    compressor = subject.build(cls, script, copy.deepcopy(subject.config if config is None else config))
    duration = () if subject.steps is None else (subject.steps, None)
    script.returned = compressor.compress(*duration)
    model, left = script.returned if isinstance(script.returned, tuple) else (script.returned, {})
    assert model is script.model
    script.left.finish(compressor, left)
    return compressor


_references: Dict[int, Left] = {}


def reference(subject: Subject) -> Left:
    """Stock NNI on one device."""
    if id(subject) not in _references:
        assert not nni_dataparallel.is_patched()
        script = Script()
        run(subject, stock(subject), script)
        _references[id(subject)] = script.left
    return _references[id(subject)]


def script_for(order: str, count: int) -> Script:
    return Script(**{order: replicated(count)})
