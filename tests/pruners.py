"""The pruners: how each is built and run in each release, and what a run leaves.

A run is a user's script: it builds a pruner, trains where the pruner asks for training, and fine-tunes
with the masks on. ``wrap`` is where the script says ``nn.DataParallel(model)``.
"""

from __future__ import annotations

import importlib
import os
import tempfile
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, List, Optional
from unittest import mock

import harness
import torch
from harness import Net, Wrap, data, freeze_norms
from torch import Tensor, nn

FIRST, SECOND = "nni.algorithms.compression.pytorch.pruning", "nni.algorithms.compression.v2.pytorch.pruning"
COVERED = ("2.0", "2.5", "2.10.1")

SIZES = (8, 7, 5, 2, 1)
BATCHES_TO_WATCH = 3  # two batches give two replicas four shards: enough, if a shard counted as a batch
SAMPLES_TO_WATCH = 9  # since 2.9 steps are samples: the second batch is still wanted, in one piece


@dataclass
class Outcome:
    """What a run left."""

    model: nn.Module
    masks: Dict[str, Tensor]
    weights: Dict[str, Tensor]
    losses: List[float]
    evaluation: Tensor
    metrics: Dict[str, Any]


class Script:
    """What the user's script does: it holds the model, the batches and the ``nn.DataParallel``."""

    def __init__(self, wrap: Wrap, norm: bool = False) -> None:
        self.wrap = wrap
        self.losses: List[float] = []
        self.metrics: Dict[str, Any] = {}
        torch.manual_seed(0)
        self.net = Net(norm)
        for module in self.net.modules():
            if isinstance(module, nn.BatchNorm2d):
                nn.init.uniform_(module.running_var, 0.5, 2.0)
                nn.init.uniform_(module.weight, 0.5, 1.5)

    def note_metrics(self, pruner: Any) -> None:
        """Take down by what the second API's pruner ranks the weights."""
        calculator = pruner.metrics_calculator
        calculate = calculator.calculate_metrics

        def noting(data: Any) -> Any:
            self.metrics = calculate(data)
            return self.metrics

        calculator.calculate_metrics = noting

    def sgd(self, model: Optional[nn.Module] = None, make: Callable[..., Any] = torch.optim.SGD) -> Any:
        return make((model or self.net).parameters(), lr=0.05, momentum=0.9)

    def train(
        self,
        model: nn.Module,
        optimizer: Any,
        criterion: Optional[Callable[[Tensor, Tensor], Tensor]] = None,
        seed: int = 1,
        steps: int = len(SIZES),
        before_step: Optional[Callable[[], None]] = None,
    ) -> None:
        parallel = self.wrap(model)
        parallel.train()
        freeze_norms(parallel)
        criterion = criterion or nn.functional.cross_entropy
        for x, target in data(SIZES[:steps], seed):
            optimizer.zero_grad()
            loss = criterion(parallel(x), target)
            loss.backward()
            if before_step is not None:
                before_step()
            optimizer.step()
            self.losses.append(loss.item())

    # The trainers that NNI calls
    def trainer_2_0(self, model: Any, criterion: Any, optimizer: Any, epoch: int, callback: Any) -> None:
        self.train(model, optimizer, criterion, epoch, before_step=callback)

    def trainer_first(self, model: Any, optimizer: Any, criterion: Any, epoch: int) -> None:
        self.train(model, optimizer, criterion, epoch)

    def trainer_second(self, model: Any, optimizer: Any, criterion: Any) -> None:
        self.train(model, optimizer, criterion)

    def training_func(
        self, model: Any, optimizers: Any, criterion: Any, lr_schedulers: Any = None, max_steps: Any = None, max_epochs: Any = None
    ) -> None:
        for epoch in range(max_epochs or 1):
            self.train(model, optimizers, criterion, epoch, min(max_steps or len(SIZES), len(SIZES)))

    def fine_tune(self, model: nn.Module, optimizer: Any = None, seed: int = 5) -> None:
        self.train(model, optimizer or self.sgd(model), seed=seed, steps=3)

    def outcome(self, model: nn.Module, masks: Dict[str, Tensor]) -> Outcome:
        weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        weights.update({name: t.clone() for name, t in model.named_buffers() if "running" in name})
        parallel = self.wrap(model).eval()
        with torch.no_grad():
            evaluation = parallel(data((6,), seed=2)[0][0])
        masks = {name: mask.detach().clone() for name, mask in masks.items()}
        return Outcome(model, masks, weights, self.losses, evaluation, self.metrics)


def masks_of(pruner: Any) -> Dict[str, Tensor]:
    """The masks on a pruner's wrappers."""
    wrappers = pruner.get_modules_wrapper()
    found = {}
    for wrapper in wrappers.values() if isinstance(wrappers, dict) else wrappers:
        found[f"{wrapper.name}.weight"] = wrapper.weight_mask
        if wrapper.bias_mask is not None:
            found[f"{wrapper.name}.bias"] = wrapper.bias_mask
    return found


Run = Callable[[Wrap], Outcome]
CONV: List[Dict[str, Any]] = [{"sparsity": 0.5, "op_types": ["Conv2d"]}]
LAYERS: List[Dict[str, Any]] = [{"sparsity": 0.5, "op_types": ["Conv2d", "Linear"]}]
NORM: List[Dict[str, Any]] = [{"sparsity": 0.5, "op_types": ["BatchNorm2d"]}]


def _class(home: str, name: str) -> Any:
    return getattr(importlib.import_module(home), name)


def _copy(config: List[Dict[str, Any]]) -> List[Dict[str, Any]]:
    return [dict(entry) for entry in config]  # the second API writes into it


# The first API, 2.0: a pruner is given the optimizer, and masks appear in its steps.
def one_shot(name: str, config: List[Dict[str, Any]], norm: bool = False, **options: Any) -> Run:
    def run(wrap: Wrap) -> Outcome:
        script = Script(wrap, norm)
        optimizer = script.sgd()
        pruner = _class(FIRST, name)(script.net, _copy(config), optimizer, **options)
        model = pruner.compress()
        script.train(model, optimizer)
        script.fine_tune(model, optimizer)
        return script.outcome(model, masks_of(pruner))

    return run


def admm_2_0(wrap: Wrap) -> Outcome:
    script = Script(wrap)
    pruner = _class(FIRST, "ADMMPruner")(script.net, _copy(CONV), script.trainer_2_0, num_iterations=2, training_epochs=2, row=1e-2)
    model = pruner.compress()
    script.fine_tune(model)
    return script.outcome(model, masks_of(pruner))


def agp_2_0(wrap: Wrap) -> Outcome:
    script = Script(wrap)
    optimizer = script.sgd()
    epochs = {"start_epoch": 0, "end_epoch": 3, "frequency": 1}
    config = [{"initial_sparsity": 0.0, "final_sparsity": 0.8, **epochs, "op_types": ["Conv2d", "Linear"]}]
    pruner = _class(FIRST, "AGPPruner")(script.net, config, optimizer)
    model = pruner.compress()
    for epoch in range(4):
        pruner.update_epoch(epoch)
        script.train(model, optimizer, seed=epoch)
    return script.outcome(model, masks_of(pruner))


def lottery_first(wrap: Wrap) -> Outcome:
    script = Script(wrap)
    optimizer = script.sgd()
    config = [{"prune_iterations": 2, "sparsity": 0.6, "op_types": ["Conv2d", "Linear"]}]
    pruner = _class(FIRST, "LotteryTicketPruner")(script.net, config, optimizer)
    model = pruner.compress()
    for iteration in pruner.get_prune_iterations():
        pruner.prune_iteration_start()
        script.train(model, optimizer, seed=iteration)
    return script.outcome(model, masks_of(pruner))


# The first API since 2.3: compress() itself calls the user's trainer.
def weights_only(home: str, name: str, config: List[Dict[str, Any]]) -> Run:
    def run(wrap: Wrap) -> Outcome:
        script = Script(wrap)
        script.train(script.net, script.sgd())  # the training before
        pruner = _class(home, name)(script.net, _copy(config))
        pruned = pruner.compress()
        model = pruned[0] if isinstance(pruned, tuple) else pruned
        script.fine_tune(model)
        return script.outcome(model, masks_of(pruner))

    return run


def trained_first(name: str, config: List[Dict[str, Any]], norm: bool = False, own_optimizer: bool = False, **options: Any) -> Run:
    def run(wrap: Wrap) -> Outcome:
        script = Script(wrap, norm)
        optimizers = () if own_optimizer else (script.sgd(),)
        criterion = nn.functional.cross_entropy
        pruner = _class(FIRST, name)(script.net, _copy(config), *optimizers, script.trainer_first, criterion, **options)
        model = pruner.compress()
        script.fine_tune(model)
        return script.outcome(model, masks_of(pruner))

    return run


# The second API
def _traced(release: str) -> Callable[..., Any]:
    if release == "2.5":
        return torch.optim.SGD
    import nni

    return nni.trace(torch.optim.SGD)


def trained_second(
    release: str, name: str, config: List[Dict[str, Any]], norm: bool = False, evaluator: bool = False, **options: Any
) -> Run:
    def run(wrap: Wrap) -> Outcome:
        script = Script(wrap, norm)
        optimizer = script.sgd(make=_traced(release))
        criterion = nn.functional.cross_entropy
        how: Any = (script.trainer_second, optimizer, criterion)
        if evaluator:
            how = (_class("nni.compression.pytorch", "TorchEvaluator")(script.training_func, optimizer, criterion),)
        pruner = _class(SECOND, name)(script.net, _copy(config), *how, **options)
        script.note_metrics(pruner)
        if name == "ADMMPruner":
            _leave_zero(pruner.Z)
        model, _ = pruner.compress()
        script.fine_tune(model)
        return script.outcome(model, masks_of(pruner))

    return run


def _leave_zero(projections: Dict[str, Any]) -> None:
    """Away from the root of a norm at 0, where ADMM starts: today's torch has no finite gradient there."""
    for projection in projections.values():
        for tensor in projection.values() if isinstance(projection, dict) else [projection]:
            tensor += 0.01


# The scheduler loads whole models, which torch.load() refuses by default since 2.6.
unsafe_load = mock.patch.dict(os.environ, {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"})


def iterative(name: str) -> Run:
    @unsafe_load
    def run(wrap: Wrap) -> Outcome:
        script = Script(wrap)
        with tempfile.TemporaryDirectory() as folder:
            # The activation pruners cannot be had inside: NNI saves the model with their hooks, which do not pickle.
            pruner = _class(SECOND, name)(script.net, _copy(LAYERS), "level", 2, log_dir=folder, finetuner=script.fine_tune)
            pruner.compress()
            _, model, masks, _, _ = pruner.get_best_result()
        flat = {f"{layer}.{target}": mask for layer, own in masks.items() for target, mask in own.items() if mask is not None}
        return script.outcome(model, flat)

    return run


@dataclass(frozen=True)
class PrunerCase:
    """One pruner as one release has it; ``wrong``: why stock differs under DataParallel, where it does."""

    name: str
    release: str
    run: Run = field(hash=False, compare=False)
    wrong: str = ""


SHARDS = "a shard is counted as a batch"


def _first_2_0() -> List[PrunerCase]:
    def case(name: str, run: Run, wrong: str = "") -> PrunerCase:
        return PrunerCase(name, "2.0", run, wrong)

    watch = {"statistics_batch_num": BATCHES_TO_WATCH}
    return [
        case("LevelPruner", one_shot("LevelPruner", LAYERS)),
        *(case(name, one_shot(name, CONV)) for name in ("L1FilterPruner", "L2FilterPruner", "FPGMPruner")),
        case("SlimPruner", one_shot("SlimPruner", NORM, norm=True)),
        case("TaylorFOWeightFilterPruner", one_shot("TaylorFOWeightFilterPruner", CONV, **watch)),
        *(case(name, one_shot(name, CONV, **watch), SHARDS)
          for name in ("ActivationAPoZRankFilterPruner", "ActivationMeanRankFilterPruner")),
        case("AGPPruner", agp_2_0),
        case("ADMMPruner", admm_2_0),
        case("LotteryTicketPruner", lottery_first),
    ]  # fmt: skip


def _first(release: str) -> List[PrunerCase]:
    def case(name: str, run: Run, wrong: str = "") -> PrunerCase:
        return PrunerCase(name, release, run, wrong)

    watch = {"sparsifying_training_batches": BATCHES_TO_WATCH}
    rounds = {"num_iterations": 2, "epochs_per_iteration": 2}
    return [
        case("LevelPruner", weights_only(FIRST, "LevelPruner", LAYERS)),
        *(case(name, weights_only(FIRST, name, CONV)) for name in ("L1FilterPruner", "L2FilterPruner", "FPGMPruner")),
        case("SlimPruner", trained_first("SlimPruner", NORM, norm=True, sparsifying_training_epochs=2)),
        case("TaylorFOWeightFilterPruner", trained_first("TaylorFOWeightFilterPruner", CONV, **watch)),
        *(case(name, trained_first(name, CONV, **watch), SHARDS)
          for name in ("ActivationAPoZRankFilterPruner", "ActivationMeanRankFilterPruner")),
        case("AGPPruner", trained_first("AGPPruner", LAYERS, **rounds)),
        case("ADMMPruner", trained_first("ADMMPruner", CONV, own_optimizer=True, row=1e-2, **rounds)),
        case("LotteryTicketPruner", lottery_first),
    ]  # fmt: skip


def _second(release: str) -> List[PrunerCase]:
    def case(name: str, run: Run, wrong: str = "") -> PrunerCase:
        return PrunerCase(f"v2.{name}", release, run, wrong)

    def trained(name: str, config: List[Dict[str, Any]], **options: Any) -> Run:
        return trained_second(release, name, config, **options)

    activation = ("ActivationAPoZRankPruner", "ActivationMeanRankPruner")
    watched = {"training_batches": BATCHES_TO_WATCH if release == "2.5" else SAMPLES_TO_WATCH}
    batches = {"training_batches": BATCHES_TO_WATCH}
    cases = [
        case("LevelPruner", weights_only(SECOND, "LevelPruner", LAYERS)),
        *(case(name, weights_only(SECOND, name, CONV)) for name in ("L1NormPruner", "L2NormPruner", "FPGMPruner")),
        case(
            "SlimPruner",
            trained("SlimPruner", [{"total_sparsity": 0.5, "op_types": ["BatchNorm2d"]}], norm=True, training_epochs=2),
        ),
        case("TaylorFOWeightPruner", trained("TaylorFOWeightPruner", CONV, **batches)),
        *(case(name, trained(name, LAYERS, **watched), SHARDS) for name in activation),
        case("ADMMPruner", trained("ADMMPruner", [{**LAYERS[0], "rho": 1e-2}], iterations=2, training_epochs=2)),
        *(case(name, iterative(name)) for name in ("LinearPruner", "AGPPruner", "LotteryTicketPruner")),
    ]
    if release == "2.10.1":
        movement = {"warm_up_step": 2, "cool_down_beginning_step": 6}
        cases += [
            case("MovementPruner", trained("MovementPruner", LAYERS, training_epochs=2, **movement)),
            case("MovementPruner.evaluator", trained("MovementPruner", LAYERS, evaluator=True, training_epochs=2, **movement)),
            case("TaylorFOWeightPruner.evaluator", trained("TaylorFOWeightPruner", CONV, evaluator=True, training_steps=3)),
            *(
                case(f"{name}.evaluator", trained(name, LAYERS, evaluator=True, training_steps=SAMPLES_TO_WATCH), SHARDS)
                for name in activation
            ),
        ]
    return cases


def pruner_cases(release: str) -> List[PrunerCase]:
    """The pruners of a release; none where they are not tested."""
    if release not in COVERED:
        return []
    return _first_2_0() if release == "2.0" else [*_first(release), *_second(release)]


def apart(reference: Outcome, outcome: Outcome, exact: bool = False) -> List[str]:
    """In words, where two runs differ: masks exactly, what was trained as after a few steps."""
    rtol, atol = (0.0, 0.0) if exact else (harness.RTOL, harness.ATOL)
    lines = harness.unequal("mask", reference.masks, outcome.masks)
    for name in ("metrics", "weights", "losses", "evaluation"):
        lines += harness.unequal(name, getattr(reference, name), getattr(outcome, name), rtol, atol)
    return lines
