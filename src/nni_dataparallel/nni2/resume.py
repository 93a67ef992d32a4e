"""What a quantizer keeps outside the model's and the optimizer's ``state_dict``.

NNI 1.x counts its steps in a Python number, ``NaiveQuantizer`` keeps its scales in a dict, and
``ObserverQuantizer`` its histograms in modules that are not part of the model.
"""

from __future__ import annotations

from typing import Any, Dict

import torch
from torch import Tensor

from .wrapping import covered_name, was_calibrated

__all__ = ["load_quantizer_state_dict", "quantizer_state_dict"]


def _observers(quantizer: Any) -> Dict[str, Any]:
    every = getattr(quantizer, "all_observers", {})
    return {f"{layer}/{slot}": observer for layer, slots in every.items() for slot, observer in slots.items()}


def _kind(quantizer: Any) -> str:
    return covered_name(quantizer) or type(quantizer).__name__


def _wrappers(quantizer: Any) -> Any:
    return () if quantizer.modules_wrapper is None else quantizer.get_modules_wrapper()  # None before 1.4's compress()


def quantizer_state_dict(quantizer: Any) -> Dict[str, Any]:
    """The third part of a checkpoint, beside the model's and the optimizer's ``state_dict``.

    Parameters
    ----------
    quantizer
        Any quantizer of NNI 1.4 - 2.10.1, stock or fixed.

    Returns
    -------
    dict
        Numbers, names and tensors only, so that ``torch.load(..., weights_only=True)`` reads it. Just the
        quantizer's name, ``{"quantizer": name}``, where the model's ``state_dict`` holds everything: QAT
        and LSQ of NNI 2.x, DoReFa, BNN. Besides, in ``QAT_Quantizer`` of 1.x ``{"steps": int}``; in
        ``NaiveQuantizer`` ``{"layer_scale": {layer: scale}}``; in ``ObserverQuantizer``
        ``{"observers": {"layer/slot": its state_dict}}``; after ``load_calibration_config``
        ``{"calibrated": [layer]}``.

    Raises
    ------
    TypeError
        When given something else than a quantizer.
    """
    if not hasattr(quantizer, "bound_model") or not hasattr(quantizer, "get_modules_wrapper"):
        raise TypeError(
            f"expected an NNI quantizer (what QAT_Quantizer(model, ...) returns), not {type(quantizer).__name__}; "
            "a model's own state is model.state_dict()"
        )
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


def _shown(state: Any) -> str:
    return (
        f"a dict of {', '.join(map(str, sorted(state)))}"
        if isinstance(state, dict) and state
        else f"{type(state).__name__} {state!r}"
    )


def load_quantizer_state_dict(quantizer: Any, state: Dict[str, Any]) -> None:
    """Load what :func:`quantizer_state_dict` gave into a fresh quantizer of the same kind.

    Raises
    ------
    ValueError
        When ``state`` is that of another kind of quantizer or of other layers; nothing is loaded then.
    TypeError
        When ``quantizer`` is none.
    """
    fresh = quantizer_state_dict(quantizer)
    name = _kind(quantizer)
    if not isinstance(state, dict) or "quantizer" not in state:
        raise ValueError(f"expected what quantizer_state_dict(quantizer) returned, not {_shown(state)}")
    if state["quantizer"] != name or set(fresh) - {"calibrated"} != set(state) - {"calibrated"}:
        raise ValueError(
            f"this is the state of {state['quantizer']} ({_shown(state)}), the quantizer is {name} ({_shown(fresh)}). "
            "Save and load with the same quantizer and the same NNI line (1.x or 2.x)."
        )
    observers = _observers(quantizer)
    layers = {layer.name for layer, _ in quantizer.get_modules_to_compress()} if "layer_scale" in state else set()
    given, known = set(state.get("observers", {})), set(observers)
    strangers = sorted((given ^ known) | (set(state.get("layer_scale", {})) - layers))
    for layer in given & known:
        own, its = set(observers[layer].state_dict()), set(state["observers"][layer])
        strangers += [f"{layer}: {key}" for key in sorted(own ^ its)]
    if strangers:
        raise ValueError(f"the {name} and the saved state are of different layers; on one side only: {', '.join(strangers)}")
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
