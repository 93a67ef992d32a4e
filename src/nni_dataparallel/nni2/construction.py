"""What a quantizer is given that it cannot take as the user means it."""

from __future__ import annotations

import threading
import warnings
from typing import Any, Callable, Dict

from torch import nn

__all__ = ["compress", "quantizer_init"]

_under_construction = threading.local()
_PREFIX = "module."


def quantizer_init(stock: Callable[..., None], self: Any, model: nn.Module, config_list: Any, *args: Any, **kwargs: Any) -> None:
    """``Quantizer.__init__``: take the model out of its DataParallel, and names without its prefix.

    Otherwise NNI 1.4 - 2.4 calls every layer ``module.<name>``, in the export too. A layer that is really
    called so, in a child of the user's named ``module``, keeps its name.
    """
    if getattr(_under_construction, "quantizer", None) is self:
        # A subclass of ours on top of patched stock classes: done once is enough.
        stock(self, model, config_list, *args, **kwargs)
        return
    outer_model = model
    if isinstance(model, nn.DataParallel):
        model = model.module
    elif isinstance(model, nn.parallel.DistributedDataParallel):
        kind = type(model).__name__
        warnings.warn(
            f"{type(self).__name__} was given a {kind}, whose layers it calls 'module.<name>' (in op_names and in the "
            f"export). Build the quantizer on the plain model first, then wrap it: "
            f"quantizer = {type(self).__name__}(model, config_list, optimizer, ...), and after it the {kind}.",
            stacklevel=4,
        )
    config_list = _without_prefix(config_list, model, model is not outer_model)
    outer = getattr(_under_construction, "quantizer", None)
    _under_construction.quantizer = self
    try:
        stock(self, model, config_list, *args, **kwargs)
    finally:
        _under_construction.quantizer = outer
    if outer_model is not model:
        self.parallel_model = outer_model
    if self.modules_wrapper is not None and not self.get_modules_wrapper():
        _warn_of_no_match(self, model, config_list)


def compress(stock: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """``Quantizer.compress``: what was given in a DataParallel comes back in it."""
    wrapped_here = self.modules_wrapper is None  # 1.4
    model = stock(self, *args, **kwargs)
    if wrapped_here and not self.get_modules_wrapper():
        _warn_of_no_match(self, self.bound_model, self.config_list)
    return self.__dict__.get("parallel_model", model)


def _without_prefix(config_list: Any, model: nn.Module, in_parallel: bool) -> Any:
    names = {name for name, _ in model.named_modules()}
    replaced: Dict[str, str] = {}

    def prefixed(name: Any) -> bool:
        return isinstance(name, str) and name.startswith(_PREFIX) and name[len(_PREFIX) :] in names

    def plain(name: Any) -> Any:
        if prefixed(name) and (every or name not in names):
            replaced[name] = name[len(_PREFIX) :]
            return replaced[name]
        return name

    try:
        # In a list made from a DataParallel's names every name has the prefix, that of a child called `module` too.
        every = in_parallel and all(prefixed(name) for config in config_list for name in config.get("op_names", ()))
        plain_list = [{**config, "op_names": [plain(name) for name in config["op_names"]]} if "op_names" in config else config
                      for config in config_list]  # fmt: skip
    except (AttributeError, TypeError):  # not a list of dicts: NNI says so
        return config_list
    return plain_list if replaced else config_list


def _warn_of_no_match(self: Any, model: nn.Module, config_list: Any) -> None:
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    names = [f"{name} ({type(module).__name__})" for name, module in inner.named_modules() if not list(module.children())]
    shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    warnings.warn(
        f"{type(self).__name__} quantises nothing: no layer of {type(inner).__name__} matches config_list "
        f"{config_list!r}. Use op_types or op_names of its layers, which are: {shown}.",
        stacklevel=5,
    )
