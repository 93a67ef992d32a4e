"""The distillers of NNI 3.0 under DDP: the loss of the whole batch, and linear layers that all ranks train together.

What a distiller adds to the loss is a mean over this rank's shard. DDP takes the mean of the ranks' gradients, so each
rank's loss gets the weight of its shard; with equal shards that is 1. ``trans_linears`` are no part of the DDP module.
"""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Iterator, List, Optional, Tuple

import torch
from torch import Tensor, nn

from ..ranks import Ranks
from ..sharing import ranks_of
from .reducing import in_order

__all__ = ["compute_distill_loss", "register_linears_optimization"]

_TEMPERATURE = 2


def compute_distill_loss(stock: Callable[..., Any], self: Any) -> Any:
    """``compute_distill_loss`` of both distillers: this rank's part of the mean over all ranks."""
    group = ranks_of(self._module_wrappers[name] for name in self._target_spaces)
    if group is None:
        return stock(self)
    spaces = [space for _, own in sorted(self._target_spaces.items()) for _, space in sorted(own.items())]
    with _of_all_ranks(self, spaces, group), _trained_together(self, group) as start:
        return stock(self) + start


@contextlib.contextmanager
def _of_all_ranks(self: Any, spaces: List[Any], group: Ranks) -> Iterator[None]:
    """Inside, each target has one link, that of the least loss over all ranks, and its lambda the weight of the shard."""
    measured = [_measured(self, space) for space in spaces]
    mine = torch.tensor([number for numbers in measured for number in numbers], dtype=torch.float64)
    totals = iter(group.all_reduce(mine, "sum").tolist())
    before = [(space.link, space.lambda_) for space in spaces]
    try:
        for space, numbers in zip(spaces, measured):
            total, *errors = [next(totals) for _ in numbers]
            if not total:
                continue  # no rank has this target
            if errors:
                losses = [space.lambda_ * error for error in errors]
                space.link = [space.link[losses.index(min(losses))]]
            space._setting["lambda"] = space.lambda_ * (numbers[0] * group.size / total)
            _fill(self, space)
        yield
    finally:
        for space, (link, weight) in zip(spaces, before):
            space.link, space._setting["lambda"] = link, weight


def _teachers(self: Any, space: Any) -> List[Any]:
    return [self._teacher_target_spaces[link][space._target_name] for link in space.link]


def _measured(self: Any, space: Any) -> List[float]:
    """By what this shard's loss is divided to be a mean, and, where there is a choice of links, the sum for each."""
    state, teachers = space.hidden_state, _teachers(self, space)
    links = len(teachers) if len(teachers) > 1 else 0
    if state is None:
        return [0.0] * (1 + links)
    count = state.shape[0] if space.apply_method == "kl" and state.dim() else state.numel()
    with torch.no_grad():
        return [float(count), *(_error(space, state, teacher.hidden_state) for teacher in teachers[:links])]


def _error(space: Any, state: Tensor, wanted: Optional[Tensor]) -> float:
    if wanted is None:
        return float("inf")
    wanted = wanted.to(state.device)
    if space.apply_method == "kl":
        logs, shares = (state / _TEMPERATURE).log_softmax(-1), (wanted / _TEMPERATURE).softmax(-1)
        return nn.functional.kl_div(logs, shares, reduction="sum").item()
    return nn.functional.mse_loss(state, wanted, reduction="sum").item()


def _fill(self: Any, space: Any) -> None:
    """Give an empty shard, whose mean is NaN, a row that has no loss; the graph stays, DDP waits for its gradients."""
    state = space.hidden_state
    if state is None or state.numel():
        return
    space.hidden_state = (state.sum() * 0).expand(1, *state.shape[1:])
    for teacher in _teachers(self, space):
        wanted = teacher.hidden_state
        if wanted is not None and not wanted.numel():
            teacher.hidden_state = wanted.new_zeros((1, *wanted.shape[1:]))


class _Shared(torch.autograd.Function):
    """Parameters as they are, whose gradient is the mean over the ranks.

    One node for all, made before the loss: every rank comes by it once in backward, and before any bucket of DDP is ready.
    The first output is a zero, so that this holds on a rank without a target, too.
    """

    @staticmethod
    def forward(ctx: Any, group: Ranks, *parameters: Tensor) -> Tuple[Tensor, ...]:
        ctx.group = group
        return (parameters[0].new_zeros(()), *(parameter.view_as(parameter) for parameter in parameters))

    @staticmethod
    def backward(ctx: Any, _: Tensor, *grads: Tensor) -> Tuple[Any, ...]:
        return (None, *(ctx.group.all_reduce(grad, "sum") / ctx.group.size for grad in grads))


class _Linear:
    """A linear layer with such parameters, as NNI calls it."""

    def __init__(self, weight: Tensor, bias: Optional[Tensor]) -> None:
        self._weight, self._bias = weight, bias

    def to(self, device: torch.device) -> _Linear:
        return self

    def __call__(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self._weight, self._bias)


@contextlib.contextmanager
def _trained_together(self: Any, group: Ranks) -> Iterator[Any]:
    """Inside, the linear layers are the same on all ranks, and so are their gradients; gives a zero to add to the loss."""
    linears = self.__dict__.get("trans_linears", {})
    places = [(own, name) for _, own in sorted(linears.items()) for name in sorted(own) if own[name] is not None]
    if not places:
        yield 0
        return
    for own, name in places:
        _start_equal(own[name], group)
    before = [own[name] for own, name in places]
    parameters = [parameter for linear in before for parameter in (linear.weight, linear.bias)]
    zero, *shared = _Shared.apply(group, *parameters)
    for (own, name), weight, bias in zip(places, shared[::2], shared[1::2]):
        own[name] = _Linear(weight, bias)
    try:
        yield zero
    finally:
        for (own, name), linear in zip(places, before):
            own[name] = linear


def _start_equal(linear: nn.Linear, group: Ranks) -> None:
    """Every rank has drawn numbers of its own for the layer: rank 0's count, as in DDP."""
    if linear.__dict__.get("equal_on_all_ranks"):
        return
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.copy_(group.all_reduce(parameter if group.rank == 0 else torch.zeros_like(parameter), "sum"))
    linear.__dict__["equal_on_all_ranks"] = True


def register_linears_optimization(stock: Callable[..., None], self: Any, evaluator: Any) -> None:
    """``_register_linears_optimization``: in the order of names, which an optimizer's checkpoint goes by.

    NNI's order is that of a set, another in every process.
    """
    in_order(self.trans_linears)
    stock(self, evaluator)
