"""What a layer of NNI 3.0 under distillation holds of a forward on replicas: the whole batch, no longer than it must."""

from __future__ import annotations

import copy
import gc
import time
import weakref
from typing import Any, Dict, Iterator, List, Tuple

import pytest
from conftest import RELEASE

if RELEASE != "3.0":
    pytest.skip(f"NNI {RELEASE} does not have the distillers of 3.0", allow_module_level=True)

import harness
import torch
from harness import Linear, data, one_device, replicated
from nni.compression.distillation import DynamicLayerwiseDistiller
from nni3_scripts import Script, make_net
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nni_dataparallel import patched, rehearse

each_count = pytest.mark.parametrize("count", [2, 3, 4])


def distiller_of(script: Script, *layers: str, **more: Any) -> Any:
    config = [{"op_names": list(layers or ("conv1", "fc")), **more}]
    return DynamicLayerwiseDistiller(
        script.net, config, script.evaluator, make_net(seed=5), lambda batch, teacher: teacher(batch[0])
    )


def watched(net: nn.Module, *layers: str, teacher: nn.Module) -> List[Any]:
    """The target spaces of a net's layers."""
    config = [{"op_names": list(layers)}]
    distiller = DynamicLayerwiseDistiller(net, config, Script(one_device).evaluator, teacher, lambda batch, model: None)
    return [distiller._target_spaces[layer]["_output_0"] for layer in layers]


class Late(nn.Module):
    """Keeps a shard the longer the earlier it is in the batch; samples say in their first number which they are."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.1 / (1 + float(x[0, 0].detach())))
        return x


def numbered(size: int, width: int = 4) -> Tensor:
    x = torch.randn(size, width, generator=torch.Generator().manual_seed(3))
    x[:, 0] = torch.arange(size)
    return x


def late_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Late(), Linear(4, 3), nn.Tanh())


@each_count
@pytest.mark.parametrize("size", [1, 2, 5, 8])
def test_shards_are_joined_in_the_order_of_the_batch(count: int, size: int) -> None:
    """Whichever replica is done first: the rows of a hidden state are those of the batch, and so are its gradients."""
    results = []
    for wrap in (one_device, replicated(count)):
        with patched():
            net = late_net()
            (space,) = watched(net, "1", teacher=late_net())
            x = numbered(size).requires_grad_()
            wrap(net)(x)
            weights = torch.arange(size * 3.0).reshape(size, 3)  # no two rows weigh the same
            (space.hidden_state * weights).sum().backward()
            gradients = {name: p.grad for name, p in net.named_parameters()}
            results.append({"state": space.hidden_state, "shape": torch.tensor(space.shape), "x": x.grad, **gradients})
    assert harness.unequal("hidden state", *results, 1e-5, 1e-6) == []
    assert torch.equal(results[0]["state"], results[1]["state"])


class Reused(nn.Module):
    """One layer, used twice, and an activation behind it that writes into what it returned."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = Linear(4, 4)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.relu(self.layer(x)))


@each_count
@pytest.mark.parametrize("mode", ["refresh", "append"])
def test_a_layer_that_is_used_twice(count: int, mode: str) -> None:
    """Its hidden states are those of one device: the last use's, or all of them, one per use and forward."""
    states = []
    for wrap in (one_device, replicated(count)):
        with patched():
            net = Reused()
            (space,) = watched(net, "layer", teacher=Reused())
            space._buffer_mode = mode
            parallel = wrap(net)
            for size in (7, 3):
                parallel(numbered(size))
            states.append(list(space.hidden_states))
    assert len(states[0]) == len(states[1]) == {"refresh": 1, "append": 4}[mode]
    assert all(torch.equal(a, b) for a, b in zip(*states))


class Pointwise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x)


@pytest.mark.parametrize("count", [2, 3])
def test_uneven_shards_tell_where_the_batch_is(count: int) -> None:
    """Activations of time first are joined along the batch where the shards differ in it."""
    states = []
    for wrap in (one_device, lambda net: rehearse(net, count, dim=1)):
        with patched():
            net = nn.Sequential(Pointwise())
            (space,) = watched(net, "0", teacher=nn.Sequential(Pointwise()))
            wrap(net)(torch.arange(5 * 7 * 2.0).reshape(5, 7, 2))
            states.append(space.hidden_state)
    assert torch.equal(*states)


def test_a_single_number_cannot_be_joined() -> None:
    """A hidden state without dimensions is refused in words that name the layer."""

    class Mean(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mean()

    with patched():
        net = nn.Sequential(Mean())
        watched(net, "0", teacher=nn.Sequential(Mean()))
        with pytest.raises(RuntimeError, match="'0' is a single number"):
            rehearse(net, 2)(torch.randn(4, 2))


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What is in a cycle stays."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@each_count
def test_nothing_outlives_its_step(count: int, no_collector: None) -> None:
    """Replicas, shards and hidden states are gone after the step, without the garbage collector."""
    seen: List[List[weakref.ref[Any]]] = []

    def see(module: nn.Module, inputs: Any, output: Tensor) -> None:
        seen[-1].extend([weakref.ref(module), weakref.ref(module._nni_wrapper), weakref.ref(output)])

    with patched():
        script = Script(replicated(count))
        distiller = distiller_of(script)
        script.net.conv1.register_forward_hook(see)
        compute = distiller.compute_distill_loss

        def compute_distill_loss() -> Tensor:
            seen[-1].append(weakref.ref(distiller._target_spaces["fc"]["_output_0"].hidden_state))
            return compute()

        def step(batch: Tuple[Tensor, Tensor], model: nn.Module) -> Tensor:
            seen.append([])
            return nn.functional.cross_entropy(model(batch[0]), batch[1])

        distiller.compute_distill_loss = compute_distill_loss
        script.evaluator._training_step = step
        distiller.compress(3, None)
    assert [len(refs) for refs in seen] == [3 * len(data()[i][0].chunk(count)) + 1 for i in range(3)]
    assert [ref() for refs in seen for ref in refs if ref() is not None] == []


def copied_while_held(count: int) -> None:
    script = Script(replicated(count))
    distiller = distiller_of(script)
    distiller.compress(2, None)
    x = data()[0][0]
    replicated(count)(script.net)(x)
    space = distiller._target_spaces["fc"]["_output_0"]
    held = space.hidden_state
    assert held.requires_grad
    twin = copy.deepcopy(script.net)
    own = twin.fc._nni_wrapper.distillation_target_spaces["_output_0"]
    assert space.hidden_state is held
    assert own._wrapper is twin.fc._nni_wrapper
    assert torch.equal(own.hidden_state, held)
    assert not own.hidden_state.requires_grad
    replicated(count)(twin)(2 * x)
    assert not torch.equal(own.hidden_state, held)
    assert space.hidden_state is held


@pytest.mark.parametrize("count", [1, 3])
def test_a_model_is_copied_while_it_holds_a_hidden_state(count: int) -> None:
    """The copy has the values and none of the graph, and observes for itself from then on."""
    with patched():
        copied_while_held(count)


@pytest.mark.xfail(strict=True, raises=RuntimeError, reason="a tensor with a graph cannot be copied")
def test_stock_is_not_copied_while_it_holds_a_hidden_state() -> None:
    """Without the fixes copy.deepcopy fails after every forward outside of training."""
    copied_while_held(1)


@pytest.mark.parametrize("prefix", ["", "module."])
def test_links_into_a_teacher_in_parallel(prefix: str) -> None:
    """The layers of a teacher in DataParallel are named with the prefix or without; it is called as it was given."""
    called = []
    with patched():
        script, teacher = Script(replicated(2)), rehearse(make_net(seed=5), 2)
        config = [{"op_names": ["relu1"], "link": [f"{prefix}relu1", f"{prefix}conv1"]}]

        def predict(batch: Any, model: nn.Module) -> Tensor:
            called.append(model)
            return model(batch[0])

        distiller = DynamicLayerwiseDistiller(script.net, config, script.evaluator, teacher, predict)
        assert sorted(distiller._teacher_target_spaces) == ["conv1", "relu1"]
        distiller.compress(1, None)
    assert called == [teacher]


class Recomputed(harness.Net):
    """Layers under distillation that run again in the backward."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(norm=False)

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(lambda x: self.relu1(self.conv1(x)), x, use_reentrant=False)
        x = checkpoint(lambda x: self.relu2(self.conv2(x)), x, use_reentrant=False)
        return self.fc(x.flatten(1))


class Trunk(nn.Module):
    """A user's model of which one part runs in DataParallel."""

    def __init__(self, count: int, net: Any) -> None:
        super().__init__()
        self.net = net
        self.trunk = replicated(count)(nn.Sequential(net.conv1, net.relu1, net.conv2, net.relu2))

    def forward(self, x: Tensor) -> Tensor:
        return self.net.fc(self.trunk(x).flatten(1))


def distilled(net: nn.Module, wrap: Any) -> Dict[str, Any]:
    script = Script(wrap, net)
    distiller_of(script, "conv1", "relu2", "fc").compress(5, None)
    return {"losses": torch.tensor(script.losses), **harness.snapshot(net)}


@each_count
def test_layers_that_are_recomputed_in_backward(count: int) -> None:
    """Activation checkpointing changes nothing: hidden states and gradients are those of the forward."""
    on_one = distilled(Recomputed(), one_device)
    with patched():
        assert harness.unequal("state", on_one, distilled(Recomputed(), replicated(count)), harness.RTOL, harness.ATOL) == []


@each_count
def test_a_part_of_the_model_in_parallel(count: int) -> None:
    """Layers inside a DataParallel and layers outside it are distilled together."""
    on_one = distilled(make_net(), one_device)
    with patched():
        parts = distilled(make_net(), lambda net: Trunk(count, net))
    assert harness.unequal("state", on_one, parts, harness.RTOL, harness.ATOL) == []
