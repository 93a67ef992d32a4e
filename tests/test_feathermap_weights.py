"""Where weights come from: every index range, every kind of layer, against formulas written out by hand."""

from __future__ import annotations

import copy
import math
from typing import List, Tuple

import pytest
import torch
from feathermap_nets import ZOO, Attention, Own, Tied, by_hand, hand_cut, made, resnet18
from torch import Tensor, nn

from nni_dataparallel.feathermap import FeatherNet
from nni_dataparallel.feathermap.factors import Int8Factor
from nni_dataparallel.feathermap.layout import Layout
from nni_dataparallel.feathermap.pool import Pool

RANGES = [(n, a, b) for n in range(1, 7) for a in range(n * n) for b in range(a, n * n)]


def test_every_index_range_by_brute_force() -> None:
    """Evaluation, deployment and INT8 deployment give V's entries a..b, for all 1183 ranges of V up to 6 x 6."""
    assert len(RANGES) == 1183
    one = torch.ones(1)
    for n, a, b in RANGES:
        sizes = [(size,) for size in (a, b - a + 1, n * n - b - 1) if size]
        pool = Pool(Layout(sizes, 0.9), torch.float32, torch.device("cpu")).eval()
        assert pool.layout.n == n
        index = 1 if a else 0
        v = pool.V1.weight.detach() @ pool.V2.weight.detach().t()
        wanted = torch.stack([v[k // n, k % n] for k in range(a, b + 1)])
        with torch.no_grad():
            with pool.working():
                torch.testing.assert_close(pool.tensor(index, one), wanted)
            pool.deployed = True
            with pool.working():
                torch.testing.assert_close(pool.tensor(index, one), wanted)
            codes = [torch.randint(-127, 128, (n, pool.layout.m)) for _ in range(2)]
            pool.set_factors(Int8Factor(codes[0], torch.full((n, 1), 0.5)), Int8Factor(codes[1], torch.ones(1, 1)))
            v = 0.5 * (codes[0] @ codes[1].t())
            assert torch.equal(pool.tensor(index, one), torch.stack([v[k // n, k % n] for k in range(a, b + 1)]))


@pytest.mark.parametrize("kind", ZOO)
def test_every_kind_of_layer_computes_what_the_formulas_say(kind: str) -> None:
    """Evaluation, deployment, INT8 and the materialised model agree with a plain model that holds hand-made weights."""
    model, inputs = made(kind)
    net = FeatherNet(model, 0.5).eval()
    plain = copy.deepcopy(model).eval()
    with torch.no_grad():
        for name, tensor in by_hand(net).items():
            path, _, kept = name.rpartition(".")
            owner = plain.get_submodule(path)
            if kind == "padded embedding" and kept == "weight" and tensor.shape == (9, 4):
                tensor = torch.where(torch.arange(9)[:, None] == 2, torch.zeros(()).double(), tensor)
            getattr(owner, kept).copy_(tensor)
        wanted = plain(*inputs)
        torch.testing.assert_close(net(*inputs), wanted)
        torch.testing.assert_close(net.materialized()(*inputs), wanted)
        torch.testing.assert_close(net.deploy()(*inputs), wanted)
        net.deploy(False).convert()
        if kind in ("weight norm", "spectral norm"):  # hashed are 10 numbers with m = 1
            assert net.pool.layout.m == 1
        int8 = net(*inputs)
        # Where a weight requires a gradient, torch multiplies in another order, also without grad mode.
        plain, unhashed = net.materialized(), dict(net.module.named_parameters())
        for name, parameter in plain.named_parameters():
            parameter.requires_grad_(name in unhashed)
        assert torch.equal(int8, plain(*inputs))
        assert torch.equal(int8, net.deploy()(*inputs))


@pytest.mark.parametrize("kind", ZOO)
def test_every_kind_of_layer_trains_its_factors(kind: str) -> None:
    """Gradients of the factors and the scalars are those of the hand-made weights, by the chain rule."""
    model, inputs = made(kind)
    inputs = tuple(x.double() if x.is_floating_point() else x for x in inputs)
    net = FeatherNet(model.double().eval(), 0.5)  # no batch statistics, no power iteration
    net(*inputs).square().sum().backward()
    v1, v2 = (factor.weight.detach().clone().requires_grad_() for factor in (net.pool.V1, net.pool.V2))
    plain = net.materialized()
    weights = hand_cut(net, v1 @ v2.t())
    plain(*inputs).square().sum().backward()
    found = dict(plain.named_parameters())
    sum((weight * found[name].grad).sum() for name, weight in weights.items()).backward()
    for factor, mine in ((net.pool.V1, v1), (net.pool.V2, v2)):
        torch.testing.assert_close(factor.weight.grad, mine.grad)
    scalars = dict(net.module.named_parameters())
    for name, weight in weights.items():
        scalar = scalars[name + "_p"]
        by_scalar = (found[name].grad * weight.detach() / scalar.detach()).sum()
        torch.testing.assert_close(scalar.grad.sum(), by_scalar)


def test_sizes_order_and_start_are_the_papers() -> None:
    """n = ceil(sqrt(N)), m = ceil(c n / 2); slices weight then bias in the order of the modules; 1/sqrt(3 fan_in); std(V) = 1."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Sequential(nn.Linear(300, 100), nn.ReLU()), nn.Linear(100, 10)
    )
    net = FeatherNet(model, 0.3)
    report = net.compression_report()
    assert [name for name, _ in report.hashed] == ["0.weight", "0.bias", "2.0.weight", "2.0.bias", "3.weight", "3.bias"]
    count = 16 * 27 + 16 + 30000 + 100 + 1000 + 10
    assert (report.hashed_count, report.n, report.m) == (count, math.ceil(math.sqrt(count)), math.ceil(0.3 * report.n / 2))
    assert net.pool.V1.weight.shape == net.pool.V2.weight.shape == (report.n, report.m)
    scalars = dict(net.module.named_parameters())
    for name, fan_in in (("0", 27), ("2.0", 300), ("3", 100)):
        for kind in ("weight_p", "bias_p"):
            torch.testing.assert_close(scalars[f"{name}.{kind}"].data, torch.full((1,), 1 / math.sqrt(3 * fan_in)))
    bound = math.sqrt(12) / 2 * report.m ** (-1 / 4)
    for factor in (net.pool.V1, net.pool.V2):
        assert 0.99 * bound < float(factor.weight.detach().abs().max()) <= bound
    assert abs(float((net.pool.V1.weight @ net.pool.V2.weight.t()).detach().std()) - 1) < 0.05


def test_the_report_counts_what_is_there() -> None:
    """Counts, ratios and bytes are those of the models themselves."""
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Flatten(), nn.Linear(64, 10))
    net = FeatherNet(model, 0.3)
    report = net.compression_report()

    def size(of: nn.Module) -> int:
        return sum(t.numel() * t.element_size() for t in of.state_dict().values())

    assert report.hashed_count + report.left_out_count == sum(p.numel() for p in model.parameters())
    assert report.left_out == [("1.weight", (16,), "norm"), ("1.bias", (16,), "norm")]
    assert report.actual == 2 * report.n * report.m / report.hashed_count
    assert report.overall == sum(p.numel() for p in net.parameters()) / sum(p.numel() for p in model.parameters())
    assert (report.requested, report.dense_bytes, report.bytes) == (0.3, size(model), size(net))
    assert report.int8_bytes == size(net.convert()) == net.compression_report().bytes == net.compression_report().int8_bytes
    assert "1.bias (16,): norm" in str(report)


def test_tied_weights_stay_tied() -> None:
    """One slice and one scalar for both uses, in the net, its copies, and the plain model that comes out."""
    net = FeatherNet(Tied(), 0.5)
    assert [name for name, _ in net.compression_report().hashed] == ["embedding.weight", "hidden.weight", "hidden.bias"]
    for each in (net, copy.deepcopy(net)):
        assert each.module.head.weight_p is each.module.embedding.weight_p
        assert torch.equal(each.module.head.weight, each.module.embedding.weight)
    plain = net.materialized()
    assert plain.head.weight is plain.embedding.weight
    assert list(plain.state_dict()) == list(Tied().state_dict())


class Padded(nn.Module):
    """A tied embedding with padding, before or after the layer that shares its weight."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        embedding, head = nn.Embedding(12, 8, padding_idx=2), nn.Linear(8, 12, bias=False)
        head.weight = embedding.weight
        for name in ("embedding", "head") if first else ("head", "embedding"):
            self.add_module(name, embedding if name == "embedding" else head)


@pytest.mark.parametrize("first", [True, False])
def test_the_padding_row_of_a_tied_embedding_is_zero(first: bool) -> None:
    """For every use and in the plain model, whichever of them comes first."""
    net = FeatherNet(Padded(first), 0.5)
    for each in (net.module, net.eval().module, net.deploy().module, net.materialized()):
        assert not bool(each.embedding.weight[2].any())
        assert torch.equal(each.head.weight, each.embedding.weight)
        assert bool(each.head.weight[1].any())


def test_a_tie_to_what_is_left_out_leaves_both() -> None:
    """A weight that a frozen, excluded or recurrent layer shares stays one dense Parameter."""
    net = FeatherNet(Tied(), 0.5, exclude=nn.Embedding)
    assert net.module.head.weight is net.module.embedding.weight
    assert [name for name, _ in net.compression_report().hashed] == ["hidden.weight", "hidden.bias"]
    assert net.compression_report().left_out[0][2] == "excluded"


def test_what_is_frozen_or_excluded_stays_dense() -> None:
    """By requires_grad, by class, by name; other layers are hashed."""

    def model() -> nn.Sequential:
        return nn.Sequential(nn.Linear(5, 7), nn.Sequential(nn.Linear(7, 6)), nn.Conv1d(6, 4, 1))

    frozen = model()
    frozen[0].requires_grad_(False)
    assert left(FeatherNet(frozen)) == {"0.weight": "frozen", "0.bias": "frozen"}
    assert torch.equal(FeatherNet(frozen).module[0].weight, frozen[0].weight)
    assert left(FeatherNet(model(), exclude=(nn.Conv1d,))) == {"2.weight": "excluded", "2.bias": "excluded"}
    assert left(FeatherNet(model(), exclude="1")) == {"1.0.weight": "excluded", "1.0.bias": "excluded"}
    assert left(FeatherNet(model(), exclude=["1", nn.Conv1d])) == dict.fromkeys(
        ["1.0.weight", "1.0.bias", "2.weight", "2.bias"], "excluded"
    )


def left(net: FeatherNet) -> dict:
    return {name: reason for name, _, reason in net.compression_report().left_out}


def test_layers_keep_their_class_their_weight_and_their_place() -> None:
    """isinstance holds, ``weight`` is readable with a graph, it is no Parameter and cannot be assigned."""
    net = FeatherNet(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten()), 0.5)
    layer = net.module[0]
    assert isinstance(layer, nn.Conv2d)
    assert type(layer).__name__ == "HashedConv2d"
    assert layer.weight.requires_grad
    assert set(net.state_dict()) == {"pool.V1.weight", "pool.V2.weight", "module.0.weight_p", "module.0.bias_p"}
    for change in (lambda: setattr(layer, "weight", torch.zeros(2, 1, 3, 3)), lambda: delattr(layer, "weight")):
        with pytest.raises(AttributeError, match=r"net\.pool"):
            change()


def test_a_penalty_on_a_weight_reaches_the_factors() -> None:
    """What a script computes from ``layer.weight`` outside the forward trains as inside."""
    net = FeatherNet(nn.Linear(5, 4), 0.5)
    net.module.weight.square().sum().backward()
    v1, v2 = (f.weight.detach().clone().requires_grad_() for f in (net.pool.V1, net.pool.V2))
    ((v1 @ v2.t()).flatten()[:20] * net.module.weight_p.detach()).square().sum().backward()
    torch.testing.assert_close(net.pool.V1.weight.grad, v1.grad)
    torch.testing.assert_close(net.pool.V2.weight.grad, v2.grad)


def test_half_and_double_precision_models() -> None:
    """The factors take the model's precision, a layer of another one keeps its own."""
    double = FeatherNet(nn.Linear(5, 4).double(), 0.5)
    assert double(torch.randn(2, 5).double()).dtype == torch.float64
    mixed = FeatherNet(nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3).to(torch.bfloat16)), 0.5)
    assert [mixed.module[i].weight.dtype for i in (0, 1)] == [torch.float32, torch.bfloat16]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        net = FeatherNet(nn.Linear(50, 40), 0.5)
        assert net(torch.randn(2, 50)).dtype == torch.bfloat16
        inside = net.module.weight
    assert torch.equal(inside, net.module.weight)


def test_original_or_copy() -> None:
    """clone=True leaves the model alone, clone=False changes it."""
    model = nn.Sequential(nn.Linear(5, 4))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    FeatherNet(model, 0.5)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert FeatherNet(model, 0.5, clone=False).module is model
    assert "weight" not in model[0]._parameters


def test_attention_and_layers_of_the_users_are_hashed_whole() -> None:
    """Attention's joint projection as well; only Parameters of other names stay."""
    attention = FeatherNet(Attention(), 0.5).compression_report()
    assert attention.left_out == []
    assert FeatherNet(Attention(kdim=5, vdim=7), 0.5).compression_report().left_out == []
    assert FeatherNet(Own(), 0.5).compression_report().left_out == [("temperature", (), "neither weight nor bias")]


def test_resnet18_has_the_sizes_that_were_promised(capsys: pytest.CaptureFixture[str]) -> None:
    """11.17 M weights, n = 3342; verbose prints it; an INT8 state dict of at most 1.30 MB."""
    net = FeatherNet(resnet18(), 0.1, verbose=True)
    report = net.compression_report()
    assert report.n == 3342
    assert "3342" in capsys.readouterr().out
    assert report.int8_bytes < 1.30e6 < report.bytes / 3


def test_shapes_of_slots_cover_v_without_gaps() -> None:
    """Slots follow each other, and their rows hold them."""
    shapes: List[Tuple[int, ...]] = [(3, 4), (5,), (2, 2, 2), (1,)]
    layout = Layout(shapes, 0.5)
    offset = 0
    for slot, shape in zip(layout.slots, shapes):
        cells: Tensor = torch.arange(layout.n**2).reshape(layout.n, layout.n)[slot.first : slot.last].flatten()
        assert cells[slot.skip : slot.skip + slot.numel].tolist() == list(range(offset, offset + math.prod(shape)))
        offset += math.prod(shape)
