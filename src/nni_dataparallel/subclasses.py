"""The fixed quantizers as subclasses, built from the same rows; stock classes stay untouched.

A row whose target lies on a class of the quantizer's MRO becomes a method of the subclass. The
helpers that a quantizer creates (its module wrappers, its autograd function) are exchanged for
subclasses made the same way.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any, Dict, List, Tuple

from packaging.specifiers import SpecifierSet

from . import fixes, patching

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
    releases = fixes.QUANTIZERS[name]
    release = fixes.installed_release()
    rows = fixes.rows_for(release)
    if not SpecifierSet(releases).contains(release, prereleases=True):
        raise ImportError(f"nni_dataparallel has no {name} for NNI {release}; it exists for NNI {releases}")
    torch_rows = [row for row in rows if not row.releases]
    patching.require(row for row in rows if row.due)
    for row in torch_rows:
        patching.install(row, HOLDER)
    return fixed_class(fixes.stock_quantizer(name), "nni_dataparallel")


def _methods(stock: type, rows: List[patching.Fix]) -> Dict[str, Any]:
    lineage = {f"{base.__module__}:{base.__qualname__}" for base in stock.__mro__}
    namespace: Dict[str, Any] = {}
    for row in rows:
        owner, _, name = row.target.rpartition(".")
        if owner in lineage:
            namespace[name] = patching.bind(row, None if row.added else patching.stock_attribute(stock, name))
    return namespace


def fixed_class(stock: type, module: str = __name__) -> type:
    """The fixed subclass of ``stock``, made once; ``stock`` itself where no row concerns it."""
    if stock in _made:
        return _made[stock]
    namespace = _methods(stock, fixes.rows_for(fixes.installed_release()))
    if not namespace:
        return stock
    if "_wrap_modules" in namespace:
        namespace = {**namespace, **_exchange_helpers(stock, namespace)}
    # Importable under its name, so that pickle finds it again.
    namespace.update(__module__=module, __qualname__=stock.__name__, __doc__=stock.__doc__)
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


def __getattr__(name: str) -> Any:
    """Make helper classes on demand, for an unpickled model in a fresh process."""
    for module, path in _helpers():
        if path == name:
            return fixed_class(getattr(importlib.import_module(module), path))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _helpers() -> List[Tuple[str, str]]:
    try:
        rows = fixes.rows_for(fixes.installed_release())
    except fixes.UnsupportedReleaseError:
        return []
    return sorted({(row.module, row.path[0]) for row in rows if len(row.path) == 2})
