"""Scripts of NNI 3.0 that are run under DDP only: what ranks could do differently, and what they have to do together."""

from __future__ import annotations

import contextlib
import functools
import itertools
from typing import Any, Dict, List, Optional

import nni3_scripts
import test_nni3_distillers as distillers
import torch
from harness import Wrap, freeze_norms
from nni.compression import pruning
from nni.compression.distillation import DynamicLayerwiseDistiller
from nni3_scripts import Outcome, RunCase, Script
from torch import nn

from nni_dataparallel import load_quantizer_state_dict, quantizer_state_dict


class InTwoParts(Script):
    """The gradients of two batches in one step, DDP's only communication in the second."""

    def train(self, model: nn.Module, optimizer: Any, step: Any, scheduler: Any, max_steps: Any, max_epochs: Any) -> None:
        parallel: Any = self.wrap(model)
        batches = itertools.cycle(nni3_scripts.data())
        for _ in range(max_steps):
            optimizer.zero_grad()
            for last in (False, True):
                alone = contextlib.nullcontext() if last or parallel is model else parallel.no_sync()
                with alone:
                    loss = step(next(batches), parallel)
                    loss.backward()
                self.losses.append(loss.item())
            optimizer.step()


class Validating(Script):
    """Rank 0 looks at the loss with its plain model, between the backward and the step; the others do not."""

    def train(self, model: nn.Module, optimizer: Any, step: Any, scheduler: Any, max_steps: Any, max_epochs: Any) -> None:
        def validate(_: nn.Module) -> None:
            if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
                with torch.no_grad():
                    step(nni3_scripts.data((3,), seed=3)[0], model)

        self.after_backward = validate
        super().train(model, optimizer, step, scheduler, max_steps, max_epochs)


class InOneGo(Script):
    """Trains some of the steps: those before a stop, or those after it."""

    saved: Optional[Dict[str, Any]] = None
    first, last = 0, distillers.STEPS
    distiller: Any = None

    def train(self, model: nn.Module, optimizer: Any, step: Any, scheduler: Any, max_steps: Any, max_epochs: Any) -> None:
        parts = {"model": model, "optimizer": optimizer}
        if self.saved is not None:
            for name, part in parts.items():
                part.load_state_dict(self.saved[name])
            load_quantizer_state_dict(self.distiller, self.saved["distiller"])
        parallel = self.wrap(model)
        freeze_norms(model)
        for batch in itertools.islice(itertools.cycle(nni3_scripts.data()), self.first, self.last):
            optimizer.zero_grad()
            loss = step(batch, parallel)
            loss.backward()
            optimizer.step()
            self.losses.append(loss.item())
        self.saved = {name: part.state_dict() for name, part in parts.items()}
        self.saved["distiller"] = quantizer_state_dict(self.distiller)


def start(script: InOneGo, first: int, last: int) -> Any:
    """A distiller whose training does the steps from ``first`` to ``last``."""
    script.first, script.last = first, last
    distiller = distillers.adaptive(distillers.WIDTHS)(script, distillers.wide(), distillers.plain_predict(script.wrap))
    distiller.track_forward(nni3_scripts.data((2,))[0][0])
    script.distiller = distiller
    return distiller


def compressed(distiller: Any) -> Any:
    torch.manual_seed(7)
    distiller.compress(distillers.STEPS, None)
    return distiller


def stopped_and_resumed(wrap: Wrap) -> Outcome:
    """On one device this never stops: what the ranks are compared with."""
    script = InOneGo(wrap, distillers.narrow())
    stop = 4 if torch.distributed.is_initialized() else distillers.STEPS
    distiller = compressed(start(script, 0, stop))
    if stop < distillers.STEPS:
        before, script = script, InOneGo(wrap, distillers.narrow())
        script.saved, script.losses = before.saved, before.losses
        distiller = compressed(start(script, stop, distillers.STEPS))
    outcome = script.outcome(distiller)
    linears = quantizer_state_dict(distiller)["trans_linears"]
    outcome.more = {f"{place} {name}": t for place, own in linears.items() for name, t in own.items()}
    return outcome


def two_parts(wrap: Wrap) -> Outcome:
    script = InTwoParts(wrap)
    pruner = pruning.TaylorPruner(script.net, distillers.HALF, script.evaluator, 3)
    pruner.compress()
    return script.outcome(pruner)


def validated(wrap: Wrap) -> Outcome:
    script = Validating(wrap)
    teacher, predict = distillers.net_teacher(), distillers.plain_predict(wrap)
    build = distillers.taught(distillers.taylor, DynamicLayerwiseDistiller, distillers.LINKS)
    compressor = build(script, teacher, predict)
    compressor.compress(distillers.STEPS, None)
    return script.outcome(compressor)


BOTH = ["first", "second"]
CHOICE = [{"op_names": BOTH, "link": BOTH}]
same_width = functools.partial(distillers.Mlp, 20, 0)
MORE_CASES: List[RunCase] = [
    RunCase("TaylorPruner: two backwards per step", two_parts),
    RunCase(
        "Dynamic: a choice of links",
        distillers.distilled(distillers.dynamic(CHOICE), student=same_width, teacher=distillers.wide),
    ),
    RunCase("Adaptive1d: stopped and resumed", stopped_and_resumed),
]
EVEN_CASES: List[RunCase] = [RunCase("Taylor, links: rank 0 validates", validated)]
