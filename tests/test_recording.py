"""A rebound buffer becomes an in-place update of the buffer that was there."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from nni_dataparallel import rehearse, replicas
from nni_dataparallel.recording import recorded

pytestmark = pytest.mark.usefixtures("worker_contexts")
NAMES = frozenset({"seen", "untouched"})


class Rebinding(nn.Module):
    """Counts samples the way NNI's quantizers keep statistics: by assignment."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("untouched", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        with recorded(self, NAMES):
            total = replicas.all_reduce(torch.tensor([float(len(x))]), "sum", self, "seen")
            self.seen = self.seen + total * self.weight
        return x * self.weight


@pytest.mark.parametrize("count", [1, 2, 3])
def test_an_assignment_reaches_the_original_in_place(count: int) -> None:
    """Value from the whole batch, same object, detached, deep-copyable, on one device and on replicas."""
    module = Rebinding()
    before = module.seen
    model = module if count == 1 else rehearse(module, count)
    for _ in range(2):
        model(torch.ones(6, 1)).sum().backward()
    assert module.seen is before
    assert module.seen.tolist() == [12]
    assert not module.seen.requires_grad
    copy.deepcopy(module)


def test_a_failed_forward_changes_nothing() -> None:
    """When the body raises, the buffers are what they were."""
    module = Rebinding()
    before = module.seen
    with pytest.raises(KeyError), recorded(module, NAMES):
        module.seen = torch.ones(1)
        raise KeyError
    assert module.seen is before
    assert module.seen.tolist() == [0]


def test_shapes_at_construction_stay() -> None:
    """A value of another shape with as many elements takes the buffer's shape."""
    module = Rebinding()
    with recorded(module, NAMES):
        module.seen = torch.tensor(3.0)
    assert module.seen.shape == (1,)
    assert module.seen.item() == 3


def test_a_layer_that_only_other_replicas_ran_is_updated_too() -> None:
    """Shard 0 skipped the layer: its state still reaches the original."""

    class Skipping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Rebinding()

        def forward(self, x: Tensor) -> Tensor:
            return x if replicas.rank() == 0 else self.layer(x)

    model = Skipping()
    before = model.layer.seen
    rehearse(model, 3)(torch.ones(6, 1))
    assert model.layer.seen is before
    assert model.layer.seen.tolist() == [4]


def test_buffers_of_the_users_own_are_left_alone() -> None:
    """A name that is not recorded stays what the body assigned."""
    module = Rebinding()
    fresh = torch.ones(1)
    with recorded(module, frozenset({"untouched"})):
        module.seen = fresh
    assert module.seen is fresh


def test_a_kept_tensor_carries_its_graph_until_the_next_recording() -> None:
    """keep=True: the fresh tensor stays for a use outside, its value is in the buffer all the same."""
    module = Rebinding()
    buffer = module.seen
    with recorded(module, NAMES, keep=True):
        module.seen = module.weight * 3
    assert module.seen.requires_grad
    assert buffer.tolist() == [3]
    with recorded(module, NAMES, keep=True):
        assert module.seen is buffer
    assert module.seen is buffer
