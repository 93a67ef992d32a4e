"""What a quantizer is given that it cannot take as the user means it."""

from __future__ import annotations

import inspect
from typing import Any, Callable

from torch import nn

from .. import given

__all__ = ["compress", "quantizer_init"]

_FIRST = "Build the quantizer on the plain model first, then wrap it: "
_ORDER = _FIRST + (
    "the optimizer of model.parameters(), quantizer = {name}(model, config_list, optimizer, ...), quantizer.compress(), "
    "and after it the {kind}."
)
_ORDER_1_4 = _FIRST + (
    "quantizer = {name}(model, config_list), quantizer.compress(), the optimizer of model.parameters(), and after it the {kind}."
)


def quantizer_init(stock: Callable[..., None], self: Any, model: nn.Module, config_list: Any, *args: Any, **kwargs: Any) -> None:
    """``Quantizer.__init__``: take the model out of its DataParallel, and names without its prefix.

    Otherwise NNI 1.4 - 2.4 calls every layer ``module.<name>``, in the export too.
    """
    with given.constructing(self) as first:
        if not first:
            stock(self, model, config_list, *args, **kwargs)
            return
        plain = given.plain_model(model)
        order = _ORDER if "optimizer" in inspect.signature(stock).parameters else _ORDER_1_4
        given.warn_of_ddp(self, plain, "the export", order)
        config_list = given.without_prefix(config_list, plain, plain is not model)
        stock(self, plain, config_list, *args, **kwargs)
    if plain is not model:
        self.parallel_model = model
    if self.modules_wrapper is not None and not self.get_modules_wrapper():
        _warn_of_no_match(self, plain, config_list)


def compress(stock: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """``Quantizer.compress``: what was given in a DataParallel comes back in it."""
    wrapped_here = self.modules_wrapper is None  # 1.4
    model = stock(self, *args, **kwargs)
    if wrapped_here and not self.get_modules_wrapper():
        _warn_of_no_match(self, self.bound_model, self.config_list)
    return self.__dict__.get("parallel_model", model)


def _warn_of_no_match(self: Any, model: nn.Module, config_list: Any) -> None:
    given.warn(
        f"{type(self).__name__} quantises nothing: no layer of {given.kind_of(model)} matches config_list "
        f"{config_list!r}. Use op_types or op_names of its layers, which are: {given.described(model)}."
    )
