"""What a compressor of NNI 3.0 is given: names with a prefix, optimizers of either model, other compressors, mistakes."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
from typing import Any

import pytest
from conftest import RELEASE

if not RELEASE.startswith("3.0") or "rc" in RELEASE:
    pytest.skip("NNI 3.0 only", allow_module_level=True)

import nni
import torch
from evaluating import FUSED, INT8, STEPS, SUBJECTS, Script, differences, reference, replicated, run, script_for
from harness import LEARNING_RATE, unequal
from nni.compression.pruning import L1NormPruner, SlimPruner
from nni.compression.quantization import PtqQuantizer, QATQuantizer
from nni.compression.utils import TorchEvaluator
from torch import Tensor, nn

import nni_dataparallel
from nni_dataparallel import patch, patched, rehearse

each_order = pytest.mark.parametrize("order", ["inside", "before"])
QAT, QAT_FUSED, LSQ, PTQ = SUBJECTS[:4]
PRUNED = [{"op_types": ["Conv2d"], "sparse_ratio": 0.5}]
CONV = {"op_types": ["Conv2d"], "target_names": ["weight"], **INT8}


@each_order
@pytest.mark.parametrize("subject", [QAT_FUSED, LSQ], ids=["QATQuantizer-fused", "LsqQuantizer"])
def test_names_with_the_prefix_of_a_data_parallel_model(subject: Any, order: str) -> None:
    """op_names, exclude_op_names, op_names_re and fuse_names taken from a DataParallel mean the same layers."""
    script = script_for(order, 2)
    if subject is LSQ:
        named = [{**LSQ.config[0], "op_names": ["module.conv1", "module.conv2", "module.fc"], "exclude_op_names": ["module.relu1"]}]
    else:
        named = copy.deepcopy(FUSED)
        named[0].update(op_names=["module.conv1"], fuse_names=[("module.conv1", "module.bn1")])
    with patched():
        run(subject, nni_dataparallel.fixes.stock_quantizer(subject.name), script, named)
    assert differences(reference(subject), script.left) == []


@pytest.mark.parametrize(
    ("more", "left"),
    [
        ({"exclude_op_names": ["module.conv2"]}, ["conv1"]),
        ({"op_names_re": ["module.conv[12]"], "exclude_op_names_re": [r"module\.conv1"]}, ["conv2"]),
        ({"op_names_re": ["conv1"]}, ["conv1"]),
        ({"op_names": ["conv2"]}, ["conv2"]),
        ({"op_names": ["module.conv1"], "exclude_op_names": ["fc"]}, ["conv1"]),
    ],
)
def test_patterns_and_excluded_names(more: Any, left: list[str]) -> None:
    """With the prefix or without, of a model in a DataParallel."""
    with patched():
        pruner = L1NormPruner(nn.DataParallel(Script().net), [{"op_types": ["Conv2d"], "sparse_ratio": 0.5, **more}])
    assert list(pruner.get_masks()) == left


class Nested(nn.Module):
    """A network with a layer, and the child ``module`` with a layer of the same name."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.module = nn.Conv2d(1, 1, 3), nn.Sequential(nn.Conv2d(1, 1, 3))
        self.module.conv1 = nn.Conv2d(1, 1, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.module(self.conv1(x))


@pytest.mark.parametrize(
    ("wrap", "names", "expected"),
    [
        (False, ["conv1", "module.conv1"], ["conv1", "module.conv1"]),
        (True, ["conv1", "module.conv1"], ["conv1", "module.conv1"]),
        (True, ["module.conv1", "module.module.0"], ["conv1", "module.0"]),
        (True, ["module.module.conv1"], ["module.conv1"]),
    ],
)
@pytest.mark.parametrize("below", ["subclass", "patched", "both"])
def test_a_child_of_the_users_called_module(wrap: bool, names: list[str], expected: list[str], below: str) -> None:
    """Its layers keep their name; a list in which every name has the prefix is that of the DataParallel."""
    net = Nested()
    optimizer = nni.trace(torch.optim.SGD)(net.parameters(), lr=0.1)
    evaluator = TorchEvaluator(lambda *_: None, optimizer, lambda *_: None)
    if below != "subclass":
        patch()
    cls = QATQuantizer if below == "patched" else nni_dataparallel.QATQuantizer
    quantizer = cls(nn.DataParallel(net) if wrap else net, [{**CONV, "op_names": names}], evaluator)
    assert sorted(quantizer.get_calibration_config()) == expected


@pytest.mark.parametrize("owner", ["model", "net"])
def test_an_optimizer_of_either_model(owner: str) -> None:
    """Made from the parameters of the DataParallel, or of the model inside: the same training."""
    script = script_for("before", 2)
    with patched():
        evaluator = script.evaluator(getattr(script, owner))
        quantizer = QATQuantizer(script.model, copy.deepcopy(QAT.config), evaluator)
        _, config = quantizer.compress(STEPS, None)
    assert differences(reference(QAT), script.left.finish(quantizer, config)) == []


@each_order
@pytest.mark.filterwarnings("ignore:.*has been overridden after learning rate scheduler")
def test_groups_of_parameters_and_a_scheduler(order: str) -> None:
    """Two groups with a rate each, and a scheduler: NNI makes them anew by name, and training equals one device's."""

    def trained(script: Script) -> Any:
        layers = script.model.module if order == "before" and script.model is not script.net else script.net
        groups = [
            {"params": layers.fc.parameters(), "lr": 0.01},
            {"params": [*layers.conv1.parameters(), *layers.conv2.parameters()]},
        ]
        optimizer = nni.trace(torch.optim.SGD)(groups, lr=LEARNING_RATE)
        scheduler = nni.trace(torch.optim.lr_scheduler.StepLR)(optimizer, 2, 0.5)

        def train(model: Any, optimizer: Any, step: Any, schedulers: Any, *duration: Any) -> None:
            assert [group["lr"] for group in optimizer.param_groups] == [0.01, LEARNING_RATE]
            script.train(model, optimizer, lambda *batch: (schedulers.step(), step(*batch))[1], None, *duration)

        evaluator = TorchEvaluator(train, optimizer, script.training_step, scheduler)
        quantizer = QATQuantizer(script.model, copy.deepcopy(QAT.config), evaluator)
        return script.left.finish(quantizer, quantizer.compress(STEPS, None)[1])

    expected = trained(Script())
    with patched():
        found = trained(script_for(order, 3))
    assert differences(expected, found) == []


@each_order
def test_calibrating_in_inference_mode(order: str) -> None:
    """PtqQuantizer, whose evaluating function uses torch.inference_mode()."""
    script = script_for(order, 3)
    script.no_grad = torch.inference_mode
    with patched():
        run(PTQ, PtqQuantizer, script)
    assert differences(reference(PTQ), script.left) == []


def test_a_pruner_without_an_evaluator() -> None:
    """Its masks have plain names, the DataParallel comes back."""
    script = script_for("before", 2)
    expected = L1NormPruner(Script().net, PRUNED).compress()[1]
    with patched():
        model, masks = L1NormPruner(script.model, PRUNED).compress()
    assert model is script.model
    assert unequal("masks", expected, masks) == []


def test_training_without_an_evaluator() -> None:
    """NNI's own error, of a model in a DataParallel as well."""
    with patched(), pytest.raises(AssertionError):
        QATQuantizer(script_for("before", 2).model, copy.deepcopy(QAT.config), None).compress(1, None)


def test_a_compressor_made_from_another() -> None:
    """Pruned first, quantised with what that left: the DataParallel is still the one that was given first."""

    def compressed(script: Script) -> Any:
        pruner = SlimPruner(script.model, PRUNED, script.evaluator(), 2)
        quantizer = QATQuantizer.from_compressor(pruner, copy.deepcopy(QAT.config))
        model, config = quantizer.compress(STEPS, None)
        assert model is script.model
        return script.left.finish(quantizer, config)

    expected = compressed(Script())
    script = script_for("before", 2)
    with patched():
        found = compressed(script)
    assert script.seen == [script.model]
    assert differences(expected, found) == []


@pytest.mark.parametrize("way", ["patched", "subclass"])
def test_the_evaluator_is_given_back(way: str) -> None:
    """After compress(), and after an error in the user's function, it holds the user's functions and no others."""
    script = script_for("before", 2)
    lengths = [2, 0]

    def train(*args: Any) -> None:
        script.train(*args[:4], lengths.pop(0), None)
        if not lengths:
            raise ZeroDivisionError

    if way == "patched":
        patch()
    optimizer = nni.trace(torch.optim.SGD)(script.net.parameters(), lr=LEARNING_RATE)
    evaluator = TorchEvaluator(train, optimizer, script.training_step, evaluating_func=script.evaluate)
    cls = QATQuantizer if way == "patched" else nni_dataparallel.QATQuantizer
    quantizer = cls(script.model, copy.deepcopy(QAT.config), evaluator)
    quantizer.compress(2, None)
    assert (evaluator.training_func, evaluator.evaluating_func) == (train, script.evaluate)
    with pytest.raises(ZeroDivisionError):
        quantizer.compress(2, None)
    assert (evaluator.training_func, evaluator.evaluating_func) == (train, script.evaluate)
    assert script.seen == [script.model, script.model]


@pytest.mark.parametrize("way", ["patched", "subclass", "both"])
def test_a_model_in_distributed_data_parallel_is_told(way: str) -> None:
    """One warning at the script's line, with the order that works."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        script = Script(before=nn.parallel.DistributedDataParallel)
        if way != "subclass":
            patch()
        cls = QATQuantizer if way == "patched" else nni_dataparallel.QATQuantizer
        with pytest.warns(UserWarning, match="Build the compressor on the plain model first, then wrap it") as caught:
            cls(script.model, [CONV], script.evaluator())
        told = [w for w in caught if "was given a DistributedDataParallel" in str(w.message)]
        assert [w.filename for w in told] == [__file__]
        order = r"evaluator with the optimizer of model.parameters\(\), QATQuantizer\(.* and the Dist\w+ in the training function"
        assert re.search(order, str(told[0].message))
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("way", ["patched", "subclass", "both"])
def test_a_config_that_matches_nothing_is_told(way: str) -> None:
    """The warning names the config and the layers there are, once; a list that is empty (AGPPruner has none) is not told."""
    script = Script()
    if way != "subclass":
        patch()
    cls = QATQuantizer if way == "patched" else nni_dataparallel.QATQuantizer
    with pytest.warns(UserWarning, match=r"compresses nothing.*Conv3d.*conv1 \(Conv2d\), bn1 \(BatchNorm2d\)") as caught:
        cls(rehearse(script.net, 2), [{**CONV, "op_types": ["Conv3d"]}], script.evaluator())
    assert [w.filename for w in caught if "compresses nothing" in str(w.message)] == [__file__]


@pytest.mark.filterwarnings("error:.*compresses nothing")
def test_a_scheduled_pruner_is_not_told() -> None:
    """AGPPruner has an empty config of its own."""
    with patched():
        run(SUBJECTS[6], None, script_for("before", 2))


def test_a_name_that_no_layer_has_is_told() -> None:
    """KeyError as with stock, which names the layers."""
    script = Script(before=replicated(2))
    with patched(), pytest.raises(KeyError, match=r"'module.conv3' in op_names is no layer of Net.*conv1 \(Conv2d\)"):
        L1NormPruner(script.model, [{"op_names": ["module.conv3", "module.conv1"], "sparse_ratio": 0.5}])


SHOW_ORDER = """
import nni, torch, nni_dataparallel
from nni.compression.quantization import LsqQuantizer
from nni.compression.utils import TorchEvaluator
nni_dataparallel.patch()
net = torch.nn.Sequential(*(torch.nn.Conv2d(1, 1, 1) for _ in range(12)))
config = {"op_types": ["Conv2d"], "target_names": ["weight"], "quant_dtype": "int8", "quant_scheme": "symmetric"}
optimizer = nni.trace(torch.optim.SGD)(net.parameters(), lr=0.1)
evaluator = TorchEvaluator(lambda *given: None, optimizer, lambda batch, model: None)
quantizer = LsqQuantizer(net, [config], evaluator)
evaluator.bind_model(net, quantizer._get_param_names_map())
quantizer._fuse_preprocess(evaluator)
names = {id(p): name for name, p in net.named_parameters()}
print([names[id(p)] for group in evaluator._optimizers[0].param_groups for p in group["params"]])
"""


def test_learned_scales_come_in_the_models_order_in_every_process() -> None:
    """An optimizer's state is loaded by the Parameters' numbers, and NNI's order is that of a set of strings."""
    found = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        result = subprocess.run([sys.executable, "-c", SHOW_ORDER], capture_output=True, text=True, env=environment, check=False)
        found.add(result.stdout.strip().splitlines()[-1] if result.returncode == 0 else result.stderr[-500:])
    assert len(found) == 1
    assert "0._nni_wrapper.weight_scale" in found.pop()
