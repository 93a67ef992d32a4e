"""Export and reload of the calibration config.

NNI exports a tracked range with ``float()``, which dies on a per-channel range after the model
was unwrapped already, and loads it with ``.data =`` from a CPU tensor, which a model on a GPU
refuses and which changes the buffer's shape.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import warnings
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Tuple

import torch
from torch import Tensor

__all__ = ["export_model", "load_calibration_config"]

_ENDS = ("tracked_min_", "tracked_max_")


def load_calibration_config(stock: Callable[..., None], self: Any, calibration_config: Dict[str, Dict[str, Any]]) -> None:
    """``QAT_Quantizer.load_calibration_config``: check everything, then fill the buffers in place."""
    updates: List[Tuple[Tensor, Tensor]] = []
    for layer, _ in self.get_modules_to_compress():
        name, module = layer.name, layer.module
        given = calibration_config.get(name)
        settings = module.layer_quant_setting
        if given is None:
            if settings.weight or settings.input or settings.output:
                warnings.warn(f"the calibration config has no entry for module {name}: its ranges stay as they are", stacklevel=3)
            continue
        for slot in ("weight", "input", "output"):
            setting = getattr(settings, slot)
            if not setting:
                continue
            bits = given.get(f"{slot}_bits")
            # AssertionError is what NNI raises here, and what callers may catch.
            assert bits == setting.bits, (
                f"{slot} bits of module {name} fail to match: {bits} in the file, {setting.bits} in config_list"
            )
            if slot == "weight":
                continue
            for end in _ENDS:
                buffer = module._buffers[end + slot]
                value = torch.as_tensor(given[end + slot], dtype=buffer.dtype)
                if value.numel() != buffer.numel():
                    raise ValueError(
                        f"{end}{slot} of module {name} holds {value.numel()} values, the quantizer expects {buffer.numel()}: "
                        "export and load with the same quant_scheme"
                    )
                updates.append((buffer, value.reshape(buffer.shape)))
    with torch.no_grad():
        for buffer, value in updates:
            buffer.copy_(value)


@contextlib.contextmanager
def _one_value_each(quantizer: Any) -> Iterator[Dict[str, Dict[str, List[float]]]]:
    """Put a stand-in with one value where a range has many; give the many as lists."""
    many: Dict[str, Dict[str, List[float]]] = {}
    kept: List[Tuple[Any, str, Tensor]] = []
    for layer, _ in quantizer.get_modules_to_compress():
        for slot in ("input", "output"):
            for name in (end + slot for end in _ENDS):
                buffer = layer.module._buffers.get(name)
                if buffer is not None and buffer.numel() > 1:
                    many.setdefault(layer.name, {})[name] = buffer.flatten().tolist()
                    kept.append((layer.module, name, buffer))
                    layer.module._buffers[name] = buffer.flatten()[:1]
    try:
        yield many
    except BaseException:
        for module, name, buffer in kept:
            module._buffers[name] = buffer
        raise


def export_model(stock: Callable[..., Any], self: Any, model_path: Any, *args: Any, **kwargs: Any) -> Any:
    """``export_model``: looks before it unwraps; a per-channel range is exported as a list of floats."""
    given = inspect.signature(stock).bind(self, model_path, *args, **kwargs).arguments
    for name in ("model_path", "calibration_path", "onnx_path"):
        path = given.get(name)
        if path is not None and isinstance(path, (str, os.PathLike)) and not Path(path).parent.is_dir():
            raise FileNotFoundError(
                f"{name}: there is no folder {str(Path(path).parent)!r}; nothing was exported, the model is unchanged"
            )
    write = self.export_model_save

    def save(model: Any, path: Any, calibration_config: Any = None, *rest: Any, **named: Any) -> None:
        for name, ranges in many.items():
            calibration_config[name].update(ranges)
        write(model, path, calibration_config, *rest, **named)

    with _one_value_each(self) as many:
        self.export_model_save = save
        try:
            return stock(self, model_path, *args, **kwargs)
        finally:
            del self.export_model_save
