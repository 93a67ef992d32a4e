"""LightningEvaluator of NNI 3.0: Lightning 1.x' strategy "dp" is DataParallel; Lightning 2.x has none.

Without a GPU, Lightning's own strategy builds a rehearsal.
"""

from __future__ import annotations

import copy
from importlib.util import find_spec
from typing import Any, Dict, NamedTuple

import pytest
from conftest import RELEASE

if not RELEASE.startswith("3.0") or "rc" in RELEASE:
    pytest.skip("NNI 3.0 only", allow_module_level=True)
if find_spec("pytorch_lightning") is None:
    pytest.skip("pytorch-lightning is not installed: pip install '.[evaluators]'", allow_module_level=True)

import nni
import pytorch_lightning as pl
import torch
from evaluating import INT8, Left, differences, replicas_in
from harness import LEARNING_RATE, Linear
from nni.compression.pruning import SlimPruner, TaylorPruner
from nni.compression.utils import LightningEvaluator
from torch import Tensor, nn

import nni_dataparallel
from nni_dataparallel import patched, rehearse
from nni_dataparallel.fixes import QUANTIZERS, stock_quantizer

FIRST = pl.__version__.startswith("1.")
has_dp = pytest.mark.skipif(not FIRST, reason="Lightning 2.x has no DataParallel")
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:pytorch_lightning"),
    pytest.mark.filterwarnings("ignore:.*lightning.*"),
]
BATCHES = (8, 8, 8)
EPOCHS = 2
QUANTISED = [{"op_types": ["Linear"], "target_names": ["_input_", "weight", "_output_"], **INT8}]
PRUNED = [{"op_types": ["Linear"], "sparse_ratio": 0.5}]


class Data(pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(1)
        x, y = torch.randn(sum(BATCHES), 4, generator=generator), torch.randint(3, (sum(BATCHES),), generator=generator)
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=BATCHES[0])

    test_dataloader = train_dataloader


class Model(pl.LightningModule):
    """Counts steps and keeps losses where it is no replica: Lightning calls ``training_step_end`` on the model itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.relu, self.out = Linear(4, 8), nn.ReLU(), Linear(8, 3)
        self.left = Left()

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.relu(self.fc(x)))

    def training_step(self, batch: Any, index: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def test_step(self, batch: Any, index: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.left.losses.append(outputs["loss"].mean().item())

    def on_test_batch_end(self, outputs: Any, *_: Any) -> None:
        self.left.metrics.append(outputs.mean().item())

    def configure_optimizers(self) -> Any:
        return nni.trace(torch.optim.SGD)(self.parameters(), lr=LEARNING_RATE, momentum=0.9)


class Subject(NamedTuple):
    name: str
    config: Any
    duration: Any = (None, EPOCHS)
    more: Any = {}


SUBJECTS = [Subject(name, QUANTISED) for name in ("QATQuantizer", "LsqQuantizer", "PtqQuantizer")]
SUBJECTS.append(Subject("TaylorPruner", PRUNED, (), {"training_steps": 4}))
each_subject = pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.name)


def evaluator(count: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer_class, more = pl.Trainer, {"max_epochs": EPOCHS}
    if count > 1:
        from pytorch_lightning.strategies import dp

        monkeypatch.setattr(dp, "DataParallel", replicas_in(nn, count).DataParallel)

        class SeveralDevices(pl.Trainer):
            """As ``strategy="dp"``, which Lightning refuses on a CPU."""

            def __init__(self, **kwargs: Any) -> None:
                super().__init__(strategy=dp.DataParallelStrategy(), devices=count, **kwargs)

        trainer_class = SeveralDevices
    return LightningEvaluator(nni.trace(trainer_class)(accelerator="cpu", **quiet, **more), nni.trace(Data)())


def stock(subject: Subject) -> Any:
    return stock_quantizer(subject.name) if subject.name in QUANTIZERS else TaylorPruner


def train(subject: Subject, cls: Any, count: int, monkeypatch: pytest.MonkeyPatch, times: int = 1) -> Left:
    model = Model()
    compressor = cls(model, copy.deepcopy(subject.config), evaluator(count, monkeypatch), **subject.more)
    for _ in range(times):
        returned, config = compressor.compress(*subject.duration)
        assert returned is model
    return model.left.finish(compressor, config)


_references: Dict[str, Left] = {}


def reference(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> Left:
    """Stock NNI with Lightning on one device."""
    if subject.name not in _references:
        assert not nni_dataparallel.is_patched()
        _references[subject.name] = train(subject, stock(subject), 1, monkeypatch)
    return _references[subject.name]


@has_dp
@each_subject
@pytest.mark.parametrize("count", [2, 4])
def test_lightnings_dp_equals_one_device(subject: Subject, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses, evaluation losses, the whole state, masks or calibration config."""
    expected = reference(subject, monkeypatch)
    with patched():
        found = train(subject, stock(subject), count, monkeypatch)
    assert expected.losses or expected.metrics
    assert differences(expected, found) == []


@has_dp
@pytest.mark.parametrize("subject", SUBJECTS[:2], ids=lambda subject: subject.name)
def test_a_subclass_with_stock_nni_below(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quantizer of ours with NNI's own evaluator."""
    expected = reference(subject, monkeypatch)
    assert differences(expected, train(subject, getattr(nni_dataparallel, subject.name), 2, monkeypatch)) == []


@has_dp
@each_subject
@pytest.mark.xfail(reason="the faults that this package repairs")
def test_stock_lightnings_dp_equals_one_device(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock NNI raises what CUDA would: replicas run the original's layers."""
    expected = reference(subject, monkeypatch)
    assert differences(expected, train(subject, stock(subject), 2, monkeypatch)) == []


@has_dp
def test_a_second_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the first one has reverted does not stand in the replicas' way."""
    qat = SUBJECTS[0]
    expected = train(qat, stock(qat), 1, monkeypatch, times=2)
    with patched():
        found = train(qat, stock(qat), 2, monkeypatch, times=2)
    assert len(found.losses) == 2 * EPOCHS * len(BATCHES)
    assert differences(expected, found) == []


@has_dp
def test_what_adds_to_the_loss_is_refused_under_dp(monkeypatch: pytest.MonkeyPatch) -> None:
    """SlimPruner's penalty has no place in a loss that every replica computes; on one device it has."""
    slim = Subject("SlimPruner", PRUNED, (), {"training_steps": 4})
    expected = train(slim, SlimPruner, 1, monkeypatch)
    with patched():
        assert differences(expected, train(slim, SlimPruner, 1, monkeypatch)) == []
        with pytest.raises(NotImplementedError, match=r"SlimPruner.*strategy 'dp'.*Use TorchEvaluator"):
            train(slim, SlimPruner, 2, monkeypatch)


def test_a_data_parallel_and_lightning_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning cannot train a model in a DataParallel: a warning says what is trained, and it is trained as on one device."""
    qat = SUBJECTS[0]
    model = Model()
    with patched():
        expected = train(qat, stock(qat), 1, monkeypatch)
        with pytest.warns(UserWarning, match="LightningEvaluator.*the DataParallel is not used") as caught:
            quantizer = stock(qat)(rehearse(model, 2), copy.deepcopy(QUANTISED), evaluator(1, monkeypatch))
        returned, config = quantizer.compress(None, EPOCHS)
    assert [w.filename for w in caught if "is not used" in str(w.message)] == [__file__]
    assert returned.module is model
    assert differences(expected, model.left.finish(quantizer, config)) == []


def test_max_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training stops after them, with Lightning 1.x (as stock) and 2.x (where stock cannot set them)."""
    qat = Subject("QATQuantizer", QUANTISED, (4, None))
    with patched():
        assert len(train(qat, stock(qat), 1, monkeypatch).losses) == 4


@pytest.mark.skipif(FIRST, reason="Lightning 1.x can")
@pytest.mark.xfail(reason="the setting that NNI writes to has become read-only", raises=AttributeError)
def test_stock_max_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock NNI with Lightning 2.x."""
    qat = Subject("QATQuantizer", QUANTISED, (4, None))
    train(qat, stock(qat), 1, monkeypatch)


@pytest.mark.skipif(FIRST, reason="Lightning 1.x has it")
def test_lightning_2_has_no_data_parallel() -> None:
    """Lightning says so itself."""
    with pytest.raises(ValueError, match="dp"):
        pl.Trainer(accelerator="cpu", strategy="dp")
