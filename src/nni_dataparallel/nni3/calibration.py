"""``get_calibration_config`` and ``update_calibration_config`` of NNI 3.0 are each other's inverse."""

from __future__ import annotations

from typing import Any, Callable, Dict, List

import torch
from torch import Tensor, nn

from .. import given
from .ranges import has_shape, scale_shape
from .wrapping import device_of

__all__ = ["get_calibration_config", "update_calibration_config"]

_TRACKED = ("tracked_max", "tracked_min")


def get_calibration_config(stock: Callable[..., Any], self: Any) -> Any:
    """``Quantizer.get_calibration_config``: plain tensors.

    On the CPU NNI's are the model's own, and of learned scales they come with their graph: they change with the
    next step, and cannot be copied.
    """
    found = stock(self)
    for targets in found.values():
        for config in targets.values():
            config.update({key: value.detach().clone() for key, value in config.items() if isinstance(value, Tensor)})
    return {name: dict(targets) for name, targets in found.items()}  # torch's safe loader knows no defaultdict


def update_calibration_config(stock: Callable[..., None], self: Any, calibration_config: Dict[str, Dict[str, Any]]) -> None:
    """``Quantizer.update_calibration_config``: ranges too, learned scales too, and all of it or nothing.

    Raises
    ------
    ValueError
        When the config is of other layers or targets, or of another kind of quantisation.
    """
    problems = _problems(self, calibration_config)
    if problems:
        raise ValueError(
            f"this calibration config does not fit the {type(self).__name__}, nothing was loaded:\n  "
            + "\n  ".join(problems)
            + "\nBuild the quantizer with the config_list that the calibration config was made with."
        )
    absent = [
        f"{module_name}: {target_name}"
        for module_name, wrapper in self._module_wrappers.items()
        for target_name in wrapper.quantization_target_spaces
        if target_name not in calibration_config.get(module_name, {})
    ]
    if absent:
        given.warn(f"the calibration config has no entry for {', '.join(absent)}: what is there stays as it is")
    tracks = hasattr(self, "track_min_max_val")  # the others' ranges are computed from their scales
    for module_name, targets in calibration_config.items():
        wrapper = self._module_wrappers[module_name]
        for target_name, config in targets.items():
            for what in ("scale", "zero_point", *(_TRACKED if tracks else ())):
                if isinstance(config.get(what), Tensor):
                    _load(wrapper, f"{target_name}_{what}", config[what])
    if hasattr(self, "is_compressed"):  # PtqQuantizer: there is something to quantise with now
        self.is_compressed = True
        self.register_ptq_apply_method()


def _problems(self: Any, calibration_config: Any) -> List[str]:
    if not isinstance(calibration_config, dict):
        return [f"expected what get_calibration_config() returned, not {type(calibration_config).__name__}"]
    found: List[str] = []
    for module_name, targets in calibration_config.items():
        spaces = getattr(self._module_wrappers.get(module_name), "quantization_target_spaces", {})
        if not isinstance(targets, dict):
            found.append(f"{module_name}: expected a dict of targets, not {type(targets).__name__}")
            continue
        for target_name, config in targets.items():
            space = spaces.get(target_name)
            if space is None:
                found.append(f"{module_name}: {target_name} is not quantised here")
                continue
            if not isinstance(config, dict):
                found.append(f"{module_name}: {target_name}: expected a dict, not {type(config).__name__}")
                continue
            own = {"quant_dtype": space.quant_dtype or "int8", "quant_scheme": space.quant_scheme, "quant_bits": space.quant_bits}
            found += [
                f"{module_name}: {target_name} has {key} {value!r} here, {config.get(key)!r} in the config"
                for key, value in own.items()
                if config.get(key) != value
            ]
            found += [
                f"{module_name}: {target_name} has no {key!r} in the config" for key in ("scale", "zero_point") if key not in config
            ]
            found += [f"{module_name}: {target_name}: {text}" for text in _misshapen(space, config)]
    return found


def _misshapen(space: Any, config: Dict[str, Any]) -> List[str]:
    """What is no tensor, or one of another granularity or layer."""
    expected = scale_shape(space)
    found = []
    for key in ("scale", "zero_point", *_TRACKED):
        value = config.get(key)
        if value is None:
            continue  # a quantizer that has not seen anything yet
        if not isinstance(value, Tensor):
            found.append(f"{key} is a {type(value).__name__}, not a tensor")
        elif not has_shape(value, expected):
            found.append(f"{key} has shape {tuple(value.shape)} in the config, {expected} here")
        elif not bool(torch.isfinite(value).all()):
            found.append(f"{key} is not finite in the config")
    return found


def _load(wrapper: Any, name: str, value: Tensor) -> None:
    """Into the tensor that is there, where it has the shape."""
    old = getattr(wrapper, name)
    with torch.no_grad():
        if old is not None and old.shape == value.shape:
            old.copy_(value)
        elif isinstance(old, nn.Parameter):
            old.data = value.to(old.device, old.dtype, copy=True)
        else:
            wrapper._buffers[name] = value.detach().to(device_of(wrapper, value), copy=True)
    if isinstance(old, nn.Parameter):
        wrapper.started = wrapper.__dict__.get("started", frozenset()) | {name}
