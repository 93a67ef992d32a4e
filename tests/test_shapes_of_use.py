"""Networks that use their layers in less simple ways: equal to stock NNI on one device all the same."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Tuple

import pytest
import torch
from cases import Case, cases_for
from conftest import IS_NEW, RELEASE
from harness import QAT, make_quantizer, replicated, snapshot, stock_class, stock_nni
from references import reference_class
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nni_dataparallel import is_patched, patched

pytestmark = pytest.mark.skipif(not cases_for(RELEASE), reason=f"NNI {RELEASE} has no quantizer")
WEIGHT = [{"quant_types": ["weight"], "quant_bits": 8, "op_types": ["Linear"]}]
OUTPUT = [{"quant_types": ["weight", "output"], "quant_bits": 8, "op_types": ["Linear"]}]
ALL = [{"quant_types": ["weight", "input", "output"], "quant_bits": 8, "op_types": ["Linear"]}]
# What each quantizer that trains is asked for where stock is the reference.
CONFIGS = {
    "QAT_Quantizer": WEIGHT,
    "LsqQuantizer": ALL,
    "DoReFaQuantizer": WEIGHT,
    "BNNQuantizer": OUTPUT,
    "NaiveQuantizer": WEIGHT,
    "QATQuantizer": ALL,
    "LsqPlusQuantizer": ALL,
}
QUANTIZERS = [name for name in CONFIGS if cases_for(RELEASE, name)]


class Tied(nn.Module):
    """One layer under two names; NNI wraps the first."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = self.a

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x)))


class Twice(nn.Module):
    """One layer, used twice in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(torch.relu(self.a(x)))


class Selecting(nn.Module):
    """A layer that sees a selection of the rows, in a shard perhaps none."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        chosen = x[:, 0] > 0
        h = self.a(x)
        return h.index_add(0, chosen.nonzero().flatten(), self.b(h[chosen]))


def batches(select: bool = False) -> List[Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(size, 4, generator=generator) for size in (6, 5, 4)]
    if select:
        for x in made:
            x[:, 0] = torch.where(torch.arange(len(x)) >= len(x) // 2 + 1, 1.0, -1.0)
    return made


def train(
    make: Callable[[], nn.Module], config: Any, count: int, loss: Any, xs: List[Tensor], quantizer: str = QAT
) -> Tuple[List[float], Dict[str, Tensor]]:
    torch.manual_seed(0)
    net = make()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    case = Case("", "", config, quantizer=quantizer)
    quantizer_class = stock_class(quantizer)
    if not is_patched():
        quantizer_class = reference_class(quantizer_class)
    make_quantizer(quantizer_class, case, net, optimizer, RELEASE, shape=(4, 4))
    model = replicated(count)(net)
    model.train()
    losses = []
    for x in xs:
        optimizer.zero_grad()
        value = loss(model, x)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses, snapshot(net)


def once(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) * torch.linspace(-1, 1, 4)).square().mean()


def two_forwards(model: nn.Module, x: Tensor) -> Tensor:
    return once(model, x) + once(model, 0.3 * x)


def accumulated(model: nn.Module, x: Tensor) -> Tensor:
    """Two backward passes before one step."""
    once(model, 0.3 * x).backward()
    return once(model, x)


def after_no_grad(model: nn.Module, x: Tensor) -> Tensor:
    """A forward without grad, in training mode, before the one that is learned from."""
    with torch.no_grad():
        model(2 * x)
    return once(model, x)


USES = {
    "tied": (Tied, once),
    "tied, two forwards": (Tied, two_forwards),
    "twice": (Twice, once),
    "two forwards": (Twice, two_forwards),
    "accumulated": (Twice, accumulated),
    "after no_grad": (Twice, after_no_grad),
    "selecting": (Selecting, once),
}


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("name", USES)
@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_equal_to_stock_on_one_device(quantizer: str, name: str, count: int) -> None:
    """Loss per step and state_dict."""
    make, loss = USES[name]
    if IS_NEW and make is Tied:
        pytest.skip("NNI 3.0 refuses a layer that has two names")
    if IS_NEW and quantizer == "DoReFaQuantizer" and loss is two_forwards and count > 1:
        pytest.skip("its gradient has noise, which one device draws for the second forward first")
    config, xs = CONFIGS[quantizer], batches(select=make is Selecting)
    with stock_nni():
        losses, state = train(make, config, 1, loss, xs, quantizer)
    with patched():
        found, found_state = train(make, config, count, loss, xs, quantizer)
    assert found == pytest.approx(losses, rel=1e-4)
    for key, tensor in state.items():
        torch.testing.assert_close(found_state[key].flatten(), tensor.flatten(), rtol=2e-3, atol=2e-4, msg=key)


@pytest.mark.parametrize("make", [Twice, Selecting])
def test_ranges_of_several_uses_are_the_whole_batchs(make: Any) -> None:
    """Tracked ranges and scales of replicas are those of the same fixes on one device (and there of stock, elsewhere)."""
    xs = batches(select=make is Selecting)
    with patched():
        losses, state = train(make, OUTPUT, 1, once, xs)
        for count in (2, 3):
            found, found_state = train(make, OUTPUT, count, once, xs)
            assert found == pytest.approx(losses, rel=1e-4)
            for key, tensor in state.items():
                torch.testing.assert_close(found_state[key], tensor, rtol=2e-3, atol=2e-4, msg=key)


def test_an_empty_batch_is_refused_as_on_one_device() -> None:
    """No shard has anything to observe: torch's own error, not an infinite range."""

    class Nothing(Selecting):
        def forward(self, x: Tensor) -> Tensor:
            return x + self.b(x[:0]).sum()

    with patched(), pytest.raises((RuntimeError, IndexError), match=r"numel|non-zero|empty|zero-size"):
        train(Nothing, OUTPUT, 2, once, batches())


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_activation_checkpointing_counts_a_batch_once(quantizer: str, reentrant: bool) -> None:
    """A forward recomputed in backward leaves the statistics of the first: as without checkpointing."""

    class Checkpointed(nn.Module):
        def __init__(self, on: bool) -> None:
            super().__init__()
            # The norm: something to learn in front of what is recomputed.
            self.p, self.a, self.on = nn.LayerNorm(4), nn.Linear(4, 4), on
            # LSQ's first step starts a scale at each use, 3.0 keeps a layer's scale in a buffer: what is recomputed
            # after a second use sees that one's.
            self.b = nn.Linear(4, 4)
            self.second = "b" if quantizer.startswith("Lsq") or IS_NEW else "a"

        def forward(self, x: Tensor) -> Tensor:
            x = self.p(x)
            y = checkpoint(self.a, x, use_reentrant=reentrant) if self.on and self.training else self.a(x)
            return y + getattr(self, self.second)(2 * x)

    config = OUTPUT if quantizer == QAT else CONFIGS[quantizer]
    with patched():
        expected = train(lambda: Checkpointed(False), config, 1, once, batches(), quantizer)
        for count in (1, 2):
            losses, state = train(lambda: Checkpointed(True), config, count, once, batches(), quantizer)
            assert losses == pytest.approx(expected[0], rel=1e-4)
            for key, tensor in expected[1].items():
                torch.testing.assert_close(state[key], tensor, rtol=2e-3, atol=2e-4, msg=key)


@pytest.mark.skipif(IS_NEW, reason="NNI 3.0 has no such method")
def test_a_users_own_rounding_is_used() -> None:
    """A subclass that overrides _quantize quantises its way, as with stock."""
    calls: List[int] = []

    def make(config: Any) -> Any:
        class Floor(stock_class()):
            def _quantize(self, *args: Any) -> Tensor:
                calls.append(1)
                return super()._quantize(*args).floor()

        net = Twice()
        make_quantizer(Floor, Case("", "", config), net, torch.optim.SGD(net.parameters(), lr=0.1), RELEASE, shape=(4, 4))
        return net

    with patched():
        make(OUTPUT)(batches()[0])
    assert len(calls) >= 4


@pytest.mark.skipif(IS_NEW, reason="NNI 3.0 has no alias of the trained weight")
def test_float_weights_loaded_after_compress_are_trained() -> None:
    """strict=False with the plain names reaches the trained weight, as through stock's alias."""
    with patched():
        torch.manual_seed(0)
        net = Twice()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        make_quantizer(stock_class(), Case("", "", WEIGHT), net, optimizer, RELEASE, shape=(4, 4))
        net.load_state_dict({"a.module.weight": torch.full((4, 4), 0.5), "a.module.bias": torch.zeros(4)}, strict=False)
        assert net.a.module.old_weight.unique().tolist() == [0.5]
        with pytest.raises(RuntimeError, match=r"Missing key.*a\.module\.old_weight"):
            net.load_state_dict({"a.module.weight": torch.ones(4, 4), "a.module.bias": torch.zeros(4)})
