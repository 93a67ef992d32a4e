"""One training step, and what it left: on one device, on the first shard alone, on virtual replicas."""

from __future__ import annotations

import contextlib
import copy
import logging
import random
import sys
import warnings
from collections import abc
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, Iterator, List, Optional, Set, Tuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from .places import Fault, Place, fault_of
from .state import Key, State, non_leaves, state_of
from .subject import DoctorError, Loss, Subject
from .watched import Watched

__all__ = ["Bench", "Outcome", "isolated", "rows_of", "training_norms"]


@dataclass
class Outcome:
    """What one step left."""

    loss: Optional[float] = None
    before: State = field(default_factory=dict)
    after: State = field(default_factory=dict)
    """Buffers and attributes after backward, before the optimizer's step."""
    gradients: Dict[str, Optional[Tensor]] = field(default_factory=dict)
    parameters: Dict[str, Tensor] = field(default_factory=dict)
    hanging: List[Tuple[Key, str]] = field(default_factory=list)
    replicas: List[State] = field(default_factory=list)
    asked: Dict[str, Place] = field(default_factory=dict)
    fault: Optional[Fault] = None
    mixed: Optional[Fault] = None
    norms: List[str] = field(default_factory=list)
    """Batch norms that normalise by the batch's own statistics."""
    dropouts: List[str] = field(default_factory=list)


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """Random numbers, NNI's log and warnings of the runs stay in here."""
    numpy, disabled = sys.modules.get("numpy"), logging.root.manager.disable
    python, array = random.getstate(), numpy.random.get_state() if numpy is not None else None
    logging.disable(logging.WARNING)
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), torch.enable_grad():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(array)


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


def training_norms(model: nn.Module) -> List[str]:
    """Batch norms that use the statistics of the batch they see."""
    return [name for name, module in model.named_modules() if isinstance(module, _BatchNorm) and module.training]


def rows_of(batch: Any) -> Optional[int]:
    """The length of a batch: that of its first tensor with a dimension."""
    return next((len(t) for t in _leaves(batch) if t.dim()), None)


def _leaves(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, abc.Mapping):
        for item in tree.values():
            yield from _leaves(item)
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from _leaves(item)


def _mapped(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, abc.Mapping):
        return {key: _mapped(item, change) for key, item in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_mapped(item, change) for item in tree))
    return type(tree)(_mapped(item, change) for item in tree) if isinstance(tree, (list, tuple)) else tree


class Bench:
    """Runs steps on fresh builds of one subject.

    Parameters
    ----------
    build
        Makes model, batch, optimizer and loss anew.
    replicas
        Number of virtual devices.
    dtype
        Precision of the runs; None leaves the model's own.
    """

    def __init__(self, build: Callable[[], Subject], replicas: int, dtype: Optional[torch.dtype]) -> None:
        self._build, self._replicas, self._dtype = build, replicas, dtype
        self._weights: Optional[Dict[str, Tensor]] = None

    def subject(self, frozen_norms: bool = True, outcome: Optional[Outcome] = None) -> Subject:
        """A build on the CPU, without dropout, and with its batch norms frozen."""
        _seed(0)
        subject = self._build()
        model = subject.model.to("cpu") if self._dtype is None else subject.model.to("cpu", self._dtype)
        subject.batch = _mapped(subject.batch, self._converted)
        if outcome is not None:
            outcome.norms = training_norms(model)
        for name, module in model.named_modules():
            dropout = "p" if isinstance(module, _DropoutNd) else "dropout"
            random_ = isinstance(module, (_DropoutNd, nn.MultiheadAttention, nn.RNNBase)) and module.training
            if random_ and getattr(module, dropout):
                setattr(module, dropout, 0.0)
                if outcome is not None:
                    outcome.dropouts.append(name)
            if frozen_norms and isinstance(module, _BatchNorm):
                module.eval()
        self._require_the_same(model)
        return subject

    def _converted(self, tensor: Tensor) -> Tensor:
        tensor = tensor.detach().to("cpu")
        return tensor.to(self._dtype) if self._dtype is not None and tensor.is_floating_point() else tensor

    def _require_the_same(self, model: nn.Module) -> None:
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        if self._weights is None:
            self._weights = weights
        for name, weight in weights.items():
            if name not in self._weights or not torch.equal(weight, self._weights[name]):
                raise DoctorError(
                    f"the second model built is not the first one ({name} differs): let the function seed what it draws, or "
                    "load the same weights each time"
                )

    def run(self, kind: str, seed: int = 1, check: bool = True, frozen_norms: bool = True) -> Outcome:
        """One step; ``kind`` is ``"one device"``, ``"first shard"`` or ``"replicas"``."""
        outcome = Outcome()
        subject = self.subject(frozen_norms, outcome)
        model, batch = subject.model, subject.batch
        if kind == "first shard":
            batch = _mapped(batch, self._first_shard(rows_of(batch)))
        parallel = Watched(model, self._replicas, check) if kind == "replicas" else None
        outcome.before = state_of(model)
        built_with = {key for key, _ in non_leaves(model)}
        _seed(seed)
        try:
            loss = _backward(subject.loss, model if parallel is None else parallel, batch, subject.optimizer)
            outcome.loss = loss
            outcome.gradients = {n: None if p.grad is None else p.grad.detach().clone() for n, p in model.named_parameters()}
        except DoctorError:
            raise
        except Exception as error:
            fault = fault_of(error)
            fault = fault._replace(text=fault.text.replace(f"'{Watched.__name__}' object", "'DataParallel' object"))
            if "virtual devices" in fault.text:
                outcome.mixed = fault
            else:
                outcome.fault = fault
        outcome.after, outcome.hanging = state_of(model), _hanging(model, built_with)
        if parallel is not None:
            outcome.replicas, outcome.asked = parallel.states, parallel.asked
        if outcome.loss is not None and subject.optimizer is not None:
            subject.optimizer.step()
            outcome.parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
        return outcome

    def _first_shard(self, rows: Optional[int]) -> Callable[[Tensor], Tensor]:
        def first(tensor: Tensor) -> Tensor:
            return tensor.chunk(self._replicas)[0] if tensor.dim() and len(tensor) == rows else tensor

        return first

    def replicas(self) -> Outcome:
        """The step on replicas; where they mix devices, the step goes on unchecked, to see what else there is."""
        outcome = self.run("replicas")
        if outcome.mixed is None:
            return outcome
        further = self.run("replicas", check=False)
        further.mixed = outcome.mixed
        further.asked = {**outcome.asked, **further.asked}
        return further


def _hanging(model: nn.Module, before: Set[Key]) -> List[Tuple[Key, str]]:
    """What keeps the model from being copied since the step; a model that knows how to copy itself is right."""
    found = [(key, graph) for key, graph in non_leaves(model) if key not in before]
    if found:
        try:
            copy.deepcopy(model)
        except Exception:
            return found
    return []


def _backward(loss_function: Loss, model: nn.Module, batch: Any, optimizer: Any) -> float:
    if optimizer is not None:
        optimizer.zero_grad()
    loss = loss_function(model, batch)
    if not isinstance(loss, Tensor):
        raise DoctorError(f"the loss is {type(loss).__name__}, not a tensor of one number")
    if loss.requires_grad:
        loss.backward()  # type: ignore[no-untyped-call]
    return float(loss.detach().mean())
