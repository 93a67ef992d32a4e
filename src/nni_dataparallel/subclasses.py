"""The fixed quantizers as subclasses, built from the same rows; stock classes stay untouched.

A row whose target lies on a class of the quantizer's MRO becomes a method of the subclass. The
helpers that a quantizer creates (its module wrappers, its autograd function) are exchanged for
subclasses made the same way.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any, Dict, List

from torch.nn import Module

from . import fixes, patching
from .descriptions import describe

__all__ = ["fixed_class", "quantizer"]

HOLDER = "subclasses"
_made: Dict[type, type] = {}


def quantizer(name: str) -> type:
    """The fixed subclass of NNI's quantizer ``name``.

    Raises
    ------
    ImportError
        When the installed NNI has no such quantizer; the text says which releases do.
    """
    release = fixes.installed_release()
    rows = fixes.rows_for(release)
    if not fixes.ships(release, name):
        others = [other for other in fixes.QUANTIZERS if fixes.ships(release, other)]
        raise ImportError(
            f"nni_dataparallel has no {name} for NNI {release}; it exists for NNI {' and '.join(fixes.QUANTIZERS[name])}. "
            f"NNI {release} has: {', '.join(others)}."
        )
    torch_rows = [row for row in rows if not row.releases]
    patching.require(row for row in rows if row.due)
    for row in torch_rows:
        patching.install(row, HOLDER)
    return fixed_class(fixes.stock_quantizer(name), "nni_dataparallel")


def _methods(stock: type, rows: List[patching.Fix]) -> Dict[str, Any]:
    lineage = {f"{base.__module__}:{base.__qualname__}": base for base in stock.__mro__}
    namespace: Dict[str, Any] = {}
    for row in rows:
        owner, _, name = row.target.rpartition(".")
        if owner in lineage and not _overridden(stock, lineage[owner], name):
            namespace[name] = patching.bind(row, None if row.added else patching.stock_attribute(stock, name))
    return namespace


def _overridden(stock: type, owner: type, name: str) -> bool:
    """Whether a wrapper has a forward of its own (the one of a fused batch norm) where the row is about its base class's.

    A quantizer's own method goes on to its base class's: the fix is around both.
    """
    return issubclass(stock, Module) and any(name in vars(base) for base in stock.__mro__[: stock.__mro__.index(owner)])


def fixed_class(stock: type, module: str = __name__) -> type:
    """The fixed subclass of ``stock``, made once; ``stock`` itself where no row concerns it."""
    if stock in _made:
        return _made[stock]
    namespace = _methods(stock, fixes.rows_for(fixes.installed_release()))
    if not namespace:
        return stock
    if "_wrap_modules" in namespace:
        namespace.update(_exchange_helpers(stock, namespace))
    elif hasattr(stock, "wrap_model"):
        namespace.update(_exchange_wrappers(stock))
    # Importable under its name, so that pickle finds it again.
    doc = describe(stock, fixes.installed_release()) if stock.__name__ in fixes.QUANTIZERS else stock.__doc__
    namespace.update(__module__=module, __qualname__=stock.__name__, __doc__=doc)
    made = type(stock)(stock.__name__, (stock,), namespace)
    _made[stock] = _made[made] = made
    return made


def _exchange_helpers(stock: type, namespace: Dict[str, Any]) -> Dict[str, Any]:
    init, wrap_modules = namespace["__init__"], namespace["_wrap_modules"]

    @functools.wraps(init)
    def exchanging_init(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        grad = self.quant_grad
        if isinstance(grad, type):  # 2.0 - 2.2 keep the class, later releases its `apply`
            self.quant_grad = fixed_class(grad)
        elif isinstance(getattr(grad, "__self__", None), type):
            self.quant_grad = fixed_class(grad.__self__).apply  # type: ignore[attr-defined]

    @functools.wraps(wrap_modules)
    def exchanging_wrap(self: Any, *args: Any, **kwargs: Any) -> Any:
        wrapper = wrap_modules(self, *args, **kwargs)
        wrapper.__class__ = fixed_class(type(wrapper))
        return wrapper

    return {"__init__": exchanging_init, "_wrap_modules": exchanging_wrap}


def _exchange_wrappers(stock: Any) -> Dict[str, Any]:
    wrap_model = stock.wrap_model

    @functools.wraps(wrap_model)
    def exchanging_wrap_model(self: Any) -> None:
        for wrapper in self._module_wrappers.values():
            wrapper.__class__ = fixed_class(type(wrapper))
        wrap_model(self)

    return {"wrap_model": exchanging_wrap_model}


def __getattr__(name: str) -> Any:
    """Make helper classes on demand, for an unpickled model in a fresh process."""
    for module in _homes_of_helpers():
        helper = getattr(importlib.import_module(module), name, None)
        if isinstance(helper, type):
            return fixed_class(helper)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _homes_of_helpers() -> List[str]:
    try:
        rows = fixes.rows_for(fixes.installed_release())
    except fixes.UnsupportedReleaseError:
        return []
    return sorted({row.module for row in rows if row.due and len(row.path) == 2})
