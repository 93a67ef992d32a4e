"""The doctor: each kind of fault is found where it is, and nowhere else; what the patch repairs and what remains."""

from __future__ import annotations

import copy
import inspect
from typing import Any, Callable, List

import pytest
import torch
from cases import is_new
from conftest import CASES, RELEASE
from doctor_models import (
    AsksForParameters,
    Assigns,
    AssignsAGraph,
    Centres,
    Collects,
    Counts,
    Draws,
    Float32Only,
    Healthy,
    KeepsAnActivation,
    MixesAGlobal,
    MixesAnAttribute,
    Moves,
    Normalised,
    OwnLoss,
    Refuses,
    UpdatesInPlace,
    batch,
    line_of,
)
from harness import data, freeze_norms, make_net, make_quantizer, stock_class
from torch import Tensor, nn

from nni_dataparallel import DoctorError, api, diagnose, fixes, is_patched, patch

pytestmark = pytest.mark.of_a_kind
checked = pytest.mark.skipif(int(torch.__version__.split(".")[0]) < 2, reason="before torch 2.0 mixed devices are not found")


@pytest.mark.parametrize("make", [Healthy, Moves, Float32Only], ids=lambda make: make.__name__)
@pytest.mark.parametrize("replicas", [2, 3])
def test_a_healthy_model_has_no_finding(make: Callable[[], nn.Module], replicas: int) -> None:
    """Neither rounding, nor uneven shards, nor constants that are moved or stay the same are taken for faults."""
    diagnosis = diagnose(make(), batch(), replicas=replicas)
    assert diagnosis.findings == []
    assert diagnosis.healthy
    assert "Nothing found: " in diagnosis.table()


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (Counts, {"lost attribute": "calls"}),
        (Assigns, {"lost buffer": "seen"}),
        (AssignsAGraph, {"lost buffer": "seen", "non-leaf": "seen"}),
        (UpdatesInPlace, {"one shard": "seen"}),
        (KeepsAnActivation, {"lost activation": "hidden"}),
        (Collects, {"shared attribute": "kept"}),
        (Centres, {"loss differs": "loss", "gradients differ": "weight, bias"}),
        (Refuses, {"fails": ""}),
        (AsksForParameters, {"asked for parameters": ""}),
        pytest.param(MixesAnAttribute, {"mixed devices": ""}, marks=checked),
        pytest.param(MixesAGlobal, {"mixed devices": ""}, marks=checked),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_fault_is_found_and_no_other(make: Callable[[], nn.Module], expected: Any) -> None:
    """Kind and name are told, with a remedy; without NNI in the model nothing is repaired."""
    diagnosis = diagnose(make(), batch())
    assert {finding.kind: ", ".join(finding.names) for finding in diagnosis.findings} == expected
    assert all(finding.status == "remains" and finding.remedy and finding.seen for finding in diagnosis.findings)
    assert not diagnosis.healthy
    assert not diagnosis.with_patch


@pytest.mark.parametrize(
    "make", [Refuses, AsksForParameters, pytest.param(MixesAnAttribute, marks=checked), pytest.param(MixesAGlobal, marks=checked)]
)
def test_the_line_of_the_users_code_is_told(make: type) -> None:
    """File and line are where it happens, not where the model is called, nor where a worker raises again."""
    (finding,) = diagnose(make(), batch()).findings
    assert finding.place == f"{inspect.getsourcefile(make)}:{line_of(make)}"
    assert finding.code.endswith("# here")
    assert finding.place in diagnose(make(), batch()).table()


def test_batch_norm_remains_with_its_remedy_and_hides_nothing() -> None:
    """The other runs are made with it frozen: its statistics do not show as faults of what comes after it."""
    diagnosis = diagnose(Normalised(), batch())
    norm, dropout = diagnosis.findings
    assert (norm.kind, norm.module, norm.status) == ("batch norm", "norm", "remains")
    assert "SyncBatchNorm" in norm.remedy
    assert "running_mean is the first shard's" in norm.seen
    assert (dropout.kind, dropout.status) == ("dropout", "note")
    assert "batch norms frozen, no dropout" in diagnosis.table()
    frozen = Normalised()
    frozen.norm.eval()
    assert diagnose(frozen, batch()).healthy


def test_random_numbers_are_a_note() -> None:
    """What changes with the seed on one device already is no fault of the replicas."""
    diagnosis = diagnose(Draws(), batch())
    assert [(finding.kind, finding.status) for finding in diagnosis.findings] == [("random", "note")]
    assert diagnosis.healthy


def test_the_live_model_is_not_touched() -> None:
    """Parameters, buffers, attributes, gradients, modes, random numbers and the optimizer stay as they are."""
    model = nn.Sequential(Counts(), nn.BatchNorm1d(3), nn.Dropout(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    before, drawn = copy.deepcopy(model.state_dict()), torch.random.get_rng_state()
    assert not diagnose(model, batch(), optimizer=optimizer).healthy
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert all(p.grad is None and p.dtype == torch.float32 for p in model.parameters())
    assert model[0].calls == 0
    assert model[1].training
    assert model[2].p == 0.5
    assert not optimizer.state
    assert torch.equal(torch.random.get_rng_state(), drawn)


def test_batches_and_losses_of_many_shapes() -> None:
    """Keywords with a loss of the model's own, an input alone, a target to regress to, a loss of the user's."""
    x, y = batch()
    assert diagnose(lambda: (OwnLoss(), {"x": x, "y": y})).healthy
    assert diagnose(Healthy(), x).healthy
    assert diagnose(Healthy(), (x, torch.randn(8, 3))).healthy
    assert diagnose(lambda: {"model": Healthy(), "batch": x, "loss": lambda model, rows: model(rows).abs().sum()}).healthy


KEPT = Healthy()


def run_away() -> Any:
    raise KeyError("no data here")


built: List[int] = []


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((3,), TypeError, "takes a torch.nn.Module or a function that builds one, not int"),
        ((Healthy(),), DoctorError, "needs a batch"),
        ((Healthy(), batch(1)), DoctorError, "the batch has 1 row, 2 replicas need at least 2 rows"),
        ((Healthy(), batch(), 1), ValueError, "with 1 replica there is nothing to compare"),
        ((Healthy(), batch(), "2"), TypeError, "replicas is a number, not str"),
        (
            (Healthy(), (torch.ones(8, 4), torch.zeros(8).long())),
            DoctorError,
            r"fails on one device already: .*doctor_models.py:\d+",
        ),
        ((Healthy(), (torch.ones(8, 5), torch.ones(8))), DoctorError, "no loss fits the model's output"),
        ((lambda: 3,), DoctorError, "returned int, which does not begin with a model: return"),
        ((Healthy,), DoctorError, "returned no batch to train on"),
        ((lambda: {"net": 1},), DoctorError, "a dict with net, which means nothing here"),
        ((lambda: (Healthy(), 1, 2),), DoctorError, "two values that may be the batch"),
        ((lambda: (KEPT, batch()),), DoctorError, "returned the same model twice"),
        ((run_away,), DoctorError, r"run_away\(\) raised KeyError: 'no data here'"),
        ((lambda: (nn.Linear(5, 3 + len(built), bool(built.append(1))), batch()),), DoctorError, "is not the first one"),
    ],
)
def test_what_cannot_be_examined_is_told(arguments: Any, error: Any, text: str) -> None:
    """The error names what was given and what is expected instead."""
    with pytest.raises(error, match=text):
        diagnose(*arguments)


def test_a_model_that_cannot_be_copied_is_built_anew_instead() -> None:
    """The error of a model with a graph in it says to give the function."""
    model = AssignsAGraph()
    model(batch()[0])
    with pytest.raises(DoctorError, match=r"AssignsAGraph cannot be copied .*: give diagnose"):
        diagnose(model, batch())
    assert [f.kind for f in diagnose(AssignsAGraph, batch()).findings] == ["lost buffer", "non-leaf"]


def test_works_without_nni(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of torch's alone needs none."""

    def missing() -> str:
        raise fixes.UnsupportedReleaseError("NNI is not installed")

    monkeypatch.setattr(fixes, "installed_release", missing)
    diagnosis = diagnose(Counts(), batch())
    assert diagnosis.nni is None
    assert "no NNI" in diagnosis.table()


QAT = [case for case in CASES if case.trains and not case.fold and not case.start and "output" in str(case.config)]
needs_qat = pytest.mark.skipif(not QAT, reason=f"NNI {RELEASE} has no quantizer")


def make_qat(count: bool = False) -> Any:
    net = make_net(QAT[0])
    if count:
        net.__class__ = CountingNet
    freeze_norms(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    make_quantizer(stock_class(QAT[0].quantizer), QAT[0], net, optimizer, RELEASE)
    return net, optimizer, data()[0]


class CountingNet(type(make_net(QAT[0])) if QAT else nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(x)


def test_a_loss_that_looks_into_the_model_is_told() -> None:
    """It gets the DataParallel, which has not the model's attributes."""
    loss = lambda model, rows: model(rows[0]).sum() + model.calls  # noqa: E731
    (finding,) = diagnose(Healthy(), batch(), loss=loss).findings
    assert (finding.kind, finding.code) == ("fails", "loss = lambda model, rows: model(rows[0]).sum() + model.calls  # noqa: E731")
    assert "'DataParallel' object has no attribute 'calls'" in finding.seen
    assert "model.module" in finding.remedy


def test_a_weight_that_torch_computes_before_each_forward_is_no_state() -> None:
    """Weight norm and spectral norm keep theirs as an attribute, a tensor with a graph."""

    def make() -> Any:
        torch.manual_seed(0)
        layers = nn.utils.weight_norm(nn.Linear(5, 4)), nn.utils.spectral_norm(nn.Linear(4, 3))
        return nn.Sequential(*layers), batch()

    assert diagnose(make).findings == []


@needs_qat
def test_the_faults_of_stock_nni_are_repaired_by_the_patch() -> None:
    """Stock leaves other ranges than one device; with the patch nothing remains. Whether NNI is patched stays as it was."""
    diagnosis = diagnose(make_qat)
    assert not is_patched()
    assert diagnosis.healthy
    assert diagnosis.with_patch
    repaired = diagnosis.of("repaired")
    assert {"lost buffer", "one shard", "state differs", "mixed devices"} & {finding.kind for finding in repaired}
    assert all("_nni_wrapper" not in f.module and ".module" not in f.module for f in repaired)
    assert diagnosis.losses["replicas, patched"] == pytest.approx(diagnosis.losses["one device"])
    assert diagnosis.ranges
    assert all(r.patched == pytest.approx(r.one_device) for r in diagnosis.ranges)
    assert any(r.stock != pytest.approx(r.one_device) for r in diagnosis.ranges)


@needs_qat
def test_what_remains_is_the_users_own() -> None:
    """A counter in the user's model is told apart from NNI's faults; a patch that was there is there afterwards."""
    patch()
    diagnosis = diagnose(lambda: make_qat(count=True))
    assert is_patched()
    assert [(finding.kind, finding.names) for finding in diagnosis.of("remains")] == [("lost attribute", ("calls",))]
    assert diagnosis.of("repaired")
    assert not any("calls" in finding.names for finding in diagnosis.of("repaired"))
    assert "1 finding remains with the patch; the patch repairs" in diagnosis.verdict


@needs_qat
def test_a_script_that_patches_is_examined_without_the_patch_first() -> None:
    """`import nni_dataparallel.auto` in the script, even in the function: stock NNI's faults are shown all the same."""
    once: List[int] = []

    def make() -> Any:
        if not once:  # as an import, which does something the first time only
            once.append(1)
            api.arm()
        return make_qat()

    assert diagnose(make).of("repaired")
    assert not is_patched()


@checked
@pytest.mark.skipif(not is_new(RELEASE), reason="evaluators are NNI 3.0's")
def test_an_evaluator_brings_optimizer_and_loss() -> None:
    """NNI 3.0: the quantizer as a script builds it; its evaluator's training step is the step."""
    import nni
    from nni.compression.utils import TorchEvaluator

    steps = []

    def training_step(batch: Any, model: nn.Module) -> Tensor:
        steps.append(type(model).__name__)
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def make() -> Any:
        net = make_net(QAT[0])
        optimizer = nni.trace(torch.optim.SGD)(net.parameters(), lr=0.05)
        config = [{"op_types": ["Conv2d", "Linear"], "target_names": ["_input_", "weight"], "quant_dtype": "int8"}]
        quantizer = stock_class()(net, config, TorchEvaluator(lambda *args: None, optimizer, training_step))
        return net, quantizer, data()[0]

    diagnosis = diagnose(make)
    assert diagnosis.healthy
    assert diagnosis.of("repaired")[0].kind == "mixed devices"
    assert set(steps) == {"Net", "Watched"}
