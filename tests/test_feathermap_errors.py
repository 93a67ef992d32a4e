"""Bad input: the error names the object, the cause and the remedy, and nothing has changed."""

from __future__ import annotations

import io
import threading
import warnings
from typing import Any, Dict

import pytest
import torch
from feathermap_nets import Digits, resnet18
from torch import Tensor, nn

from nni_dataparallel.feathermap import FeatherNet


def snapshot(module: nn.Module) -> Dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def assert_unchanged(module: nn.Module, before: Dict[str, Tensor]) -> None:
    now = module.state_dict()
    assert list(now) == list(before)
    assert all(torch.equal(now[name], before[name]) for name in now)


@pytest.mark.parametrize("compress", [0, -0.1, 1.01, 5, float("nan"), float("inf")])
def test_compress_is_above_zero_and_at_most_one(compress: float) -> None:
    """Anything else is no compression."""
    with pytest.raises(ValueError, match="compress is"):
        FeatherNet(nn.Linear(3, 3), compress)


@pytest.mark.parametrize("compress", ["0.5", None, True, [0.5]])
def test_compress_is_a_number(compress: Any) -> None:
    """Another type is a TypeError."""
    with pytest.raises(TypeError, match="compress is a number"):
        FeatherNet(nn.Linear(3, 3), compress)


def bad_models() -> Dict[str, Any]:
    integers = nn.Linear(3, 3)
    integers.weight = nn.Parameter(torch.ones(3, 3, dtype=torch.int8), requires_grad=False)
    complex_layer = nn.Linear(3, 3, dtype=torch.complex64)
    return {
        "without Parameters": (nn.ReLU(), ValueError, "no Parameters"),
        "norms only": (nn.Sequential(nn.BatchNorm1d(3)), ValueError, r"0\.weight: norm"),
        "complex": (nn.Sequential(nn.Linear(3, 3), complex_layer), TypeError, r"1\.weight is torch\.complex64"),
        "integer": (nn.Sequential(nn.Linear(3, 3), integers), TypeError, r"1\.weight is torch\.int8"),
        "lazy": (nn.Sequential(nn.LazyLinear(3)), ValueError, "run the model once"),
        "no module": ("model", TypeError, r"torch\.nn\.Module, not str"),
        "DataParallel": (nn.DataParallel(nn.Linear(3, 3)), TypeError, r"FeatherNet\(model\.module\)"),
        "hashed": (FeatherNet(nn.Linear(3, 3)), TypeError, r"net\.materialized\(\)"),
        "script": (torch.jit.script(nn.Linear(3, 3)), TypeError, r"torch\.jit"),
    }


@pytest.mark.parametrize("kind", bad_models())
def test_models_that_cannot_be_hashed(kind: str) -> None:
    """They stay as they are, also with clone=False."""
    model, error, text = bad_models()[kind]
    before = snapshot(model) if isinstance(model, nn.Module) and kind != "lazy" else None
    with pytest.raises(error, match=text):
        FeatherNet(model, 0.5, clone=False)
    if before is not None:
        assert_unchanged(model, before)


def test_a_model_that_cannot_be_copied_is_told_of_clone() -> None:
    """Why, and what to do; that works."""
    model = nn.Sequential(nn.Linear(8, 8))
    model.lock = threading.Lock()
    with pytest.raises(ValueError, match=r"Sequential cannot be copied \(.*lock.*\)\. FeatherNet\(model, clone=False\)"):
        FeatherNet(model)
    assert FeatherNet(model, clone=False).module is model


def test_exclude_is_checked() -> None:
    """A name that is no module of the model is a mistake; so is an object."""
    with pytest.raises(ValueError, match=r"'conv3'.*there are bn1, bn2, conv1"):
        FeatherNet(Digits(), exclude=["conv1", "conv3"])
    with pytest.raises(TypeError, match="classes and names"):
        FeatherNet(Digits(), exclude=[nn.Linear(2, 2)])  # type: ignore[list-item]


def trained(model: nn.Module, norm: bool = False) -> nn.Module:
    if not norm:
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(30):
        optimizer.zero_grad()
        model(torch.randn(16, 1, 8, 8)).square().sum().backward()
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return model


def plain_net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 30), nn.ReLU(), nn.Linear(30, 10))


@pytest.mark.parametrize("make", [lambda: trained(Digits(), True), lambda: trained(Digits()), lambda: trained(plain_net())])
def test_wrapping_a_trained_model_warns(make: Any) -> None:
    """Told by its norms, or by weights that no initialiser draws."""
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="looks trained"):
        FeatherNet(make(), 0.5)


@pytest.mark.parametrize(
    "initialise",
    [
        None,
        lambda w: nn.init.kaiming_normal_(w),
        lambda w: nn.init.xavier_uniform_(w),
        lambda w: nn.init.normal_(w, 0, 0.02),
        lambda w: nn.init.trunc_normal_(w, 0, 0.02),
        lambda w: nn.init.trunc_normal_(w, 0, 1, -2, 2),
        lambda w: nn.init.orthogonal_(w),
        lambda w: nn.init.dirac_(w) if w.dim() > 2 else nn.init.eye_(w),
        lambda w: nn.init.constant_(w, 0.1),
    ],
)
def test_wrapping_a_fresh_model_is_silent(initialise: Any) -> None:
    """Whatever initialiser it uses."""
    for seed in range(3):
        torch.manual_seed(seed)
        for model in (Digits(), plain_net()):
            for parameter in model.parameters():
                if initialise is not None and parameter.dim() > 1:
                    initialise(parameter.data)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                FeatherNet(model, 0.5)


def test_a_fresh_resnet_is_silent() -> None:
    """Large tensors have sharp statistics: a fresh ResNet-18 must not be taken for a trained one."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FeatherNet(resnet18(), 0.1, clone=False)


@pytest.mark.parametrize(("bits", "error"), [(1, ValueError), (9, ValueError), (4.0, TypeError), (True, TypeError)])
def test_bits_are_two_to_eight(bits: Any, error: Any) -> None:
    """In prepare_qat and in convert."""
    net = FeatherNet(nn.Linear(3, 3), 0.5)
    for call in (net.prepare_qat, net.convert):
        with pytest.raises(error, match="bits is"):
            call(bits)
    assert net.pool.scheme is None


def test_quantising_twice_is_refused() -> None:
    """INT8 factors are neither converted nor prepared again, and trained bits cannot be changed at the end."""
    net = FeatherNet(nn.Linear(9, 9), 0.5).prepare_qat(4)
    with pytest.raises(ValueError, match="trained with 4 bits"):
        net.convert(8)
    net.convert(4)
    with pytest.raises(RuntimeError, match="INT8 already"):
        net.convert()
    with pytest.raises(RuntimeError, match="INT8 or wrapped"):
        net.prepare_qat()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_factor_that_is_not_finite_is_not_shipped(value: float) -> None:
    """convert() names the factor and the rows; the net is float as before."""
    net = FeatherNet(nn.Linear(9, 9), 0.5).prepare_qat()
    net.pool.V2.weight.data[3, 1] = value
    with pytest.raises(ValueError, match=r"pool\.V2 has 1 entries .* rows 3"):
        net.convert()
    assert isinstance(net.pool.V1, nn.Linear)
    assert net.pool.scheme is not None
    other = FeatherNet(nn.Linear(9, 9), 0.5)
    before = snapshot(other)
    with pytest.raises(RuntimeError, match=r"pool\.V2\.weight is not finite"):
        other.load_state_dict(net.state_dict())
    assert_unchanged(other, before)


def test_a_file_of_another_model_changes_nothing() -> None:
    """Float and INT8, alone and through a parent: shapes of both are named."""
    net = FeatherNet(nn.Linear(30, 10), 0.5)
    before = snapshot(net)
    for other in (FeatherNet(nn.Linear(30, 10), 0.25), FeatherNet(nn.Linear(50, 10), 0.5)):
        n, m = other.pool.layout.n, other.pool.layout.m
        for state in (other.state_dict(), other.convert().state_dict()):
            with pytest.raises(RuntimeError, match=rf"pool\.V1\.q?weight: \({n}, {m}\) in the file, \(18, 5\) in this net"):
                net.load_state_dict(state)
            with pytest.raises(RuntimeError, match="unchanged"):
                nn.Sequential(net).load_state_dict({"0." + key: value for key, value in state.items()})
            assert_unchanged(net, before)


def test_a_damaged_state_dict_changes_nothing() -> None:
    """Names too many or too few, codes of another type, scales of another shape, norms of another size."""
    net = FeatherNet(Digits(), 0.2)
    good = FeatherNet(Digits(), 0.2).convert().state_dict()
    float_state = FeatherNet(Digits(), 0.2).state_dict()
    before = snapshot(net)
    without = {key: value for key, value in good.items() if key != "module.fc1.weight_p"}
    for state, text in (
        (without, r"module\.fc1\.weight_p"),
        ({**good, "module.fc9.weight_p": torch.ones(1)}, r"module\.fc9"),
        ({**good, "pool.V1.qweight": good["pool.V1.qweight"].float()}, r"pool\.V1\.qweight is torch\.float32"),
        ({**good, "pool.V1.scale": torch.ones(3, 1)}, r"pool\.V1\.scale is \(3, 1\)"),
        ({**good, "pool.V1.scale": good["pool.V1.scale"] * float("nan")}, r"pool\.V1\.scale is not finite"),
        ({**good, "pool.V1.scale": -good["pool.V1.scale"]}, r"pool\.V1\.scale is not positive"),
        ({**good, "pool.V1.scale": good["pool.V1.scale"] * 0}, r"pool\.V1\.scale is not positive"),
        ({**good, "pool.V1.scale": good["pool.V1.scale"].int()}, r"pool\.V1\.scale is torch\.int32"),
        ({**good, "pool.V1.scale": good["pool.V1.scale"].to(torch.complex64)}, r"pool\.V1\.scale is torch\.complex64"),
        ({**good, "pool.V1.scale": "x"}, r"pool\.V1\.scale is str"),
        ({**good, "pool.V1.zero_point": "x"}, r"pool\.V1\.zero_point is str"),
        ({**good, "pool.V1.zero_point": good["pool.V1.scale"]}, r"pool\.V1\.zero_point is torch\.float32"),
        ({**good, "pool.V1.qweight": "x"}, r"pool\.V1\.qweight is a str"),
        ({**float_state, "pool.V1.weight": float_state["pool.V1.weight"].int()}, r"pool\.V1\.weight is torch\.int32"),
        ({**float_state, "pool.V1.weight": float_state["pool.V1.weight"].to(torch.complex64)}, r"weight is torch\.complex64"),
        ({**float_state, "module.fc1.weight_p": torch.tensor([float("nan")])}, r"module\.fc1\.weight_p is not finite"),
        ({**good, "module.bn1.weight": torch.ones(5)}, r"module\.bn1\.weight: \(5,\) in the file, \(32,\) in this net"),
        ({key: value for key, value in good.items() if "V2" not in key}, r"pool\.V2"),
        ({key: value for key, value in good.items() if key != "module.bn1.weight"}, r"module\.bn1\.weight"),
    ):
        with pytest.raises(RuntimeError, match=text):
            net.load_state_dict(state)
        assert_unchanged(net, before)


def test_one_factor_in_int8_is_no_file() -> None:
    """strict=False or not, into a float or an INT8 net: nothing could be computed, shipped or mended from it."""
    good = FeatherNet(nn.Linear(9, 9), 0.5).convert().state_dict()
    floats = FeatherNet(nn.Linear(9, 9), 0.5).state_dict()
    only_v1 = {key: value for key, value in good.items() if "V2" not in key}
    float_v1 = {key: value for key, value in floats.items() if "V2" not in key}
    mixed = {**only_v1, "pool.V2.weight": floats["pool.V2.weight"]}
    for net, state, text in (
        (FeatherNet(nn.Linear(9, 9), 0.5), only_v1, r"pool\.V1 INT8 and pool\.V2 missing"),
        (FeatherNet(nn.Linear(9, 9), 0.5), mixed, r"pool\.V1 INT8 and pool\.V2 float"),
        (FeatherNet(nn.Linear(9, 9), 0.5).convert(), float_v1, r"pool\.V1 float and pool\.V2 missing"),
    ):
        before = snapshot(net)
        with pytest.raises(RuntimeError, match=text):
            net.load_state_dict(state, strict=False)
        assert_unchanged(net, before)
    net = FeatherNet(nn.Linear(9, 9), 0.5)
    net.load_state_dict(float_v1, strict=False)
    assert torch.equal(net.pool.V1.weight, floats["pool.V1.weight"])


def test_a_scalar_that_is_not_finite_is_not_shipped() -> None:
    """convert() names it and changes nothing."""
    net = FeatherNet(nn.Sequential(nn.Linear(9, 9)), 0.5)
    with torch.no_grad():
        net.module[0].bias_p.fill_(float("nan"))
    with pytest.raises(ValueError, match=r"module\.0\.bias_p is NaN"):
        net.convert()
    assert isinstance(net.pool.V1, nn.Linear)


def test_numbers_of_any_kind_and_switches_of_one() -> None:
    """NumPy's scalars count as numbers; per_row is a bool; the model itself cannot be excluded."""
    numpy = pytest.importorskip("numpy")
    net = FeatherNet(nn.Linear(9, 9), numpy.float32(0.5)).prepare_qat(numpy.int64(4))
    assert type(net.compress) is float
    assert type(net.pool.scheme.bits) is int
    with pytest.raises(TypeError, match="per_row is True or False, not 'no'"):
        net.prepare_qat(per_row="no")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the model itself"):
        FeatherNet(nn.Linear(9, 9), exclude="")


def test_a_truncated_file_is_no_file() -> None:
    """torch refuses it before anything is loaded."""
    net = FeatherNet(Digits(), 0.2).convert()
    file = io.BytesIO()
    torch.save(net.state_dict(), file)
    for length in (0, 10, 3000, len(file.getvalue()) - 10):
        with pytest.raises((RuntimeError, EOFError, OSError, ValueError)):
            torch.load(io.BytesIO(file.getvalue()[:length]))


def test_the_pool_is_no_layer() -> None:
    """Calling it, or a missing factor, says what to do."""
    net = FeatherNet(nn.Linear(3, 3), 0.5)
    with pytest.raises(RuntimeError, match="FeatherNet that it belongs to"):
        net.pool(torch.ones(1, 3))
    net.pool.V1 = nn.Identity()
    with pytest.raises(RuntimeError, match=r"net\.convert\(\)"):
        net(torch.ones(1, 3))
