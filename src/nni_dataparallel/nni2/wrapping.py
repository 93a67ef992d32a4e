"""The wrapper of NNI 2.x: its ``weight`` is a buffer of its own, its updates outlive a replica.

NNI keeps the trained weight as the Parameter ``old_weight`` and registers the same object (2.0 -
2.4) or an alias of its storage (2.5 - 2.10.1) as the buffer ``weight``. The alias is broadcast
through autograd, cannot be assigned on a replica without grad, and lets ``load_state_dict``
overwrite the trained weight with the quantised one.
"""

from __future__ import annotations

import threading
from typing import Any, Callable, Dict, FrozenSet, List, Optional

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from .. import replicas
from ..notices import NNIDataParallelRuntimeWarning, warn
from ..recording import recorded

__all__ = [
    "Unquantised",
    "covered_name",
    "follow_parameters",
    "forward",
    "grad_wanted",
    "load_from_state_dict",
    "note_other_names",
    "note_quantised",
    "recomputed_buffers",
    "separate",
    "was_calibrated",
    "wrap_modules",
]

_TRAINED = {"weight": "old_weight", "bias": "old_bias"}
_SLOTS = ("input", "weight", "output", "activation")
ASSIGNED: FrozenSet[str] = frozenset(
    ["weight", "bias", "scale", "zero_point", "tracked_min_biased", "tracked_max_biased"]
    + [f"{slot}_{what}" for slot in _SLOTS for what in ("scale", "zero_point", "bit", "bits")]
    + [f"tracked_{end}{slot}" for slot in ("", *(f"_{slot}" for slot in _SLOTS)) for end in ("min", "max")]
)
"""The buffers that NNI's quantizers assign in a forward; a layer may have others of its own."""

COVERED = {"QAT_Quantizer", "LsqQuantizer", "DoReFaQuantizer", "BNNQuantizer", "NaiveQuantizer", "ObserverQuantizer"}

_lock = threading.Lock()


class _Outside(threading.local):
    grad = True


_outside = _Outside()


class Unquantised:
    """Whether a layer may never have been quantised in training. Replicas share the object.

    True is looked up in the layer's scales before it is believed: a copy that follows another model's
    buffers (an average of models), or a restored checkpoint, has scales without a training forward.
    """

    def __init__(self) -> None:
        self.value = True

    def holds(self, module: Module) -> bool:
        """Whether the scales of ``module`` are those at construction; the device is asked until they are not."""
        if self.value:
            buffers = module._buffers
            scale, zero_point = buffers.get("scale"), buffers.get("zero_point")
            if scale is not None and zero_point is not None:  # 2.0 - 2.4
                self.value = bool((scale == 1).all() and (zero_point == 0).all())
            else:
                scales = [buffer for name, buffer in buffers.items() if name.endswith("_scale") and buffer is not None]
                self.value = all(bool((scale == 0).all()) for scale in scales)
        return self.value


def note_quantised(wrapper: Any) -> None:
    """A training forward has set the scales of ``wrapper``'s layer."""
    state = wrapper.__dict__.get("unquantised")
    if state is not None:
        state.value = False


def was_calibrated(wrapper: Any) -> bool:
    """Whether ranges were loaded into ``wrapper``'s layer: its first training step goes on from them."""
    return bool(wrapper.__dict__.get("calibrated", False))


def grad_wanted() -> bool:
    """Whether the forward runs with grad; inside an autograd function torch itself says no."""
    return _outside.grad


def _aliased(module: Module, name: str) -> bool:
    buffer = module._buffers.get(name)
    trained = getattr(module, _TRAINED[name], None)
    if buffer is None or trained is None:
        return False
    return isinstance(buffer, Parameter) or buffer.data_ptr() == trained.data_ptr() != 0


def separate(wrapper: Any) -> None:
    """Give the ``weight`` (and folded ``bias``) buffers of ``wrapper.module`` storage of their own, without a graph."""
    module = wrapper.module
    fresh = "unquantised" not in wrapper.__dict__
    for name in _TRAINED:
        buffer = module._buffers.get(name)
        if buffer is not None and (_aliased(module, name) or (fresh and not buffer.is_leaf)):
            module._buffers[name] = buffer.detach().clone()
    if fresh:
        wrapper.unquantised = Unquantised()


def wrap_modules(stock: Callable[..., Any], self: Any, layer: Any, config: Any) -> Any:
    """``Quantizer._wrap_modules``: a new wrapper starts with separate buffers."""
    wrapper = stock(self, layer, config)
    separate(wrapper)
    note_other_names(wrapper, self.bound_model)
    return wrapper


def note_other_names(wrapper: Any, model: Module) -> None:
    """Note a layer that the model has by a second name, too.

    NNI wraps one of the names. By another one the bare layer is used, with the weight the wrapper left.
    """
    names = sum(module is wrapper.module for _, module in model.named_modules(remove_duplicate=False))
    wrapper.has_other_names = names > 1


def recomputed_buffers(stock: None, self: Any) -> List[Tensor]:
    """``QuantizerModuleWrapper._recomputed_buffers``: what DDP need not broadcast."""
    module = self.module
    names = [name for name, trained in _TRAINED.items() if hasattr(module, trained)]
    return [module._buffers[name] for name in names if module._buffers.get(name) is not None]


def covered_name(quantizer: Any) -> Optional[str]:
    """The covered class that ``quantizer`` is of, or of a subclass of; None for one of the user's own."""
    return next((cls.__name__ for cls in type(quantizer).__mro__ if cls.__name__ in COVERED), None)


def _mend(wrapper: Any) -> None:
    """Separate buffers of a quantizer that was built before the fixes were installed.

    The original has to be mended, not only the replica, or recording the quantised weight on
    replica 0 would overwrite the trained one.
    """
    here = replicas.current()
    original: Any = None if here is None else here.original(wrapper)
    with _lock:
        if original is not None:
            separate(original)
            wrapper.unquantised = original.unquantised
            if here is not None and here.rank == 0:
                for name in _TRAINED:
                    if name in wrapper.module._buffers:
                        wrapper.module._buffers[name] = original.module._buffers[name]
        separate(wrapper)


def forward(stock: Callable[..., Any], self: Any, *inputs: Any) -> Any:
    """``QuantizerModuleWrapper.forward``: record what it assigns."""
    module = self.module
    if "unquantised" not in self.__dict__ or _aliased(module, "weight"):
        _mend(self)
    here = replicas.current()
    if here is not None and here.rank == 0 and covered_name(self.quantizer) is None:
        warn(
            f"{type(self.quantizer).__name__} is not covered under DataParallel by this version of nni_dataparallel: "
            f"its state may differ from one device's. Covered: {', '.join(sorted(COVERED))}. Train it on one device.",
            NNIDataParallelRuntimeWarning,
        )
    if here is None and replicas.is_replica(self) and not replicas.recomputing():
        warn(
            f"layer {self.name!r} of a DataParallel replica runs outside the worker threads of torch.nn.DataParallel: "
            "it sees its own shard only, and its statistics are lost. If you call parallel_apply yourself, import "
            "nni_dataparallel before you import it, or call torch.nn.parallel.parallel_apply.",
            NNIDataParallelRuntimeWarning,
        )
    outer, _outside.grad = _outside.grad, torch.is_grad_enabled()
    try:
        with recorded(module, ASSIGNED, keep=getattr(self, "has_other_names", False)):
            return stock(self, *inputs)
    finally:
        _outside.grad = outer


def _fit_shapes(module: Module, state_dict: Dict[str, Any], prefix: str) -> None:
    """Let a checkpoint in whose shapes drifted, as stock NNI's do, from ``[1]`` to ``[]`` or from None to a tensor."""
    for members in (module._parameters, module._buffers):
        for name in ASSIGNED.intersection(members).difference(_TRAINED):
            given, own = state_dict.get(prefix + name), members[name]
            if not isinstance(given, torch.Tensor):
                continue
            if own is None:
                like = next((t for t in (*module.parameters(), *module.buffers())), given)
                dtype = like.dtype if given.is_floating_point() and like.is_floating_point() else given.dtype
                module._buffers[name] = torch.zeros_like(given, device=like.device, dtype=dtype)
            elif own.shape != given.shape and own.numel() == given.numel():
                state_dict[prefix + name] = given.reshape(own.shape)


def load_from_state_dict(
    stock: Callable[..., None], self: Any, state_dict: Dict[str, Any], prefix: str, local_metadata: Any, strict: bool, *lists: Any
) -> None:
    """``QuantizerModuleWrapper._load_from_state_dict``: a float checkpoint reaches the trained weight.

    A file with ``weight`` alone (``strict=False``) goes into ``old_weight`` through stock's alias.
    """
    inner = f"{prefix}module."
    _fit_shapes(self.module, state_dict, inner)
    if isinstance(getattr(self.quantizer, "steps", None), int):
        # 1.x has no scale before the first forward; nor has a file written then.
        for name in ("scale", "zero_point"):
            if name in self.module._buffers and f"{inner}{name}" not in state_dict:
                self.module._buffers[name] = None
    absent = []
    for name, trained in _TRAINED.items():
        key, missing = f"{prefix}module.{name}", f"{prefix}module.{trained}"
        if key in state_dict and missing not in state_dict and hasattr(self.module, trained):
            state_dict[missing] = state_dict[key]
            absent.append(missing)
    if any(key.startswith(inner) for key in state_dict):
        # What is loaded decides, not what happened here before.
        self.unquantised = Unquantised()
        self.__dict__.pop("calibrated", None)
    stock(self, state_dict, prefix, local_metadata, strict, *lists)
    lists[0].extend(absent)  # still missing from the file: strict=True says so


def follow_parameters(wrapper: Any) -> None:
    """Copy the trained weight into the ``weight`` buffer, as stock's alias does by itself.

    For the steps before quantisation starts, when the layer computes with the trained weight.
    """
    module = wrapper.module
    trained = getattr(module, "old_weight", None)
    buffer = module._buffers.get("weight")
    if trained is not None and buffer is not None and getattr(wrapper, "bn_module", None) is None:
        with torch.no_grad():
            buffer.copy_(trained)
