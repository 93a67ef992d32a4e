"""What a quantizer is told at construction that cannot work as the user means it."""

from __future__ import annotations

import threading
import warnings
from typing import Any, Callable

from torch import nn

__all__ = ["quantizer_init"]

_under_construction = threading.local()


def quantizer_init(stock: Callable[..., None], self: Any, model: nn.Module, config_list: Any, *args: Any, **kwargs: Any) -> None:
    """``Quantizer.__init__``: warn about a model that is wrapped already, and about no match."""
    if getattr(_under_construction, "quantizer", None) is self:
        # A subclass of ours on top of patched stock classes: said once is enough.
        stock(self, model, config_list, *args, **kwargs)
        return
    parallel = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    if isinstance(model, parallel):
        kind = type(model).__name__
        warnings.warn(
            f"{type(self).__name__} was given a {kind}. Some NNI releases then name every layer 'module.<name>' "
            f"(in op_names and in the export), others unwrap it and compress() returns the bare model, which runs "
            f"on one device. Build the quantizer on the plain model first, then wrap it: "
            f"quantizer = {type(self).__name__}(model, config_list, optimizer, ...), and after it the {kind}.",
            stacklevel=4,
        )
    outer = getattr(_under_construction, "quantizer", None)
    _under_construction.quantizer = self
    try:
        stock(self, model, config_list, *args, **kwargs)
    finally:
        _under_construction.quantizer = outer
    if not self.get_modules_wrapper():
        inner = model.module if isinstance(model, parallel) else model
        names = [f"{name} ({type(module).__name__})" for name, module in inner.named_modules() if not list(module.children())]
        shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
        warnings.warn(
            f"{type(self).__name__} quantises nothing: no layer of {type(inner).__name__} matches config_list "
            f"{config_list!r}. Use op_types or op_names of its layers, which are: {shown}.",
            stacklevel=4,
        )
