"""The third part of a checkpoint, beside the model's and the optimizer's ``state_dict``: the quantizer's own."""

from __future__ import annotations

from typing import Any, Dict

from .nni2 import resume as nni2
from .nni3 import resume as nni3

__all__ = ["load_quantizer_state_dict", "quantizer_state_dict"]


def _line(quantizer: Any) -> Any:
    if hasattr(quantizer, "bound_model") and hasattr(quantizer, "get_modules_wrapper"):
        return nni2
    if hasattr(quantizer, "bound_model") and getattr(quantizer, "mode", None) in ("quantization", "distillation"):
        return nni3
    raise TypeError(
        f"expected an NNI quantizer (what QAT_Quantizer(model, ...) returns), not {type(quantizer).__name__}; "
        "a model's own state is model.state_dict()"
    )


def quantizer_state_dict(quantizer: Any) -> Dict[str, Any]:
    """What a quantizer (or a distiller of NNI 3.0) keeps outside the model's and the optimizer's ``state_dict``.

    Parameters
    ----------
    quantizer
        Any quantizer of NNI 1.4 - 3.0, stock or fixed; a distiller of 3.0.

    Returns
    -------
    dict
        Numbers, names and tensors only, so that ``torch.load(..., weights_only=True)`` reads it. Just the
        quantizer's name, ``{"quantizer": name}``, where the model's ``state_dict`` holds everything: QAT
        and LSQ of NNI 2.x, DoReFa, BNN. Besides, in ``QAT_Quantizer`` of 1.x ``{"steps": int}``; in
        ``NaiveQuantizer`` ``{"layer_scale": {layer: scale}}``; in ``ObserverQuantizer``
        ``{"observers": {"layer/slot": its state_dict}}``; after ``load_calibration_config``
        ``{"calibrated": [layer]}``. In NNI 3.0 ``{"current_step": int}``, ``{"is_init": bool}`` or
        ``{"is_compressed": bool}``, as the quantizer has them; in ``Adaptive1dLayerwiseDistiller``
        ``{"trans_linears": {"layer/target": its state_dict}}``, which exist inside the training function.

    Raises
    ------
    TypeError
        When given something else than a quantizer.
    """
    return _line(quantizer).state_of(quantizer)  # type: ignore[no-any-return]


def load_quantizer_state_dict(quantizer: Any, state: Dict[str, Any]) -> None:
    """Load what :func:`quantizer_state_dict` gave into a fresh quantizer of the same kind.

    Raises
    ------
    ValueError
        When ``state`` is that of another kind of quantizer or of other layers; nothing is loaded then.
    TypeError
        When ``quantizer`` is none.
    """
    line = _line(quantizer)
    fresh = line.state_of(quantizer)
    name = fresh["quantizer"]
    if not isinstance(state, dict) or "quantizer" not in state:
        raise ValueError(f"expected what quantizer_state_dict(quantizer) returned, not {_shown(state)}")
    if state["quantizer"] != name or set(fresh) - {"calibrated"} != set(state) - {"calibrated"}:
        raise ValueError(
            f"this is the state of {state['quantizer']} ({_shown(state)}), the quantizer is {name} ({_shown(fresh)}). "
            "Save and load with the same quantizer and the same NNI line (1.x, 2.x or 3.x)."
        )
    line.load_state(quantizer, state)


def _shown(state: Any) -> str:
    return (
        f"a dict of {', '.join(map(str, sorted(state)))}"
        if isinstance(state, dict) and state
        else f"{type(state).__name__} {state!r}"
    )
