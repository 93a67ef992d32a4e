"""``LsqQuantizer`` and ``LsqPlusQuantizer`` of NNI 3.0: learned scales and zero points, of the right size from the start.

Esser et al., "Learned Step Size Quantization" (ICLR 2020); Bhalgat et al., "LSQ+" (CVPR Workshops 2020). NNI
starts them by ``.data =`` inside a forward: lost on a replica, and of another size than the optimizer and DDP
have seen. Here they have their size at construction, where the layer tells it; what only an activation can tell
(the channels of a ReLU) is learned by the original when the replicas of the first forward are done.
"""

from __future__ import annotations

import threading
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
from torch import Tensor, nn

from .. import replicas
from .ranges import whole_shape
from .views import holder_of, is_parameter

__all__ = ["init_parameters", "register_parameters"]

_DIMS = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3, nn.ConvTranspose1d: 1, nn.ConvTranspose2d: 2, nn.ConvTranspose3d: 3}
_lock = threading.Lock()


def _names(wrapper: Any, target_name: str) -> List[str]:
    both = (f"{target_name}_scale", f"{target_name}_zero_point")
    return [name for name in both if name in wrapper._parameters]


def register_parameters(stock: Callable[..., None], self: Any) -> None:
    """``register_scale`` and ``register_scale_zp``: Parameters of the size, dtype and device they will have."""
    stock(self)
    start = self.init_scale_zp if hasattr(self, "init_scale_zp") else self.init_scale
    for module_name, spaces in self._target_spaces.items():
        wrapper = self._module_wrappers[module_name]
        for target_name, space in spaces.items():
            like, example = _examples(wrapper, space, self.bound_model)
            for name in _names(wrapper, target_name):
                parameter = wrapper._parameters[name]
                # NNI's scales are of the default dtype, in a double model too; half precision would refuse to mix with them.
                dtype = like.dtype if like.element_size() < 4 else torch.get_default_dtype()
                parameter.data = parameter.data.to(like.device, dtype)
                if example is None:
                    parameter.data = parameter.data.new_empty(0)
            if example is not None:
                zero_point = wrapper._buffers.get(space._zero_point_name)
                start(wrapper, target_name, example)
                if space._zero_point_name in wrapper._buffers:  # LSQ: None until the first forward, as NNI's
                    wrapper._buffers[space._zero_point_name] = zero_point


def _examples(wrapper: Any, space: Any, model: nn.Module) -> Tuple[Tensor, Optional[Tensor]]:
    """A tensor of the layer, and one of the target's shape as far as scales depend on it.

    The latter is None where only a forward can tell.
    """
    module = wrapper.module
    named = (*module.named_parameters(), *module.named_buffers(), *model.named_parameters())
    tensors = (t.detach() for name, t in named if not name.endswith(("_scale", "_zero_point")))
    like = next((t for t in tensors if t.is_floating_point() and t.numel()), torch.zeros(1))
    if is_parameter(space):
        return like, None if space.target is None else space.target.detach()
    if space._scaler is None:
        return like, like.new_zeros(1)
    dims = _DIMS.get(type(module))
    if space._setting.get("granularity") != "per_channel" or dims is None:
        return like, None
    channels = getattr(module, "in_channels" if space._target_name.startswith("_input_") else "out_channels")
    return like, like.new_zeros((1, channels, *[1] * dims))


def init_parameters(stock: Callable[..., None], self: Any, wrapper: Any, target_name: str, target: Tensor) -> None:
    """``init_scale`` and ``init_scale_zp``: into the Parameters that are there, and not over loaded ones."""
    if self.is_init or replicas.recomputing() or not self.check_target(wrapper, target_name):
        return
    here = replicas.current()
    space = wrapper.quantization_target_spaces[target_name]
    spread = not is_parameter(space) and space._scaler is not None
    shape = whole_shape(wrapper, target_name, target) if spread else target.shape
    target = target.detach().new_empty(1).expand(shape)  # NNI looks at shape and device only
    if here is None:
        if not replicas.is_replica(wrapper):
            _start(stock, self, wrapper, target_name, target)
        return  # a replica outside its thread recomputes a forward whose scales it has
    original: Any = here.original(wrapper)
    names = _names(original, target_name)
    started = wrapper.__dict__.get("started", ())
    holders = {name: holder_of(wrapper, name) for name in names}
    mine = {name: holder[name] for name, holder in holders.items()}
    for name, holder in holders.items():
        holder[name] = mine[name].detach().clone()
    stock(self, wrapper, target_name, target)
    values = {name: holders[name][name].detach().to(mine[name].dtype) for name in names if name not in started}
    for name, holder in holders.items():
        holder[name] = mine[name]
    for name, value in values.items():
        if value.shape == mine[name].shape:
            mine[name].data.copy_(value)
        else:
            holders[name][name] = _shared_leaf(value, original._parameters[name])
    replicas.defer(values, wrapper, f"start of {target_name}", lambda parts: _adopt(original, parts[0]))


def _start(stock: Callable[..., None], self: Any, wrapper: Any, target_name: str, target: Tensor) -> None:
    parameters = {name: wrapper._parameters[name] for name in _names(wrapper, target_name)}
    started = wrapper.__dict__.get("started", ())
    try:
        # Into stand-ins: data of another dtype, put into a Parameter, takes away the hook by which DDP reduces its gradient.
        for name, parameter in parameters.items():
            wrapper._parameters[name] = nn.Parameter(parameter.detach().clone())
        stock(self, wrapper, target_name, target)
        values = {name: wrapper._parameters[name].detach() for name in parameters if name not in started}
    finally:
        wrapper._parameters.update(parameters)
    _adopt(wrapper, values)


def _adopt(wrapper: Any, values: Dict[str, Tensor]) -> None:
    """Start the Parameters, in their own storage where the size is known already."""
    for name, value in values.items():
        parameter = wrapper._parameters[name]
        if parameter.shape == value.shape:
            parameter.data.copy_(value)
        else:
            parameter.data = value.to(parameter.device, parameter.dtype, copy=True)


def _shared_leaf(value: Tensor, parameter: nn.Parameter) -> Tensor:
    """This replica's copy of a Parameter that has no size before this forward: its gradient is added to the Parameter's."""
    leaf = value.clone().requires_grad_(parameter.requires_grad)

    def give(grad: Tensor) -> None:
        with _lock:
            mine = grad.detach().to(parameter.device, copy=True)
            parameter.grad = mine if parameter.grad is None else parameter.grad + mine

    if leaf.requires_grad and torch.is_grad_enabled():
        leaf.register_hook(give)
    return leaf
