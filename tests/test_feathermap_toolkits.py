"""Toolkits on top of a FeatherNet: NNI's QAT of both lines and torch.ao's quantise exactly V1 and V2."""

from __future__ import annotations

import inspect
import warnings
from typing import Any, Dict, List, Tuple

import pytest
import torch
from cases import is_first, is_modern
from conftest import IS_NEW, RELEASE
from feathermap_nets import Digits
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

import nni_dataparallel
from nni_dataparallel import rehearse
from nni_dataparallel.feathermap import FeatherNet, Int8Factor

BATCHES = [torch.randn(size, 1, 8, 8, generator=torch.Generator().manual_seed(size)) for size in (6, 5, 4)]
needs_nni = pytest.mark.skipif(is_first(RELEASE) or RELEASE == "3.0rc1", reason="QAT_Quantizer of NNI 2.x, QATQuantizer of 3.0")


def net_of(seed: int = 0) -> FeatherNet:
    torch.manual_seed(seed)
    net = FeatherNet(Digits(), 0.2)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.0  # batch statistics are per shard
    return net


def config(**where: Any) -> List[Dict[str, Any]]:
    where = where or {"op_types": ["Linear"]}
    if IS_NEW:
        settings = {"quant_dtype": "int8", "quant_scheme": "symmetric", "granularity": "out_channel"}
        return [{**where, "target_names": ["weight"], **settings}]
    made = {**where, "quant_types": ["weight"], "quant_bits": {"weight": 8}}
    return [{**made, "quant_dtype": "int", "quant_scheme": {"weight": "per_channel_symmetric"}} if is_modern(RELEASE) else made]


def trained_by_nni(net: FeatherNet, replicas: int = 1, settings: Any = None) -> Any:
    """Three steps of QAT on the factors; returns the quantizer."""
    nni_dataparallel.patch()
    settings = config() if settings is None else settings

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return (model(batch) - 1).square().sum() / len(batch) / 100

    def train(model: nn.Module, optimizer: Any) -> None:
        parallel = model if replicas == 1 else rehearse(model, replicas)
        parallel.train()
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        for batch in BATCHES:
            optimizer.zero_grad()
            loss(parallel, batch).backward()
            optimizer.step()

    if IS_NEW:
        import nni
        from nni.compression.quantization import QATQuantizer
        from nni.compression.utils import TorchEvaluator

        def training(
            model: Any, optimizer: Any, step: Any, lr_schedulers: Any = None, max_steps: Any = None, max_epochs: Any = None
        ):
            train(model, optimizer)

        optimizer = nni.trace(torch.optim.SGD)(net.parameters(), lr=0.05)
        evaluator = TorchEvaluator(training, optimizer, lambda batch, model: loss(model, batch))
        quantizer = QATQuantizer(net, settings, evaluator)
        quantizer.compress(None, max_epochs=1)
        return quantizer
    from nni.algorithms.compression.pytorch.quantization import QAT_Quantizer

    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    dummy = {"dummy_input": BATCHES[0]} if "dummy_input" in inspect.signature(QAT_Quantizer.__init__).parameters else {}
    quantizer = QAT_Quantizer(net, settings, optimizer, **dummy)
    quantizer.compress()
    train(net, optimizer)
    return quantizer


def wrapped_by_nni(net: FeatherNet) -> List[str]:
    """Names of the layers that have a wrapper."""
    names = []
    for name, module in net.named_modules():
        if (
            type(module).__name__ == "QuantizerModuleWrapper"
            or "_nni_wrapper" in module.__dict__
            or "_nni_wrapper" in module._modules
        ):
            names.append(name)
    return names


@needs_nni
def test_nni_quantises_exactly_the_factors() -> None:
    """op_types Linear means V1 and V2: a hashed linear layer has another type."""
    net = net_of()
    before = net.pool.V1.weight.detach().clone()
    trained_by_nni(net)
    assert wrapped_by_nni(net) == ["pool.V1", "pool.V2"]
    assert not net.pool.plain
    left, right = net.eval().pool.factors()[:2]
    assert max(len(row.unique()) for row in left.detach()) <= 255
    assert not torch.equal(left, before)
    with torch.no_grad():
        end = net.compression_report().hashed_count
        wanted = (left @ right.t()).flatten()[end - 10 : end] * net.module.fc2.bias_p
        torch.testing.assert_close(net.module.fc2.bias, wanted)


@needs_nni
def test_nni_on_replicas_is_nni_on_one_device() -> None:
    """With this package's patch: the same Parameters, scales and outputs after every step."""
    nets = []
    for replicas in (1, 2):
        nets.append(net_of())
        trained_by_nni(nets[-1], replicas)
    states = [net.state_dict() for net in nets]
    assert list(states[0]) == list(states[1])
    for name, one in states[0].items():
        if isinstance(one, Tensor):
            torch.testing.assert_close(states[1][name].float(), one.float(), rtol=2e-3, atol=2e-4, msg=name)
    with torch.no_grad():
        outputs = [net.eval()(BATCHES[0]) for net in nets]
        torch.testing.assert_close(outputs[1], outputs[0], rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(rehearse(nets[1], 2)(BATCHES[0]), outputs[1], rtol=1e-5, atol=1e-5)


@needs_nni
def test_what_nni_trained_is_converted() -> None:
    """INT8 evaluates as NNI's quantised net, on every sample; nothing of NNI stays in the net."""
    net = net_of()
    trained_by_nni(net)
    net.eval()
    with torch.no_grad():
        wanted = net(BATCHES[0])
        torch.testing.assert_close(net.deploy()(BATCHES[0]), wanted, rtol=1e-4, atol=1e-5)
        net.convert()
        torch.testing.assert_close(net(BATCHES[0]), wanted, rtol=1e-4, atol=1e-5)
    assert wrapped_by_nni(net) == []
    assert net.pool.V1.qweight.dtype == torch.int8
    fresh = net_of(7).eval()
    fresh.load_state_dict(net.state_dict())
    with torch.no_grad():
        assert torch.equal(fresh(BATCHES[0]), net(BATCHES[0]))


@needs_nni
def test_nni_leaves_hashed_layers_alone_or_says_why() -> None:
    """A config for convolutions touches nothing; one that names a hashed layer is refused."""
    net = net_of()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trained_by_nni(net, settings=config(op_types=["Conv2d"]))
    assert wrapped_by_nni(net) == []
    with pytest.raises((AttributeError, AssertionError), match=r"HashedConv2d"):
        trained_by_nni(net_of(), settings=config(op_names=["module.conv1"]))


@needs_nni
def test_a_model_that_nni_has_wrapped_is_refused() -> None:
    """QAT first and FeatherNet second would leave the factors in float."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    nni_dataparallel.patch()
    net: Any = model
    trained_by_nni(net)
    with pytest.raises(ValueError, match=r"(?s)wrapped by NNI.*FeatherNet first.*net\.pool"):
        FeatherNet(model, 0.5)


def ao() -> Tuple[Any, Any]:
    quantization = pytest.importorskip("torch.ao.quantization")
    weight = quantization.FakeQuantize.with_args(
        observer=quantization.MovingAveragePerChannelMinMaxObserver,
        quant_min=-127,
        quant_max=127,
        dtype=torch.qint8,
        qscheme=torch.per_channel_symmetric,
        ch_axis=0,
    )
    return quantization, quantization.QConfig(activation=nn.Identity, weight=weight)


@pytest.mark.filterwarnings("ignore")
def test_torch_ao_quantises_exactly_the_factors_and_is_converted() -> None:
    """Eager QAT with a weight-only qconfig on the pool."""
    quantization, qconfig = ao()
    net = net_of().train()
    net.pool.qconfig = qconfig
    quantization.prepare_qat(net, inplace=True)
    assert [name for name, m in net.named_modules() if hasattr(m, "weight_fake_quant")] == ["pool.V1", "pool.V2"]
    optimizer = torch.optim.SGD(net.param_groups(0.01))
    for batch in BATCHES:
        optimizer.zero_grad()
        net(batch).square().mean().backward()
        optimizer.step()
    net.eval().apply(quantization.disable_observer)
    with torch.no_grad():
        wanted = net(BATCHES[0])
        scale = net.pool.V1.weight_fake_quant.scale.clone()
        by_hand = torch.round(net.pool.V1.weight / scale[:, None]).clamp(-127, 127)
        net.convert()
        torch.testing.assert_close(net(BATCHES[0]), wanted, rtol=1e-4, atol=1e-5)
        assert torch.equal(net.deploy()(BATCHES[0]), net.deploy(False)(BATCHES[0]))
    torch.testing.assert_close(net.pool.V1.qweight * net.pool.V1.scale, by_hand * scale[:, None])


@pytest.mark.filterwarnings("ignore")
def test_a_model_that_torch_ao_has_prepared_is_refused() -> None:
    """As for NNI: the factors are what is shipped."""
    quantization, qconfig = ao()
    model = nn.Sequential(nn.Linear(5, 4)).train()
    model.qconfig = qconfig
    with pytest.raises(ValueError, match=r"(?s)wrapped by torch\.ao.*FeatherNet first"):
        FeatherNet(quantization.prepare_qat(model), 0.5)


def test_torch_prunes_and_parametrises_the_factors() -> None:
    """Whatever stands in the place of a factor is asked: hooks, parametrisations."""
    net = net_of().eval()
    prune.l1_unstructured(net.pool.V1, "weight", amount=0.5)
    mask = net.pool.V1.weight_mask
    v1 = net.pool.V1.weight_orig * mask
    torch.testing.assert_close(net.pool.factors().left, v1)
    parametrize.register_parametrization(net.pool.V2, "weight", Halved())
    torch.testing.assert_close(net.pool.factors().right, net.pool.V2.parametrizations.weight.original / 2)
    net(BATCHES[0]).sum().backward()
    assert bool((net.pool.V1.weight_orig.grad[mask == 0] == 0).all())


class Halved(nn.Module):
    """A parametrisation."""

    def forward(self, x: Tensor) -> Tensor:
        return x / 2


def test_two_quantizers_on_the_factors_are_refused() -> None:
    """prepare_qat() on top of a toolkit, or convert(bits) in its place."""
    net = net_of()
    parametrize.register_parametrization(net.pool.V1, "weight", Halved())
    with pytest.raises(RuntimeError, match="one of both"):
        net.prepare_qat()
    with pytest.raises(ValueError, match="without arguments"):
        net.convert(4)
    with pytest.raises(ValueError, match="int8 weights only"):
        net.convert()
    assert isinstance(net.pool.V1, nn.Linear)


def test_a_toolkit_after_prepare_qat_is_refused() -> None:
    """At the next forward and at convert(): the factors would be quantised twice. Pruning is none of it."""
    quantization, qconfig = ao()
    net = net_of().prepare_qat().train()
    prune.l1_unstructured(net.pool.V1, "weight", amount=0.5)
    net(BATCHES[0])
    prune.remove(net.pool.V1, "weight")
    net.pool.qconfig = qconfig
    quantization.prepare_qat(net, inplace=True)
    for call in (lambda: net(BATCHES[0]), net.convert, net.deploy().materialized):
        with pytest.raises(RuntimeError, match=r"pool\.V1 is quantised twice, by prepare_qat\(\) and by torch\.ao"):
            call()
    assert not isinstance(net.pool.V1, Int8Factor)


def test_nni_after_prepare_qat_is_refused() -> None:
    """With the remedy, when NNI or the user runs the net."""
    with pytest.raises(RuntimeError, match=r"(?s)quantised twice, by prepare_qat\(\) and by NNI.*Leave prepare_qat\(\) out"):
        trained_by_nni(net_of().prepare_qat())


def test_a_pruned_factor_says_how_it_is_converted() -> None:
    """The mask is a hook; made permanent, its zeros are shipped."""
    net = net_of()
    prune.l1_unstructured(net.pool.V1, "weight", amount=0.5)
    with pytest.raises(ValueError, match=r"prune\.remove\(net\.pool\.V1, 'weight'\)"):
        net.convert()
    prune.remove(net.pool.V1, "weight")
    assert float((net.convert().pool.V1.qweight == 0).float().mean()) >= 0.5
