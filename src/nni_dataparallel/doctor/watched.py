"""``nn.DataParallel`` on virtual devices that watches its replicas.

What they keep after a forward is noted, since they are gone afterwards; constants that the model captured live on
device 0, as they would on GPUs; and who asks a replica for its parameters, of which it has none, is noted, too.
"""

from __future__ import annotations

import inspect
from collections import abc
from typing import Any, Dict, Iterator, List, Optional

from torch import Tensor, nn

from ..rehearsal import Rehearsal
from ..virtual import virtual_devices
from .places import Place, caller
from .state import State, state_of

__all__ = ["Watched"]


class Watched(Rehearsal):
    """See the module's docstring."""

    def __init__(self, module: nn.Module, replicas: int, check: bool) -> None:
        super().__init__(module, replicas, check=check)
        self.states: List[State] = []
        """What each replica of the first forward kept."""
        self.asked: Dict[str, Place] = {}
        """Module -> where its replica was asked for its parameters."""
        self._copies: List[nn.Module] = []

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """``nn.DataParallel.forward`` on virtual devices."""
        with virtual_devices(self._replicas, self._check) as devices:
            for constant in _constants(self.module):
                devices.claim(constant, 0)
            try:
                output = nn.DataParallel.forward(self, *inputs, **kwargs)
                if self._copies and not self.states:
                    self.states = [state_of(copy) for copy in self._copies]
            finally:
                self._copies = []
        return output

    def replicate(self, module: nn.Module, device_ids: Any) -> List[nn.Module]:
        """The replicas, each of which tells who asks it for its parameters."""
        self._copies = super().replicate(module, device_ids)
        for copy in self._copies:
            for name, part in copy.named_modules():
                part.__dict__["named_parameters"] = self._spy(name, part)
        return list(self._copies)

    def _spy(self, name: str, part: nn.Module) -> Any:
        def named_parameters(*args: Any, **kwargs: Any) -> Iterator[Any]:
            place: Optional[Place] = caller()
            if place is not None:
                self.asked.setdefault(name, place)
            return type(part).named_parameters(part, *args, **kwargs)

        return named_parameters


def _constants(model: nn.Module) -> Iterator[Tensor]:
    """Floating point tensors that a forward can reach and that are neither parameters nor buffers.

    Left out are single numbers and integers: those of the host may be mixed with tensors of any GPU, and on the CPU
    nobody can tell whether they are meant to stay there.
    """
    seen = set()
    for module in model.modules():
        for name, value in module.__dict__.items():
            if name not in ("_parameters", "_buffers", "_modules"):
                yield from _tensors(value, 3)
        forward = getattr(type(module), "forward", None)
        if inspect.isfunction(forward) and forward not in seen:
            seen.add(forward)
            try:
                captured = inspect.getclosurevars(forward)
            except (TypeError, ValueError):
                continue
            for value in (*captured.nonlocals.values(), *captured.globals.values()):
                yield from _tensors(value, 3)


def _tensors(value: Any, depth: int) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.dim() > 0:
            yield value
    elif depth and isinstance(value, abc.Mapping):
        for item in value.values():
            yield from _tensors(item, depth - 1)
    elif depth and isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item, depth - 1)
