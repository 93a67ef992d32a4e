"""Quantization-aware training of the factors, and their INT8 form."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from feathermap_nets import Digits, hand_cut, quantised_by_hand
from torch import Tensor, nn
from torch.nn.utils import parametrize

from nni_dataparallel.feathermap import FeatherNet, Int8Factor
from nni_dataparallel.feathermap.integers import Scheme, codes_on_grid, quantise

SAFELY = {"weights_only": True} if hasattr(torch, "compile") else {}
X = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(1))


def digits_net(compress: float = 0.2, seed: int = 0) -> FeatherNet:
    torch.manual_seed(seed)
    return FeatherNet(Digits(), compress)


def through_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, **SAFELY)


@pytest.mark.parametrize("per_row", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_training_and_evaluation_use_the_quantised_factors(bits: int, per_row: bool) -> None:
    """Every hashed weight is that of the factors quantised by hand, in training, evaluation, deployment and INT8."""
    net = digits_net().prepare_qat(bits, per_row)
    v1, v2 = (quantised_by_hand(factor.weight, bits, per_row) for factor in (net.pool.V1, net.pool.V2))
    wanted = hand_cut(net, v1 @ v2.t())
    int8 = digits_net().prepare_qat(bits, per_row).convert()
    for each in (net.train(), net.eval(), int8, int8.eval(), int8.deploy()):
        for name, tensor in wanted.items():
            path, _, kind = name.rpartition(".")
            found = getattr(each.module.get_submodule(path), kind)
            torch.testing.assert_close(found.double(), tensor, rtol=1e-4, atol=1e-6)


def test_the_gradient_goes_straight_through() -> None:
    """A factor's gradient is that of the quantised factor; the scale has none."""
    net = FeatherNet(nn.Linear(30, 20, bias=False), 0.3).prepare_qat(3)
    x, target = torch.randn(5, 30), torch.randn(5, 20)
    (net(x) - target).square().sum().backward()
    v1, v2 = (quantised_by_hand(f.weight, 3, True).float().requires_grad_() for f in (net.pool.V1, net.pool.V2))
    weight = (v1 @ v2.t()).flatten()[:600].view(20, 30) * net.module.weight_p.detach()
    (nn.functional.linear(x, weight) - target).square().sum().backward()
    torch.testing.assert_close(net.pool.V1.weight.grad, v1.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(net.pool.V2.weight.grad, v2.grad, rtol=1e-4, atol=1e-4)


def test_evaluation_mode_trains_too() -> None:
    """A net fine-tuned in evaluation mode (frozen norms) has the gradients of training mode."""
    nets = [FeatherNet(nn.Linear(30, 20), 0.3) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    x = torch.randn(5, 30)
    for net, mode in zip(nets, (True, False)):
        net.prepare_qat(4).train(mode)(x).square().sum().backward()
    for mine, other in zip(nets[0].parameters(), nets[1].parameters()):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-4)


def test_what_evaluation_emulates_is_what_is_deployed() -> None:
    """Fake-quantised evaluation, INT8 evaluation, INT8 deployment and the plain model agree to the last bit."""
    net = digits_net().prepare_qat(8).eval()
    with torch.no_grad():
        emulated = net(X)
        assert torch.equal(net.deploy()(X), emulated)
        assert torch.equal(net.convert()(X), emulated)
        assert torch.equal(net.deploy(False).eval()(X), emulated)
        assert torch.equal(net.materialized().requires_grad_(False)(X), emulated)
        fresh = digits_net(seed=5).eval()
        fresh.load_state_dict(through_file(net.state_dict()))
        assert torch.equal(fresh.deploy()(X), emulated)


def test_converting_without_training_quantises_the_factors_as_they_are() -> None:
    """convert(bits, per_row) on a float net gives what prepare_qat with the same arguments evaluates."""
    for bits, per_row in ((8, True), (5, False)):
        trained = digits_net().prepare_qat(bits, per_row).eval()
        with torch.no_grad():
            assert torch.equal(digits_net().eval().convert(bits, per_row)(X), trained(X))
    codes = digits_net().convert().pool.V1.qweight
    assert int(codes.abs().max()) == 127


def test_the_state_dict_holds_int8_and_loads_safely() -> None:
    """int8 codes and float scales; a float net takes the INT8 form from the file and an INT8 net the float form."""
    net = digits_net().prepare_qat(4).convert()
    state = net.state_dict()
    n, m = net.pool.layout.n, net.pool.layout.m
    for factor in ("pool.V1", "pool.V2"):
        assert (state[factor + ".qweight"].dtype, tuple(state[factor + ".qweight"].shape)) == (torch.int8, (n, m))
        assert int(state[factor + ".qweight"].abs().max()) == 7
        assert (state[factor + ".scale"].dtype, tuple(state[factor + ".scale"].shape)) == (torch.float32, (n, 1))
    other = digits_net(seed=5).prepare_qat()
    other.load_state_dict(through_file(state))
    assert isinstance(other.pool.V1, Int8Factor)
    assert all(torch.equal(a, b) for a, b in zip(state.values(), other.state_dict().values()))
    floats = digits_net(seed=7)
    other.load_state_dict(through_file(floats.state_dict()))
    assert torch.equal(other.eval()(X), floats.prepare_qat().eval()(X))
    assert other.pool.V1.weight.requires_grad
    per_tensor = digits_net().convert(8, False)
    net.load_state_dict(per_tensor.state_dict())
    assert torch.equal(net.eval()(X), per_tensor.eval()(X))


def test_a_converted_net_trains_what_is_left() -> None:
    """Scalars and norms keep learning, the codes stay."""
    net = digits_net().convert().train()
    codes = net.pool.V1.qweight.clone()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    before = net.module.conv1.weight_p.clone()
    net(X).square().sum().backward()
    optimizer.step()
    assert not torch.equal(net.module.conv1.weight_p, before)
    assert torch.equal(net.pool.V1.qweight, codes)


@pytest.mark.parametrize("converted", [False, True])
def test_a_float_file_after_an_int8_one_goes_on_as_before(converted: bool) -> None:
    """The scheme of training and what is frozen survive the INT8 form, loaded or converted to."""
    net = digits_net().prepare_qat(4)
    net.pool.V1.requires_grad_(False)
    own, x = copy.deepcopy(net.state_dict()), torch.randn(2, 1, 8, 8)
    wanted = net.eval()(x)
    if converted:
        net.convert()
    else:
        net.load_state_dict(digits_net(seed=1).convert().state_dict())
    net.load_state_dict(own)
    assert torch.equal(net(x), wanted)
    assert net.pool.scheme == (4, True)
    assert (net.pool.V1.weight.requires_grad, net.pool.V2.weight.requires_grad) == (False, True)


def test_a_row_of_zeros_is_no_nan() -> None:
    """Its codes are zero, its gradient finite."""
    net = FeatherNet(nn.Linear(9, 9), 0.5).prepare_qat()
    net.pool.V1.weight.data[0] = 0
    net(torch.randn(2, 9)).sum().backward()
    assert bool(torch.isfinite(net.pool.V1.weight.grad).all())
    assert not bool(net.convert().pool.V1.qweight[0].any())
    assert bool(torch.isfinite(net(torch.randn(2, 9))).all())


def test_codes_are_found_on_any_grid_of_eight_bits() -> None:
    """Symmetric and shifted grids, per row and per tensor; random matrices are on none."""
    generator = torch.Generator().manual_seed(0)
    for low, high in ((-1, 2), (-7, 8), (-127, 128), (-128, 128), (-127, 129), (-20, 236), (0, 256)):
        codes = torch.randint(low, high, (20, 40), generator=generator)
        for scale in (torch.rand(20, 1, generator=generator) + 1e-3, torch.full((20, 1), 0.0123)):
            matrix = codes * scale
            found = codes_on_grid(matrix)
            assert found is not None
            assert found[0].dtype == torch.int8
            torch.testing.assert_close((found[0] - found[2]) * found[1], matrix, rtol=1e-6, atol=0)
            assert bool(found[2].any()) == (high > 128)
    assert codes_on_grid(torch.randn(20, 40, generator=generator)) is None
    assert codes_on_grid(torch.randint(-200, 200, (20, 40), generator=generator) * 0.01) is None
    zeros = codes_on_grid(torch.zeros(3, 4))
    assert zeros is not None
    assert not bool(zeros[0].any())


def test_a_grid_that_is_not_symmetric_is_shipped_with_its_zero_point() -> None:
    """Through a file, and back to a net without one."""
    net = FeatherNet(nn.Linear(40, 30), 0.5).eval()
    for factor in (net.pool.V1, net.pool.V2):
        codes = torch.randint(-20, 236, factor.weight.shape)
        codes[:, 0], codes[:, 1] = -20, 235
        parametrize.register_parametrization(factor, "weight", Given(codes * 0.003))
    x = torch.randn(4, 40)
    with torch.no_grad():
        wanted = net(x)
        torch.testing.assert_close(net.convert()(x), wanted, rtol=1e-4, atol=1e-5)
        assert net.state_dict()["pool.V1.zero_point"].dtype == torch.int16
        for other in (FeatherNet(nn.Linear(40, 30), 0.5), FeatherNet(nn.Linear(40, 30), 0.5).convert()):
            plain = other.state_dict()
            other.load_state_dict(through_file(net.state_dict()))
            assert torch.equal(other.eval().deploy()(x), net.deploy()(x))
            other.load_state_dict(plain)
            assert "pool.V1.zero_point" not in other.state_dict()


class Given(nn.Module):
    """A parametrisation that answers with a given matrix."""

    def __init__(self, matrix: Tensor) -> None:
        super().__init__()
        self.matrix = matrix

    def forward(self, weight: Tensor) -> Tensor:
        return self.matrix + 0 * weight


def test_quantise_keeps_whole_numbers_whole() -> None:
    """Codes with a graph are the integers themselves: a sum of them is exact."""
    matrix: Tensor = torch.randn(50, 40).requires_grad_()
    codes, _ = quantise(matrix, Scheme(8))
    assert torch.equal(codes, codes.round())
    assert float(codes.detach().abs().max()) == 127


def test_the_precision_of_a_converted_net_can_change() -> None:
    """double() moves the scales, not the codes."""
    net = digits_net().convert().eval()
    with torch.no_grad():
        wanted = net(X)
        torch.testing.assert_close(net.double()(X.double()).float(), wanted, rtol=1e-3, atol=1e-4)
    assert net.pool.V1.qweight.dtype == torch.int8
    assert net.pool.V1.scale.dtype == torch.float64
