"""TransformersEvaluator of NNI 3.0: Hugging Face's Trainer wraps the model in DataParallel itself, where it has several GPUs.

Without a GPU it is told that it has, and the DataParallel that its own code builds is a rehearsal. The mean of the
replicas' losses, which is what Trainer trains with, is that of the whole batch where the shards are even.
"""

from __future__ import annotations

import copy
from importlib.util import find_spec
from typing import Any, Dict, List, NamedTuple

import pytest
from conftest import RELEASE

if not RELEASE.startswith("3.0") or "rc" in RELEASE:
    pytest.skip("NNI 3.0 only", allow_module_level=True)
if find_spec("transformers") is None:
    pytest.skip("transformers is not installed: pip install '.[evaluators]'", allow_module_level=True)

import nni
import torch
import transformers
from evaluating import INT8, STEPS, Left, differences, replicas_in
from nni.compression.pruning import SlimPruner, TaylorPruner
from nni.compression.utils import TransformersEvaluator
from packaging.version import Version
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import nni_dataparallel
from nni_dataparallel import patched, rehearse
from nni_dataparallel.fixes import QUANTIZERS, stock_quantizer

pytestmark = [
    pytest.mark.filterwarnings("ignore:Was asked to gather along dimension 0"),
    pytest.mark.filterwarnings("ignore:.*has been overridden after learning rate scheduler"),
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true"),
]
BATCH = 8
OF_ITS_TIME = Version(transformers.__version__) < Version("4.31")
needs_stock = pytest.mark.skipif(not OF_ITS_TIME, reason="stock NNI 3.0 trains with no Trainer since transformers 4.31")

# Not the outputs before a residual connection: stock masks their gradient in place, in the tensor that the other
# branch gets as well.
ALL = [
    {"op_types": ["Linear"], "target_names": ["_input_", "weight"], **INT8},
    {
        "op_types": ["Linear"],
        "op_names_re": [".*(query|key|value|intermediate.dense|classifier)"],
        "target_names": ["_output_"],
        **INT8,
    },
]
PRUNED = [{"op_types": ["Linear"], "op_names_re": [".*dense"], "sparse_ratio": 0.5}]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 30}
    # Dropout draws other numbers on every replica.
    return BertForSequenceClassification(
        BertConfig(**sizes, max_position_embeddings=16, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    )


def rows() -> List[Dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(30, (BATCH * STEPS, 6), generator=generator)
    return [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row.sum() % 3} for row in ids]


class RecordingTrainer(Trainer):
    """Keeps what it trained with and what came out."""

    seen: List[nn.Module]
    left: Left

    def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(model, *args, **kwargs)
        self.left.losses.append(loss.item())
        self.seen.append(model)
        return loss

    def prediction_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        self.seen.append(model)
        return super().prediction_step(model, *args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        result = super().evaluate(*args, **kwargs)
        self.left.metrics.append(result["eval_loss"])
        return {"default": -result["eval_loss"], **result}


class Run(NamedTuple):
    compressor: Any
    returned: Any
    seen: List[nn.Module]
    left: Left


class Subject(NamedTuple):
    name: str
    config: Any
    duration: Any = (STEPS, None)
    more: Any = {}


SUBJECTS = [
    Subject("QATQuantizer", ALL),
    Subject("LsqQuantizer", ALL),
    Subject("PtqQuantizer", ALL),
    Subject("TaylorPruner", PRUNED, (), {"training_steps": STEPS - 2}),
]
each_subject = pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.name)


@pytest.fixture
def train(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A user's script with a Trainer on ``count`` devices."""

    def script(subject: Subject, cls: Any, count: int, wrap: Any = lambda model: model, default_optimizer: bool = False) -> Run:
        trainer_class = type("RecordingTrainer", (RecordingTrainer,), {"seen": [], "left": Left()})
        cpu = "use_cpu" if "use_cpu" in TrainingArguments.__dataclass_fields__ else "no_cuda"
        batch = {"per_device_train_batch_size": BATCH // count, "per_device_eval_batch_size": BATCH // count}
        more = {"save_strategy": "no", "report_to": [], "disable_tqdm": True, "learning_rate": 0.01, cpu: True}
        arguments = TrainingArguments(str(tmp_path), max_steps=STEPS, **batch, **more)
        assert arguments.n_gpu <= 1
        arguments._n_gpu = count
        monkeypatch.setattr(transformers.trainer, "nn", replicas_in(nn, count) if count > 1 else nn)
        model = make_model()
        optimizer = None if default_optimizer else nni.trace(torch.optim.SGD)(model.parameters(), lr=0.1, momentum=0.9)
        data = {"train_dataset": rows(), "eval_dataset": rows()}
        trainer = nni.trace(trainer_class)(model=model, args=arguments, optimizers=(optimizer, None), **data)
        evaluator = TransformersEvaluator(trainer)
        compressor = cls(wrap(model), copy.deepcopy(subject.config), evaluator, **subject.more)
        returned, config = compressor.compress(*subject.duration)
        return Run(compressor, returned, trainer_class.seen, trainer_class.left.finish(compressor, config))

    return script


def stock(subject: Subject) -> Any:
    return stock_quantizer(subject.name) if subject.name in QUANTIZERS else TaylorPruner


_references: Dict[str, Left] = {}


def reference(subject: Subject, train: Any) -> Left:
    """Stock NNI with Trainer on one device."""
    if subject.name not in _references:
        assert not nni_dataparallel.is_patched()
        _references[subject.name] = train(subject, stock(subject), 1).left
    return _references[subject.name]


def used_replicas(run: Run) -> bool:
    return bool(run.seen) and all(isinstance(model, nn.DataParallel) for model in run.seen)


@needs_stock
@each_subject
@pytest.mark.parametrize("count", [1, 2, 4])
def test_trainer_on_several_devices_equals_one(subject: Subject, count: int, train: Any) -> None:
    """Losses, evaluation losses, the whole state, masks or calibration config, with the DataParallel of Trainer's own code."""
    expected = reference(subject, train)
    with patched():
        found = train(subject, stock(subject), count)
    assert used_replicas(found) is (count > 1)
    assert found.left.losses or found.left.metrics
    assert differences(expected, found.left) == []


@pytest.mark.skipif(OF_ITS_TIME, reason="compared with stock above")
@each_subject
def test_trainer_on_several_devices_equals_one_with_any_release(subject: Subject, train: Any) -> None:
    """The same, patched against patched, for Trainers with which stock NNI 3.0 does not train."""
    with patched():
        expected, found = (train(subject, stock(subject), count) for count in (1, 4))
    assert used_replicas(found)
    assert differences(expected.left, found.left) == []


@needs_stock
@pytest.mark.parametrize("subject", SUBJECTS[:2], ids=lambda subject: subject.name)
def test_a_subclass_with_stock_nni_below(subject: Subject, train: Any) -> None:
    """A quantizer of ours with NNI's own evaluator."""
    expected = reference(subject, train)
    found = train(subject, getattr(nni_dataparallel, subject.name), 2)
    assert used_replicas(found)
    assert differences(expected, found.left) == []


def test_a_quantizer_given_a_data_parallel(train: Any) -> None:
    """It is returned; Trainer, which has the plain model, wraps that itself."""
    qat = SUBJECTS[0]
    with patched():
        expected = train(qat, stock(qat), 2)
        found = train(qat, stock(qat), 2, wrap=lambda model: rehearse(model, 2))
    assert found.returned.module is found.compressor.bound_model
    assert used_replicas(found)
    assert found.returned not in found.seen
    assert differences(expected.left, found.left) == []


@pytest.mark.skipif(
    Version(transformers.__version__) >= Version("4.42"), reason="NNI's way to ask Trainer for its optimizer is gone"
)
def test_trainers_own_optimizer(train: Any) -> None:
    """AdamW as Trainer makes it, on replicas as on one device."""
    qat = SUBJECTS[0]
    with patched():
        expected, found = (train(qat, stock(qat), count, default_optimizer=True) for count in (1, 2))
    assert differences(expected.left, found.left) == []


SLIM = Subject("SlimPruner", PRUNED, (), {"training_steps": STEPS})


def assert_factors_are_trained(run: Run) -> None:
    factors = [tensor for name, tensor in run.left.state.items() if "slim_factor" in name]
    assert factors
    assert all(((factor - 1).abs() > 0.02).any() for factor in factors)


def test_every_caller_of_patch_optimizer_step_is_heard(train: Any) -> None:
    """SlimPruner's two: its factors are trained, on replicas as on one device."""
    with patched():
        expected, found = (train(SLIM, SlimPruner, count) for count in (1, 2))
    assert_factors_are_trained(expected)
    assert differences(expected.left, found.left) == []


@pytest.mark.xfail(reason="the last caller takes the place of the first")
def test_stock_hears_every_caller_of_patch_optimizer_step(train: Any) -> None:
    """On one device stock NNI trains no factor."""
    assert_factors_are_trained(train(SLIM, SlimPruner, 1))


@needs_stock
@each_subject
@pytest.mark.xfail(reason="the faults that this package repairs")
def test_stock_trainer_on_several_devices_equals_one(subject: Subject, train: Any) -> None:
    """Stock NNI raises what CUDA would: replicas run the original's layers."""
    expected = reference(subject, train)
    assert differences(expected, train(subject, stock(subject), 2).left) == []
