"""train, eval, deploy, cached, materialized: what a FeatherNet does in each, and how it gets there and back."""

from __future__ import annotations

import copy
import doctest
from typing import Any, ContextManager, Set

import pytest
import torch
from feathermap_nets import Attention, Digits, Two
from torch import Tensor, nn
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from nni_dataparallel.feathermap import FeatherNet


def active(mode: Any) -> ContextManager[Any]:
    """A mode that sees every operation; torch 1.12 has to make it itself."""
    return mode.push() if hasattr(_python_dispatch, "push_torch_dispatch_mode") else mode()


def sizes() -> Any:
    """A mode that notes the sizes of all tensors that operations return."""

    class Sizes(TorchDispatchMode):
        seen: Set[int] = set()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            for each in out if isinstance(out, (list, tuple)) else [out]:
                if isinstance(each, Tensor):
                    self.seen.add(each.numel())
            return out

    return active(Sizes)


def digits_net(compress: float = 0.3) -> FeatherNet:
    torch.manual_seed(0)
    return FeatherNet(Digits(), compress)


def test_modes_return_the_net() -> None:
    """``net = net.eval()`` keeps the factors; so do train, deploy, prepare_qat and convert."""
    net = digits_net()
    assert net.train() is net.eval() is net.deploy() is net.deploy(False) is net.prepare_qat() is net.convert() is net


def test_deploy_goes_back() -> None:
    """deploy(False) restores every module's mode; deploying twice is deploying once; train() ends it."""
    net = digits_net().train()
    net.module.bn1.eval()
    net.deploy().deploy()
    assert net.deployed
    assert not any(module.training for module in net.modules())
    net.deploy(False).deploy(False)
    assert net.training
    assert not net.module.bn1.training
    assert net.module.bn2.training
    assert not net.deploy().train().deployed


def test_deploy_equals_eval_after_every_step() -> None:
    """Evaluation and deployment see each update at once, also one that is made while in evaluation."""
    net = digits_net()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    x = torch.randn(4, 1, 8, 8)
    net.eval()
    outputs = []
    for _ in range(3):
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            outputs.append(net(x))
            torch.testing.assert_close(net.deploy()(x), outputs[-1])
            torch.testing.assert_close(net.deploy(False).materialized()(x), outputs[-1])
    assert not torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[1], outputs[2])


@pytest.mark.parametrize("int8", [False, True])
def test_a_deployed_forward_makes_no_n_by_n_tensor(int8: bool) -> None:
    """The largest tensor is the largest layer's rows; evaluation of float factors makes V."""
    net = digits_net().eval()
    n = net.compression_report().n
    x = torch.randn(1, 1, 8, 8)
    with torch.no_grad():
        net(x)
        with sizes() as seen:
            net(x)
        assert max(seen.seen) == n * n
        if int8:
            net.convert()
        net.deploy()
        with sizes() as seen:
            net(x)
        rows = max(slot.last - slot.first for slot in net.pool.layout.slots)
        assert rows * n <= max(seen.seen) < (rows + 1) * n < n * n
        assert net.pool.cache is None


def test_any_inputs_and_outputs() -> None:
    """Several inputs, keywords, a dict of outputs."""
    net = FeatherNet(Two(), 0.5)
    a, b = torch.randn(3, 4), torch.randn(3, 5)
    torch.testing.assert_close(net(a, b=b)["out"], nn.functional.bilinear(a, b, net.module.mix.weight, net.module.mix.bias))


def test_cached_computes_the_weights_once() -> None:
    """In the block nothing is generated, the output is that of evaluation, and afterwards updates are seen again."""
    net = digits_net().eval()
    n = net.compression_report().n
    x = torch.randn(2, 1, 8, 8)
    with torch.no_grad():
        wanted = net(x)
        with net.cached() as same, sizes() as seen:
            assert same is net
            assert torch.equal(net(x), wanted)
        assert not seen.seen & {n * n, n * net.pool.layout.m}
        net.pool.V1.weight.mul_(2)
        assert not torch.equal(net(x), wanted)
    with pytest.raises(RuntimeError, match="eval"):
        with net.train().cached():
            pass


def test_cached_in_a_deployed_net_and_in_itself() -> None:
    """The inner block's end leaves the outer one open, with the weights that the inner one computed."""
    net = digits_net().convert().deploy()
    x = torch.randn(2, 1, 8, 8)
    with net.cached():
        with net.cached():
            assert torch.equal(net(x), net.materialized()(x))
        assert net.pool.cache is not None
    assert net.pool.cache is None


@pytest.mark.filterwarnings("ignore:this model looks trained")
def test_materialized_is_the_plain_model() -> None:
    """Class, keys and their order are those of the model; nothing is shared with the net; it can be hashed again."""
    model = Digits()
    net = FeatherNet(model, 0.3).train()
    before = net.pool.V1.weight.clone()
    plain = net.materialized()
    FeatherNet(copy.deepcopy(plain), 0.5)
    assert [type(m) for m in plain.modules()] == [type(m) for m in model.modules()]
    assert list(plain.state_dict()) == list(model.state_dict())
    assert all(parameter.requires_grad for parameter in plain.parameters())
    plain.conv1.weight.data.zero_()
    plain.bn1.weight.data.zero_()
    assert float((net.module.conv1.weight.abs().sum() * net.module.bn1.weight.abs().sum()).detach()) > 0
    assert torch.equal(net.pool.V1.weight, before)
    assert net.training


def test_param_groups_hold_every_parameter_once() -> None:
    """The scalars have a learning rate of their own: a tenth, or what is given."""
    net = digits_net()
    groups = net.param_groups(0.5)
    names = {id(p): name for name, p in net.named_parameters()}
    assert sorted(names[id(p)] for group in groups for p in group["params"]) == sorted(names.values())
    assert {names[id(p)].rpartition(".")[2] for p in groups[1]["params"]} == {"weight_p", "bias_p"}
    assert [group["lr"] for group in groups] == [0.5, 0.05]
    assert net.param_groups(0.5, 0.2)[1]["lr"] == 0.2
    torch.optim.Adam(groups)


def test_gradients_inside_a_forward_without_them() -> None:
    """A part of a net that asks for gradients of its own gets weights with a graph."""

    class Energy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                return torch.autograd.grad(self.layer(x).sum(), self.layer.weight_p)[0]

    net = FeatherNet(Energy(), 1.0)
    x = torch.randn(2, 3)
    with torch.no_grad():
        wanted = (x @ (net.module.layer.weight / net.module.layer.weight_p).t()).sum()
        torch.testing.assert_close(net(x).sum(), wanted)


def test_a_reentrant_net() -> None:
    """A net that calls itself computes V once."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.outer = nn.Linear(3, 3), []

        def forward(self, x: Tensor, deep: bool = True) -> Tensor:
            return self.outer[0](self.layer(x), False) if deep else self.layer(x)

    net = FeatherNet(Twice(), 1.0)
    net.module.outer.append(net)
    x = torch.randn(2, 3)
    torch.testing.assert_close(net(x), net.module.layer(net.module.layer(x)))


def test_attention_computes_each_weight_once() -> None:
    """It reads its joint projection several times in a forward; deployed, that is one product all the same."""

    class Products(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            self.count += str(func).startswith("aten.mm") and args[1].shape[1] == net.pool.layout.n
            return func(*args, **(kwargs or {}))

    net = FeatherNet(Attention(), 0.5).deploy()
    with torch.no_grad(), active(Products) as products:
        net(torch.randn(2, 5, 8))
    assert products.count == len(net.pool.layout.slots)


def test_examples_in_the_docstrings_run() -> None:
    """As written."""
    from nni_dataparallel.feathermap import net

    found = doctest.testmod(net)
    assert found.attempted > 5
    assert found.failed == 0
