"""Tracers and exporters: torch.compile, torch.export, ONNX, torch.jit.trace, functional calls, checkpointing."""

from __future__ import annotations

import copy
import io
import warnings
from pathlib import Path
from typing import Any, List

import pytest
import torch
from feathermap_nets import ZOO, Attention, Digits, made
from torch import nn
from torch.utils.checkpoint import checkpoint

from nni_dataparallel.feathermap import FeatherNet

X = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(1))
FORMS = ["train", "eval", "qat", "deploy", "int8", "int8 deploy"]
modern = pytest.mark.skipif(not hasattr(torch, "export") or not hasattr(torch.compiler, "is_compiling"), reason="torch >= 2.1")


def net_in(form: str) -> FeatherNet:
    torch.manual_seed(0)
    net = FeatherNet(Digits(), 0.2)
    if form == "train":
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = 0.0
        return net
    if form == "qat":
        net.prepare_qat(4)
    if "int8" in form:
        net.convert()
    return net.deploy() if "deploy" in form else net.eval()


@modern
@pytest.mark.parametrize("form", FORMS)
def test_compiles_as_one_graph(form: str) -> None:
    """torch.compile(fullgraph=True): outputs and gradients of the uncompiled net, also after an update."""
    net = net_in(form)
    torch._dynamo.reset()
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        grads: List[Any] = []
        outputs = []
        for run in (net, compiled):
            net.zero_grad()
            outputs.append(run(X))
            outputs[-1].square().sum().backward()
            grads.append([p.grad.clone() for p in net.parameters()])
        torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-4, atol=1e-4)
        for mine, wanted in zip(grads[1], grads[0]):
            torch.testing.assert_close(mine, wanted, rtol=1e-3, atol=1e-3)
        with torch.no_grad():
            net.module.conv1.weight_p.mul_(1.2)


@modern
@pytest.mark.parametrize("form", FORMS[1:])
def test_exports_without_full_weights(form: str) -> None:
    """A program of torch.export holds factors and scalars only, and computes what the net does."""
    net = net_in(form)
    program = torch.export.export(net, (X,))
    n, m = net.pool.layout.n, net.pool.layout.m
    assert max(t.numel() for t in program.state_dict.values()) == n * m
    with torch.no_grad():
        torch.testing.assert_close(program.module()(X), net(X), rtol=1e-4, atol=1e-5)
    nodes = [node.meta["val"].numel() for node in program.graph.nodes if isinstance(node.meta.get("val"), torch.Tensor)]
    assert max(nodes) < n * n


@pytest.mark.parametrize("form", FORMS[1:])
def test_traces(form: str) -> None:
    """torch.jit.trace, which NNI 2.x uses on the model."""
    net = net_in(form)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(net, X)
        torch.testing.assert_close(traced(X), net(X))


@pytest.mark.parametrize("dynamo", [False, True])
def test_onnx(dynamo: bool, tmp_path: Path) -> None:
    """A deployed INT8 net as ONNX: int8 initialisers, no dense weights, output within 1e-5."""
    onnx = pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    if dynamo:
        pytest.importorskip("onnxscript")
    net = net_in("int8 deploy")
    file = tmp_path / "net.onnx"
    options = {"dynamo": dynamo} if hasattr(torch.onnx, "ONNXProgram") else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # These factors are so small that the exporters would fold the casts, and keep the factors in float.
        folding = {"optimize": False} if dynamo else {"do_constant_folding": False}
        torch.onnx.export(net, (X,), str(file), input_names=["x"], opset_version=18, **folding, **options)
    model = onnx.load(str(file))
    count = net.pool.layout.n * net.pool.layout.m
    large = [t for t in model.graph.initializer if onnx.numpy_helper.to_array(t).size >= count]
    assert {t.data_type for t in large} == {onnx.TensorProto.INT8}
    assert len(large) <= 4
    settings = runtime.SessionOptions()
    settings.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = runtime.InferenceSession(str(file), settings, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: X.numpy()})
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(found), net(X), rtol=0, atol=1e-5)


@pytest.mark.skipif(not hasattr(torch, "func"), reason="torch >= 2.0")
def test_functional_calls_and_transforms() -> None:
    """torch.func: a call with other factors, gradients per sample."""
    net = FeatherNet(nn.Linear(5, 3), 0.5)
    x = torch.randn(4, 5)
    state = dict(net.named_parameters())
    doubled = {**state, "pool.V1.weight": 2 * state["pool.V1.weight"]}
    torch.testing.assert_close(torch.func.functional_call(net, doubled, (x,)), 2 * net(x))

    def loss(parameters: Any, sample: Any) -> Any:
        return torch.func.functional_call(net, parameters, (sample,)).square().sum()

    each = torch.func.vmap(torch.func.grad(loss), (None, 0))(state, x)
    net(x).square().sum().backward()
    torch.testing.assert_close(each["pool.V1.weight"].sum(0), net.pool.V1.weight.grad)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(form: str, reentrant: bool) -> None:
    """A recomputed part reads its weights after the forward, and has the gradients of one that is not."""

    class Checkpointed(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.on = inner, True

        def forward(self, x: Any) -> Any:
            return checkpoint(self.inner, x, use_reentrant=reentrant) if self.on else self.inner(x)

    torch.manual_seed(0)
    net = FeatherNet(Checkpointed(nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(144, 3))), 0.4)
    net.prepare_qat(4) if form == "qat" else net
    if "int8" in form:
        net.convert()
    net = net.deploy() if "deploy" in form else net.train(form == "train")
    x = X.clone().requires_grad_()
    gradients = []
    for on in (False, True):
        net.module.on = on
        net.zero_grad()
        net(x).square().sum().backward()
        gradients.append([p.grad.clone() for p in net.parameters()])
    for plain, recomputed in zip(*gradients):
        torch.testing.assert_close(recomputed, plain, rtol=1e-4, atol=1e-4)


@modern
@pytest.mark.parametrize("kind", ["attention", "tied", "padded embedding", "transposed", "own layer", "bag"])
def test_kinds_of_layers_compile_and_export(kind: str) -> None:
    """Layers whose forward is more than one call."""
    assert kind in ZOO
    model, inputs = made(kind)
    net = FeatherNet(model, 0.5).deploy()
    torch._dynamo.reset()
    compiled = torch.compile(net, backend="eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*inputs), net(*inputs), rtol=1e-5, atol=1e-5)
        program = torch.export.export(copy.deepcopy(net), inputs)
        torch.testing.assert_close(program.module()(*inputs), net(*inputs), rtol=1e-5, atol=1e-5)


def test_a_scripted_file_runs_without_the_package(tmp_path: Path) -> None:
    """A trace of a deployed INT8 net is saved small and loaded by torch alone."""
    net = FeatherNet(Attention(), 0.5).convert().deploy()
    x = torch.randn(2, 5, 8)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        file = io.BytesIO()
        torch.jit.save(torch.jit.trace(net, x), file)
        file.seek(0)
        torch.testing.assert_close(torch.jit.load(file)(x), net(x))
