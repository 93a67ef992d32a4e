"""Pruners and distillers of NNI 3.0: how a script uses each, and what a run leaves.

``wrap`` is where the script says ``nn.DataParallel(model)``: inside the training function that it gives to NNI's
evaluator, and around the finished model.
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, List, Optional

import harness
import nni
import torch
from harness import LEARNING_RATE, Net, Wrap, data, freeze_norms, snapshot
from nni.compression.utils import TorchEvaluator
from torch import Tensor, nn

Config = List[Dict[str, Any]]


@dataclass
class Outcome:
    """What a run left."""

    losses: List[float]
    state: Dict[str, Tensor]
    masks: Dict[str, Tensor]
    evaluation: Tensor
    plain: Dict[str, Tensor] = field(default_factory=dict)
    """The state after ``unwrap_model()``."""
    more: Dict[str, Tensor] = field(default_factory=dict)
    """What a compressor keeps outside the model."""


def make_net(norm: bool = False, seed: int = 0) -> Net:
    torch.manual_seed(seed)
    net = Net(norm)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_var, 0.5, 2.0)
            nn.init.uniform_(module.weight, 0.5, 1.5)
    return net


class Script:
    """What the user's script does: it holds the model, the batches, the evaluator and the ``nn.DataParallel``."""

    def __init__(self, wrap: Wrap, net: Optional[nn.Module] = None) -> None:
        self.wrap = wrap
        self.losses: List[float] = []
        self.net = make_net() if net is None else net
        optimizer = nni.trace(torch.optim.SGD)(self.net.parameters(), lr=LEARNING_RATE, momentum=0.9)
        self.evaluator = TorchEvaluator(self.train, optimizer, self.training_step)
        self.after_backward: Callable[[nn.Module], None] = lambda model: None

    @staticmethod
    def training_step(batch: Any, model: nn.Module) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def train(self, model: nn.Module, optimizer: Any, step: Any, scheduler: Any, max_steps: Any, max_epochs: Any) -> None:
        parallel = self.wrap(model)
        parallel.train()
        freeze_norms(model)
        for batch in itertools.islice(itertools.cycle(data()), max_steps):
            optimizer.zero_grad()
            loss = step(batch, parallel)
            loss.backward()
            self.after_backward(model)
            optimizer.step()
            self.losses.append(loss.item())

    def fine_tune(self, model: nn.Module, steps: int = 5) -> None:
        """Train the finished model, wrappers and all."""
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        self.train(model, optimizer, self.training_step, None, steps, None)

    def outcome(self, compressor: Any) -> Outcome:
        """Evaluate, and then unwrap."""
        self.net.eval()
        parallel = self.wrap(self.net)
        with torch.no_grad():
            evaluation = parallel(data((6,), seed=2)[0][0])
        masks = {}
        for fused in compressor.fused_compressors:
            if fused.mode == "pruning":
                for layer, own in fused.get_masks().items():
                    masks.update({f"{layer}.{target}": mask for target, mask in own.items() if mask is not None})
        result = Outcome(list(self.losses), snapshot(self.net), masks, evaluation)
        compressor.unwrap_model()
        result.plain = snapshot(self.net)
        return result


Run = Callable[[Wrap], Outcome]


@dataclass(frozen=True)
class RunCase:
    """One compressor, or several on one model, as a script uses them."""

    name: str
    run: Run = field(hash=False, compare=False)


def layers(**setting: Any) -> Config:
    return [{"op_types": ["Conv2d", "Linear"], **setting}]


def run_of(build: Callable[[Script], Any], *steps: Any, norm: bool = False, fine_tune: bool = True) -> Run:
    """A run that builds a compressor, lets it compress, and trains the result."""

    def run(wrap: Wrap) -> Outcome:
        script = Script(wrap, make_net(norm))
        compressor = build(script)
        compressor.compress(*steps)
        if fine_tune:
            script.fine_tune(script.net)
        return script.outcome(compressor)

    return run


def built(make: Any, config: Config, *args: Any, evaluator: bool = True, **options: Any) -> Callable[[Script], Any]:
    def build(script: Script) -> Any:
        return make(script.net, copy.deepcopy(config), *([script.evaluator] if evaluator else []), *args, **options)

    return build


def apart(reference: Outcome, outcome: Outcome, exact: bool = False) -> List[str]:
    """In words, where two runs differ: masks exactly, what was trained as after a few steps."""
    rtol, atol = (0.0, 0.0) if exact else (harness.RTOL, harness.ATOL)
    lines = harness.unequal("mask", reference.masks, outcome.masks)
    for name in ("losses", "state", "evaluation", "plain", "more"):
        mine, yours = getattr(reference, name), getattr(outcome, name)
        lines += harness.unequal(name, mine, yours, rtol, atol)
    return lines
