"""Copies, files, moves, parents, threads: a FeatherNet is a module like others."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import weakref
from typing import Any, Callable, List

import pytest
import torch
from feathermap_nets import ZOO, Digits, Tied, made
from torch import nn
from torch.optim.swa_utils import AveragedModel

from nni_dataparallel.feathermap import FeatherNet

X = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(1))


def saved_and_loaded(net: Any) -> Any:
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    return torch.load(file, **({"weights_only": False} if hasattr(torch, "compile") else {}))


COPIES: List[Callable[[Any], Any]] = [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net)), saved_and_loaded]
FORMS: List[Callable[[FeatherNet], FeatherNet]] = [
    lambda net: net.eval(),
    lambda net: net.prepare_qat(4).eval(),
    lambda net: net.convert().eval(),
    lambda net: net.convert().deploy(),
]


@pytest.mark.parametrize("form", FORMS, ids=["float", "qat", "int8", "deployed"])
@pytest.mark.parametrize("copied", COPIES, ids=["deepcopy", "pickle", "file"])
def test_copies_stand_alone(copied: Any, form: Any) -> None:
    """A copy after a training forward computes the same, and from factors of its own."""
    net = FeatherNet(Digits(), 0.2)
    net(X)
    form(net)
    other = copied(net)
    with torch.no_grad():
        wanted = net(X)
        assert torch.equal(other(X), wanted)
        other.pool.state_dict(keep_vars=True)[next(iter(other.pool.state_dict()))].mul_(0)
        assert not torch.equal(other(X), wanted)
        assert torch.equal(net(X), wanted)
    assert [type(m).__name__ for m in other.modules()] == [type(m).__name__ for m in net.modules()]


@pytest.mark.parametrize("kind", ZOO)
def test_every_kind_of_layer_can_be_copied(kind: str) -> None:
    """Pickled and deep-copied layers compute the same."""
    model, inputs = made(kind)
    net = FeatherNet(model, 0.5).eval()
    with torch.no_grad():
        wanted = net(*inputs)
        # torch lets no parametrised module be pickled.
        for each in (copy.deepcopy(net), net if "norm" in kind else pickle.loads(pickle.dumps(net))):
            assert torch.equal(each(*inputs), wanted)


def test_an_average_of_models() -> None:
    """EMA and SWA average the factors; its forward is that of the averaged factors."""
    net = FeatherNet(Digits(), 0.2)
    average = AveragedModel(net)
    first = net.pool.V1.weight.detach().clone()
    average.update_parameters(net)
    with torch.no_grad():
        net.pool.V1.weight.add_(1)
    average.update_parameters(net)
    torch.testing.assert_close(average.module.pool.V1.weight.data, first + 0.5)
    by_hand = copy.deepcopy(net).eval()
    by_hand.pool.V1.weight.data.copy_(average.module.pool.V1.weight)
    assert torch.equal(average.eval()(X), by_hand(X))


def test_moves_and_precision_reach_every_weight() -> None:
    """.double(), .to(dtype) and .to(device) move what the layers read, also in evaluation."""
    net = FeatherNet(Digits(), 0.2).eval()
    with torch.no_grad():
        wanted = net(X)
        torch.testing.assert_close(net.double()(X.double()).float(), wanted)
        assert net.module.conv1.weight.dtype == torch.float64
        torch.testing.assert_close(net.to(torch.float32)(X), wanted)
    assert net.to("meta").module.conv1.weight.is_meta


def test_loading_through_a_parent_is_seen_at_once() -> None:
    """In training, evaluation and deployment, float and INT8, with ``strict=False`` as well."""
    source = nn.Sequential(FeatherNet(Digits(), 0.2), nn.Linear(10, 2)).eval()
    for form in (lambda net: net, lambda net: net.convert()):
        form(source[0])
        target = nn.Sequential(FeatherNet(Digits(), 0.2), nn.Linear(10, 2)).eval()
        target[0].deploy()
        target.load_state_dict(source.state_dict())
        torch.testing.assert_close(target(X), source(X))
    target = FeatherNet(Digits(), 0.2)
    missing = target.load_state_dict({"pool.V1.weight": torch.zeros_like(target.pool.V1.weight)}, strict=False)
    assert "pool.V2.weight" in missing.missing_keys
    assert not bool(target.module.conv1.weight.any())


def test_a_net_inside_a_net() -> None:
    """A FeatherNet can be part of a model; its factors are found by the optimizer once."""
    parent = nn.Sequential(FeatherNet(nn.Conv2d(1, 2, 3), 0.5), nn.Flatten(), FeatherNet(nn.Linear(72, 3), 0.5))
    parent.train()(X).sum().backward()
    names = [name for name, p in parent.named_parameters() if p.grad is not None]
    assert names == [name for name, _ in parent.named_parameters()]
    assert sum("pool" in name for name in names) == 4


@pytest.mark.parametrize("mode", ["eval", "train", "deploy"])
def test_several_threads_share_a_net(mode: str) -> None:
    """Forwards at the same time, some with and some without gradients, compute what one alone does."""
    net = FeatherNet(Digits(), 0.2)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.track_running_stats, module.momentum = False, 0.0
    getattr(net, mode)()
    wanted = net(X).detach()
    found: List[Any] = []

    def work(index: int) -> None:
        with torch.set_grad_enabled(index % 2 == 0):
            for _ in range(5):
                found.append((index, net(X)))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 20
    for index, out in found:
        torch.testing.assert_close(out.detach(), wanted)
        assert out.requires_grad == (index % 2 == 0)


def test_a_net_is_freed_without_the_garbage_collector() -> None:
    """No cycle holds the factors: neither after a forward nor after a conversion."""
    gc.collect()
    gc.disable()
    try:
        net = FeatherNet(Tied(), 0.5)
        net(torch.zeros(1, 2, dtype=torch.long)).sum().backward()
        factors = [weakref.ref(net.pool.V1)]
        net.deploy()(torch.zeros(1, 2, dtype=torch.long))
        net.convert()
        factors.append(weakref.ref(net.pool))
        del net
        assert [reference() for reference in factors] == [None, None]
    finally:
        gc.enable()
