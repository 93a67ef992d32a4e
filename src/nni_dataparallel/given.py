"""What a compressor is given that it cannot take as the user means it.

Names with a DataParallel's prefix, a model wrapped for parallel use, a config that fits no layer.
"""

from __future__ import annotations

import contextlib
import re
import threading
from typing import Any, Dict, Iterator, List, Set

from torch import nn

from .notices import warn

__all__ = ["PREFIX", "constructing", "described", "kind_of", "plain_model", "users_model", "warn", "warn_of_ddp", "without_prefix"]

PREFIX = "module."
NAMES = ("op_names", "exclude_op_names")
PATTERNS = ("op_names_re", "exclude_op_names_re")
FUSED = "fuse_names"
_construction = threading.local()


@contextlib.contextmanager
def constructing(compressor: Any) -> Iterator[bool]:
    """Yield whether this is the first fix around ``compressor``'s constructor.

    A subclass of ours may stand on top of patched stock classes: done once is enough.
    """
    outer = getattr(_construction, "compressor", None)
    _construction.compressor = compressor
    try:
        yield outer is not compressor
    finally:
        _construction.compressor = outer


def plain_model(model: nn.Module) -> nn.Module:
    """The model inside a DataParallel; any other one as it is."""
    return model.module if isinstance(model, nn.DataParallel) else model


def users_model(model: nn.Module) -> nn.Module:
    """The model inside a DataParallel or a DistributedDataParallel; any other one as it is."""
    return model.module if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)) else model


def without_prefix(config_list: Any, model: nn.Module, in_parallel: bool) -> Any:
    """``config_list`` with the names that ``model``, taken out of its DataParallel (``in_parallel``), has for its layers.

    A layer that is really called ``module.<name>``, in a child of the user's named ``module``, keeps its name.
    """
    names = {name for name, _ in model.named_modules()}
    try:
        # In a list made from a DataParallel's names every name has the prefix, that of a child called `module` too.
        every = in_parallel and all(_prefixed(name, names) for config in config_list for name in _names_in(config))
        plain_list = [_plain(config, names, every, in_parallel) for config in config_list]
    except (AttributeError, TypeError, re.error):  # not a list of dicts of lists of names: NNI says so
        return config_list
    return plain_list if plain_list != list(config_list) else config_list


def _names_in(config: Dict[str, Any]) -> List[Any]:
    fused = [name for names in config.get(FUSED) or () for name in names]
    return [name for key in NAMES for name in config.get(key) or ()] + fused


def _prefixed(name: Any, names: Set[str]) -> bool:
    return isinstance(name, str) and name.startswith(PREFIX) and name[len(PREFIX) :] in names


def _plain(config: Dict[str, Any], names: Set[str], every: bool, in_parallel: bool) -> Dict[str, Any]:
    def plain(name: Any) -> Any:
        return name[len(PREFIX) :] if _prefixed(name, names) and (every or name not in names) else name

    changed: Dict[str, Any] = {key: [plain(name) for name in config[key]] for key in NAMES if config.get(key)}
    if config.get(FUSED):
        changed[FUSED] = [type(fused)(plain(name) for name in fused) for fused in config[FUSED]]
    if in_parallel:
        changed.update({key: [p for given in config[key] for p in _patterns(given, names)] for key in PATTERNS if config.get(key)})
    return {**config, **changed}


def _patterns(pattern: str, names: Set[str]) -> List[str]:
    """A pattern that only names with the prefix fit, as patterns of the names that it means."""
    meant = sorted(name for name in names if name and re.match(pattern, PREFIX + name))
    if not meant or any(re.match(pattern, name) for name in names):
        return [pattern]
    return [f"{re.escape(name)}$" for name in meant]


def kind_of(model: nn.Module) -> str:
    """The class of the user's model."""
    return type(users_model(model)).__name__


def described(model: nn.Module) -> str:
    """The names and kinds of a model's layers, for an error's text."""
    layers = [
        f"{name} ({type(module).__name__})" for name, module in users_model(model).named_modules() if not list(module.children())
    ]
    return ", ".join(layers[:8]) + (", ..." if len(layers) > 8 else "")


def warn_of_ddp(compressor: Any, model: nn.Module, where: str, order: str) -> None:
    """Say in which order a compressor and a DistributedDataParallel are built."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        kind = type(model).__name__
        warn(
            f"{type(compressor).__name__} was given a {kind}, whose layers it calls 'module.<name>' (in op_names and in {where}). "
            f"{order.format(kind=kind, name=type(compressor).__name__)}"
        )
