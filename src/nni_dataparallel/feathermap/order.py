"""FeatherNet comes first, quantizers and DataParallel after it: the other order is refused with the reason."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .layers import hashed_layers
from .marks import quantised_by

__all__ = ["refuse_wrong_order"]


def refuse_wrong_order(model: Any) -> None:
    """Raise if ``model`` is no plain model any more.

    Raises
    ------
    TypeError
        No module, a script module, a model in DataParallel, a FeatherNet.
    ValueError
        A model with a quantizer's or a pruner's wrappers.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"FeatherNet wraps a torch.nn.Module, not {type(model).__name__}")
    for path, module in model.named_modules():
        where = f"its layer {path!r}" if path else "it"
        if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            raise TypeError(
                f"the model is in {type(module).__name__} already ({where}): every replica must compute its own weights. Wrap the "
                f"plain model, FeatherNet(model.module), and put the result into {type(module).__name__}."
            )
        if isinstance(module, (torch.jit.ScriptModule, torch.jit.ScriptFunction)):
            raise TypeError(f"the model is compiled by torch.jit ({where}): wrap the Python model")
        toolkit = quantised_by(module)
        if toolkit is not None:
            raise ValueError(
                f"the model was quantised or wrapped by {toolkit} before ({where} is a {type(module).__name__}). FeatherNet first, "
                "then quantization: what is shipped are the two factors, and quantizing the layers' weights leaves these in float. "
                "FeatherNet(plain_model).prepare_qat(), or the toolkit on net.pool."
            )
    for path, _, _ in hashed_layers(model):
        raise TypeError(f"the model is hashed already (its layer {path!r}): wrap the plain model, net.materialized() gives it")
