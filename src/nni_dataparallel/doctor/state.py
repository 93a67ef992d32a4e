"""What a module keeps from one forward to the next: buffers and Python attributes, frozen to be compared."""

from __future__ import annotations

from collections import abc, deque
from typing import Any, Dict, List, NamedTuple, Tuple

import torch
from torch import Tensor, nn

__all__ = ["MISSING", "Key", "State", "is_of_nni", "non_leaves", "own_names", "same", "shown", "state_of"]

DEPTH, LENGTH = 4, 1000  # of containers that are looked into
_OF_TORCH = frozenset(nn.Module().__dict__) | {"_is_replica", "_former_parameters", "_flat_weights", "_flat_weight_refs"}
_OF_OURS = frozenset({"_recorded_into", "named_parameters"})


class Key(NamedTuple):
    """One buffer or attribute of one module."""

    module: str
    name: str
    is_buffer: bool


State = Dict[Key, Any]


class _Missing:
    """Stands for an attribute that does not exist."""


MISSING = _Missing()


class _Opaque(NamedTuple):
    """Stands for an object that is not looked into."""

    kind: str


def is_of_nni(module: nn.Module) -> bool:
    """Whether NNI has made this module around one of the user's."""
    return type(module).__module__.partition(".")[0] == "nni"


def own_names(model: nn.Module) -> Dict[str, str]:
    """Names of modules that NNI has made, and of those it has wrapped -> the user's names for the layers."""
    names: Dict[str, str] = {}
    for name, module in model.named_modules():
        if is_of_nni(module):
            users = name[: -len("._nni_wrapper")] if name.endswith("._nni_wrapper") else name
            names.update({name: users, f"{name}.module": users})
    return names


def state_of(model: nn.Module, clone: bool = True) -> State:
    """Buffers and attributes of every module; NNI's own attributes are its bookkeeping, and left out."""
    state: State = {}
    for module_name, module in model.named_modules():
        for name, buffer in module._buffers.items():
            state[Key(module_name, name, True)] = _frozen(buffer, clone)
        if is_of_nni(module):
            continue
        for name, value in module.__dict__.items():
            if (
                name not in _OF_TORCH
                and name not in _OF_OURS
                and not isinstance(value, nn.Module)
                and not _is_derived(module, name)
            ):
                state[Key(module_name, name, False)] = _frozen(value, clone)
    return state


def _is_derived(module: nn.Module, name: str) -> bool:
    """Whether a hook of torch's (weight norm, spectral norm, pruning) computes the attribute before each forward."""
    return f"{name}_orig" in module._parameters or f"{name}_v" in module._parameters


def _frozen(value: Any, clone: bool, depth: int = DEPTH) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone() if clone else value.detach()
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return value
    if depth and isinstance(value, abc.Mapping) and len(value) <= LENGTH:
        return {str(key): _frozen(item, clone, depth - 1) for key, item in value.items()}
    if depth and isinstance(value, (list, tuple, deque)) and len(value) <= LENGTH:
        return tuple(_frozen(item, clone, depth - 1) for item in value)
    if isinstance(value, (set, frozenset)) and len(value) <= LENGTH:
        return tuple(sorted(str(item) for item in value))
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return _frozen(value.tolist(), clone, depth)
    return _Opaque(type(value).__name__)


def same(a: Any, b: Any, rtol: float = 0.0) -> bool:
    """Whether two frozen values are equal; tensors and floats up to ``rtol`` of the largest number in them."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return _close(a, b, rtol)
    if isinstance(a, dict) and isinstance(b, dict):
        return set(a) == set(b) and all(same(a[key], b[key], rtol) for key in a)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(same(x, y, rtol) for x, y in zip(a, b))
    if isinstance(a, float) and isinstance(b, float):
        return a == b or (a != a and b != b) or abs(a - b) <= rtol * max(abs(a), abs(b))
    return type(a) is type(b) and bool(a == b)


def _close(a: Tensor, b: Tensor, rtol: float) -> bool:
    if a.numel() != b.numel() or a.is_complex() != b.is_complex():
        return False
    if a.numel() == 0 or a.layout is not torch.strided:
        return True
    x, y = (t.detach().flatten().to(torch.complex128 if t.is_complex() else torch.float64) for t in (a, b))
    if torch.equal(torch.isnan(x), torch.isnan(y)):
        x, y = x[~torch.isnan(x)], y[~torch.isnan(y)]
        if torch.equal(x, y):
            return True
        largest = torch.maximum(x.abs().max(), y.abs().max()).item()
        return bool((x - y).abs().max().item() <= rtol * max(largest, 1e-6))
    return False


def shown(value: Any) -> str:
    """A frozen value in a few characters."""
    if isinstance(value, _Missing):
        return "missing"
    if isinstance(value, Tensor):
        if value.numel() == 1:
            return f"{value.item():.5g}"
        return f"a tensor of {'x'.join(str(n) for n in value.shape)}"
    if isinstance(value, float):
        return f"{value:.5g}"
    if isinstance(value, (tuple, dict)):
        return f"{len(value)} item{'' if len(value) == 1 else 's'}"
    if isinstance(value, _Opaque):
        return value.kind
    return repr(value)[:40]


def non_leaves(model: nn.Module) -> List[Tuple[Key, str]]:
    """Buffers and attributes that hang on a graph: ``copy.deepcopy`` refuses them."""
    found = []
    for module_name, module in model.named_modules():
        holders = [(name, value, True) for name, value in module._buffers.items()]
        if not is_of_nni(module):
            holders += [(n, v, False) for n, v in module.__dict__.items() if n not in _OF_TORCH and n not in _OF_OURS]
        for name, value, is_buffer in holders:
            tensor = next(_hanging(value, DEPTH), None)
            if tensor is not None and not _is_derived(module, name):
                found.append((Key(module_name, name, is_buffer), type(tensor.grad_fn).__name__))
    return found


def _hanging(value: Any, depth: int) -> Any:
    if isinstance(value, Tensor):
        if value.grad_fn is not None:
            yield value
    elif depth and isinstance(value, abc.Mapping) and len(value) <= LENGTH:
        for item in value.values():
            yield from _hanging(item, depth - 1)
    elif depth and isinstance(value, (list, tuple, deque)) and len(value) <= LENGTH:
        for item in value:
            yield from _hanging(item, depth - 1)
