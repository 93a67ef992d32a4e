"""``load_calibration_config``: a quantizer goes on from ranges that were exported.

NNI fills only the tracked ranges, by ``.data =`` from a CPU tensor, which a model on a GPU refuses and
which changes a buffer's shape. It leaves the scales as they are (0 in QAT, which divides by it in an
evaluation), and the first training step throws away what was loaded.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Set, Tuple

import torch
from torch import Tensor

from ..notices import warn
from .qat import scale_by_ranges
from .wrapping import note_quantised

__all__ = ["ENDS", "load_calibration_config", "load_lsq_calibration_config"]

_NOTHING = "nothing was loaded"
ENDS = ("tracked_min_", "tracked_max_")
Updates = List[Tuple[Tensor, Tensor]]


def _check_config(quantizer: Any, calibration_config: Any) -> None:
    if not isinstance(calibration_config, dict):
        raise TypeError(
            "expected the dict that export_model() returned (torch.load of its calibration_path), "
            f"not {type(calibration_config).__name__}"
        )
    for name, given in calibration_config.items():
        if not isinstance(given, dict):
            raise TypeError(f"the calibration config holds a {type(given).__name__} for module {name}, not a dict; {_NOTHING}")
    strangers = sorted(map(str, set(calibration_config) - {layer.name for layer, _ in quantizer.get_modules_to_compress()}))
    if strangers:
        warn(f"the calibration config has entries of layers that are not quantised here: {strangers}")


def _given(calibration_config: Dict[str, Dict[str, Any]], name: str, wanted: bool) -> Dict[str, Any]:
    given = calibration_config.get(name)
    if given is None and wanted:
        warn(f"the calibration config has no entry for module {name}: its ranges stay as they are")
    return given or {}


def _check_bits(name: str, slot: str, given: Dict[str, Any], bits: int) -> None:
    found = given.get(f"{slot}_bits")
    # AssertionError is what NNI raises here, and what callers may catch.
    assert found == bits, f"{slot} bits of module {name} fail to match: {found} in the file, {bits} in config_list"


def _range(name: str, given: Dict[str, Any], key: str, dtype: torch.dtype) -> Tensor:
    """One end of a range: numbers, and finite ones."""
    if key not in given:
        # KeyError is what NNI raises here.
        raise KeyError(f"the calibration config has no {key} of module {name}, only {', '.join(map(str, given))}; {_NOTHING}")
    try:
        value = torch.as_tensor(given[key], dtype=dtype)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{key} of module {name} is {given[key]!r}, not numbers; {_NOTHING}") from error
    if not bool(torch.isfinite(value).all()):
        raise ValueError(f"{key} of module {name} is not finite in the calibration config; {_NOTHING}")
    return value


def _apply(quantizer: Any, updates: Updates, loaded: Set[str]) -> List[Any]:
    """Fill what was checked; the wrappers whose layers it concerns."""
    with torch.no_grad():
        for target, value in updates:
            target.copy_(value)
    wrappers = [wrapper for wrapper in quantizer.get_modules_wrapper() if wrapper.name in loaded]
    for wrapper in wrappers:
        wrapper.calibrated = True
    return wrappers


def load_calibration_config(stock: Callable[..., None], self: Any, calibration_config: Dict[str, Dict[str, Any]]) -> None:
    """``QAT_Quantizer.load_calibration_config``: check everything, then fill ranges and scales in place."""
    _check_config(self, calibration_config)
    updates: Updates = []
    loaded = set()
    for layer, _ in self.get_modules_to_compress():
        name, module = layer.name, layer.module
        settings = module.layer_quant_setting
        given = _given(calibration_config, name, bool(settings.weight or settings.input or settings.output))
        for slot in ("weight", "input", "output") if given else ():
            setting = getattr(settings, slot)
            if not setting:
                continue
            _check_bits(name, slot, given, setting.bits)
            if slot == "weight":
                continue
            for end in ENDS:
                buffer = module._buffers[end + slot]
                value = _range(name, given, end + slot, buffer.dtype)
                if value.numel() != buffer.numel():
                    raise ValueError(
                        f"{end}{slot} of module {name} holds {value.numel()} values, the quantizer expects {buffer.numel()}: "
                        "export and load with the same quant_scheme"
                    )
                updates.append((buffer, value.reshape(buffer.shape)))
        if given:
            loaded.add(name)
    for wrapper in _apply(self, updates, loaded):
        scale_by_ranges(wrapper)
        note_quantised(wrapper)


def load_lsq_calibration_config(stock: Callable[..., None], self: Any, calibration_config: Dict[str, Dict[str, Any]]) -> None:
    """``LsqQuantizer.load_calibration_config``: check everything, then fill the scales in place."""
    _check_config(self, calibration_config)
    updates: Updates = []
    loaded = set()
    for layer, config in self.get_modules_to_compress():
        name, module = layer.name, layer.module
        given = _given(calibration_config, name, bool(config["quant_types"]))
        for slot in ("weight", "input", "output") if given else ():
            bits = getattr(module, f"{slot}_bits", None)
            if bits is None:
                continue
            _check_bits(name, slot, given, int(bits))
            if slot != "weight":
                scale, qmax = getattr(module, f"{slot}_scale"), getattr(module, f"{slot}_qmax")
                end = _range(name, given, f"tracked_max_{slot}", torch.float64)
                if end.numel() != 1:
                    raise ValueError(f"tracked_max_{slot} of module {name} holds {end.numel()} values, not one; {_NOTHING}")
                updates.append((scale, torch.full_like(scale, float(end) / qmax)))
        if given:
            loaded.add(name)
    _apply(self, updates, loaded)
