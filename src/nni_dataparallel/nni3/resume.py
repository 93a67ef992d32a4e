"""What a quantizer of NNI 3.0 keeps outside the model's and the optimizer's ``state_dict``."""

from __future__ import annotations

from typing import Any, Dict

__all__ = ["load_state", "state_of"]

_PROGRESS = {"current_step": int, "is_init": bool, "is_compressed": bool}


def state_of(quantizer: Any) -> Dict[str, Any]:
    """How far the quantizer is: ``current_step`` (QAT), ``is_init`` (LSQ, DoReFa, BNN), ``is_compressed`` (Ptq)."""
    kinds = {name: kind for name, kind in _PROGRESS.items() if name in quantizer.__dict__}
    return {"quantizer": type(quantizer).__name__, **{name: kind(quantizer.__dict__[name]) for name, kind in kinds.items()}}


def load_state(quantizer: Any, state: Dict[str, Any]) -> None:
    """Load what :func:`state_of` gave; what is applied to the tensors (``apply_method``) follows from it."""
    for name, kind in _PROGRESS.items():
        if name in state:
            setattr(quantizer, name, kind(state[name]))
    if "current_step" in state:
        begun = quantizer.current_step >= quantizer.quant_start_step
        for spaces in quantizer._target_spaces.values():
            for space in spaces.values():
                space.apply_method = "qat_clamp_round" if begun else "bypass"
    if "is_compressed" in state:
        quantizer.register_ptq_apply_method()
