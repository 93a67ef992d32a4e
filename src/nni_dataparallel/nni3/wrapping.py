"""``ModuleWrapper`` of NNI 3.0: one forward for one device and for a replica.

What the forward assigns (scales, ranges, the compressed weight that the layer computes with) ends in the
buffers that were there, so that it outlives the replica and can be copied and saved. The weight is
recomputed in every forward from the wrapper's Parameter of the same name. ``torch.cuda.empty_cache()``,
which NNI calls after every layer, is left out: it waits for the device each time.
"""

from __future__ import annotations

import types
from typing import Any, Callable, Dict, FrozenSet, List

import torch
from torch import Tensor, nn

from .. import replicas
from ..recording import recorded
from ..sharing import note_ranks
from .ranges import has_shape, scale_shape
from .views import is_parameter, report, spaces_of

__all__ = ["device_of", "forward", "load_from_state_dict", "recomputed_buffers", "unwrap", "wrap"]

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
Params = Dict[str, Tensor]


def forward(stock: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """``ModuleWrapper.forward``: as NNI's, on this replica's own module, recorded."""
    note_ranks(self)
    view = self.__dict__.get("view")
    if view is None:
        with recorded(self, frozenset(self._buffers)):
            return _run(stock, self, args, kwargs)
    view.enter(self)
    try:
        with recorded(self, frozenset(self._buffers)):
            outputs = _run(stock, self, args, kwargs)
        report(self)
        return outputs
    finally:
        view.leave(self)


def _run(stock: Callable[..., Any], self: Any, args: Any, kwargs: Any) -> Any:
    args, kwargs = self.patch_inputs(*args, **kwargs)
    params: Params = {name: space.target for _, name, space in spaces_of(self) if is_parameter(space)}
    activations: List[Any] = []
    if self.fused_modules:
        params, activations = stock.__globals__["fuse_modules"](self, params, *args, **kwargs)
    correcting = getattr(self, "is_bias_correction", False) and isinstance(getattr(self.module, "bias", None), Tensor)
    with recorded(self.module, frozenset(params).intersection(self.module._buffers)):
        if correcting:
            unquantised = _call(self, {name: param * 1.0 for name, param in params.items()}, activations, args, kwargs)
        # A copy of a folded bias, which NNI hands over as a new Parameter: it is no more trained than any buffer.
        patched = {name: p.detach() if isinstance(p, nn.Parameter) else p for name, p in self.patch_params(params).items()}
        outputs = self.patch_outputs(_call(self, patched, activations, args, kwargs))
    if correcting:
        _note_bias_error(self, unquantised, outputs)
    return outputs


def _call(self: Any, params: Params, activations: List[Any], args: Any, kwargs: Any) -> Any:
    for name, param in params.items():
        setattr(self.module, name, param)
    outputs = self.module_forward(*args, **kwargs)
    for activation in activations:
        outputs = activation._nni_wrapper.module_forward(outputs)
    return outputs


def _note_bias_error(self: Any, unquantised: Any, outputs: Any) -> None:
    """Add up what the bias has to make good (``PtqQuantizer``), over the whole batch."""
    if not isinstance(unquantised, Tensor) or not isinstance(outputs, Tensor):
        raise TypeError(
            f"bias correction needs layers that return one tensor; {self.name!r} returns {type(outputs).__name__}. "
            "Leave it out of config_list, or set is_bias_correction=False."
        )
    error = (unquantised - outputs).sum(tuple(range(unquantised.dim() - 1)))
    count = unquantised[..., 0].numel()
    here = replicas.current()
    wrapper = self if here is None else here.original(self)
    # Errors and count in one row, for the way to the other ranks.
    noted = torch.cat([error.to(torch.promote_types(error.dtype, torch.float32)), torch.tensor([count], device=error.device)])[None]
    replicas.defer(noted, self, "bias correction", lambda parts: _add_bias_error(wrapper, parts), _in_rows)


def _in_rows(parts: List[Tensor]) -> Tensor:
    return torch.cat([part.to(parts[0].device) for part in parts])


def _add_bias_error(wrapper: Any, parts: List[Tensor]) -> None:
    for row in _in_rows(parts):
        total, error = wrapper.__dict__.get("bias_correction"), row[:-1]
        wrapper.bias_correction = error if total is None else total + error.to(total.device)
        wrapper.bias_element_num = wrapper.__dict__.get("bias_element_num", 0) + int(row[-1])


def wrap(stock: Callable[..., None], self: Any) -> None:
    """``ModuleWrapper.wrap``: a layer without bias that is fused with a batch norm has a place for the folded one.

    NNI makes one in the first forward, after which the model refuses a state saved before, and the other way round.
    """
    norms = [fused for fused in self.fused_modules[1:] if isinstance(fused, _NORMS)]
    if norms and "bias" not in self.quantization_target_spaces and not hasattr(self.module, "_nni_wrapper"):
        self._parameters.pop("bias", None)  # of an earlier wrap(): NNI would take its presence for somebody else's
    stock(self)
    module = self.module
    if norms and "bias" in module._parameters and module.bias is None:
        del module._parameters["bias"]
        module.register_buffer("bias", torch.zeros_like(self.weight[:, 0].reshape(len(self.weight), -1)[:, 0]).detach())


def unwrap(stock: Callable[..., None], self: Any) -> None:
    """``ModuleWrapper.unwrap``: the layer finds its forward in its class again, so that a copy has one of its own.

    NNI leaves the bound method on the layer, which ``nn.DataParallel`` copies as it is.
    """
    stock(self)
    module = self.module
    if module.__dict__.get("forward") == types.MethodType(type(module).forward, module):
        del module.__dict__["forward"]


def load_from_state_dict(
    stock: Callable[..., None], self: Any, state_dict: Dict[str, Any], prefix: str, local_metadata: Any, strict: bool, *lists: Any
) -> None:
    """``ModuleWrapper._load_from_state_dict``: buffers that a forward would create are created from the file.

    They are None again where the file was written before the first forward. Learned scales take the file's
    shape, and are not started anew by the next forward.
    """
    started: FrozenSet[str] = self.__dict__.get("started", frozenset())
    expected = {t: scale_shape(space) for t, space in self.quantization_target_spaces.items()}
    for name, buffer in self._buffers.items():
        saved = state_dict.get(prefix + name)
        if buffer is None and isinstance(saved, Tensor):
            # Of the shape that the target has here: torch says so if the file's is another.
            target = next((t for t in expected if name.startswith(f"{t}_")), "")
            shape = expected.get(target)
            mine = saved.shape if has_shape(saved, shape) else shape or ()
            self._buffers[name] = saved.new_empty(mine, device=device_of(self, saved))
    for name in _unborn(self, state_dict, prefix) if strict else ():
        self._buffers[name] = None
    for name, parameter in self._parameters.items():
        saved = state_dict.get(prefix + name)
        if name.endswith(("_scale", "_zero_point")) and parameter is not None and isinstance(saved, Tensor):
            if not saved.numel() or not parameter.numel():
                parameter.data = torch.empty(saved.shape, dtype=parameter.dtype, device=parameter.device)
            if saved.shape == parameter.shape and saved.numel():
                started = started | {name}
    self.started = started
    stock(self, state_dict, prefix, local_metadata, strict, *lists)


def _unborn(wrapper: Any, state_dict: Dict[str, Any], prefix: str) -> List[str]:
    """The buffers of targets of which a file of the wrapped model knows nothing yet.

    A file without the wrapper's Parameters is one of another model and left to fail: ranges must not be lost to it.
    """
    found: List[str] = []
    if not all(prefix + name in state_dict for name in wrapper._parameters):
        return found
    for name in wrapper.quantization_target_spaces:
        buffers = [f"{name}_{what}" for what in ("scale", "zero_point", "tracked_max", "tracked_min")]
        buffers = [buffer for buffer in buffers if buffer in wrapper._buffers]
        if not any(prefix + buffer in state_dict for buffer in buffers):
            found += buffers
    return found


def recomputed_buffers(stock: None, self: Any) -> List[Tensor]:
    """``ModuleWrapper._recomputed_buffers``: the compressed weight (and bias) that the layer computes with."""
    buffers = self.module._buffers
    names = {name for _, name, space in spaces_of(self) if is_parameter(space)}
    return [buffers[name] for name in names if buffers.get(name) is not None]


def device_of(wrapper: Any, default: Tensor) -> torch.device:
    """Where a wrapper lives; that of ``default`` where it has no tensor."""
    for tensor in (*wrapper.parameters(), *wrapper.buffers(), *wrapper.module.parameters(), *wrapper.module.buffers()):
        return tensor.device  # type: ignore[no-any-return]
    return default.device
