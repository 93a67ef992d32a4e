"""The machinery of the fix table: check a target, install a fix, take it back.

A :class:`Fix` is a row: *where* (a target such as ``"package.module:Class.method"``), *for which
releases*, *what* (a function that gets the stock callable first) and *why*. This file knows
neither torch nor NNI; it only knows how to put a function in the place of another so that the
place can be restored by identity.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import threading
from dataclasses import dataclass
from typing import Any, Callable, Dict, Iterable, List, Optional, Set, Tuple

from packaging.specifiers import SpecifierSet

from .notices import PatchError, PatchWarning, warn

__all__ = ["Fix", "PatchError", "PatchWarning", "check", "install", "is_live", "uninstall", "was_replaced"]


@functools.lru_cache(maxsize=None)
def _within(releases: str, release: str) -> bool:
    """Many rows are for the same releases, and comparing versions takes its time."""
    return SpecifierSet(releases).contains(release, prereleases=True)


@dataclass(frozen=True)
class Fix:
    """One row of the fix table.

    Parameters
    ----------
    name
        Short name of the repair, unique per target and release.
    target
        ``"module:function"`` or ``"module:Class.method"``.
    fix
        ``fix(stock, *args, **kwargs)``: takes the stock callable, then the call's own arguments.
    reason
        The fault that is repaired, in one sentence.
    releases
        A version specifier of the NNI releases the row is for; empty means all of them.
    expects
        Parameter names the stock callable must have, in this order, before it is touched.
    issue
        Where the fault was reported.
    inherited
        The class has the method from a base class; the fix becomes its own.
    added
        The class has no such method; ``fix`` gets None for the stock callable.
    on_import
        The row waits until a script imports the module: it is not worth loading for everybody.
    """

    name: str
    target: str
    fix: Callable[..., Any]
    reason: str
    releases: str = ""
    expects: Tuple[str, ...] = ()
    issue: str = ""
    inherited: bool = False
    added: bool = False
    on_import: bool = False

    def fits(self, release: str) -> bool:
        """Whether the row is for this NNI release (pre-releases count)."""
        return _within(self.releases, release)

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]

    @property
    def due(self) -> bool:
        """Whether the row has to be in place now, or waits for an import."""
        return not self.on_import or self.module in sys.modules

    @property
    def path(self) -> List[str]:
        return self.target.partition(":")[2].split(".")


@dataclass
class _Installed:
    owner: Any
    attribute: str
    stock: Any  # what stood in owner.__dict__, or _INHERITED
    placed: Any
    holders: Set[str]


_INHERITED = object()
_lock = threading.RLock()
_installed: Dict[str, _Installed] = {}


def _locate(fix: Fix) -> Tuple[Any, str]:
    owner: Any = importlib.import_module(fix.module)
    for name in fix.path[:-1]:
        owner = getattr(owner, name)
    return owner, fix.path[-1]


def _plain(attribute: Any) -> Callable[..., Any]:
    return attribute.__func__ if isinstance(attribute, (staticmethod, classmethod)) else attribute


def check(fix: Fix) -> Optional[str]:
    """Say in one sentence why ``fix`` does not fit what is installed; None where it fits."""
    if fix.target in _installed:
        return None
    try:
        owner, name = _locate(fix)
        if fix.target in _installed:
            return None  # by a hook of ours on the import that has just happened
        if fix.added:
            return f"{fix.target} exists, which it does not in that release" if hasattr(owner, name) else None
        stock = inspect.getattr_static(owner, name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("nni"):
            return f"{fix.module} cannot be imported ({error})"
        return f"{fix.module} cannot be imported, {error.name!r} is not installed: pip install {error.name}"
    except ImportError as error:
        return f"{fix.module} cannot be imported ({error})"
    except AttributeError as error:
        return f"{fix.target} does not exist ({error})"
    if not fix.inherited and name not in vars(owner):
        return f"{fix.target} does not exist (only a base class has it)"
    if not callable(_plain(stock)):
        return f"{fix.target} is not a function but {type(stock).__name__}"
    names = tuple(inspect.signature(_plain(stock)).parameters)
    if names[: len(fix.expects)] != fix.expects:
        return f"{fix.target} takes ({', '.join(names)}), not ({', '.join(fix.expects)}, ...)"
    return None


def bind(fix: Fix, stock: Any) -> Any:
    """Return what stands in the place of ``stock``: same kind of descriptor, name and signature."""
    inner = None if fix.added else _plain(stock)
    function = fix.fix

    @functools.wraps(inner or function)
    def fixed(*args: Any, **kwargs: Any) -> Any:
        return function(inner, *args, **kwargs)

    fixed.__nni_dataparallel__ = fix  # type: ignore[attr-defined]
    if isinstance(stock, (staticmethod, classmethod)):
        return type(stock)(fixed)
    return fixed


def stock_attribute(cls: type, name: str) -> Any:
    """The raw attribute ``cls.name`` as it is without any installed fix."""
    ours = {id(entry.placed): entry.stock for entry in _installed.values()}
    for base in cls.__mro__:
        if name in vars(base):
            value = vars(base)[name]
            value = ours.get(id(value), value)
            if value is not _INHERITED:
                return value
    raise AttributeError(f"{cls.__qualname__} has no attribute {name!r}")


def install(fix: Fix, holder: str) -> None:
    """Put ``fix`` in place for ``holder``. A second holder only keeps it there longer."""
    with _lock:
        entry = _installed.get(fix.target)
        if entry is not None:
            entry.holders.add(holder)
            return
        owner, name = _locate(fix)
        present = vars(owner).get(name, _INHERITED)
        placed = bind(fix, inspect.getattr_static(owner, name, None))
        setattr(owner, name, placed)
        _installed[fix.target] = _Installed(owner, name, present, placed, {holder})


def uninstall(fix: Fix, holder: str) -> None:
    """Take ``fix`` back for ``holder``; the last holder restores the stock attribute itself."""
    with _lock:
        entry = _installed.get(fix.target)
        if entry is None or holder not in entry.holders:
            return
        entry.holders.discard(holder)
        if entry.holders:
            return
        del _installed[fix.target]
        if vars(entry.owner).get(entry.attribute) is not entry.placed:
            # Somebody patched over us: putting the stock callable back would undo their work.
            warn(
                f"{fix.target} was replaced by other code after nni_dataparallel patched it; "
                "left as it is. Undo the other patch first, then call unpatch().",
                PatchWarning,
            )
        elif entry.stock is _INHERITED:
            delattr(entry.owner, entry.attribute)
        else:
            setattr(entry.owner, entry.attribute, entry.stock)


def is_live(fix: Fix) -> bool:
    """Whether the attribute that callers reach right now is this fix (read, not remembered)."""
    entry = _installed.get(fix.target)
    return entry is not None and vars(entry.owner).get(entry.attribute) is entry.placed


def was_replaced(fix: Fix) -> bool:
    """Whether ``fix`` was installed, and other code put something else in its place."""
    return fix.target in _installed and not is_live(fix)


def require(fixes: Iterable[Fix]) -> None:
    """Raise :class:`PatchError` naming every row that does not fit; change nothing."""
    problems: Dict[str, None] = {}  # an ordered set: one missing package concerns many rows
    for fix in fixes:
        problem = check(fix)
        if problem:
            problems[problem] = None
    if problems:
        raise PatchError(
            "These fixes do not fit what is installed, nothing was patched:\n  "
            + "\n  ".join(problems)
            + "\nIf NNI itself was changed, reinstall the release from the package registry, or use "
            "`import nni_dataparallel.auto`, which installs the fixes that fit and names the others."
        )
