"""Many devices: the same numbers as on one, under DataParallel (nothing patched, or patched) and DistributedDataParallel."""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any, Iterator, List

import pytest
import torch
from feathermap_nets import ZOO, Attention, Digits, made
from torch import Tensor, nn

from nni_dataparallel import parallel, patching, rehearse
from nni_dataparallel.feathermap import FeatherNet

BATCHES = [torch.randn(size, 1, 8, 8, generator=torch.Generator().manual_seed(size)) for size in (8, 7, 2, 1)]


@pytest.fixture(params=[False, True], ids=["stock", "patched"])
def replication(request: pytest.FixtureRequest) -> Iterator[bool]:
    """DataParallel as torch has it, and with this package's wrapped names."""
    if request.param:
        for fix in parallel.FIXES:
            patching.install(fix, "feathermap test")
    yield request.param
    if request.param:
        for fix in parallel.FIXES:
            patching.uninstall(fix, "feathermap test")


def frozen_norms(net: nn.Module) -> None:
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()


def trained(net: FeatherNet, model: nn.Module) -> FeatherNet:
    optimizer = torch.optim.SGD(net.param_groups(0.05), momentum=0.9)
    for batch in BATCHES:
        model.train()
        frozen_norms(net)
        optimizer.zero_grad()
        (model(batch) - 1).square().sum().div(len(batch)).backward()
        optimizer.step()
    return net


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("bits", [0, 4])
def test_training_on_replicas_is_training_on_one_device(bits: int, replicas: int, replication: bool) -> None:
    """Every Parameter after every step, within summation order; with and without QAT."""
    nets = []
    for count in (1, replicas):
        torch.manual_seed(0)
        net = FeatherNet(Digits(), 0.2)
        if bits:
            net.prepare_qat(bits)
        nets.append(trained(net, net if count == 1 else rehearse(net, count)))
    for (name, one), many in zip(nets[0].state_dict().items(), nets[1].state_dict().values()):
        torch.testing.assert_close(many, one, rtol=1e-3, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")
    assert not torch.equal(nets[0].pool.V1.weight, FeatherNet(Digits(), 0.2).pool.V1.weight)


@pytest.mark.parametrize("form", ["eval", "qat", "deploy", "int8", "int8 deploy"])
def test_evaluation_on_replicas(form: str, replication: bool) -> None:
    """Each replica computes from its own copy of the factors, also after an update; outputs are one device's."""
    net = FeatherNet(Digits(), 0.2).eval()
    if "qat" in form:
        net.prepare_qat(4)
    if "int8" in form:
        net.convert()
    if "deploy" in form:
        net.deploy()
    model = rehearse(net, 3)
    for _ in range(2):
        with torch.no_grad():
            for batch in BATCHES:
                torch.testing.assert_close(model(batch), net(batch), rtol=1e-5, atol=1e-5)
            net.module.conv1.weight_p.mul_(1.5)
            net.module.fc2.bias_p.add_(1)
            if "int8" not in form:
                net.pool.V1.weight.add_(0.1)


@pytest.mark.parametrize("kind", ["attention", "tied", "embedding", "transposed", "conv3d", "own layer", "lstm"])
def test_kinds_of_layers_on_replicas(kind: str) -> None:
    """Outputs and gradients of the factors, deployed and not."""
    assert kind in ZOO
    model, inputs = made(kind)
    net = FeatherNet(model.double(), 0.5).eval()
    inputs = tuple(x.double() if x.is_floating_point() else x for x in inputs)
    for each in (net, net.deploy()):
        gradients: List[List[Tensor]] = []
        outputs = []
        for run in (each, rehearse(each, 2)):
            each.zero_grad()
            outputs.append(run(*inputs))
            outputs[-1].square().sum().backward()
            gradients.append([p.grad.clone() for p in each.parameters()])
        torch.testing.assert_close(outputs[1], outputs[0])
        for many, one in zip(gradients[1], gradients[0]):
            torch.testing.assert_close(many, one)


def test_a_net_inside_the_parallel_model(replication: bool) -> None:
    """Only a part of the replicated model is hashed, and attention reads its projection on the replica."""
    model = nn.Sequential(nn.Linear(8, 8), FeatherNet(Attention(), 0.5)).eval()
    x = torch.randn(4, 3, 8)
    with torch.no_grad():
        torch.testing.assert_close(rehearse(model, 2)(x), model(x))


def test_cached_weights_stay_on_their_device() -> None:
    """Replicas of a net in a cached() block compute their own."""
    net = FeatherNet(Digits(), 0.2).eval()
    with torch.no_grad(), net.cached():
        torch.testing.assert_close(rehearse(net, 2)(BATCHES[0]), net(BATCHES[0]), rtol=1e-5, atol=1e-5)
        assert net.pool.cache is not None


def test_replicas_are_freed_without_the_garbage_collector(replication: bool) -> None:
    """Nothing of a replica survives its forward: factors on other devices would pile up."""
    net = FeatherNet(nn.Linear(9, 9), 0.5)
    seen: List[Any] = []
    follow = FeatherNet._point_at_own_pool

    def noted(self: FeatherNet) -> None:
        seen.append(weakref.ref(self.pool))
        follow(self)

    gc.collect()
    gc.disable()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(FeatherNet, "_point_at_own_pool", noted)
            rehearse(net, 2)(torch.randn(4, 9)).sum().backward()
        assert len(seen) >= 2
        assert [reference() for reference in seen] == [None] * len(seen)
    finally:
        gc.enable()


def test_a_copy_of_a_net_that_ran_on_replicas() -> None:
    """The net itself is untouched by replication: its layers read its own pool."""
    net = FeatherNet(Digits(), 0.2)
    rehearse(net, 2)(BATCHES[0])
    other = copy.deepcopy(net).eval()
    assert torch.equal(other(BATCHES[0]), net.eval()(BATCHES[0]))


def states_of(batch: Tensor, wrap: Any) -> dict:
    """What three steps leave, float and QAT, and the gradients of the converted nets."""
    states = {}
    for bits in (0, 4):
        torch.manual_seed(0)
        net = FeatherNet(Digits(), 0.2)
        if bits:
            net.prepare_qat(bits)
        model = wrap(net)
        optimizer = torch.optim.SGD(net.param_groups(0.05), momentum=0.9)
        for _ in range(3):
            model.train()
            frozen_norms(net)
            optimizer.zero_grad()
            (model(batch) - 1).square().mean().backward()
            optimizer.step()
        states[f"{bits} bits, trained"] = {name: value.clone() for name, value in net.state_dict().items()}
        net.eval().convert()
        states[f"{bits} bits, codes"] = {name: value for name, value in net.state_dict().items() if "qweight" in name}
        model = wrap(net)  # buffers of int8 are broadcast now
        model.train()
        frozen_norms(net)
        optimizer.zero_grad()
        (model(batch) - 1).square().mean().backward()
        states[f"{bits} bits, gradients"] = {name: p.grad for name, p in net.named_parameters()}
    return states


def run_rank(rank: int, store: str) -> None:
    """One of two processes."""
    from torch import distributed

    distributed.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
    states = states_of(WHOLE.chunk(2)[rank], nn.parallel.DistributedDataParallel)
    if rank == 1:
        torch.save(states, store + ".states")
    gc.collect()  # a DDP that lives on holds gloo's threads, and the process aborts at its end
    distributed.barrier()
    distributed.destroy_process_group()


WHOLE = torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.skipif(not torch.distributed.is_available() or sys.platform == "win32", reason="needs gloo and a file store")
def test_two_ranks_train_as_one(tmp_path: Path) -> None:
    """DistributedDataParallel over gloo: Parameters after three steps, then the gradients of the INT8 net."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]), "OMP_NUM_THREADS": "1"}
    code = "import sys; from test_feathermap_devices import run_rank; run_rank(int(sys.argv[1]), sys.argv[2])"
    store = str(tmp_path / "store")
    ranks = [subprocess.Popen([sys.executable, "-c", code, rank, store], env=environment) for rank in "01"]
    try:
        one = states_of(WHOLE, lambda net: net)
        assert [process.wait(timeout=120) for process in ranks] == [0, 0]
    finally:
        for process in ranks:
            process.kill()
    two = torch.load(store + ".states", **({"weights_only": False} if hasattr(torch, "compile") else {}))
    assert list(one) == list(two)
    for key, wanted in one.items():
        for name, tensor in wanted.items():
            if key.endswith("codes"):  # a scale differs in its last bit, and with it a value that lies between two codes
                assert int((two[key][name].int() - tensor.int()).abs().max()) <= 1
            else:
                torch.testing.assert_close(two[key][name], tensor, rtol=1e-3, atol=1e-4, msg=f"{key} {name}")
