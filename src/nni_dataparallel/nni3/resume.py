"""What a quantizer or distiller of NNI 3.0 keeps outside the model's and the optimizer's ``state_dict``."""

from __future__ import annotations

from typing import Any, Dict

import torch

__all__ = ["load_state", "state_of"]

_PROGRESS = {"current_step": int, "is_init": bool, "is_compressed": bool}


def state_of(quantizer: Any) -> Dict[str, Any]:
    """How far the quantizer is: ``current_step`` (QAT), ``is_init`` (LSQ, DoReFa, BNN), ``is_compressed`` (Ptq).

    Of ``Adaptive1dLayerwiseDistiller`` the linear layers that it trains between student and teacher.
    """
    if quantizer.mode == "distillation":
        state: Dict[str, Any] = {"quantizer": type(quantizer).__name__}
        if hasattr(quantizer, "_register_trans_linear"):
            state["trans_linears"] = {
                place: {name: tensor.detach().clone() for name, tensor in linear.state_dict().items()}
                for place, linear in _linears(quantizer).items()
            }
        return state
    kinds = {name: kind for name, kind in _PROGRESS.items() if name in quantizer.__dict__}
    return {"quantizer": type(quantizer).__name__, **{name: kind(quantizer.__dict__[name]) for name, kind in kinds.items()}}


def _linears(distiller: Any) -> Dict[str, torch.nn.Linear]:
    """The linear layers by ``"layer/target"``; none before the training function is called."""
    found = distiller.__dict__.get("trans_linears", {})
    return {f"{layer}/{name}": own[name] for layer, own in sorted(found.items()) for name in sorted(own) if own[name] is not None}


def _load_linears(distiller: Any, saved: Dict[str, Dict[str, torch.Tensor]]) -> None:
    linears = _linears(distiller)
    if not isinstance(saved, dict) or not all(
        isinstance(own, dict) and all(isinstance(tensor, torch.Tensor) for tensor in own.values()) for own in saved.values()
    ):
        raise ValueError(f"trans_linears is {type(saved).__name__} {saved!r}, not dicts of tensors: nothing was loaded")
    shapes = [
        {place: {name: tuple(t.shape) for name, t in own.items()} for place, own in tensors.items()}
        for tensors in (saved, {place: linear.state_dict() for place, linear in linears.items()})
    ]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"the state has trans_linears {shapes[0]}, the distiller has {shapes[1]}: nothing was loaded. NNI makes them when "
            "compress() begins: load in the training function, into a distiller with the same config_list, student and teacher."
        )
    for place, linear in linears.items():
        linear.load_state_dict(saved[place])


def load_state(quantizer: Any, state: Dict[str, Any]) -> None:
    """Load what :func:`state_of` gave; what is applied to the tensors (``apply_method``) follows from it."""
    for name, kind in _PROGRESS.items():
        value: Any = state.get(name)
        fits = isinstance(value, int) and isinstance(value, bool) == (kind is bool) and value >= 0
        if name in state and not fits:
            raise ValueError(f"{name} is {value!r} in the state, not {'a number of steps' if kind is int else 'True or False'}")
    if "trans_linears" in state:
        _load_linears(quantizer, state["trans_linears"])
    for name in _PROGRESS:
        if name in state:
            setattr(quantizer, name, state[name])
    if "current_step" in state:
        begun = quantizer.current_step >= quantizer.quant_start_step
        for spaces in quantizer._target_spaces.values():
            for space in spaces.values():
                space.apply_method = "qat_clamp_round" if begun else "bypass"
    if "is_compressed" in state:
        quantizer.register_ptq_apply_method()
