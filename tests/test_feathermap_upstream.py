"""Checkpoints of phelps-matthew/FeatherMap, made here from its formulas."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any, Dict, Tuple

import pytest
import torch
from feathermap_nets import Digits, Tied
from torch import Tensor, nn

from nni_dataparallel.feathermap import FeatherNet

X = torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(3))


def fixture(model: nn.Module, compress: float, seed: int = 0, names: Tuple[str, str] = ("_V1", "_V2")) -> Dict[str, Tensor]:
    """A checkpoint as FeatherMap writes it: norms excluded, everything else with a weight hashed."""
    generator = torch.Generator().manual_seed(seed)
    hashed = [
        (f"{path}.{kind}", getattr(module, kind), module.weight)
        for path, module in model.named_modules()
        for kind in ("weight", "bias")
        if getattr(module, kind, None) is not None and not isinstance(module, nn.BatchNorm2d)
    ]
    n = math.ceil(math.sqrt(sum(tensor.numel() for _, tensor, _ in hashed)))
    m = math.ceil((compress * n) / 2)
    spread = m ** (-1 / 4)
    state = {names[0]: spread * torch.randn(n, m, generator=generator), names[1]: spread * torch.randn(m, n, generator=generator)}
    for name, _, weight in hashed:
        fan_in = weight[0].numel()
        state[f"module.{name}_p"] = torch.tensor([1 / math.sqrt(3 * fan_in)]) * (1 + torch.rand(1, generator=generator))
    left = {f"{name}" for name, _, _ in hashed}
    for name, tensor in model.state_dict().items():
        if name not in left:
            state["module." + name] = torch.rand(tensor.shape, generator=generator).to(tensor.dtype) + 1
    return state


def evaluated_by_formulas(model: nn.Module, state: Dict[str, Tensor]) -> nn.Module:
    """FeatherMap's ``eval()``: scalar times a slice of V, in the order of the scalars in the checkpoint."""
    plain = copy.deepcopy(model).eval()
    entries = torch.matmul(state["_V1"], state["_V2"]).view(-1, 1)
    offset = 0
    for key, value in state.items():
        if not key.startswith("module."):
            continue
        name = key[len("module.") :]
        if not name.endswith("_p"):
            found: Any = dict(plain.named_buffers()).get(name, dict(plain.named_parameters()).get(name))
            found.data.copy_(value)
            continue
        path, _, kind = name[:-2].rpartition(".")
        owner = plain.get_submodule(path)
        shape = getattr(owner, kind).shape
        count = math.prod(shape)
        del owner._parameters[kind]  # upstream's weights are plain tensors
        setattr(owner, kind, value * entries[offset : offset + count].reshape(shape))
        offset += count
    return plain


def wrapped(state: Dict[str, Tensor]) -> Dict[str, Tensor]:
    return {"module." + key: value for key, value in state.items()}


@pytest.mark.parametrize("compress", [0.05, 0.1, 0.5, 1.0])
def test_evaluation_is_upstreams_bit_for_bit(compress: float) -> None:
    """From a checkpoint alone, saved with or without DataParallel, by this or the earlier names."""
    model = Digits()
    state = fixture(model, compress)
    with torch.no_grad():
        wanted = evaluated_by_formulas(model, state)(X)
        earlier = fixture(model, compress, names=("V1", "V2"))
        for each in (state, wrapped(state), {"net": wrapped(state), "acc": 97.0, "epoch": 3}, earlier):
            net = FeatherNet.from_upstream(each, model).eval()
            assert torch.equal(net(X), wanted)
            torch.testing.assert_close(net.deploy()(X), wanted, rtol=1e-5, atol=1e-5)
    assert net.pool.V1.weight.shape == state["_V1"].shape


def test_a_file_loads(tmp_path: Path) -> None:
    """A path works as a dict does, and what was given is left as it is."""
    model, state = Digits(), fixture(Digits(), 0.2)
    keys = list(state)
    torch.save({"net": state}, tmp_path / "ckpt.pth")
    with torch.no_grad():
        assert torch.equal(
            FeatherNet.from_upstream(tmp_path / "ckpt.pth", model).eval()(X), FeatherNet.from_upstream(state, model).eval()(X)
        )
    assert list(state) == keys


@pytest.mark.parametrize("change", [lambda s: s, wrapped], ids=["plain", "DataParallel"])
def test_load_state_dict_takes_them_too(change: Any) -> None:
    """A net of the same compression, alone or inside a parent; then it trains, converts and deploys."""
    state = fixture(Digits(), 0.2)
    with torch.no_grad():
        wanted = evaluated_by_formulas(Digits(), state)(X)
    net = FeatherNet(Digits(), 0.2).eval()
    net.load_state_dict(change(state))
    parent = nn.Sequential(FeatherNet(Digits(), 0.2), nn.Identity()).eval()
    parent.load_state_dict({"0." + key: value for key, value in change(state).items()})
    with torch.no_grad():
        assert torch.equal(net(X), wanted)
        assert torch.equal(parent(X), wanted)
    net.prepare_qat().train()(X).sum().backward()
    assert int(net.convert().deploy()(X).argmax()) >= 0


def test_a_seed_gives_upstreams_factors() -> None:
    """V1 and V2 are drawn in upstream's order and layout, so a script's seed starts from the same net."""
    model = nn.Linear(20, 10)
    torch.manual_seed(3)
    net = FeatherNet(model, 0.4)
    torch.manual_seed(3)
    bound = math.sqrt(12) / 2 * (net.pool.layout.m ** (-1 / 4))
    v1 = torch.empty(net.pool.layout.n, net.pool.layout.m).uniform_(-bound, bound)
    v2 = torch.empty(net.pool.layout.m, net.pool.layout.n).uniform_(-bound, bound)
    assert torch.equal(net.pool.V1.weight, v1)
    assert torch.equal(net.pool.V2.weight.t(), v2)


def test_what_upstream_untied_stays_untied() -> None:
    """Upstream gives the uses of a tied weight slices of their own; its checkpoint decides."""
    state = fixture(Tied(), 0.5)
    net = FeatherNet.from_upstream(state, Tied()).eval()
    tokens = torch.randint(11, (3, 4))
    with torch.no_grad():
        assert torch.equal(net(tokens), evaluated_by_formulas(Tied(), state)(tokens))
        assert not torch.equal(net.module.head.weight, net.module.embedding.weight)


@pytest.mark.parametrize("wrong", ["x", None, 3, torch.ones(3), torch.ones(2, 2, 2)])
def test_a_factor_that_is_no_matrix_is_refused(wrong: Any) -> None:
    """Either of them, with a ValueError."""
    state = fixture(Digits(), 0.2)
    for name in ("_V1", "_V2"):
        with pytest.raises(ValueError, match="factor"):
            FeatherNet.from_upstream({**state, name: wrong}, Digits())


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    """Names, shapes, missing factors, a file cut short: each is said."""
    state = fixture(Digits(), 0.2)
    with pytest.raises(ValueError, match=r"another model: it hashes bn\.weight"):
        FeatherNet.from_upstream({**state, "module.bn.weight_p": torch.ones(1)}, Digits())
    with pytest.raises(ValueError, match="do not fit each other"):
        FeatherNet.from_upstream({**state, "_V2": state["_V2"][1:]}, Digits())
    with pytest.raises(ValueError, match=r"pool\.V1\.weight: \(10, 3\) in the file"):
        FeatherNet.from_upstream({**state, "_V1": torch.ones(10, 3), "_V2": torch.ones(3, 10)}, Digits())
    with pytest.raises(ValueError, match="no factors"):
        FeatherNet.from_upstream(Digits().state_dict(), Digits())
    torch.save(state, tmp_path / "whole.pth")
    (tmp_path / "cut.pth").write_bytes((tmp_path / "whole.pth").read_bytes()[:5000])
    with pytest.raises(ValueError, match=r"cut\.pth cannot be read"):
        FeatherNet.from_upstream(tmp_path / "cut.pth", Digits())
    with pytest.raises(FileNotFoundError):
        FeatherNet.from_upstream(tmp_path / "none.pth", Digits())
