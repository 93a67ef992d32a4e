"""``export_model``: what NNI's own cannot export, and what does not belong into an export.

NNI exports a tracked range with ``float()``, which dies on a per-channel range after the model
was unwrapped already; LSQ's export asks every layer for an ``input_scale``; and the saved weights carry
``steps`` and ``old_bias``, which no plain model can load.
"""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Dict, Iterator, List

import torch

from .calibration import ENDS
from .export_files import arguments_of, check_paths, unchanged

__all__ = ["export_lsq_model", "export_model"]


def _one_value_each(quantizer: Any) -> Dict[str, Dict[str, List[float]]]:
    """Put a stand-in with one value where a range has many; give the many as lists."""
    many: Dict[str, Dict[str, List[float]]] = {}
    for layer, _ in quantizer.get_modules_to_compress():
        for slot in ("input", "output"):
            for name in (end + slot for end in ENDS):
                buffer = layer.module._buffers.get(name)
                if buffer is not None and buffer.numel() > 1:
                    many.setdefault(layer.name, {})[name] = buffer.flatten().tolist()
                    layer.module._buffers[name] = buffer.flatten()[:1]
    return many


@contextlib.contextmanager
def _without_the_quantizers_own(model: Any) -> Iterator[None]:
    """Inside, ``model.state_dict()`` has the keys of the model that the user built."""
    hidden = model._non_persistent_buffers_set
    steps = "steps" in model._buffers and "steps" not in hidden
    for module in model.modules():
        if "old_bias" in module._parameters and module._parameters.get("bias") is module._parameters["old_bias"]:
            del module._parameters["old_bias"]
    if steps:
        hidden.add("steps")  # the optimizer goes on counting
    try:
        yield
    finally:
        if steps:
            hidden.discard("steps")


def export_model(stock: Callable[..., Any], self: Any, model_path: Any, *args: Any, **kwargs: Any) -> Any:
    """``export_model``: looks before it unwraps; the file loads into the plain model, which is as it was if there is none.

    A per-channel range is exported as a list of floats.
    """
    check_paths(arguments_of(stock, self, model_path, *args, **kwargs).arguments)
    write = self.export_model_save

    def save(model: Any, path: Any, calibration_config: Any = None, *rest: Any, **named: Any) -> None:
        for name, ranges in many.items():
            calibration_config[name].update(ranges)
        with _without_the_quantizers_own(model):
            write(model, path, calibration_config, *rest, **named)

    with unchanged(self):
        many = _one_value_each(self)
        self.export_model_save = save
        try:
            return stock(self, model_path, *args, **kwargs)
        finally:
            del self.export_model_save


def export_lsq_model(stock: Callable[..., Any], self: Any, model_path: Any, *args: Any, **kwargs: Any) -> Any:
    """``LsqQuantizer.export_model``: a layer whose input is not quantised has no range of its input."""
    bare = [
        layer
        for layer, _ in self.get_modules_to_compress()
        if hasattr(layer.module, "weight_scale") and not hasattr(layer.module, "input_scale")
    ]
    save = self.export_model_save

    def without_stand_ins(model: Any, path: Any, calibration_config: Any = None, *rest: Any, **named: Any) -> None:
        for layer in bare:
            for end in ENDS:
                calibration_config[layer.name].pop(f"{end}input")
        save(model, path, calibration_config, *rest, **named)

    for layer in bare:
        layer.module.input_scale, layer.module.input_qmax = torch.zeros(()), 0
        if hasattr(layer.module, "weight_bit"):
            layer.module.input_bit = 0  # 2.3 and 2.4 make no entry for a layer without it
    self.export_model_save = without_stand_ins
    try:
        return export_model(stock, self, model_path, *args, **kwargs)
    finally:
        self.__dict__.pop("export_model_save", None)
        for layer in bare:
            for name in ("input_scale", "input_qmax", "input_bit"):
                layer.module.__dict__.pop(name, None)
