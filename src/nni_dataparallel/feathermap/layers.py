"""Hashed layers: the user's own layer, whose ``weight`` and ``bias`` are read from the pool.

A layer gets a subclass of its class, ``HashedConv2d`` for ``Conv2d``. Its weight is a property, so that every way in which
the layer is used (a forward of the user's, attention's fast path, a tied layer, a penalty on the weight) gets today's
value with its graph, and nothing is left behind that a replica, a copy or a checkpoint could find stale.
"""

from __future__ import annotations

from typing import Any, Dict, Iterator, List, Tuple

from torch import Tensor, nn

from .pool import Pool

__all__ = ["Link", "apart", "follow", "hash_layer", "hashed_layers", "restore_layer"]

_LINK = "_feather_link"
_classes: Dict[Tuple[type, Tuple[str, ...]], type] = {}


class Link:
    """What a hashed layer knows: its pool, and which slots its tensors have.

    No module, so that the pool is not a submodule of every layer.
    """

    def __init__(self, pool: Pool, slots: Dict[str, int], order: List[str]) -> None:
        self.pool, self.slots, self.order = pool, slots, order


def _refuse(layer: nn.Module, name: str) -> None:
    raise AttributeError(
        f"{name} of this {type(layer).__name__} is computed from FeatherNet's factors: it can be neither assigned nor "
        "deleted, so quantizers and pruners cannot wrap this layer. Apply them to net.pool (the linear layers V1 and V2), "
        "leave the layer out with FeatherNet(..., exclude=...), or take a plain model from net.materialized()."
    )


def _property(name: str, base: type) -> property:
    def read(layer: nn.Module) -> Tensor:
        link = layer.__dict__[_LINK]
        try:
            return link.pool.tensor(link.slots[name], getattr(layer, name + "_p"))  # type: ignore[no-any-return]
        except AttributeError as error:  # would reach nn.Module.__getattr__, which says that there is no `weight`
            raise RuntimeError(f"{name} of a hashed {base.__name__} cannot be computed: {error}") from error

    def refuse(layer: nn.Module, *value: Any) -> None:
        _refuse(layer, name)

    return property(read, refuse, refuse, f"Computed from the pool's factors, times ``{name}_p``.")


def _hashed_class(base: type, names: Tuple[str, ...]) -> type:
    made = _classes.get((base, names))
    if made is None:

        def reduce(layer: Any, protocol: Any) -> Any:
            reduced: Any = object.__reduce_ex__(layer, max(int(protocol), 2))
            arguments, rest = reduced[1], reduced[2:]
            return (_new, (base, names, *arguments[1:]), *rest)

        def forward(layer: Any, *args: Any, **kwargs: Any) -> Any:
            with layer.__dict__[_LINK].pool.reading_once():
                return base.forward(layer, *args, **kwargs)  # type: ignore[attr-defined]

        def registering(method: str) -> Any:
            def register(layer: Any, name: str, *args: Any, **kwargs: Any) -> None:
                if name in names:
                    _refuse(layer, name)
                getattr(base, method)(layer, name, *args, **kwargs)

            return register

        made = type(base)(
            f"Hashed{base.__name__}",
            (base,),
            {
                **{name: _property(name, base) for name in names},
                **({"forward": forward} if issubclass(base, nn.MultiheadAttention) else {}),
                # Assigning a Parameter registers it: nn.Module does not ask the property.
                **{method: registering(method) for method in ("register_parameter", "register_buffer")},
                "__module__": base.__module__,
                "__doc__": f"``{base.__name__}`` with {' and '.join(names)} from FeatherNet's factors.",
                "__reduce_ex__": reduce,  # a class made at run time cannot be found by its name
                "__jit_unused_properties__": [*getattr(base, "__jit_unused_properties__", []), *names],
            },
        )
        made = _classes.setdefault((base, names), made)
    return made


def _new(base: type, names: Tuple[str, ...], *arguments: Any) -> Any:
    cls = _hashed_class(base, names)
    return cls.__new__(cls, *arguments)


def hash_layer(layer: nn.Module, pool: Pool, slots: Dict[str, int], scalars: Dict[str, nn.Parameter]) -> None:
    """Take a layer's Parameters ``slots`` away; from now on they come from ``pool``, times ``<name>_p``."""
    link = Link(pool, dict(slots), list(layer._parameters))
    layer.__class__ = _hashed_class(type(layer), tuple(slots))
    for name in slots:
        del layer._parameters[name]
    layer.__dict__[_LINK] = link
    for name, scalar in scalars.items():
        layer.register_parameter(name + "_p", scalar)


def restore_layer(layer: nn.Module, tensors: Dict[str, nn.Parameter]) -> None:
    """The opposite of :func:`hash_layer`, with ``tensors`` as Parameters in their old places."""
    link = layer.__dict__.pop(_LINK)
    layer.__class__ = type(layer).__mro__[1]
    held = dict(layer._parameters)
    for name in list(layer._parameters):
        del layer._parameters[name]
    for name in [*link.order, *held]:
        if name in link.slots:
            layer._parameters[name] = tensors[name]
        elif name in held and not (name.endswith("_p") and name[:-2] in link.slots):
            layer._parameters[name] = held[name]


def hashed_layers(root: nn.Module) -> Iterator[Tuple[str, nn.Module, Link]]:
    """Every hashed layer below ``root``, with its path and its link."""
    for path, layer in root.named_modules():
        link = layer.__dict__.get(_LINK)
        if link is not None:
            yield path, layer, link


def follow(root: nn.Module, pool: Pool) -> None:
    """Let the layers of a replica read the replica's pool."""
    for layer in root.modules():
        link = layer.__dict__.get(_LINK)
        if link is not None and link.pool is not pool:
            layer.__dict__[_LINK] = Link(pool, link.slots, link.order)


def apart(root: nn.Module) -> Tuple[List[nn.Parameter], List[nn.Parameter]]:
    """The scalars of all hashed layers below ``root``, and its other Parameters; each once."""
    known = {id(getattr(layer, name + "_p")) for _, layer, link in hashed_layers(root) for name in link.slots}
    parameters = list(root.parameters())
    return [p for p in parameters if id(p) in known], [p for p in parameters if id(p) not in known]
