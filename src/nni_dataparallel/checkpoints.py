"""Checkpoints: the quantizer's own state beside the model's and the optimizer's, and files with all three."""

from __future__ import annotations

import contextlib
import io
import os
from typing import Any, BinaryIO, Dict, Iterator, Optional, Union

import torch
from torch import nn

from .files import PathLike, read_tensors, written_whole
from .given import users_model
from .nni2 import resume as nni2
from .nni3 import resume as nni3
from .rollback import unchanged_on_error

__all__ = ["load_checkpoint", "load_quantizer_state_dict", "quantizer_state_dict", "save_checkpoint"]


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


def save_checkpoint(path: PathLike, model: nn.Module, optimizer: Any = None, quantizer: Any = None, **more: Any) -> None:
    """Write a checkpoint, whole or not at all: a full disk or an interrupt leaves the file that was there before.

    Parameters
    ----------
    path : str or os.PathLike
        The file.
    model : torch.nn.Module
        The model; of a DataParallel or DistributedDataParallel the one inside.
    optimizer, quantizer : optional
        What else is resumed. The quantizer's part is :func:`quantizer_state_dict`.
    more
        Whatever else the script needs, by name: numbers, texts, tensors and containers of them.

    Raises
    ------
    ValueError
        When ``more`` holds what could not be loaded again. Nothing is written.
    OSError
        When the file cannot be written.

    Examples
    --------
    >>> import torch
    >>> from nni_dataparallel import save_checkpoint
    >>> model = torch.nn.Linear(4, 3)
    >>> save_checkpoint("checkpoint.pth", model, torch.optim.SGD(model.parameters(), lr=0.1), epoch=3)
    """
    parts = {"model": users_model(model).state_dict(), **more}
    if optimizer is not None:
        parts["optimizer"] = optimizer.state_dict()
    if quantizer is not None:
        parts["quantizer"] = quantizer_state_dict(quantizer)
    groups = parts.get("optimizer", {}).get("param_groups")
    for name, value in {**more, "the optimizer's param_groups": groups}.items():
        _require_loadable(name, value)
    try:
        with written_whole(path) as (draft,), _with_sums(), open(draft, "wb") as file:
            torch.save(parts, file)
    except (OSError, RuntimeError) as error:
        reason = error if isinstance(error, OSError) else error.__context__  # torch's own does not say why it could not write
        if not isinstance(reason, OSError) or reason.errno is None or reason.filename is not None:
            raise
        text = f"{reason.strerror}; the checkpoint was not written, what was there before is as it was"
        raise OSError(reason.errno, text, os.fspath(path)) from error


def load_checkpoint(
    path: Union[PathLike, BinaryIO], model: nn.Module, optimizer: Any = None, quantizer: Any = None, map_location: Any = "cpu"
) -> Dict[str, Any]:
    """Load what :func:`save_checkpoint` wrote: all of it, or nothing.

    Read with ``weights_only=True``, checksums compared. Before NNI 3.0 the quantizer is built and ``compress()`` called
    first; with it, load inside the training function.

    Parameters
    ----------
    path : str, os.PathLike or file
        The file, or an open one.
    model, optimizer, quantizer : optional
        As in :func:`save_checkpoint`.
    map_location : str or torch.device
        Where tensors are put that go nowhere else, as in ``torch.load``.

    Returns
    -------
    dict
        What was saved beside model, optimizer and quantizer.

    Raises
    ------
    ValueError
        When the file is truncated, damaged, holds what could run code, lacks a part that is asked for, or does not fit; the
        text says what. Model, optimizer and quantizer are as before.
    OSError
        When the file cannot be opened.

    Examples
    --------
    >>> import torch
    >>> from nni_dataparallel import load_checkpoint, save_checkpoint
    >>> save_checkpoint("checkpoint.pth", torch.nn.DataParallel(torch.nn.Linear(4, 3)), epoch=3)
    >>> load_checkpoint("checkpoint.pth", torch.nn.Linear(4, 3))
    {'epoch': 3}
    """
    where = os.fspath(path) if isinstance(path, (str, os.PathLike)) else "the checkpoint"
    parts = read_tensors(path, map_location)
    targets = {"model": users_model(model), "optimizer": optimizer, "quantizer": quantizer}
    wanted = [name for name, target in targets.items() if target is not None]
    for name in wanted:
        if not isinstance(parts, dict) or not isinstance(parts.get(name), dict):
            raise ValueError(f"{where} has no part {name!r}, it is {_shown(parts)}: was it written by save_checkpoint()? {_KEPT}")
    with unchanged_on_error(*(targets[name] for name in ("model", "optimizer") if name in wanted), values=True):
        for name in wanted:
            try:
                if name == "quantizer":
                    load_quantizer_state_dict(quantizer, parts[name])
                else:
                    targets[name].load_state_dict(parts[name])
            except Exception as error:  # a state that was damaged, or of something else, may trip over anything
                kind = type(targets[name]).__name__
                raise ValueError(f"the {name} in {where} does not fit this {kind}, {_KEPT}: {error}") from error
    return {name: value for name, value in parts.items() if name not in targets}


_KEPT = "nothing was loaded"


def _require_loadable(name: str, value: Any) -> None:
    held = io.BytesIO()
    try:
        torch.save(value, held)
        held.seek(0)
        read_tensors(held)
    except Exception as error:
        raise ValueError(
            f"{name} cannot be part of a checkpoint, nothing was written: a {type(value).__name__} would not be loaded again "
            f"({error}). Save numbers, texts, tensors, and lists or dicts of them."
        ) from error


@contextlib.contextmanager
def _with_sums() -> Iterator[None]:
    """Have torch compute checksums, by which a damaged file is told from a good one; it can be set not to."""
    options = torch.serialization
    before: Optional[bool] = options.get_crc32_options() if hasattr(options, "get_crc32_options") else None
    if before is None or before:
        yield
        return
    options.set_crc32_options(True)
    try:
        yield
    finally:
        options.set_crc32_options(before)


def _shown(state: Any) -> str:
    return (
        f"a dict of {', '.join(map(str, sorted(state)))}"
        if isinstance(state, dict) and state
        else f"{type(state).__name__} {state!r}"
    )
