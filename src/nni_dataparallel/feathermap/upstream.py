"""Checkpoints of phelps-matthew/FeatherMap: the names in them, and what they tell about the net."""

from __future__ import annotations

import os
from typing import Any, Dict, MutableMapping, Set, Tuple

from torch import Tensor, nn

from ..files import read_tensors

__all__ = ["hashed_names", "read", "translate"]

_FACTORS = (("_V1", "_V2"), ("V1", "V2"))  # the released version, and those before it
_WRAPPED = "module."
_INSIDE = ("net", "state_dict", "model", "model_state_dict")


def read(checkpoint: Any) -> Dict[str, Tensor]:
    """The state dict in a checkpoint: a dict, one inside another (``{"net": ...}``), or a file.

    Raises
    ------
    ValueError
        When the file cannot be read, or there are no factors in it.
    """
    where = "the checkpoint"
    if isinstance(checkpoint, (str, os.PathLike)):
        where = os.fspath(checkpoint)
        checkpoint = read_tensors(where)
    for key in _INSIDE:
        if isinstance(checkpoint, dict) and isinstance(checkpoint.get(key), dict):
            checkpoint = checkpoint[key]
            break
    if not isinstance(checkpoint, dict):
        raise ValueError(f"{where} holds a {type(checkpoint).__name__} where a state dict was expected")
    state = dict(checkpoint)
    translate(state)
    if "pool.V1.weight" not in state or "pool.V2.weight" not in state:
        raise ValueError(
            f"{where} has no factors _V1 and _V2: it was not saved from a FeatherNet. It has {', '.join(list(state)[:5])}"
        )
    for key in ("pool.V1.weight", "pool.V2.weight"):
        if not isinstance(state[key], Tensor):
            raise ValueError(f"{where} holds a {type(state[key]).__name__} as a factor ({key}), where a Tensor was expected")
    return state


def translate(state: MutableMapping[str, Any], prefix: str = "") -> None:
    """Bring a state dict to this package's names, in place; nothing happens to one that has them.

    DataParallel's ``module.`` goes, ``_V1`` and ``_V2`` become the weights of the pool's linear layers.
    """
    wrapped = prefix + _WRAPPED
    own = [prefix + name for pair in _FACTORS for name in pair[:1]] + [prefix + "pool.V1."]
    deeper = [wrapped + name for pair in _FACTORS for name in pair[:1]] + [wrapped + "pool.V1."]
    if not _any(state, own) and _any(state, deeper):
        moved = {key: state.pop(key) for key in list(state) if key.startswith(wrapped)}
        state.update({prefix + key[len(wrapped) :]: value for key, value in moved.items()})
    for v1, v2 in _FACTORS:
        if prefix + v1 in state and prefix + v2 in state:
            state[prefix + "pool.V1.weight"] = state.pop(prefix + v1)
            right = state.pop(prefix + v2)
            matrix = isinstance(right, Tensor) and right.dim() == 2  # whatever else it is, its checks come later
            state[prefix + "pool.V2.weight"] = right.t().contiguous() if matrix else right
            break


def _any(state: MutableMapping[str, Any], starts: Any) -> bool:
    return any(key == start or (start.endswith(".") and key.startswith(start)) for key in state for start in starts)


def hashed_names(state: Dict[str, Tensor], model: nn.Module) -> Tuple[Set[str], int, int]:
    """What was hashed in a translated state dict: names inside ``model``, the wrapped one; n and m.

    Raises
    ------
    ValueError
        When the factors do not belong together, or ``model`` has no such tensors.
    """
    v1, v2 = state["pool.V1.weight"], state["pool.V2.weight"]
    if v1.dim() != 2 or v1.shape != v2.shape:
        raise ValueError(f"the checkpoint's factors do not fit each other: _V1 is {tuple(v1.shape)}, _V2 {tuple(v2.shape[::-1])}")
    names = {key[len(_WRAPPED) : -2] for key in state if key.startswith(_WRAPPED) and key.endswith(("weight_p", "bias_p"))}
    known = {f"{path}.{name}" if path else name for path, each in model.named_modules() for name in each._parameters}
    foreign = ", ".join(sorted(names - known)[:5])
    if foreign:
        raise ValueError(f"the checkpoint is of another model: it hashes {foreign}, which this one lacks")
    return names, int(v1.shape[0]), int(v1.shape[1])
