"""NNI 3.0 where a script does something unusual: lost dimensions, recomputed layers, failed loads, methods of its own."""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any, List

import pytest
from conftest import IS_NEW, RELEASE

if not IS_NEW:
    pytest.skip(f"NNI {RELEASE} is of the older line", allow_module_level=True)

import torch
from cases import EVERY, INPUT, OUTPUT, WEIGHT, Case
from harness import replicated, stock_class, stock_nni, unequal
from new_line import make
from test_nni3_wrapper import linear, quantized
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nni_dataparallel import patched, rehearse


class Bytes(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


class Recursive(nn.Linear):
    def forward(self, x: Tensor, again: bool = True) -> Tensor:
        y = super().forward(x)
        return self(y, False) if again else y


@pytest.fixture(autouse=True)
def registered() -> None:
    """NNI knows layers by their class's name."""
    from nni.compression.base.setting import QuantizationSetting

    for layer in (Bytes, Recursive):
        QuantizationSetting.register(layer.__name__, QuantizationSetting.registry["Linear"])


@pytest.mark.parametrize("quantizer", ["QATQuantizer", "LsqQuantizer", "PtqQuantizer"])
def test_a_shard_of_one_sample_that_lost_its_dimension(quantizer: str) -> None:
    """``squeeze()`` on a shard of one row: the layer behind it sees a dimension less, and works as without NNI."""

    class Squeezing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x).squeeze()).reshape(-1, 4)

    with patched():
        net = Squeezing()
        quantized(net, linear(EVERY), quantizer)
        assert rehearse(net, 3)(torch.randn(7, 4)).shape == (7, 4)
        assert net.b._nni_wrapper.quantization_target_spaces["_input_0"].shape == [7, 4]


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("count", [1, 2])
def test_dorefa_under_checkpointing(reentrant: bool, count: int) -> None:
    """A recomputed forward uses the scale and the noise of the first: as one device without checkpointing."""

    class Checkpointed(nn.Module):
        def __init__(self, on: bool) -> None:
            super().__init__()
            self.a, self.b, self.on = nn.Linear(4, 4), nn.Linear(4, 4), on

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            return checkpoint(self.b, y, use_reentrant=reentrant) if self.on else self.b(y)

    def train(on: bool, count: int) -> Any:
        torch.manual_seed(0)
        net = Checkpointed(on)
        _, optimizer = quantized(net, linear([INPUT, WEIGHT]), "DoReFaQuantizer")
        model = replicated(count)(net)
        losses = []
        for i in range(3):
            x = torch.randn(6, 4, generator=torch.Generator().manual_seed(i)) * torch.arange(1, 7)[:, None]
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, net.state_dict()

    with stock_nni():
        losses, state = train(False, 1)
    with patched():
        found, found_state = train(True, count)
    assert found == pytest.approx(losses, rel=1e-4)
    assert unequal("state", state, found_state, rtol=2e-3, atol=2e-4) == []


@pytest.mark.parametrize("quantizer", ["QATQuantizer", "LsqQuantizer"])
def test_a_load_that_fails_keeps_ranges_and_scales(quantizer: str) -> None:
    """A file of the plain model, and one of another width: refused, and what was learned is still there."""
    settings = {"quant_scheme": "symmetric", "granularity": "out_channel"}
    with patched():
        net, other = nn.Sequential(nn.Linear(4, 6)), nn.Sequential(nn.Linear(4, 5))
        for model in (net, other):
            quantized(model, linear([WEIGHT], **settings), quantizer)
            model(torch.randn(3, 4))
        before = {name: t.clone() for name, t in net.state_dict().items() if "weight_" in name}
        assert before
        for state in (nn.Sequential(nn.Linear(4, 6)).state_dict(), other.state_dict()):
            with pytest.raises(RuntimeError, match=r"Missing key|size mismatch"):
                net.load_state_dict(state)
            after = net.state_dict()
            assert all(name in after and after[name].shape == t.shape for name, t in before.items())


def test_a_tracking_function_of_the_users_is_told_of_its_share() -> None:
    """Once: on a replica it sees a share of the batch, unless it calls super()."""

    class Own(stock_class()):  # type: ignore[misc]
        def track_min_max_val(self, wrapper: Any, target_name: str, target: Tensor) -> None:
            pass

    with patched():
        net = nn.Sequential(nn.Linear(4, 4))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        make(Own, Case("", "", linear([INPUT]), quantizer="QATQuantizer"), net, optimizer)
        with pytest.warns(RuntimeWarning, match=r"Own\.track_min_max_val is a tracking function of your own.*Call super\(\)"):
            rehearse(net, 2)(torch.randn(4, 4))
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            rehearse(net, 2)(torch.randn(4, 4))


def test_an_apply_method_that_the_user_replaced_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The registry of NNI is the user's to change."""
    from nni.compression.base.apply_method import quant_apply_methods

    calls: List[int] = []
    monkeypatch.setitem(quant_apply_methods, "qat_clamp_round", lambda target, space: calls.append(1) or target * 1.0)
    with patched():
        net = nn.Sequential(nn.Linear(4, 4))
        quantized(net, linear([WEIGHT]))
        net(torch.randn(3, 4))
    assert calls == [1]


def test_integers_as_inputs() -> None:
    """The smallest value of a uint8 input is not turned over when it is negated."""
    states = []
    with patched():
        for count in (1, 2):
            net = nn.Sequential(Bytes(4, 4))
            quantized(net, [{**linear([INPUT])[0], "op_types": ["Bytes"]}])
            replicated(count)(net)(torch.arange(24, dtype=torch.uint8).reshape(6, 4) + 36)
            states.append({name: t.float() for name, t in net.state_dict().items() if "tracked" in name})
    assert unequal("ranges", *states) == []


def test_a_layer_that_calls_itself() -> None:
    """Right, and gone after the step."""
    alive: List[Any] = []
    with patched():
        net = nn.Sequential(Recursive(4, 4))
        quantized(net, [{**linear([WEIGHT])[0], "op_types": ["Recursive"]}])
        model = rehearse(net, 2)
        copies = model.replicate

        def noting(*args: Any) -> Any:
            made = copies(*args)
            alive.extend(weakref.ref(module) for replica in made for module in replica.modules())
            return made

        model.replicate = noting
        gc.collect()
        gc.disable()
        try:
            model(torch.randn(4, 4)).sum().backward()
            assert alive
            assert not any(reference() is not None for reference in alive)
        finally:
            gc.enable()


def test_rows_that_share_a_scale_and_lie_on_two_replicas() -> None:
    """Told with the numbers that would work."""
    with patched():
        net = nn.Sequential(nn.Linear(4, 4))
        quantized(net, linear([INPUT], granularity=[2, -1]))
        with pytest.raises(RuntimeError, match=r"2 rows share a scale, but this replica has rows 0 to 3.*divide by 2 times"):
            rehearse(net, 2)(torch.randn(6, 4))


@pytest.mark.parametrize("quantizer", ["LsqQuantizer", "LsqPlusQuantizer"])
def test_learned_scales_of_a_half_precision_model(quantizer: str) -> None:
    """Of the model's dtype, activations alone too: stock's float32 scales make a layer refuse its weight."""
    scheme = {"quant_scheme": "symmetric" if quantizer == "LsqQuantizer" else "affine"}
    config = [*linear(EVERY, **scheme), {**linear([OUTPUT], **scheme)[0], "op_types": ["ReLU"]}]
    with patched():
        net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).to(torch.bfloat16)
        quantized(net, config, quantizer)
        assert rehearse(net, 2)(torch.randn(4, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16
        assert all(p.dtype == torch.bfloat16 for p in net.parameters())
