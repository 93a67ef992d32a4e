"""What tells each worker thread of ``nn.DataParallel`` which replica it runs.

``nn.DataParallel`` and the functional ``data_parallel`` both go through ``replicate`` and
``parallel_apply``. The two fixes below wrap these names; the threads, the copies and the gathering stay
torch's.
"""

from __future__ import annotations

import weakref
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from torch import Tensor
from torch.nn import Module

from .group import Group
from .patching import Fix
from .replicas import Replica

__all__ = ["FIXES"]

_networks: weakref.WeakKeyDictionary[Module, weakref.ref[Module]] = weakref.WeakKeyDictionary()


def _replicate(stock: Callable[..., List[Module]], network: Module, *args: Any, **kwargs: Any) -> List[Module]:
    # A Parameter that gets its size in this forward (a learned scale, one per channel) has no gradient to sum yet.
    unsized = [p for p in network.parameters() if p.requires_grad and p.numel() == 0]
    for parameter in unsized:
        parameter.requires_grad_(False)
    try:
        copies = stock(network, *args, **kwargs)
    finally:
        for parameter in unsized:
            parameter.requires_grad_(True)
    for copy in copies:
        _networks[copy] = weakref.ref(network)
    _localise(network, copies)
    return copies


def _localise(network: Module, copies: List[Module]) -> None:
    """Let modules that hold others outside ``_modules`` point their copies at copies.

    Such a class has a method ``_localise_replica(self, copy, local)``: ``self`` is the network's own module,
    ``local`` gives for any module of the network the copy that belongs to ``copy``.
    """
    originals = list(network.modules())
    hosts = [i for i, module in enumerate(originals) if hasattr(type(module), "_localise_replica")]
    if not hosts:
        return
    for copy in copies:
        modules = list(copy.modules())
        copy_of = {id(original): module for original, module in zip(originals, modules)}
        for i in hosts:
            host: Any = originals[i]
            host._localise_replica(modules[i], lambda module: copy_of.get(id(module), module))  # noqa: B023


def _parallel_apply(
    stock: Callable[..., List[Any]],
    modules: Sequence[Module],
    inputs: Sequence[Any],
    kwargs_tup: Optional[Sequence[Dict[str, Any]]] = None,
    devices: Optional[Sequence[Any]] = None,
) -> List[Any]:
    if not all(getattr(module, "_is_replica", False) for module in modules):
        # Different models side by side (an ensemble) have nothing to merge.
        return stock(modules, inputs, kwargs_tup, devices)
    references = [_networks.get(module) for module in modules]
    networks = [None if reference is None else reference() for reference in references]
    if any(n is not networks[0] for n in networks):
        return stock(modules, inputs, kwargs_tup, devices)
    network = networks[0] if networks else None
    group = Group(len(modules))
    if devices is None:
        for index, given in enumerate(inputs):
            if _first_tensor(given) is None:
                group.leave(index)  # torch gives up on such a replica before it calls the module
    workers = [Replica(module, network, group, i) for i, module in enumerate(modules)]
    try:
        outputs = stock(workers, inputs, kwargs_tup, devices)
    except BaseException:
        for worker in workers:
            if not worker.begun:  # interrupted between the starts of two threads
                group.leave(worker.rank)
        for worker in workers:
            if worker.fatal is not None:
                raise worker.fatal from None
        raise
    if network is not None:
        group.settle(network)
    return outputs


def _first_tensor(obj: Any) -> Optional[Tensor]:
    from torch.nn.parallel.parallel_apply import get_a_var

    return get_a_var(obj)


# Where the functions are defined comes first: who imports them from there later gets the fixed ones, too.
_PLACES = {
    "replicate": ("torch.nn.parallel.replicate", "torch.nn.parallel.data_parallel", "torch.nn.parallel"),
    "parallel_apply": ("torch.nn.parallel.parallel_apply", "torch.nn.parallel.data_parallel", "torch.nn.parallel"),
}

FIXES: Tuple[Fix, ...] = tuple(
    Fix(
        name=f"{function} in {module}",
        target=f"{module}:{function}",
        fix=fix,
        reason=reason,
        expects=expects,
    )
    for function, fix, reason, expects in (
        ("replicate", _replicate, "replicas do not know which network they copy", ("network", "devices")),
        ("parallel_apply", _parallel_apply, "worker threads do not know their replica", ("modules", "inputs")),
    )
    for module in _PLACES[function]
)
