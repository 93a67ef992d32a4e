"""nn.DataParallel on virtual devices behaves as it does on GPUs."""

from __future__ import annotations

import threading
from typing import Any, List

import pytest
import torch
from torch import Tensor, nn

from nni_dataparallel import rehearse
from nni_dataparallel.virtual import VirtualDevice, virtual_devices


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 16, 5))


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
@pytest.mark.parametrize("rows", [1, 2, 5, 8])
def test_plain_layers_equal_one_device(replicas: int, rows: int) -> None:
    """Outputs and gradients of a network without quantizer: the control of every other test."""
    model, x = network(), torch.randn(rows, 1, 6, 6)
    expected = model(x)
    expected.square().sum().backward()
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    found = rehearse(model, replicas)(x)
    torch.testing.assert_close(found, expected)
    found.square().sum().backward()
    for parameter, gradient in zip(model.parameters(), gradients):
        torch.testing.assert_close(parameter.grad, gradient)


class Inspect(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("buffer", torch.zeros(2))
        self.seen: List[Any] = []

    def forward(self, x: Tensor, scale: float = 1.0, **more: Tensor) -> Any:
        self.seen.append((threading.current_thread(), self.weight.data_ptr(), self.buffer.data_ptr(), self._is_replica))
        return {"y": x * self.weight * scale, "more": [t + 1 for t in more.values()]}


def test_replica_0_aliases_the_original_and_the_others_are_copies() -> None:
    """As on GPUs: an in-place write on replica 0 reaches the original, on the others it does not."""
    model, x = Inspect(), torch.ones(4, 2)
    rehearse(model, 3)(x)
    seen = sorted(model.seen, key=lambda entry: entry[1] != model.weight.data_ptr())
    assert [entry[1] == model.weight.data_ptr() for entry in seen] == [True, False]
    assert [entry[2] == model.buffer.data_ptr() for entry in seen] == [True, False]
    assert len({entry[0] for entry in seen}) == 2
    assert all(entry[3] for entry in seen)


def test_keywords_and_nested_outputs_are_scattered_and_gathered() -> None:
    """torch's own scatter and gather recursion runs above the virtual copies."""
    out = rehearse(Inspect(), 2)(torch.ones(4, 2), scale=3.0, extra=torch.zeros(4))
    assert out["y"].tolist() == [[3.0, 3.0]] * 4
    assert out["more"][0].tolist() == [1.0] * 4


def test_parameters_of_replicas_are_not_leaves() -> None:
    """With grad they are results of the broadcast; without, replica 0 holds the Parameter itself."""

    class Leaf(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.seen = nn.Parameter(torch.ones(1)), []

        def forward(self, x: Tensor) -> Tensor:
            self.seen.append((self.weight.is_leaf, isinstance(self.weight, nn.Parameter)))
            return x * self.weight

    model = Leaf()
    rehearse(model, 2)(torch.ones(2, 1))
    assert model.seen == [(False, False)] * 2
    model.seen.clear()
    with torch.no_grad():
        rehearse(model, 2)(torch.ones(2, 1))
    assert sorted(model.seen) == [(True, False), (True, True)]


class Mixing(nn.Module):
    """Keeps tensors in a Python list that all replicas share, as NNI's NaiveQuantizer does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.shared = nn.Parameter(torch.ones(1)), []

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.weight
        for other in self.shared:
            y = y + other.sum()
        self.shared.append(y.detach())
        return y


@pytest.mark.skipif(int(torch.__version__.split(".")[0]) < 2, reason="torch < 2.0 runs unchecked")
def test_mixing_devices_raises_as_cuda_does() -> None:
    """The error says which operation mixed which devices; with check=False nothing is checked."""
    model = rehearse(Mixing(), 2)
    with pytest.raises(RuntimeError, match=r"Expected all tensors to be on the same device.*aten::"):
        for _ in range(2):
            model(torch.ones(2, 1))
    rehearse(Mixing(), 2, check=False)(torch.ones(2, 1))


def test_host_tensors_and_copies_may_mix() -> None:
    """Constants made in forward, copies between devices and scalars are as legal as on GPUs."""

    class Legal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            self.total.copy_(x.sum())
            return x + torch.ones(1) + 2.0 * self.total.to(x.device)

    rehearse(Legal(), 3)(torch.ones(6, 1))


@pytest.mark.skipif(not hasattr(torch, "compile"), reason="before 2.0 nothing is checked")
@pytest.mark.parametrize("move", [lambda t, x: t.to(x.device), lambda t, x: t.type_as(x), lambda t, x: t.to(x)])
def test_moving_a_tensor_to_where_another_one_is_copies_it(move: Any) -> None:
    """All is on the CPU already, so torch itself would return the same tensor; only a change of dtype moves nothing."""

    class Moving(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + move(home, x)

    with virtual_devices(2) as devices:
        model = nn.DataParallel(Moving())
        home = torch.ones(3)
        devices.claim(home, 0)
        assert torch.equal(model(torch.zeros(4, 3)), torch.ones(4, 3))
        move = lambda t, x: t.to(torch.float32)  # noqa: E731
        with pytest.raises(RuntimeError, match="found at least two virtual devices"):
            model(torch.zeros(4, 3))


def test_worker_exceptions_reach_the_caller() -> None:
    """The original exception, with torch's note on the replica."""

    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise LookupError("in the user's code")

    with pytest.raises(LookupError, match=r"replica 0(?s:.)*in the user's code"):
        rehearse(Failing(), 2)(torch.ones(2, 1))


def test_torch_is_itself_again_afterwards() -> None:
    """Every replaced primitive is restored, by identity, after an exception too."""
    import importlib

    names = ["scatter_gather", "replicate", "parallel_apply", "data_parallel"]
    modules = [importlib.import_module(f"torch.nn.parallel.{name}") for name in names]
    before = [dict(vars(module)) for module in modules]
    with pytest.raises(KeyError), virtual_devices(2), virtual_devices(3):
        raise KeyError
    rehearse(network(), 2)(torch.randn(2, 1, 6, 6))
    for module, old in zip(modules, before):
        assert all(vars(module)[key] is value for key, value in old.items())


def test_autocast_reaches_the_workers() -> None:
    """Half precision chosen outside holds in the worker threads."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert rehearse(nn.Linear(2, 2), 2)(torch.ones(4, 2)).dtype is torch.bfloat16


def test_a_device_of_its_own_is_an_int() -> None:
    """torch takes virtual device numbers for what they are."""
    assert VirtualDevice(2) == 2
    with virtual_devices(3):
        assert nn.DataParallel(network()).device_ids == [0, 1, 2]


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: rehearse("model"), TypeError, "takes a torch.nn.Module, not str"),
        (lambda: rehearse(network(), 0), ValueError, "at least one virtual device, not 0"),
        (lambda: rehearse(rehearse(network(), 2), 2), TypeError, r"wrapped in Rehearsal already: rehearse\(model.module"),
    ],
)
def test_bad_input_is_named(make: Any, error: Any, text: str) -> None:
    """Object, cause and remedy."""
    with pytest.raises(error, match=text):
        make()
