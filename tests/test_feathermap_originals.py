"""What is the user's stays the user's: attributes of his layers, and his model where wrapping fails."""

from __future__ import annotations

import subprocess
import sys
import warnings
from typing import Any, Dict

import pytest
import torch
from torch import Tensor, nn

from nni_dataparallel.feathermap import FeatherNet


class Scaled(nn.Linear):
    """A layer with a name that FeatherNet would take."""

    def __init__(self, own: Any, name: str = "weight_p") -> None:
        super().__init__(6, 6)
        if isinstance(own, nn.Parameter) or not isinstance(own, Tensor):
            setattr(self, name, own)
        else:
            self.register_buffer(name, own)


class NoSubclasses(nn.Linear):
    """A class that cannot be derived from."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        raise TypeError("no subclasses")


OWN: Dict[str, Any] = {
    "Parameter": lambda: nn.Parameter(torch.full((1,), 7.0)),
    "buffer": lambda: torch.full((1,), 7.0),
    "attribute": lambda: 7.0,
}


@pytest.mark.parametrize("name", ["weight_p", "bias_p"])
@pytest.mark.parametrize("kind", OWN)
def test_a_layer_that_has_the_scalars_name_is_left_out(kind: str, name: str) -> None:
    """The report says why; its value and its weights survive, in the net and in the plain model."""
    model = nn.Sequential(Scaled(OWN[kind](), name), nn.Linear(6, 5))
    net = FeatherNet(model)
    for each in (net.module, net.materialized()):
        assert float(torch.as_tensor(getattr(each[0], name)).detach()) == 7
        assert torch.equal(each[0].weight, model[0].weight)
    reasons = {left: reason for left, _, reason in net.compression_report().left_out}
    assert reasons["0.weight"] == reasons["0.bias"] == f"its layer has a {name} of its own"
    assert [hashed for hashed, _ in net.compression_report().hashed] == ["1.weight", "1.bias"]


def described(model: nn.Module) -> Any:
    return [(type(each), list(each.__dict__), [(k, id(p)) for k, p in each._parameters.items()]) for each in model.modules()]


def test_a_checkpoint_that_hashes_such_a_layer_is_refused() -> None:
    """Loading it would overwrite the user's Parameter."""
    state = FeatherNet(nn.Sequential(nn.Linear(6, 6))).state_dict()
    model = nn.Sequential(Scaled(OWN["Parameter"]()))
    before = described(model)
    with pytest.raises(ValueError, match=r"0\.weight is hashed in the checkpoint, but its layer has a weight_p of its own"):
        FeatherNet.from_upstream(state, model, clone=False)
    assert described(model) == before


def test_a_failure_leaves_the_original_as_it_was() -> None:
    """With clone=False: a layer that cannot be hashed, a warning that is an error, a checkpoint that does not fit."""
    model = nn.Sequential(nn.Linear(6, 6), NoSubclasses(6, 6), nn.BatchNorm1d(6))
    before = described(model)
    with pytest.raises(TypeError, match="no subclasses"):
        FeatherNet(model, clone=False)
    assert described(model) == before

    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    model(torch.randn(4, 6))
    before = described(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="looks trained"):
            FeatherNet(model, clone=False)
    assert described(model) == before

    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    before = described(model)
    state = FeatherNet(model).state_dict()
    with pytest.raises(ValueError, match="does not fit"):
        FeatherNet.from_upstream({**state, "module.1.weight": torch.ones(7)}, model, clone=False)
    assert described(model) == before


def test_a_weight_can_be_assigned_in_no_way() -> None:
    """As a tensor, as a Parameter, by registering it: the same text, and the layer goes on working."""
    net = FeatherNet(nn.Linear(6, 5)).eval()
    x = torch.randn(2, 6)
    before = net(x)
    layer, value = net.module, nn.Parameter(torch.ones(5, 6))
    for assign in (
        lambda: setattr(layer, "weight", value.detach()),
        lambda: setattr(layer, "weight", value),
        lambda: layer.register_parameter("weight", value),
        lambda: layer.register_buffer("weight", value.detach()),
        lambda: delattr(layer, "weight"),
    ):
        with pytest.raises(AttributeError, match=r"weight of this HashedLinear is computed from .* net\.materialized"):
            assign()
    assert torch.equal(net(x), before)
    layer.register_buffer("mine", torch.ones(1))
    layer.other = nn.Parameter(torch.ones(1))
    assert {"mine", "other"} <= set(layer.state_dict())


def test_no_deprecated_function_is_called() -> None:
    """In any mode, on replicas too."""
    script = (
        "import torch; from nni_dataparallel import rehearse; from nni_dataparallel.feathermap import FeatherNet\n"
        "net, x = FeatherNet(torch.nn.Linear(6, 5)).prepare_qat(), torch.randn(4, 6)\n"
        "import warnings; warnings.simplefilter('error')\n"
        "net(x).sum().backward(); rehearse(net, 2)(x); net.convert().deploy()(x); net.materialized()(x)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_autocast_does_not_reach_the_factors() -> None:
    """V is computed in the factors' precision, the layers run in the lower one."""
    net = FeatherNet(nn.Linear(64, 50)).eval()
    wanted = net.module.weight
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(net.module.weight, wanted)
        assert net(torch.randn(2, 64)).dtype == torch.bfloat16
        net.pool.V1.weight.requires_grad_(False)
        assert net.deploy().module.weight.dtype == torch.float32
