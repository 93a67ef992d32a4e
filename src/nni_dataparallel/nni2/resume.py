"""What a quantizer keeps outside the model's and the optimizer's ``state_dict``.

NNI 1.x counts its steps in a Python number, ``NaiveQuantizer`` keeps its scales in a dict, and
``ObserverQuantizer`` its histograms in modules that are not part of the model.
"""

from __future__ import annotations

from typing import Any, Dict

import torch
from torch import Tensor

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
    """Load what :func:`state_of` gave, checked to be of this kind of quantizer; raises ValueError if of other layers."""
    observers = _observers(quantizer)
    layers = {layer.name for layer, _ in quantizer.get_modules_to_compress()} if "layer_scale" in state else set()
    given, known = set(state.get("observers", {})), set(observers)
    strangers = sorted((given ^ known) | (set(state.get("layer_scale", {})) - layers))
    for layer in given & known:
        own, its = set(observers[layer].state_dict()), set(state["observers"][layer])
        strangers += [f"{layer}: {key}" for key in sorted(own ^ its)]
    if strangers:
        raise ValueError(
            f"the {_kind(quantizer)} and the saved state are of different layers; on one side only: {', '.join(strangers)}"
        )
    for wrapper in _wrappers(quantizer):
        if wrapper.name in state.get("calibrated", ()):
            wrapper.calibrated = True
    if "steps" in state:
        quantizer.steps = int(state["steps"])
    if "layer_scale" in state:
        device = next(quantizer.bound_model.parameters()).device
        scales: Dict[str, Tensor] = state["layer_scale"]
        quantizer.layer_scale = {layer: scale.detach().clone().to(device) for layer, scale in scales.items()}
    for layer, observer in observers.items():
        observer.load_state_dict(state["observers"][layer])
