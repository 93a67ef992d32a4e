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
    quantizer : Quantizer
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

    Examples
    --------
    With NNI 1.5 - 2.10.1:

    >>> import torch
    >>> from nni_dataparallel import DoReFaQuantizer, quantizer_state_dict
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> config_list = [{"op_types": ["Linear"], "quant_types": ["weight"], "quant_bits": 4}]
    >>> quantizer = DoReFaQuantizer(model, config_list, optimizer)
    >>> model = quantizer.compress()
    >>> quantizer_state_dict(quantizer)
    {'quantizer': 'DoReFaQuantizer'}

    With NNI 3.0:

    >>> import nni, torch
    >>> from nni.compression.utils import TorchEvaluator
    >>> from nni_dataparallel import QATQuantizer, quantizer_state_dict
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3))
    >>> def training(net, optimizer, training_step, *_):
    ...     training_step(torch.ones(6, 4), net).backward()
    ...     optimizer.step()
    >>> optimizer = nni.trace(torch.optim.SGD)(model.parameters(), lr=0.1)
    >>> evaluator = TorchEvaluator(training, optimizer, lambda batch, net: net(batch).square().mean())
    >>> config_list = [{"op_types": ["Linear"], "target_names": ["weight"], "quant_dtype": "int8"}]
    >>> quantizer = QATQuantizer(model, config_list, evaluator)
    >>> _ = quantizer.compress(None, 1)
    >>> quantizer_state_dict(quantizer)
    {'quantizer': 'QATQuantizer', 'current_step': 1}
    """
    return _line(quantizer).state_of(quantizer)  # type: ignore[no-any-return]


def load_quantizer_state_dict(quantizer: Any, state: Dict[str, Any]) -> None:
    """Load what :func:`quantizer_state_dict` gave into a fresh quantizer of the same kind.

    Model and optimizer are loaded before it; in NNI 3.0 all three inside the training function.

    Parameters
    ----------
    quantizer : Quantizer
        Built as the one that was saved, with the same layers.
    state : dict
        What :func:`quantizer_state_dict` returned.

    Raises
    ------
    ValueError
        When ``state`` is that of another kind of quantizer or of other layers; nothing is loaded then.
    TypeError
        When ``quantizer`` is none.

    Examples
    --------
    With NNI 1.5 - 2.10.1:

    >>> import torch
    >>> from nni_dataparallel import NaiveQuantizer, load_quantizer_state_dict, quantizer_state_dict
    >>> def build():
    ...     model = torch.nn.Sequential(torch.nn.Linear(4, 3))
    ...     torch.nn.init.constant_(model[0].weight, 127.0)
    ...     quantizer = NaiveQuantizer(model, [{"op_types": ["Linear"], "quant_types": ["weight"], "quant_bits": 8}])
    ...     return quantizer.compress(), quantizer
    >>> model, quantizer = build()
    >>> output = model(torch.ones(2, 4))
    >>> again, fresh = build()
    >>> load_quantizer_state_dict(fresh, quantizer_state_dict(quantizer))
    >>> quantizer_state_dict(fresh)
    {'quantizer': 'NaiveQuantizer', 'layer_scale': {'0': tensor(1.)}}

    With NNI 3.0:

    >>> import nni, torch
    >>> from nni.compression.utils import TorchEvaluator
    >>> from nni_dataparallel import QATQuantizer, load_quantizer_state_dict, quantizer_state_dict
    >>> def build():
    ...     model = torch.nn.Sequential(torch.nn.Linear(4, 3))
    ...     optimizer = nni.trace(torch.optim.SGD)(model.parameters(), lr=0.1)
    ...     evaluator = TorchEvaluator(lambda net, optimizer, *_: None, optimizer, lambda batch, net: None)
    ...     return QATQuantizer(model, [{"op_types": ["Linear"], "target_names": ["weight"], "quant_dtype": "int8"}], evaluator)
    >>> fresh = build()
    >>> load_quantizer_state_dict(fresh, {"quantizer": "QATQuantizer", "current_step": 7})
    >>> quantizer_state_dict(fresh)
    {'quantizer': 'QATQuantizer', 'current_step': 7}
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
