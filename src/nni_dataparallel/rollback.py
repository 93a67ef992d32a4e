"""A model is as it was if something raises in between."""

from __future__ import annotations

import contextlib
from typing import Any, Dict, Iterator, List, Optional, Tuple

import torch
from torch import Tensor, nn

__all__ = ["unchanged_on_error"]

_Containers = List[Tuple[Any, Any]]


@contextlib.contextmanager
def unchanged_on_error(*objects: Any, values: bool = False) -> Iterator[None]:
    """Put modules (with all below them) and other objects back, with what they hold, if the block raises.

    Parameters
    ----------
    objects
        Modules, optimizers, quantizers. Of a module's attributes those that torch or NNI keeps in dicts, lists and sets are
        restored as well, one level deep.
    values
        Also the numbers in the tensors, which takes a copy of them. Without, the block must not write into tensors; that it
        rebinds them, or gives them other storage (``.data =``), is undone.
    """
    modules = {id(m): m for each in objects if isinstance(each, nn.Module) for m in each.modules()}
    kept = [(each, dict(vars(each))) for each in (*modules.values(), *(o for o in objects if not isinstance(o, nn.Module)))]
    containers = [pair for _, attributes in kept for pair in _containers(attributes)]
    tensors = [_Kept(tensor, values) for tensor in _tensors(containers)]
    try:
        yield
    except BaseException:
        for each, attributes in kept:
            vars(each).clear()
            vars(each).update(attributes)
        for container, content in containers:
            container.clear()
            container.extend(content) if isinstance(container, list) else container.update(content)
        for held in tensors:
            held.restore()
        raise


def _containers(attributes: Dict[str, Any]) -> _Containers:
    return [(value, value.copy()) for value in attributes.values() if isinstance(value, (dict, list, set))]


def _tensors(containers: _Containers) -> List[Tensor]:
    found = {}
    for _, content in containers:
        values = content.values() if isinstance(content, dict) else content
        found.update({id(v): v for v in values if isinstance(v, Tensor) and not nn.parameter.is_lazy(v)})
    return list(found.values())


class _Kept:
    """A tensor, the storage that it had, and its numbers."""

    def __init__(self, tensor: Tensor, values: bool) -> None:
        self.tensor, self.data = tensor, tensor.data
        self.numbers: Optional[Tensor] = tensor.detach().clone() if values else None

    def restore(self) -> None:
        if self.tensor.shape != self.data.shape or self.tensor.dtype != self.data.dtype or self._moved():
            self.tensor.data = self.data
        if self.numbers is not None:
            with torch.no_grad():
                self.tensor.copy_(self.numbers)

    def _moved(self) -> bool:
        return self.tensor.device.type != "meta" and self.tensor.data_ptr() != self.data.data_ptr()
