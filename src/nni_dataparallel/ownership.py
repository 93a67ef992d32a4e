"""Which virtual device does a tensor live on? Mixing two raises, as it would on GPUs.

All virtual devices share CPU memory, so torch itself would compute happily with tensors of two
of them. A dispatch mode in each worker thread notes the owner of every storage and checks the
operands of every operation.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any, Callable, Dict, Iterator, Optional, Tuple

import torch
from torch import Tensor

try:
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode
except ImportError:  # torch < 1.13
    TorchDispatchMode = None  # type: ignore[assignment,misc]

__all__ = ["Ownership"]

# Copies between devices are what these operations are for; where their result lies is up to the caller.
_MAY_MIX = ("aten::copy_", "aten::_to_copy")


class Ownership:
    """Owner of each storage; storages nobody claimed live on the host and mix with all."""

    def __init__(self) -> None:
        # A weak reference keeps the address of a dead storage from being used again, so an
        # address stands for one storage as long as its entry exists.
        self._owners: Dict[int, Tuple[Any, int]] = {}
        self._lock = threading.Lock()

    @classmethod
    def create(cls) -> Optional[Ownership]:
        """A new register; None where this torch cannot check (before 2.0)."""
        major = int(torch.__version__.split(".")[0])
        return cls() if TorchDispatchMode is not None and major >= 2 else None

    def claim(self, tensor: Tensor, device: int) -> None:
        """Note that ``tensor`` lives on virtual device ``device``."""
        if tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        with self._lock:
            self._owners[storage._cdata] = (StorageWeakRef(storage), device)
            if len(self._owners) % 4096 == 0:
                self._forget_dead()

    def owner(self, tensor: Tensor) -> Optional[int]:
        """The virtual device of ``tensor``; None for the host."""
        if tensor.layout is not torch.strided:
            return None
        entry = self._owners.get(tensor.untyped_storage()._cdata)
        return None if entry is None else entry[1]

    def _forget_dead(self) -> None:
        self._owners = {key: entry for key, entry in self._owners.items() if not entry[0].expired()}

    @contextlib.contextmanager
    def mode(self, device: int) -> Iterator[None]:
        """A context manager that checks the operations of the thread that enters it, which works on ``device``."""
        with _Moves(self, device), _Mode(self):
            yield


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from _tensors(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from _tensors(item)


def _names_a_device(arguments: Tuple[Any, ...]) -> bool:
    return any(isinstance(argument, (torch.device, str, Tensor)) for argument in arguments)


if TorchDispatchMode is not None:

    class _Moves(TorchFunctionMode):  # type: ignore[misc]
        """``x.to(y.device)``, which finds ``x`` on the CPU already, makes the copy that it would make on GPUs."""

        def __init__(self, ownership: Ownership, device: int) -> None:
            super().__init__()
            self._ownership, self._device = ownership, device

        def __torch_function__(
            self, func: Any, types: Any, args: Tuple[Any, ...] = (), kwargs: Optional[Dict[str, Any]] = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            if func is Tensor.type_as or (func is Tensor.to and _names_a_device((*args[1:], *(kwargs or {}).values()))):
                owner = self._ownership.owner(result)
                if owner is not None and owner != self._device:
                    result = result.clone()
                    self._ownership.claim(result, self._device)
            return result

    class _Mode(TorchDispatchMode):  # type: ignore[misc]
        def __init__(self, ownership: Ownership) -> None:
            super().__init__()
            self._ownership = ownership

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Tuple[Any, ...] = (), kwargs: Optional[Dict[str, Any]] = None
        ) -> Any:
            kwargs = kwargs or {}
            owners = {o for t in _tensors((args, kwargs)) for o in [self._ownership.owner(t)] if o is not None}
            if func._schema.name in _MAY_MIX:
                return func(*args, **kwargs)
            if len(owners) > 1:
                first, second = sorted(owners)[:2]
                raise RuntimeError(
                    f"Expected all tensors to be on the same device, but found at least two virtual devices, "
                    f"{first} and {second}, in {func._schema.name}. On GPUs this operation fails too. (Layers that NNI 3.0 has "
                    "wrapped run on device 0 unless they are patched: import nni_dataparallel.auto)"
                )
            result = func(*args, **kwargs)
            if len(owners) == 1:
                (device,) = owners
                for t in _tensors(result):
                    if self._ownership.owner(t) is None:
                        self._ownership.claim(t, device)
            return result

else:
    _Moves: Callable[..., Any] = None  # type: ignore[no-redef,assignment]
    _Mode: Callable[..., Any] = None  # type: ignore[no-redef,assignment]
