"""What a quantizer keeps outside the model's and the optimizer's ``state_dict``.

NNI 1.x counts its steps in a Python number, ``NaiveQuantizer`` keeps its scales in a dict, and
``ObserverQuantizer`` its histograms in modules that are not part of the model.
"""

from __future__ import annotations

from typing import Any, Dict, List, Set

import torch
from torch import Tensor

from ..rollback import unchanged_on_error
from .wrapping import covered_name, was_calibrated

__all__ = ["load_state", "state_of"]


def _observers(quantizer: Any) -> Dict[str, Any]:
    every = getattr(quantizer, "all_observers", {})
    return {f"{layer}/{slot}": observer for layer, slots in every.items() for slot, observer in slots.items()}


def _kind(quantizer: Any) -> str:
    return covered_name(quantizer) or type(quantizer).__name__


def _wrappers(quantizer: Any) -> Any:
    return () if quantizer.modules_wrapper is None else quantizer.get_modules_wrapper()  # None before 1.4's compress()


def state_of(quantizer: Any) -> Dict[str, Any]:
    """Just the quantizer's name where the model's ``state_dict`` holds everything: QAT and LSQ of 2.x, DoReFa, BNN."""
    state: Dict[str, Any] = {"quantizer": _kind(quantizer)}
    calibrated = [wrapper.name for wrapper in _wrappers(quantizer) if was_calibrated(wrapper)]
    if calibrated:
        state["calibrated"] = calibrated
    if isinstance(getattr(quantizer, "steps", None), int):
        state["steps"] = quantizer.steps
    if hasattr(quantizer, "layer_scale"):
        state["layer_scale"] = {name: torch.as_tensor(scale).detach().clone() for name, scale in quantizer.layer_scale.items()}
    observers = _observers(quantizer)
    if observers:
        state["observers"] = {
            name: {key: value.detach().clone() for key, value in observer.state_dict().items()}
            for name, observer in observers.items()
        }
    return state


def load_state(quantizer: Any, state: Dict[str, Any]) -> None:
    """Load what :func:`state_of` gave, checked to be of this kind of quantizer; raises ValueError if it does not fit."""
    observers, text = _observers(quantizer), f"this is no state of {_kind(quantizer)}, nothing was loaded: "
    problems = _mistyped(state)
    if problems:
        raise ValueError(text + "; ".join(problems))
    strangers = _strangers(quantizer, state, observers)
    if strangers:
        raise ValueError(
            f"the {_kind(quantizer)} and the saved state are of different layers; on one side only: {', '.join(strangers)}"
        )
    problems = _misshapen(state, observers)
    if problems:
        raise ValueError(text + "; ".join(problems))
    with unchanged_on_error(*observers.values(), values=True):
        for layer, observer in observers.items():
            try:
                observer.load_state_dict(state["observers"][layer])
            except RuntimeError as error:
                raise ValueError(f"the observer of {layer} cannot take the saved one, nothing was loaded: {error}") from error
    for wrapper in _wrappers(quantizer):
        if wrapper.name in state.get("calibrated", ()):
            wrapper.calibrated = True
    if "steps" in state:
        quantizer.steps = state["steps"]
    if "layer_scale" in state:
        device = next(quantizer.bound_model.parameters()).device
        scales: Dict[str, Tensor] = state["layer_scale"]
        quantizer.layer_scale = {layer: scale.detach().clone().to(device) for layer, scale in scales.items()}


def _mistyped(state: Dict[str, Any]) -> List[str]:
    """What is of another type than :func:`state_of` gives."""
    found = []
    steps, calibrated, scales, observers = (state.get(name) for name in ("steps", "calibrated", "layer_scale", "observers"))
    if "steps" in state and (not isinstance(steps, int) or isinstance(steps, bool) or steps < 0):
        found.append(f"steps is {steps!r}, not a number of steps")
    if "calibrated" in state and not (isinstance(calibrated, (list, tuple)) and all(isinstance(name, str) for name in calibrated)):
        found.append(f"calibrated is {calibrated!r}, not a list of names of layers")
    if "layer_scale" in state and not isinstance(scales, dict):
        found.append(f"layer_scale is a {type(scales).__name__}, not a dict")
    for layer, scale in scales.items() if isinstance(scales, dict) else ():
        if not isinstance(scale, Tensor) or scale.numel() != 1 or not scale.is_floating_point():
            what = f"{tuple(scale.shape)} {scale.dtype}" if isinstance(scale, Tensor) else type(scale).__name__
            found.append(f"layer_scale of {layer} is {what}, not one floating point number")
    if "observers" in state and not isinstance(observers, dict):
        found.append(f"observers is a {type(observers).__name__}, not a dict")
    for layer, own in observers.items() if isinstance(observers, dict) else ():
        if not isinstance(own, dict) or not all(isinstance(value, Tensor) for value in own.values()):
            found.append(f"the observer of {layer} is no dict of tensors")
    return found


def _misshapen(state: Dict[str, Any], observers: Dict[str, Any]) -> List[str]:
    """What an observer would take over in any shape. A range of nothing yet has no elements, in older versions of torch one dim."""
    found = []
    for layer, observer in observers.items():
        for name, own in observer.state_dict().items():
            its = state["observers"][layer][name]
            alike = its.dim() == own.dim() and (0 in own.shape or 0 in its.shape or own.shape == its.shape)
            if not alike and not (own.numel() <= 1 and its.numel() <= 1):
                found.append(f"{name} of the observer of {layer} has shape {tuple(its.shape)}, not {tuple(own.shape)}")
    return found


def _strangers(quantizer: Any, state: Dict[str, Any], observers: Dict[str, Any]) -> List[str]:
    """The layers (of observers also the entries) that only one side has."""
    layers = {layer.name for layer, _ in quantizer.get_modules_to_compress()}
    given, known = set(state.get("observers", {})), set(observers)
    strange: Set[Any] = (given ^ known) | (set(state.get("layer_scale", {})) - layers) | (set(state.get("calibrated", ())) - layers)
    found = sorted(map(str, strange))
    for layer in sorted(given & known):
        own, its = set(observers[layer].state_dict()), set(state["observers"][layer])
        found += [f"{layer}: {key}" for key in sorted(own ^ its)]
    return found
