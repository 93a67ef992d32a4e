"""A replica's own view of a wrapper: its module, its fused modules, its target spaces.

NNI 3.0's wrapper holds all of these outside ``_modules``, where ``nn.DataParallel`` leaves them pointing
at device 0, and puts itself into ``module.forward`` as a bound method, so that every replica runs the
original. What a replica holds of others is weak, or held only while its forward runs: a cycle would
keep its copies of the parameters alive until the garbage collector comes.
"""

from __future__ import annotations

import copy as copying
import types
import weakref
from typing import Any, Callable, Dict, Iterator, List, Optional, Set, Tuple

import torch
from torch import Tensor
from torch.nn import Module

from .. import replicas
from ..notices import NNIDataParallelRuntimeWarning, warn
from ..statistics import cut_dimension

__all__ = ["View", "batch_of", "holder_of", "is_parameter", "localise", "report", "spaces_of"]

_SPACES = ("pruning_target_spaces", "quantization_target_spaces", "distillation_target_spaces")
Local = Callable[[Module], Module]
_told: Set[int] = set()


def is_parameter(space: Any) -> bool:
    """Whether a target space is that of a parameter, which is the same on all replicas."""
    return bool(space._target_type.value == "parameter")


def spaces_of(wrapper: Any) -> Iterator[Tuple[str, str, Any]]:
    """``(kind, target name, target space)`` of everything a wrapper compresses."""
    for kind in _SPACES:
        for name, space in wrapper.__dict__[kind].items():
            yield kind, name, space


def holder_of(wrapper: Any, name: str) -> Dict[str, Any]:
    """The dict in which a wrapper keeps its tensor ``name``.

    A replica has its Parameters as plain attributes; in a forward without grad, replica 0 has the originals.
    """
    holders: Tuple[Dict[str, Any], ...] = (wrapper._buffers, wrapper._parameters, wrapper.__dict__)
    return next(holder for holder in holders if name in holder)


class _Forward:
    """The forward of a replica's module, as the user's class defines it."""

    def __init__(self, module: Module, forward: Callable[..., Any]) -> None:
        self._module, self._function = weakref.ref(module), forward.__func__  # type: ignore[attr-defined]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(_alive(self._module), *args, **kwargs)


def _alive(reference: weakref.ref[Module]) -> Module:
    module = reference()
    if module is None:
        raise RuntimeError(
            "a replica's layer is used after its replica is gone. Keep the replica, or use the layer of the model itself."
        )
    return module


class View:
    """What a replica's wrapper sees as its own while its forward runs."""

    def __init__(self, wrapper: Any, local: Local) -> None:
        self._module = weakref.ref(local(wrapper.module))
        self._fused = [weakref.ref(local(module)) for module in wrapper.fused_modules]
        self._before: Dict[str, Any] = {}
        self._depth = 0

    def enter(self, wrapper: Any) -> None:
        self._depth += 1
        if self._depth > 1:  # a layer that calls itself
            return
        state = wrapper.__dict__
        self._before = {name: state[name] for name in ("module", "fused_modules", *_SPACES)}
        state["module"] = _alive(self._module)
        state["fused_modules"] = [_alive(module) for module in self._fused]
        for kind in _SPACES:
            state[kind] = {name: _own(space, wrapper) for name, space in state[kind].items()}

    def leave(self, wrapper: Any) -> None:
        self._depth -= 1
        if not self._depth:
            wrapper.__dict__.update(self._before)
            self._before = {}


def _own(space: Any, wrapper: Any) -> Any:
    own = copying.copy(space)
    own._wrapper = wrapper
    if hasattr(own, "_buffer"):
        own._buffer = []
    return own


def localise(stock: None, self: Any, copy: Any, local: Local) -> None:
    """``ModuleWrapper._localise_replica``: ``copy`` is the copy of ``self`` on the replica that ``local`` leads to."""
    module = local(self.module)
    if module is self.module:
        return  # not a module of this network
    state = copy.__dict__
    state["view"] = View(self, local)
    if getattr(self.module_forward, "__self__", None) is self.module:
        state["module_forward"] = _Forward(module, self.module_forward)
    if getattr(module.__dict__.get("forward"), "__self__", None) is self:
        module.__dict__["forward"] = types.MethodType(type(copy).forward, copy)
    for name, buffer in self.module._buffers.items():
        if buffer is not None and not buffer.is_leaf:  # left by a forward of stock NNI, before the fixes were installed
            self.module._buffers[name] = buffer.detach()
    # A compressor built before the fixes were installed has bound its stock methods.
    state["_track_funcs"] = [_current(function) for function in self._track_funcs]


def _current(function: Callable[..., Any]) -> Callable[..., Any]:
    owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
    if owner is None:
        return function
    method = getattr(owner, name, function)
    inner = getattr(method, "__func__", method)
    if not getattr(inner, "__module__", "").startswith("nni.") and id(inner.__code__) not in _told:
        _told.add(id(inner.__code__))
        warn(
            f"{type(owner).__name__}.{name} is a tracking function of your own: on a replica it sees this replica's share of "
            "the batch. Call super() in it, which hands NNI's the whole batch's extremes, or train on one device.",
            NNIDataParallelRuntimeWarning,
        )
    return method


def report(wrapper: Any) -> None:
    """Tell the original, once all replicas are done, what this one's target spaces saw: shapes and hidden states."""
    here = replicas.current()
    original: Any = None if here is None else here.original(wrapper)
    if original is None:
        return
    seen = {
        (kind, name): (space._shape, list(getattr(space, "_buffer", ())))
        for kind, name, space in spaces_of(wrapper)
        if not is_parameter(space)
    }
    if seen:
        replicas.defer(seen, wrapper, "targets", lambda shards: _settle(original, shards), always=True)


def _settle(original: Any, shards: List[Dict[Tuple[str, str], Tuple[Optional[List[int]], List[Tensor]]]]) -> None:
    for kind, name, space in spaces_of(original):
        parts = [shard[(kind, name)] for shard in shards if (kind, name) in shard]
        shapes = [shape for shape, _ in parts if shape is not None]
        if shapes:
            space.shape = batch_of(shapes)
        for states in zip(*(states for _, states in parts)):
            space.hidden_state = _joined(list(states), original.name, name)


def _whole_rank(shapes: List[Any]) -> List[List[int]]:
    """Shapes of the same number of dimensions: a shard of one sample may have lost its first one to ``squeeze()``."""
    most = max(len(shape) for shape in shapes)
    return [[1] * (most - len(shape)) + list(shape) for shape in shapes]


def batch_of(shapes: List[List[int]]) -> List[int]:
    """The shape of the batch whose shards have these shapes."""
    shapes = _whole_rank(shapes)
    whole = list(shapes[0])
    if whole:
        dim = cut_dimension(shapes)
        whole[dim] = sum(shape[dim] for shape in shapes)
    return whole


def _joined(states: List[Tensor], layer: str, target: str) -> Tensor:
    """The hidden state of the batch.

    Which dimension was cut is sure only where shards differ: a layer may flatten batch and time, and any size may equal
    a shard's by chance. So where the batch is not the first dimension (``DataParallel(dim=1)``, activations of time
    first) and is cut into equal shards, their hidden states are put together along the first. Distil a layer that has
    the batch first, or have the teacher cut in the same way and compare by ``mse``, which takes the mean over all elements.
    """
    if len(states) == 1:
        return states[0]
    if not states[0].dim():
        raise RuntimeError(
            f"the hidden state {target} of layer {layer!r} is a single number: those of {len(states)} replicas cannot be joined "
            "to a batch. Distil a target with a batch dimension, or train on one device."
        )
    shapes = _whole_rank([state.shape for state in states])
    return torch.cat([state.to(states[0].device).reshape(shape) for state, shape in zip(states, shapes)], cut_dimension(shapes))
