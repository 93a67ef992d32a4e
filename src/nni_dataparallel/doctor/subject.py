"""What is examined: the user's model, batch, optimizer and loss, built anew for every run."""

from __future__ import annotations

import copy
import weakref
from collections import abc
from dataclasses import dataclass
from typing import Any, Callable, List, Optional

import torch
from torch import Tensor, nn

from ..given import users_model

__all__ = ["DoctorError", "Loss", "Subject", "from_function", "from_model", "loss_of"]

Loss = Callable[[nn.Module, Any], Any]
KEYS = ("model", "optimizer", "quantizer", "batch", "loss")
PROTOCOL = "return (model, batch), (model, optimizer, batch), (model, optimizer, quantizer, batch) or a dict with these names"


class DoctorError(RuntimeError):
    """The doctor cannot examine what it was given: it cannot be built or copied, or its step fails on one device already.

    Examples
    --------
    >>> import torch
    >>> from nni_dataparallel import DoctorError, diagnose
    >>> try:
    ...     diagnose(torch.nn.Linear(4, 3), torch.randn(1, 4))
    ... except DoctorError as error:
    ...     print(error)
    the batch has 1 row, 2 replicas need at least 2 rows (in its first dimension)
    """


@dataclass
class Subject:
    """One build of what is examined."""

    model: nn.Module
    batch: Any
    loss: Loss
    optimizer: Any
    quantizer: Any = None


def from_function(make: Callable[[], Any], batch: Any = None, loss: Optional[Loss] = None) -> Callable[[], Subject]:
    """The builder that calls the user's function; ``batch`` and ``loss`` are for what it does not return."""

    last: List[weakref.ref[Tensor]] = []

    def build() -> Subject:
        name = getattr(make, "__name__", "the function")
        try:
            made = make()
        except DoctorError:
            raise
        except Exception as error:
            raise DoctorError(f"{name}() raised {type(error).__name__}: {_first_line(error)}") from error
        parts = _parts(made, name, batch)
        own = list(users_model(parts["model"]).parameters())
        if {id(parameter) for parameter in own} & {id(reference()) for reference in last if reference() is not None}:
            raise DoctorError(f"{name}() returned the same model twice, or one with the same layers: build it anew in the function")
        last[:] = [weakref.ref(parameter) for parameter in own]
        return _subject(parts, name, loss)

    return build


def from_model(model: nn.Module, batch: Any, optimizer: Any = None, loss: Optional[Loss] = None) -> Callable[[], Subject]:
    """The builder that copies a model the user is working with, and its optimizer; neither is touched."""
    if batch is None:
        raise DoctorError("diagnose(model) needs a batch: diagnose(model, batch)")

    def build() -> Subject:
        try:
            copied, its_optimizer, rows = copy.deepcopy((users_model(model), optimizer, batch))
        except Exception as error:
            raise DoctorError(
                f"{type(model).__name__} cannot be copied ({_first_line(error)}): "
                "give diagnose() the function that builds the model instead of the model"
            ) from error
        return _subject({"model": copied, "optimizer": its_optimizer, "batch": rows}, "diagnose", loss)

    return build


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _is_quantizer(value: Any) -> bool:
    return any(kind.__module__.partition(".")[0] == "nni" for kind in type(value).__mro__) and hasattr(value, "bound_model")


def _parts(made: Any, name: str, batch: Any) -> Any:
    """What the user's function returned, by name."""
    parts = {}
    if isinstance(made, abc.Mapping) and not isinstance(made, nn.Module):
        unknown = sorted(str(key) for key in made if key not in KEYS)
        if unknown:
            raise DoctorError(f"{name}() returned a dict with {', '.join(unknown)}, which means nothing here: {PROTOCOL}")
        parts = dict(made)
    else:
        rest: List[Any] = list(made) if isinstance(made, (list, tuple)) else [made]
        if not rest or not isinstance(rest[0], nn.Module):
            raise DoctorError(f"{name}() returned {type(made).__name__}, which does not begin with a model: {PROTOCOL}")
        parts["model"] = rest.pop(0)
        for value in rest:
            if isinstance(value, torch.optim.Optimizer):
                key = "optimizer"
            elif _is_quantizer(value):
                key = "quantizer"
            else:
                key = "batch"
            if key in parts:
                raise DoctorError(f"{name}() returned two values that may be the {key}: {PROTOCOL}")
            parts[key] = value
    if parts.get("batch") is None:
        parts["batch"] = batch
    if parts["batch"] is None:
        raise DoctorError(f"{name}() returned no batch to train on: {PROTOCOL}")
    if not isinstance(parts.get("model"), nn.Module):
        raise DoctorError(f"{name}() returned no model (a torch.nn.Module): {PROTOCOL}")
    return parts


def _subject(parts: Any, name: str, loss: Optional[Loss]) -> Subject:
    model, quantizer, optimizer = users_model(parts["model"]), parts.get("quantizer"), parts.get("optimizer")
    chosen = parts.get("loss") or loss
    evaluator = getattr(quantizer, "evaluator", None)
    if evaluator is not None and hasattr(quantizer, "_fuse_preprocess"):
        # What compress() of NNI 3.0 does before it calls the training function, whose loop is ours here.
        evaluator.bind_model(quantizer.bound_model, quantizer._get_param_names_map())
        quantizer._fuse_preprocess(evaluator)
        if not getattr(evaluator, "_optimizers", None) or not hasattr(evaluator, "_training_step"):
            raise DoctorError(f"{name}(): {type(evaluator).__name__} trains by itself; build the quantizer with a TorchEvaluator")
        optimizer = evaluator._optimizers[0]
        chosen = chosen or (lambda model, batch: loss_of(evaluator._training_step(batch, model)))
    if optimizer is None:
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.01) if trained else None
    return Subject(model, parts["batch"], chosen or default_loss, optimizer, quantizer)


def loss_of(output: Any) -> Any:
    """The loss in what a training step, or a model that computes its loss itself, returned; None where there is none."""
    if isinstance(output, abc.Mapping):
        return output.get("loss")
    if isinstance(output, (list, tuple)) and not hasattr(output, "loss"):
        return output[0] if output else None
    return output if isinstance(output, Tensor) else getattr(output, "loss", None)


def default_loss(model: nn.Module, batch: Any) -> Tensor:
    """The loss of a user who named none: ``model(**batch).loss``, cross entropy, mean squared error, mean square."""
    if isinstance(batch, abc.Mapping):
        output, target = model(**batch), None
    elif isinstance(batch, (list, tuple)):
        if not 1 <= len(batch) <= 2:
            raise DoctorError(f"a batch of {len(batch)} parts needs a loss: a function loss(model, batch) in the script")
        output, target = model(batch[0]), (batch[1] if len(batch) == 2 else None)
    else:
        output, target = model(batch), None
    own = None if isinstance(output, (Tensor, list, tuple)) else loss_of(output)
    if isinstance(own, Tensor):
        return own.mean()
    scores = output if isinstance(output, Tensor) else loss_of(output)
    if isinstance(scores, Tensor):
        if target is None:
            return scores.square().mean()
        if scores.shape == target.shape and target.is_floating_point():
            return nn.functional.mse_loss(scores, target)
        if not target.is_floating_point() and scores.dim() == target.dim() + 1:
            return nn.functional.cross_entropy(scores, target)
    raise DoctorError("no loss fits the model's output and the batch: write a function loss(model, batch) in the script")
