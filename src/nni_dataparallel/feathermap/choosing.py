"""Which tensors of a model are hashed, and why the others are not."""

from __future__ import annotations

from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple, Type, Union

from torch import nn

__all__ = ["Exclude", "Tensors", "choose", "checked_exclude"]

Exclude = Union[Type[nn.Module], str, Sequence[Union[Type[nn.Module], str]]]

_NORMS: Tuple[type, ...] = tuple(
    kind
    for kind in (
        nn.modules.batchnorm._NormBase,  # batch norms and instance norms
        nn.LayerNorm,
        nn.GroupNorm,
        getattr(nn, "RMSNorm", None),  # torch >= 2.4
    )
    if kind is not None
)
_KINDS: Tuple[Tuple[Tuple[type, ...], str], ...] = (
    (_NORMS, "norm"),
    ((nn.PReLU,), "PReLU"),
    ((nn.RNNBase, nn.RNNCellBase), "recurrent"),  # cuDNN wants their weights in one piece of memory
)
_ATTENTION = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias")


class Tensors(NamedTuple):
    """One Parameter, everywhere it is used.

    Attributes
    ----------
    uses
        ``(path of the module, module, name in it)``, the first in the order of ``named_modules()``.
    parameter
        The Parameter.
    fan_in
        Number of inputs of the weight it belongs to; 0 if it is left out.
    reason
        Why it is left out; None if it is hashed.
    """

    uses: List[Tuple[str, nn.Module, str]]
    parameter: nn.Parameter
    fan_in: int
    reason: Optional[str]

    @property
    def name(self) -> str:
        """The first full name."""
        path, _, name = self.uses[0]
        return f"{path}.{name}" if path else name

    @property
    def zero_row(self) -> Optional[int]:
        """The row that an embedding keeps at zero, for every use of a tied weight, wherever the embedding comes among them."""
        modules: List[Any] = [module for _, module, _ in self.uses if isinstance(module, (nn.Embedding, nn.EmbeddingBag))]
        rows = [module.padding_idx for module in modules if module.padding_idx is not None]
        return rows[0] if rows and self.reason is None else None


def checked_exclude(exclude: Any, model: nn.Module) -> Tuple[Tuple[type, ...], Tuple[str, ...]]:
    """``exclude`` as classes and paths; an error for what is neither, or no module of ``model``."""
    given = list(exclude) if isinstance(exclude, (list, tuple, set, frozenset)) else [exclude]
    paths = {path for path, _ in model.named_modules()}
    for item in given:
        if isinstance(item, str):
            if not item:
                raise ValueError("exclude names '', the model itself: nothing would be hashed")
            if item not in paths:
                raise ValueError(f"exclude names {item!r}, which is no module of the model: {_listed(paths)}")
        elif not isinstance(item, type):
            raise TypeError(f"exclude holds classes and names of modules, not {item!r}")
    return tuple(i for i in given if isinstance(i, type)), tuple(i for i in given if isinstance(i, str))


def _listed(paths: Set[str]) -> str:
    shown = sorted(path for path in paths if path)[:8]
    return f"there are {', '.join(shown)}{', ...' if len(paths) > 9 else ''}" if shown else "it has no submodules"


def choose(
    model: nn.Module,
    classes: Tuple[type, ...] = (),
    paths: Tuple[str, ...] = (),
    only: Optional[Set[str]] = None,
) -> List[Tensors]:
    """Every Parameter of ``model``, in the order in which layers take their slices.

    Parameters
    ----------
    model
        The plain model. Not changed.
    classes, paths
        Modules to leave out; a path leaves out what is below it as well.
    only
        Full names: hash exactly these, each by itself, tied or frozen (what FeatherMap did to a checkpoint).

    Raises
    ------
    TypeError
        When a weight to hash is complex or integer.
    ValueError
        When a lazy module has not run yet.
    """
    seen: Dict[Any, Tensors] = {}
    for path, module in model.named_modules():
        whole, own = _reason_for_module(path, module, classes, paths), _taken(module)
        for name in _in_order(module):
            parameter: Any = module._parameters[name]
            key: Union[int, str]
            full = f"{path}.{name}" if path else name
            if nn.parameter.is_lazy(parameter):
                raise ValueError(f"{full} has no size yet: run the model once, so that its lazy modules know theirs, then wrap it")
            if only is None:
                reason, key = whole or own or _reason_for(module, name, parameter), id(parameter)
            else:
                reason, key = None if full in only else "not hashed in the checkpoint", full
                if reason is None and own is not None:
                    raise ValueError(f"{full} is hashed in the checkpoint, but {own}: rename that")
            if reason is None and not parameter.is_floating_point():
                raise TypeError(f"{full} is {parameter.dtype}: only real floating point weights can be hashed, exclude this layer")
            use = (path, module, name)
            known = seen.get(key)
            if known is None:
                fan_in = _fan_in(module, name) if reason is None else 0
                seen[key] = Tensors([use], parameter, fan_in, reason)
            else:
                seen[key] = _joined(known, use, reason)
    return list(seen.values())


def _joined(known: Tensors, use: Tuple[str, nn.Module, str], reason: Optional[str]) -> Tensors:
    # A tied tensor is hashed if every layer that uses it can read it from the pool.
    if known.reason is None and reason is not None:
        reason = f"tied to {use[0]}.{use[2]}: {reason}"
    elif known.reason is not None:
        reason = known.reason
    return Tensors([*known.uses, use], known.parameter, known.fan_in if reason is None else 0, reason)


def _in_order(module: nn.Module) -> Iterator[str]:
    """Names of a module's own Parameters: weight and bias first, whatever order they were registered in."""
    own = [name for name, parameter in module._parameters.items() if parameter is not None]
    first = [name for name in ("weight", "bias") if name in own]
    yield from [*first, *(name for name in own if name not in first)]


def _reason_for_module(path: str, module: Any, classes: Tuple[type, ...], paths: Tuple[str, ...]) -> Optional[str]:
    if isinstance(module, classes) or any(path == p or path.startswith(p + ".") for p in paths):
        return "excluded"
    for kinds, reason in _KINDS:
        if isinstance(module, kinds):
            return reason
    if hasattr(module, "parametrizations") and nn.utils.parametrize.is_parametrized(module):
        return "parametrised"
    if getattr(module, "sparse", False) and isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return "sparse gradients"
    return None


def _taken(module: nn.Module) -> Optional[str]:
    """What the user has under the name of a scalar, which must not be overwritten."""
    for name in module._parameters:
        if module._parameters[name] is not None and _is_hashable(module, name) and hasattr(module, name + "_p"):
            return f"its layer has a {name}_p of its own"
    return None


def _is_hashable(module: nn.Module, name: str) -> bool:
    return name in ("weight", "bias") or (isinstance(module, nn.MultiheadAttention) and name in _ATTENTION)


def _reason_for(module: nn.Module, name: str, parameter: nn.Parameter) -> Optional[str]:
    if not _is_hashable(module, name):
        return "neither weight nor bias"
    if not parameter.requires_grad and parameter.is_floating_point():
        return "frozen"
    if not parameter.numel():
        return "empty"
    if name in ("weight", "bias") or name == "in_proj_bias":
        weight = _weight_beside(module, name)
        if weight is None:
            return "its layer has no weight of its own"
        if weight.dim() < 2:
            return "one-dimensional: no fan-in"
        if name.endswith("bias") and not weight.requires_grad:
            return "its weight is frozen"
    return None


def _weight_beside(module: nn.Module, name: str) -> Optional[nn.Parameter]:
    if name == "in_proj_bias":
        joint = module._parameters.get("in_proj_weight")
        return module._parameters.get("q_proj_weight") if joint is None else joint
    return module._parameters.get("weight")


def _fan_in(module: nn.Module, name: str) -> int:
    weight = module._parameters[name] if name.endswith("weight") else _weight_beside(module, name)
    assert weight is not None
    return max(1, weight[0].numel())
