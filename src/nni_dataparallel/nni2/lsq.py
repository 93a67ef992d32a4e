"""``LsqQuantizer`` of NNI 2.3 - 2.10.1: learned scales (Esser et al., "Learned Step Size Quantization", ICLR 2020).

NNI starts a scale by ``.data =`` inside a forward, which is lost on a replica and changes the
Parameter's shape; it scales the gradient of a scale by the number of elements of the shard; and
from 2.5 on the weight is quantised from ``.data``, so that no gradient reaches ``old_weight`` and the
weights of a quantised layer are never trained.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Dict, Optional, Tuple

import torch
from torch import Tensor

from .. import replicas
from .signatures import weight_of
from .steps import read_steps
from .wrapping import grad_wanted, was_calibrated

__all__ = ["init", "quantize_input", "quantize_inputs", "quantize_output", "quantize_weight"]

_START = 1.0  # the value NNI registers a scale with; kept where everything seen so far is zero


def init(stock: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """``LsqQuantizer.__init__``: an all-zero weight starts with the scale 1, not 0."""
    stock(self, *args, **kwargs)
    with torch.no_grad():
        for layer, _ in self.get_modules_to_compress():
            scale = getattr(layer.module, "weight_scale", None)
            if scale is not None:
                scale.copy_(_started(scale))
    _let_stock_states_in(self.optimizer)


def _let_stock_states_in(optimizer: Any) -> None:
    """Fit loaded moments to the scales: stock NNI changes a scale's shape to ``[]`` in its first step."""
    load = optimizer.load_state_dict

    @functools.wraps(load)
    def load_state_dict(*args: Any, **kwargs: Any) -> Any:
        result = load(*args, **kwargs)
        for parameter, state in optimizer.state.items():
            for name, value in state.items():
                moment = isinstance(value, Tensor) and name != "step"
                if moment and value.shape != parameter.shape and value.numel() == parameter.numel():
                    state[name] = value.reshape(parameter.shape)
        return result

    optimizer.load_state_dict = load_state_dict


def _started(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, torch.full_like(scale, _START), scale)


def _rounded(self: Any, x: Tensor, module: Any, slot: str, numel: int) -> Tensor:
    scale, qmin, qmax = (getattr(module, f"{slot}_{what}") for what in ("scale", "qmin", "qmax"))
    if numel == x.numel() or not type(self).quantize.__module__.startswith("nni."):
        return self.quantize(x, scale, qmin, qmax)  # type: ignore[no-any-return]
    scale = self.grad_scale(scale, 1.0 / ((qmax * numel) ** 0.5))
    return self.round_pass(torch.clamp(x / scale, qmin, qmax)) * scale  # type: ignore[no-any-return]


def quantize_weight(stock: Callable[..., Tensor], self: Any, wrapper: Any, **kwargs: Any) -> Tensor:
    """``LsqQuantizer.quantize_weight``: from the trained weight, so that it is trained."""
    module, weight = wrapper.module, weight_of(wrapper)
    quantised = _rounded(self, weight, module, "weight", weight.numel())
    module._buffers["weight"] = quantised
    return quantised


def _whole(x: Tensor, wrapper: Any, slot: str, starting: bool) -> Tuple[int, Optional[Tensor]]:
    """Number of elements of the whole batch, and with ``starting`` also the mean of ``|x|``."""
    known: Dict[Tuple[str, int], int] = wrapper.__dict__.setdefault("shard_sizes", {})
    key = (slot, x.numel())
    if replicas.alone() or not (starting or wrapper.training or grad_wanted()):  # an evaluation: only gradients ask for it
        # A forward that is recomputed in backward knows what the forward was told.
        recomputed = replicas.recomputing() or (replicas.current() is None and replicas.is_replica(wrapper))
        if not recomputed:
            known.pop(key, None)
        return known.get(key, x.numel()), None
    mean = None
    if starting:
        count = torch.tensor(float(x.numel()), dtype=torch.float64, device=x.device)
        total = replicas.all_reduce(torch.stack((x.detach().abs().sum(dtype=torch.float64), count)), "sum", wrapper, slot)
        known[key], mean = int(total[1]), total[0] / total[1]
    else:
        known[key] = replicas.share_of(0, x.numel(), wrapper, slot).numel
    return known[key], mean


def _activation(self: Any, x: Tensor, wrapper: Any, slot: str) -> Tensor:
    module = wrapper.module
    starting = read_steps(self) == 1 and not replicas.recomputing() and not was_calibrated(wrapper)
    if starting and replicas.current() is None and replicas.is_replica(wrapper):
        starting = False  # recomputed by a torch that cannot tell
    numel, mean = _whole(x, wrapper, slot, starting)
    if starting:
        scale = getattr(module, f"{slot}_scale")
        if mean is None:  # not in half precision, whatever the activations are in
            mean = x.detach().abs().mean(dtype=torch.promote_types(x.dtype, scale.dtype))
        start = _started((mean * 2 / (getattr(module, f"{slot}_qmax") ** 0.5)).to(scale.dtype)).reshape(scale.shape)
        scale.data.copy_(start)
        _start_original(wrapper, f"{slot}_scale", start)
    return _rounded(self, x, module, slot, numel)


def _start_original(wrapper: Any, name: str, start: Tensor) -> None:
    """Replica 0's Parameter aliases the original's; a layer that only others ran needs to be told."""
    here = replicas.current()
    if here is not None:
        original: Any = here.original(wrapper)
        if original is not None:
            replicas.defer(start, wrapper, name, lambda values: getattr(original.module, name).data.copy_(values[0]))


def quantize_input(stock: Callable[..., Any], self: Any, inputs: Tensor, wrapper: Any, **kwargs: Any) -> Tensor:
    """``LsqQuantizer.quantize_input`` of 2.5 and later."""
    return _activation(self, inputs, wrapper, "input")


def quantize_inputs(stock: Callable[..., Any], self: Any, *inputs: Tensor, wrapper: Any, **kwargs: Any) -> Tuple[Tensor, ...]:
    """``LsqQuantizer.quantize_input`` of 2.3 and 2.4: the first of several inputs."""
    return (_activation(self, inputs[0], wrapper, "input"), *inputs[1:])


def quantize_output(stock: Callable[..., Any], self: Any, output: Tensor, wrapper: Any, **kwargs: Any) -> Tensor:
    """``LsqQuantizer.quantize_output``."""
    return _activation(self, output, wrapper, "output")
