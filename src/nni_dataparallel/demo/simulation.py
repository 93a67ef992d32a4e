"""An exported model as integer hardware would compute it, in floating point.

NNI's ``export_model`` writes float weights and a calibration config. Here both are put into a plain
model: weights rounded to their grid, activations to the grid of their tracked range.
"""

from __future__ import annotations

from typing import Any, Dict, Optional, Tuple

import torch
from torch import Tensor, nn

from ..statistics import fake_quantize, qparams

__all__ = ["simulate_export"]

_BITS = {"input": ("input_bits",), "output": ("output_bits", "activation_bit")}
_ENDS = {"input": ("input",), "output": ("output", "activation")}


def _activation_grid(config: Dict[str, Any], slot: str) -> Optional[Tuple[Tensor, Tensor, int]]:
    bits = next((config[key] for key in _BITS[slot] if key in config), None)
    name = next((end for end in _ENDS[slot] if f"tracked_min_{end}" in config), None)
    if bits is None or name is None:
        return None
    low, high = (torch.tensor([float(config[f"tracked_{end}_{name}"])]) for end in ("min", "max"))
    qmax = 2 ** int(bits) - 1
    scale, zero_point = qparams(low, high, 0, qmax, float(qmax))
    return scale, zero_point, qmax


def simulate_export(model: nn.Module, state: Dict[str, Tensor], calibration: Dict[str, Dict[str, Any]]) -> nn.Module:
    """Load an export of per-tensor affine uint quantisation into a plain ``model``.

    Parameters
    ----------
    model
        The network before it was compressed, on the CPU; changed in place and put into evaluation mode.
    state
        The file that ``export_model`` wrote, loaded to the CPU.
    calibration
        The calibration config that ``export_model`` returned.

    Returns
    -------
    torch.nn.Module
        ``model``, whose forward rounds weights and activations to the exported grids.
    """
    own = model.state_dict()
    model.load_state_dict({name: tensor for name, tensor in state.items() if name in own})
    for name, module in model.named_modules():
        config = calibration.get(name)
        if config is None:
            continue
        if "weight_scale" in config:
            qmax = 2 ** int(config["weight_bits"]) - 1
            scale, zero_point = config["weight_scale"].cpu(), config["weight_zero_point"].cpu()
            with torch.no_grad():
                module.weight.copy_(fake_quantize(module.weight, scale, zero_point, 0, qmax))
        arriving, leaving = _activation_grid(config, "input"), _activation_grid(config, "output")
        if arriving is not None:
            module.register_forward_pre_hook(lambda _, x, grid=arriving: (fake_quantize(x[0], grid[0], grid[1], 0, grid[2]),))
        if leaving is not None:
            module.register_forward_hook(lambda _, x, y, grid=leaving: fake_quantize(y, grid[0], grid[1], 0, grid[2]))
    return model.eval()
