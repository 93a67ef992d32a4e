"""NNI 3.0's wrapper on a replica: its own module, forward, target spaces; gone when the forward is done."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any, Dict, List, Tuple

import pytest
import torch
from cases import BIAS, EVERY, INPUT, OUTPUT, WEIGHT, Case, cases_for
from conftest import CASES, IS_NEW, RELEASE
from harness import advance, data, replicated, start_training, step, stock_class, stock_nni, unequal, wrappers
from new_line import make
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from nni_dataparallel import patched, rehearse, replicas
from nni_dataparallel.group import Group

if not IS_NEW:
    pytest.skip(f"NNI {RELEASE} is of the older line", allow_module_level=True)

each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
each_trained = pytest.mark.parametrize("case", [case for case in CASES if case.trains], ids=lambda case: case.id)


NOISY = hasattr(torch, "compile")  # the gradient is quantised from torch 2.0 on


def case_of(quantizer: str, name: str) -> Case:
    return next(case for case in cases_for(RELEASE, quantizer) if case.name == name)


def linear(targets: List[str], **more: Any) -> List[Dict[str, Any]]:
    settings = {"quant_dtype": "int8", "quant_scheme": "affine", "granularity": "default", **more}
    return [{"op_types": ["Linear"], "target_names": targets, **settings}]


def quantized(net: nn.Module, config: List[Dict[str, Any]], quantizer: str = "QATQuantizer", **arguments: Any) -> Tuple[Any, Any]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    return make(stock_class(quantizer), Case("", "", config, quantizer=quantizer, arguments=arguments), net, optimizer), optimizer


class Probe(nn.Module):
    """A layer that notes what its thread sees while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.seen: List[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        wrapper: Any = self.lin._nni_wrapper
        inside: List[Any] = []
        handle = self.lin.register_forward_pre_hook(lambda module, args: inside.append(module))
        y = self.lin(x)
        handle.remove()
        self.seen.append((replicas.rank(), self.lin, self.lin.forward.__self__, wrapper, inside[0], weakref.ref(wrapper)))
        return y


def test_a_replica_runs_its_own_wrapper_and_module() -> None:
    """replica.forward is bound to the replica's wrapper, whose Parameters are the replica's; the original keeps its own."""
    torch.manual_seed(0)
    net = Probe()
    with patched():
        quantized(net, linear(EVERY))
        rehearse(net, 3)(torch.randn(6, 4))
    assert sorted(rank for rank, *_ in net.seen) == [0, 1, 2]
    for _, module, bound_to, wrapper, inside, _ in net.seen:
        assert module is not net.lin
        assert bound_to is wrapper is not net.lin._nni_wrapper
        assert inside is module
        assert wrapper.weight is not net.lin._nni_wrapper.weight
    assert net.lin.forward.__self__ is net.lin._nni_wrapper
    assert net.lin._nni_wrapper.module is net.lin
    assert net.lin._nni_wrapper.quantization_target_spaces[WEIGHT]._wrapper is net.lin._nni_wrapper


@each_case
def test_replicas_are_gone_after_the_step(case: Case) -> None:
    """No cycle keeps their copies of the parameters alive until the garbage collector comes."""
    alive: List[Any] = []
    with patched():
        net, optimizer, _ = start_training(stock_class(case.quantizer), case, RELEASE)
        model = rehearse(net, 2)
        original = model.replicate

        def noting(*args: Any) -> Any:
            copies = original(*args)
            alive.extend(weakref.ref(module) for copy_ in copies for module in copy_.modules())
            return copies

        model.replicate = noting
        gc.collect()
        gc.disable()
        try:
            advance(case, model, optimizer, data()[:2])
            assert alive
            assert sum(reference() is not None for reference in alive) == 0
        finally:
            gc.enable()


class Talkative(nn.Module):
    """Keyword arguments with defaults, keyword-only ones, tuples and dicts as outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        a, b = self.inner(x, bias=scale, flip=True)
        c, _ = self.inner(x, flip=False)
        return self.lin(a + b * c)


class Inner(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, x: Tensor, bias: Any = None, *, flip: bool) -> Tuple[Tensor, Tensor]:
        y = super().forward(-x if flip else x)
        return (y if bias is None else y + bias), y


@pytest.mark.parametrize("count", [1, 2, 3])
def test_keyword_and_tuple_inputs_and_outputs(count: int) -> None:
    """Equal to stock on one device, batch by batch."""
    from nni.compression.base.setting import QuantizationSetting

    QuantizationSetting.register("Inner", QuantizationSetting.registry["Linear"])
    config = [*linear(EVERY), {**linear([WEIGHT, "_input_x", "_output_0", "_output_1"])[0], "op_types": ["Inner"]}]
    config[1]["target_names"] = [WEIGHT, "_input_0", "_output_0", "_output_1"]

    def train(count: int) -> Any:
        torch.manual_seed(0)
        net = Talkative()
        _, optimizer = quantized(net, config)
        model = replicated(count)(net)
        losses = []
        for size in (6, 5, 3):
            x = torch.randn(size, 4, generator=torch.Generator().manual_seed(size))
            optimizer.zero_grad()
            loss = model(x, scale=x.flip(0)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, net.state_dict()

    with stock_nni():
        losses, state = train(1)
    with patched():
        found, found_state = train(count)
    assert found == pytest.approx(losses, rel=1e-5)
    assert unequal("state", state, found_state, rtol=2e-3, atol=2e-4) == []


def test_no_wait_for_the_device_after_every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.cuda.empty_cache() is stock's; patched it is not called, and the forward is otherwise stock's."""
    calls: List[int] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append(1))
    case = case_of("QATQuantizer", "affine int8")
    net, optimizer, _ = start_training(stock_class(), case, RELEASE)
    advance(case, net, optimizer, data()[:1])
    assert len(calls) == len([m for m in net.modules() if hasattr(m, "_nni_wrapper")])
    calls.clear()
    with patched():
        net, optimizer, _ = start_training(stock_class(), case, RELEASE)
        advance(case, replicated(2)(net), optimizer, data()[:1])
    assert calls == []


@each_case
def test_at_most_one_meeting_per_observer_and_forward(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Minimum and maximum travel together; weights, and an evaluation that measures nothing, need no meeting."""
    places: List[Any] = []
    exchange = Group.exchange
    monkeypatch.setattr(
        Group, "exchange", lambda self, rank, place, value: places.append((rank, place)) or exchange(self, rank, place, value)
    )
    with patched():
        net, optimizer, quantizer = start_training(stock_class(case.quantizer), case, RELEASE)
        model = replicated(2)(net)
        advance(case, model, optimizer, data()[:1])  # in the first step LSQ asks for the whole batch's shape
        places.clear()
        advance(case, model, optimizer, data()[1:2])
        spaces = [space for wrapper in wrappers(quantizer) for space in wrapper.quantization_target_spaces.values()]
        observers = 0 if case.quantizer == "BNNQuantizer" else sum(space._target_type.value != "parameter" for space in spaces)
        if case.quantizer == "DoReFaQuantizer":  # inputs have ranges, gradients have noise, outputs lie between 0 and 1
            observers = sum(space._target_type.value == "input" for space in spaces)
            observers += NOISY * sum(WEIGHT in wrapper.quantization_target_spaces for wrapper in wrappers(quantizer))
        assert len(places) == 2 * observers
        places.clear()
        model.eval()
        with torch.no_grad():
            model(data()[0][0])
        measures = case.quantizer in ("DoReFaQuantizer", "PtqQuantizer") or case.quantizer.startswith("Lsq")
        assert places == [] or measures


@each_case
@pytest.mark.parametrize("count", [1, 2])
def test_a_model_can_be_copied_after_a_training_forward(case: Case, count: int) -> None:
    """copy.deepcopy with the graph of a forward still there: the same state, evaluated alike, apart from the original."""
    with patched():
        net, optimizer, _ = start_training(stock_class(case.quantizer), case, RELEASE)
        model = replicated(count)(net)
        advance(case, model, optimizer, data()[:3])
        output = model(data()[0][0])
        twin = copy.deepcopy(net)
        assert output.grad_fn is not None
        assert unequal("state", net.state_dict(), twin.state_dict()) == []
        net.eval(), twin.eval()
        with torch.no_grad():
            x = data()[1][0]
            assert torch.equal(twin(x), net(x))
            assert twin.fc._nni_wrapper.module is twin.fc
            assert twin.fc.forward.__self__ is twin.fc._nni_wrapper
            before = {name: t.clone() for name, t in net.state_dict().items()}
            twin.train()
            twin(3 * x)
        assert unequal("state", before, net.state_dict()) == []


@each_trained
def test_an_averaged_model_follows(case: Case) -> None:
    """torch's AveragedModel, made between two steps: parameters are the mean, it evaluates."""
    if case.start:
        pytest.skip("scales appear when the warm-up ends; an average made before has no place for them")
    with patched():
        net, optimizer, _ = start_training(stock_class(case.quantizer), case, RELEASE)
        model = replicated(2)(net)
        advance(case, model, optimizer, data()[:2])
        average = AveragedModel(net)
        average.update_parameters(net)
        first = {name: p.detach().clone() for name, p in net.named_parameters()}
        advance(case, model, optimizer, data()[2:3])
        average.update_parameters(net)
        for name, parameter in average.module.named_parameters():
            assert torch.allclose(parameter, (first[name] + dict(net.named_parameters())[name]) / 2, atol=1e-6), name
        average.eval()
        with torch.no_grad():
            assert torch.isfinite(average(data()[0][0])).all()


@each_trained
@pytest.mark.parametrize("count", [1, 3])
def test_unwrapped_it_is_the_plain_model(case: Case, count: int) -> None:
    """unwrap_model() after training on replicas: every layer its own forward and Parameters, those that were trained."""
    with patched():
        net, optimizer, quantizer = start_training(stock_class(case.quantizer), case, RELEASE)
        names = set(start_training(stock_class(case.quantizer), case, RELEASE)[0].state_dict())
        before = dict(net.named_parameters())
        advance(case, replicated(count)(net), optimizer, data()[:2])
        quantizer.unwrap_model()
        assert not any("_nni_wrapper" in name for name in net.state_dict())
        for name, parameter in net.named_parameters():
            trained = before.get(f"{name.rpartition('.')[0]}._nni_wrapper.{name.rpartition('.')[2]}", before.get(name))
            assert isinstance(parameter, nn.Parameter)
            assert torch.equal(parameter, trained), name
        assert all(module.forward.__func__ is type(module).forward for module in net.modules() if module is not net)
        quantizer.wrap_model()
        assert names <= set(net.state_dict())
        advance(case, replicated(count)(net), optimizer, data()[2:3])


@pytest.mark.parametrize("quantizer", ["QATQuantizer", "LsqPlusQuantizer", "PtqQuantizer"])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_every_sample_a_scale_of_its_own(quantizer: str, count: int) -> None:
    """A granularity that leaves the batch dimension out: ranges and scales lie in batch order, each shard uses its rows."""
    config = linear([INPUT, OUTPUT], granularity=[2])

    def train(count: int) -> Any:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))
        _, optimizer = quantized(net, config, quantizer)
        model = replicated(count)(net)
        losses = []
        for i in range(3):
            x = torch.randn(7, 4, generator=torch.Generator().manual_seed(i)) * torch.arange(1, 8)[:, None]
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, net.state_dict()

    with stock_nni():
        losses, state = train(1)
    assert any(tuple(t.shape) == (7, 2) for t in state.values())
    with patched():
        found, found_state = train(count)
    assert found == pytest.approx(losses, rel=1e-4)
    assert unequal("state", state, found_state, rtol=2e-3, atol=2e-4) == []


def test_learned_scales_have_their_size_from_the_start() -> None:
    """So that the optimizer, and DDP, hold what is trained; where only a forward can tell, the Parameter is empty."""
    with patched():
        for quantizer, name in (("LsqQuantizer", "per channel, out"), ("LsqPlusQuantizer", "per channel, in")):
            case = case_of(quantizer, name)
            net, optimizer, _ = start_training(stock_class(quantizer), case, RELEASE)
            before = {name: (p, tuple(p.shape), p.data_ptr()) for name, p in net.named_parameters()}
            assert before["conv2._nni_wrapper._input_0_scale"][1] == (1, 4, 1, 1)
            assert before["conv2._nni_wrapper._output_0_scale"][1] == (1, 6, 1, 1)
            assert before["relu1._nni_wrapper._output_0_scale"][1] == (0,)
            advance(case, replicated(2)(net), optimizer, data())
            held = {id(p) for group in optimizer.param_groups for p in group["params"]}
            for name, parameter in net.named_parameters():
                assert parameter is before[name][0]
                assert id(parameter) in held
                if "relu" not in name:
                    assert (tuple(parameter.shape), parameter.data_ptr()) == before[name][1:], name


@pytest.mark.parametrize("quantizer", ["QATQuantizer", "LsqQuantizer", "LsqPlusQuantizer", "PtqQuantizer"])
def test_a_replica_that_raises_leaves_a_usable_model(quantizer: str) -> None:
    """The user's own exception comes out; the next step is the one of a model that never failed."""

    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.fail = nn.Linear(4, 4), nn.Linear(4, 4), False

        def forward(self, x: Tensor) -> Tensor:
            if self.fail and replicas.rank() == 1:
                raise ValueError("no such sample")
            return self.b(torch.relu(self.a(x)))

    def train(fail: bool) -> Any:
        torch.manual_seed(0)
        net = Failing()
        _, optimizer = quantized(net, linear([*EVERY, BIAS]), quantizer)
        model = rehearse(net, 2)
        if fail:
            net.fail = True
            with pytest.raises(ValueError, match="no such sample"):
                model(torch.zeros(4, 4))
            net.fail = False
            assert net.a._nni_wrapper.module is net.a
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    with patched():
        assert train(True) == pytest.approx(train(False), rel=1e-6) if quantizer != "PtqQuantizer" else train(True)


def test_layers_named_by_other_layers(tmp_path: Any) -> None:
    """A batch norm fused into a convolution updates the running statistics of its own replica, in training."""
    case = case_of("QATQuantizer", "fusion")
    with patched():
        net, optimizer, _ = start_training(stock_class(), case, RELEASE)
        model = rehearse(net, 2)
        model.train()
        before = net.bn1.running_mean.clone()
        step(model, optimizer, data()[0])
        assert not torch.equal(net.bn1.running_mean, before)
        assert int(net.bn1.num_batches_tracked) == 1


def test_outputs_named_in_a_dict() -> None:
    """OUTPUT targets of layers that return a dict have a range each, and are dicts again."""
    from nni.compression.base.setting import QuantizationSetting

    class Named(nn.Linear):
        def forward(self, x: Tensor) -> Dict[str, Tensor]:
            y = super().forward(x)
            return {"high": y, "low": -y}

    QuantizationSetting.register("Named", QuantizationSetting.registry["Linear"])
    config = [{**linear([f"{OUTPUT}high", f"{OUTPUT}low"])[0], "op_types": ["Named"]}]
    states = []
    with patched():
        for count in (1, 2):
            torch.manual_seed(0)
            net = nn.Sequential(Named(4, 4))
            quantized(net, config)
            model = replicated(count)(net)
            assert set(model(torch.linspace(-1, 1, 20).reshape(5, 4))) == {"high", "low"}
            states.append(net.state_dict())
    assert unequal("state", states[0], states[1], rtol=1e-6) == []
    assert sum("tracked_max" in name for name in states[0]) == 2
