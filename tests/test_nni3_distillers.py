"""The distillers of NNI 3.0, and several compressors on one model, under nn.DataParallel: losses and gradients of one device."""

from __future__ import annotations

import copy
import functools
from typing import Any, Callable, Dict

import pytest
from conftest import RELEASE

if RELEASE != "3.0":
    pytest.skip(f"NNI {RELEASE} does not have the distillers of 3.0", allow_module_level=True)

import torch
from harness import Linear, Wrap, data, one_device, replicated
from nni.compression import pruning, quantization
from nni.compression.distillation import Adaptive1dLayerwiseDistiller, DynamicLayerwiseDistiller
from nni3_scripts import Config, Outcome, Run, RunCase, Script, apart, layers, make_net
from torch import Tensor, nn

import nni_dataparallel
from nni_dataparallel import is_patched, patched

STEPS = 7


class Mlp(nn.Module):
    """A student (narrow) or a teacher (wide) whose layers differ in their last dimension."""

    def __init__(self, width: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = Linear(64, width)
        self.second = Linear(width, width)
        self.fc = Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.tanh(self.second(torch.tanh(self.first(x.flatten(1))))))


def plain_predict(wrap: Wrap) -> Callable[[Any, nn.Module], Tensor]:
    return lambda batch, teacher: teacher(batch[0])


def parallel_predict(wrap: Wrap) -> Callable[[Any, nn.Module], Tensor]:
    return lambda batch, teacher: wrap(teacher)(batch[0])


def net_teacher() -> nn.Module:
    return make_net(seed=5)


def noting(distiller: Any, script: Script) -> Dict[str, Tensor]:
    """Take down the distillation losses and all gradients; and see that no step leaves a hidden state."""
    noted: Dict[str, Tensor] = {}
    compute = distiller.compute_distill_loss

    def compute_distill_loss() -> Any:
        loss = compute()
        noted[f"distillation loss {len(script.losses)}"] = torch.as_tensor(loss).detach().clone()
        return loss

    def after_backward(model: nn.Module) -> None:
        step = len(script.losses)
        noted.update({f"grad {n} {step}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        for spaces in (*distiller._target_spaces.values(), *distiller._teacher_target_spaces.values()):
            assert not [name for name, space in spaces.items() if space.hidden_states]
        for layer, linears in getattr(distiller, "trans_linears", {}).items():
            for linear in linears.values():
                if linear is not None:
                    noted.update({f"trans {layer} {n} {step}": p.detach().clone() for n, p in linear.named_parameters()})
                    noted.update({f"trans grad {layer} {n} {step}": p.grad.clone() for n, p in linear.named_parameters()})

    distiller.compute_distill_loss = compute_distill_loss
    script.after_backward = after_backward
    return noted


def distilled(
    build: Callable[[Script, nn.Module, Any], Any],
    student: Callable[[], nn.Module] = make_net,
    teacher: Callable[[], nn.Module] = net_teacher,
    predict: Callable[[Wrap], Any] = plain_predict,
    teacher_in_parallel: bool = False,
    track: bool = False,
) -> Run:
    def run(wrap: Wrap) -> Outcome:
        taught = teacher()
        script = Script(wrap, student())
        distiller = build(script, wrap(taught) if teacher_in_parallel else taught, predict(wrap))
        if track:
            distiller.track_forward(data()[0][0])
        noted = noting(distiller, script)
        torch.manual_seed(7)  # of the linear layers between student and teacher
        distiller.compress(STEPS, None)
        outcome = script.outcome(distiller)
        outcome.more = noted
        return outcome

    return run


def dynamic(config: Config, **options: Any) -> Callable[[Script, nn.Module, Any], Any]:
    return lambda script, teacher, predict: DynamicLayerwiseDistiller(
        script.net, copy.deepcopy(config), script.evaluator, teacher, predict, **options
    )


def adaptive(config: Config) -> Callable[[Script, nn.Module, Any], Any]:
    return lambda script, teacher, predict: Adaptive1dLayerwiseDistiller(
        script.net, copy.deepcopy(config), script.evaluator, teacher, predict
    )


HIDDEN = [{"op_names": ["conv1", "relu2"], "lambda": 2.0, "apply_method": "mse"}]
LOGITS = [{"op_names": ["fc"], "lambda": 0.5, "apply_method": "kl"}]
LINKS = [{"op_names": ["relu1"], "link": ["conv1", "relu1"]}, {"op_names": ["fc"], "link": "fc", "apply_method": "kl"}]
WIDTHS = [{"op_names": ["first", "second"]}, {"op_names": ["fc"], "apply_method": "kl"}]

narrow, wide = functools.partial(Mlp, 12, 0), functools.partial(Mlp, 20, 5)
mlps = {"student": narrow, "teacher": wide, "track": True}

DISTILLERS = [
    RunCase("Dynamic: mse", distilled(dynamic(HIDDEN))),
    RunCase("Dynamic: kl", distilled(dynamic(LOGITS, origin_loss_lambda=0.5))),
    RunCase("Dynamic: links", distilled(dynamic(LINKS))),
    RunCase("Dynamic: teacher_predict in parallel", distilled(dynamic([*HIDDEN, *LOGITS]), predict=parallel_predict)),
    RunCase("Dynamic: teacher in parallel", distilled(dynamic([*HIDDEN, *LOGITS]), teacher_in_parallel=True)),
    RunCase("Adaptive1d: same widths", distilled(adaptive([*HIDDEN, *LOGITS]), track=True)),
    RunCase("Adaptive1d: wider than the student", distilled(adaptive(WIDTHS), **mlps)),
    RunCase(
        "Adaptive1d: wider than the student, teacher in parallel", distilled(adaptive(WIDTHS), teacher_in_parallel=True, **mlps)
    ),
]

INT8 = {"quant_dtype": "int8", "quant_scheme": "affine", "granularity": "default"}
QUANT = layers(target_names=["_input_", "weight", "_output_"], **INT8)
SYMMETRIC = layers(target_names=["_input_", "weight", "_output_"], **{**INT8, "quant_scheme": "symmetric"})
HALF = layers(sparse_ratio=0.5)


def taylor(script: Script) -> Any:
    return pruning.TaylorPruner(script.net, HALF, script.evaluator, 3)


def qat(script: Script) -> Any:
    return quantization.QATQuantizer(script.net, QUANT, script.evaluator, 2)


def agp(make: Any) -> Callable[[Script], Any]:
    return lambda script: pruning.AGPPruner(make(script.net, HALF, script.evaluator), 2, 3)


def then(before: Callable[[Script], Any], make: Any, *args: Any) -> Callable[[Script], Any]:
    return lambda script: make.from_compressor(before(script), *copy.deepcopy(args))


def chained(build: Callable[[Script], Any]) -> Run:
    def run(wrap: Wrap) -> Outcome:
        script = Script(wrap)
        compressor = build(script)
        compressor.compress(STEPS, None)
        return script.outcome(compressor)

    return run


def taught(before: Callable[[Script], Any], make: Any, config: Config) -> Callable[[Script, nn.Module, Any], Any]:
    return lambda script, teacher, predict: make.from_compressor(before(script), copy.deepcopy(config), teacher, predict)


pruned_qat = then(taylor, quantization.QATQuantizer, QUANT, 3)
slim_lsq = then(lambda script: pruning.SlimPruner(script.net, HALF, script.evaluator, 4), quantization.LsqQuantizer, SYMMETRIC)
CHAINS = [
    RunCase("Taylor, QAT", chained(pruned_qat)),
    RunCase("QAT, Movement", chained(then(qat, pruning.MovementPruner, HALF, 2, 5))),
    RunCase("Slim, LSQ", chained(slim_lsq)),
    RunCase("AGP of L1, distiller", distilled(taught(agp(pruning.L1NormPruner), DynamicLayerwiseDistiller, HIDDEN))),
    RunCase("QAT, distiller", distilled(taught(qat, DynamicLayerwiseDistiller, [*HIDDEN, *LOGITS]))),
    RunCase("Taylor, QAT, distiller", distilled(taught(pruned_qat, DynamicLayerwiseDistiller, LINKS))),
    RunCase(
        "Taylor, QAT, distiller, all in parallel",
        distilled(taught(pruned_qat, Adaptive1dLayerwiseDistiller, HIDDEN), track=True, teacher_in_parallel=True),
    ),
]
CASES = [*DISTILLERS, *CHAINS]

each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
each_count = pytest.mark.parametrize("count", [2, 3, 4])


@functools.lru_cache(maxsize=None)
def reference(case: RunCase) -> Outcome:
    """Stock NNI on one device."""
    assert not is_patched()
    return case.run(one_device)


@each_case
@each_count
def test_distilled_on_replicas_equals_one_device(count: int, case: RunCase) -> None:
    """Losses, gradients, masks, state and the plain model afterwards are those of stock NNI on one device."""
    on_one = reference(case)
    with patched():
        assert apart(on_one, case.run(replicated(count))) == []


@each_case
def test_distilled_on_one_device_is_stock(case: RunCase) -> None:
    """On one device nothing changes, not the last bit."""
    on_one = reference(case)
    with patched():
        assert apart(on_one, case.run(one_device), exact=True) == []


@each_case
@pytest.mark.skipif(int(torch.__version__.split(".")[0]) < 2, reason="torch < 2.0 cannot tell the virtual devices apart")
@pytest.mark.xfail(strict=True, raises=(RuntimeError, KeyError), reason="every replica runs the original's wrapper")
def test_stock_distiller_on_replicas(case: RunCase) -> None:
    """Without the fixes no distiller of 3.0, and no chain of compressors, trains under DataParallel."""
    on_one = reference(case)
    assert apart(on_one, case.run(replicated(2))) == []


@pytest.mark.parametrize("case", DISTILLERS, ids=lambda case: case.name)
def test_a_case_distils(case: RunCase) -> None:
    """What is compared is a loss in every step, and gradients of all that is trained."""
    more = reference(case).more
    assert [float(more[f"distillation loss {step}"]) > 0 for step in range(STEPS)] == [True] * STEPS
    assert {f"grad {name} 1" for name in reference(case).plain} <= {name.replace("_nni_wrapper.", "") for name in more}
    trained = {name.split()[2] for name in more if name.startswith("trans grad")}
    assert trained == ({"first", "second"} if "student" in case.name else set())


def ours() -> Any:
    return nni_dataparallel.QATQuantizer


SUBCLASSED = [
    ("Taylor, QAT", lambda: then(taylor, ours(), QUANT, 3)),
    (
        "QAT, Movement",
        lambda: then(lambda script: ours()(script.net, QUANT, script.evaluator, 2), pruning.MovementPruner, HALF, 2, 5),
    ),
]


@pytest.mark.parametrize(("name", "build"), SUBCLASSED, ids=[name for name, _ in SUBCLASSED])
@each_count
def test_a_quantizer_of_ours_in_a_chain_with_stock_pruners(count: int, name: str, build: Any) -> None:
    """The subclass repairs the wrappers that it shares with a stock pruner of the same layers."""
    on_one = reference(next(case for case in CHAINS if case.name == name))
    assert apart(on_one, chained(build())(replicated(count))) == []


def in_parallel_from_the_start(count: int, teacher_too: bool) -> Outcome:
    """Compressors that are given ``nn.DataParallel(model)``, with its names."""
    script = Script(one_device, replicated(count)(make_net()))
    prefix = "" if count == 1 else "module."
    teacher = replicated(count)(net_teacher()) if teacher_too else net_teacher()
    config = [{"op_names": [f"{prefix}conv1", f"{prefix}fc"]}]
    distiller = taught(taylor, DynamicLayerwiseDistiller, config)(script, teacher, plain_predict(one_device))
    distiller.compress(STEPS, None)
    outcome = script.outcome(distiller)
    for name in ("state", "plain", "masks"):
        setattr(outcome, name, {key.replace("module.", "", 1): value for key, value in getattr(outcome, name).items()})
    return outcome


@pytest.mark.parametrize("teacher_too", [False, True])
@each_count
def test_a_model_that_is_given_in_parallel(count: int, teacher_too: bool) -> None:
    """Compressors of a DataParallel train it as they do the plain model; its prefix is not looked for in the teacher."""
    on_one = in_parallel_from_the_start(1, False)
    with patched():
        assert apart(on_one, in_parallel_from_the_start(count, teacher_too)) == []
