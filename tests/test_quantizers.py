"""What is special to one quantizer: the list of them, LSQ's scales, ObserverQuantizer's histograms, Naive's dict."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Dict, List

import pytest
import torch
from cases import Case, cases_for
from conftest import IS_MODERN, IS_NEW, RELEASE
from harness import Linear, advance, data, make_net, make_quantizer, replicated, start_training, stock_class, whole_state
from torch import Tensor, nn

from nni_dataparallel import patched
from nni_dataparallel.fixes import QUANTIZERS, ships

pytestmark = pytest.mark.skipif(not cases_for(RELEASE), reason=f"NNI {RELEASE} has no quantizer")
needs_lsq = pytest.mark.skipif(
    IS_NEW or not cases_for(RELEASE, "LsqQuantizer"), reason="LSQ came with 2.3; 3.0 has tests of its own"
)
needs_observer = pytest.mark.skipif(not cases_for(RELEASE, "ObserverQuantizer"), reason="ObserverQuantizer came with 2.4")


def case_of(quantizer: str, name: str) -> Case:
    return next(case for case in cases_for(RELEASE, quantizer) if case.name == name)


def test_every_quantizer_that_the_release_ships_is_covered() -> None:
    """Read from the release's own sources: each subclass of Quantizer has rows, a fixed class and cases."""
    import nni

    root = Path(nni.__file__).parent
    shipped = set()
    folders = ("quantization",) if IS_NEW else ("torch", "pytorch")
    for path in (path for folder in folders for path in root.rglob(f"compression/{folder}/**/*.py")):
        if "contrib" not in path.parts:  # 3.0rc1's preview of 3.0
            shipped |= set(re.findall(r"^class (\w+)\(Quantizer\)", path.read_text(encoding="utf-8"), re.MULTILINE))
    ours = {name for name in QUANTIZERS if ships(RELEASE, name)}
    assert shipped == ours == {case.quantizer for case in cases_for(RELEASE)}


@needs_lsq
@pytest.mark.parametrize("count", [1, 3])
def test_lsq_scales_stay_the_parameters_they_are(count: int) -> None:
    """Same object, shape and dtype after training, which is what the optimizer holds; started by the whole batch."""
    with patched():
        net, optimizer, _ = start_training(stock_class("LsqQuantizer"), case_of("LsqQuantizer", "all"), RELEASE)
        before = {name: (p, p.shape, p.dtype) for name, p in net.named_parameters()}
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        x, _ = data()[0]
        model = replicated(count)(net)
        model.train()
        model(x)
        scale = net.conv1.module.input_scale
        torch.testing.assert_close(scale, (x.abs().mean() * 2 / 127**0.5).reshape(1), rtol=1e-6, atol=0)
        advance(case_of("LsqQuantizer", "all"), model, optimizer, data())
    for name, parameter in net.named_parameters():
        assert (parameter, parameter.shape, parameter.dtype) == before[name]
        assert id(parameter) in held or name.endswith("bias")


@needs_lsq
def test_stock_lsq_scales_change_shape() -> None:
    """The fault: from [1] to [] in the first forward, so that no checkpoint loads (nni#3119)."""
    net, _, _ = start_training(stock_class("LsqQuantizer"), case_of("LsqQuantizer", "all"), RELEASE)
    assert net.conv1.module.input_scale.shape == (1,)
    net(data()[0][0])
    assert net.conv1.module.input_scale.shape == ()


@pytest.mark.skipif(not IS_MODERN, reason="2.3 and 2.4 train the weights")
def test_stock_lsq_trains_no_weights() -> None:
    """The fault that tests/references.py corrects in the reference: no gradient reaches old_weight."""
    net, _, _ = start_training(stock_class("LsqQuantizer"), case_of("LsqQuantizer", "all"), RELEASE)
    net(data()[0][0]).sum().backward()
    assert net.conv1.module.old_weight.grad is None


@needs_lsq
@pytest.mark.parametrize("count", [2, 3])
def test_lsq_gradients_are_scaled_by_the_whole_batchs_size(count: int) -> None:
    """The gradient of every scale: what one device gives, not the square root of the replicas times that."""

    def gradients(count: int) -> Dict[str, Tensor]:
        net, _, _ = start_training(stock_class("LsqQuantizer"), case_of("LsqQuantizer", "all"), RELEASE)
        model = replicated(count)(net)
        model.train()
        model(data()[1][0]).square().mean().backward()
        return {name: p.grad for name, p in net.named_parameters() if name.endswith("scale")}

    with patched():
        expected, found = gradients(1), gradients(count)
    for name, gradient in expected.items():
        assert gradient.abs() > 0, name
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-7, msg=name)


class Late(nn.Module):
    """The second layer runs only where the rows are large; replica 0 gets none of them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        return self.b(y) if x.max() > 5 else y


@pytest.mark.parametrize("quantizer", ["LsqQuantizer", "NaiveQuantizer", "QAT_Quantizer"])
def test_a_layer_that_replica_0_skips_is_recorded(quantizer: str) -> None:
    """State comes from the lowest replica that ran the layer: scales, ranges, the dict of NaiveQuantizer."""
    if not cases_for(RELEASE, quantizer):
        pytest.skip(f"NNI {RELEASE} has no {quantizer}")
    targets = {"LsqQuantizer": ["weight", "input"], "NaiveQuantizer": ["weight"], "QAT_Quantizer": ["weight", "output"]}
    config = [{"quant_types": targets[quantizer], "quant_bits": 8, "op_types": ["Linear"]}]
    torch.manual_seed(0)
    net, x = Late(), torch.randn(4, 4)
    x[2:] += 9
    with patched():
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        case = Case("", "", config, quantizer=quantizer)
        made = make_quantizer(stock_class(quantizer), case, net, optimizer, RELEASE, shape=(4, 4))
        before = whole_state(net, made)
        model = replicated(2)(net)
        model.train()
        model(x).sum().backward()
        changed = {name for name, t in whole_state(net, made).items() if name not in before or not torch.equal(t, before[name])}
    assert any(name.startswith(("b.", "layer_scale of b")) for name in changed)


@needs_observer
def test_observers_see_the_same_in_each_of_fifty_runs() -> None:
    """Histograms fed by four threads: bit for bit those of one device, every time."""
    case = case_of("ObserverQuantizer", "all")

    def watched(count: int) -> Dict[str, Tensor]:
        net, optimizer, quantizer = start_training(stock_class(case.quantizer), case, RELEASE)
        advance(case, replicated(count, check=False)(net), optimizer, data()[:2])
        return {name: t for name, t in whole_state(net, quantizer).items() if name.startswith("observer")}

    with patched():
        expected = watched(1)
        for _ in range(50):
            found = watched(4)
            assert all(torch.equal(found[name], t) for name, t in expected.items())


@needs_observer
def test_observers_see_what_the_layer_returned() -> None:
    """An in-place ReLU behind it changes the tensor before the replicas are done, not what was observed."""

    def watched(count: int) -> Dict[str, Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(Linear(4, 4), nn.ReLU(inplace=True), Linear(4, 2)).eval()
        config = [{"quant_types": ["output"], "quant_bits": 8, "op_types": ["Linear"]}]
        quantizer = stock_class("ObserverQuantizer")(net, config)
        with torch.no_grad():
            replicated(count)(net)(torch.randn(6, 4))
        return whole_state(net, quantizer)

    with patched():
        expected, found = watched(1), watched(2)
    assert expected["observer 0/output min_val"] < 0
    assert all(torch.equal(found[name], t) for name, t in expected.items())


@needs_observer
def test_observers_see_nothing_of_a_forward_that_failed() -> None:
    """A replica that raises: no histogram has half a batch."""
    case = case_of("ObserverQuantizer", "all")
    with patched():
        net, optimizer, quantizer = start_training(stock_class(case.quantizer), case, RELEASE)
        model = replicated(2)(net)
        advance(case, model, optimizer, data()[:1])
        before = whole_state(net, quantizer)

        def fail(module: Any, inputs: Any) -> None:
            if inputs[0].abs().max() > 1e3:
                raise ArithmeticError("too large")

        net.fc.register_forward_pre_hook(fail)
        x = data()[1][0].clone()
        x[-1] *= 1e6
        with torch.no_grad(), pytest.raises(ArithmeticError, match="too large"):
            model(x)
    after = whole_state(net, quantizer)
    assert all(torch.equal(after[name], t) for name, t in before.items() if torch.isfinite(t.double()).all())


@needs_observer
@pytest.mark.parametrize("count", [1, 2])
def test_observed_weights_are_quantised_in_evaluation(count: int) -> None:
    """After compress() a forward computes with 255 levels; stock 2.5 and later puts the float weight back."""
    case = case_of("ObserverQuantizer", "weight")

    def weight_after_forward() -> Tensor:
        net, optimizer, quantizer = start_training(stock_class(case.quantizer), case, RELEASE)
        model = replicated(count)(net)
        advance(case, model, optimizer, data()[:1])
        quantizer.compress()
        with torch.no_grad():
            model(data()[0][0])
        return net.fc.module.weight.detach()

    if count == 1:
        assert (weight_after_forward().unique().numel() > 255) is IS_MODERN
    with patched():
        assert weight_after_forward().unique().numel() <= 255


@pytest.mark.skipif(IS_NEW, reason="3.0 has no NaiveQuantizer")
def test_naive_scales_are_the_largest_so_far() -> None:
    """The dict holds one tensor per layer, on the model's device, that never shrinks."""
    case = case_of("NaiveQuantizer", "weight")
    with patched():
        net, optimizer, quantizer = start_training(stock_class(case.quantizer), case, RELEASE)
        model = replicated(3)(net)
        seen: List[Dict[str, Tensor]] = []
        for batch in data():
            advance(case, model, optimizer, [batch])
            seen.append(dict(quantizer.layer_scale))
    assert set(seen[0]) == {"conv1", "conv2", "fc"}
    for name in seen[0]:
        assert all(later[name] >= earlier[name] for earlier, later in zip(seen, seen[1:]))
        assert not seen[-1][name].requires_grad
    assert torch.equal(seen[0]["fc"], make_net(case).fc.weight.detach().abs().max() / 127)
