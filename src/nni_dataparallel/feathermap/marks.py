"""The marks that toolkits leave on a module; none of them needs to be installed."""

from __future__ import annotations

from typing import Any, Optional

__all__ = ["quantised_by", "quantizer_of"]


def quantised_by(module: Any) -> Optional[str]:
    """Which toolkit has been at this module before, to quantise or to prune it."""
    state = module.__dict__
    home = type(module).__module__
    if home.startswith("nni.") or "_nni_wrapper" in state:
        return "NNI"
    if "weight_fake_quant" in module._modules or "activation_post_process" in module._modules:
        return "torch.ao"
    if ".quantized" in home and home.startswith("torch."):
        return "torch.ao"
    if type(module).__name__.endswith("FakeQuantize"):
        return "torch.ao"
    return None


def quantizer_of(module: Any) -> Optional[str]:
    """Which toolkit quantises this module; None for one that only prunes it."""
    wrapper = module.__dict__.get("_nni_wrapper")  # NNI 3.0 has one class for all that it does
    if wrapper is not None and not getattr(wrapper, "quantization_target_spaces", True):
        return None
    return None if "Pruner" in type(module).__name__ else quantised_by(module)
