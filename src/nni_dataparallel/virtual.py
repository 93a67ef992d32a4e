"""Virtual devices in CPU memory: what ``nn.DataParallel`` needs below itself, and nothing above.

Replaced, only while a :class:`virtual_devices` block is open and only for virtual device
numbers: the device copies (scatter, gather, broadcast and its reduction in backward), device
selection and streams. ``DataParallel.forward``, ``replicate``, ``parallel_apply``, the worker
threads and everything above them are torch's own. Replica 0 aliases the original storage, the
others get copies, as on GPUs.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
import warnings
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from .ownership import Ownership

__all__ = ["VirtualDevice", "virtual_devices"]


class VirtualDevice(int):
    """The index of a device that is simulated in CPU memory."""


class _Local(threading.local):
    count: int = 0
    ownership: Optional[Ownership] = None


_active = _Local()


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, count: int, ownership: Optional[Ownership], *tensors: Tensor) -> Tuple[Tensor, ...]:
        ctx.width = len(tensors)
        copies = _broadcast(tensors, count, ownership)
        fixed = [i for i, needed in enumerate(ctx.needs_input_grad[2:]) if not needed]
        ctx.mark_non_differentiable(*(copy[i] for copy in copies for i in fixed))
        return tuple(t for copy in copies for t in copy)

    @staticmethod
    def backward(ctx: Any, *grads: Optional[Tensor]) -> Tuple[Optional[Tensor], ...]:
        totals: List[Optional[Tensor]] = []
        for i in range(ctx.width):
            parts = [g for g in grads[i :: ctx.width] if g is not None]
            total = parts[0].clone() if parts else None
            for part in parts[1:]:
                assert total is not None
                total += part
            totals.append(total)
        return (None, None, *totals)


def _broadcast(tensors: Sequence[Tensor], count: int, ownership: Optional[Ownership]) -> List[List[Tensor]]:
    copies = [list(tensors), *([t.detach().clone() for t in tensors] for _ in range(count - 1))]
    if ownership is not None:
        for device, owned in enumerate(copies):
            for t in owned:
                ownership.claim(t, device)
    return copies


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, count: int, sizes: Optional[Sequence[int]], dim: int, x: Tensor) -> Tuple[Tensor, ...]:
        ctx.dim = dim
        chunks = x.split(list(sizes), dim) if sizes is not None else x.chunk(count, dim)
        # Chunk 0 stays a view: on a GPU it lies on the device already.
        parts = tuple(c if i == 0 else c.clone() for i, c in enumerate(chunks))
        if _active.ownership is not None:
            for device, part in enumerate(parts):
                _active.ownership.claim(part, device)
        return parts

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tuple[Optional[Tensor], ...]:
        return None, None, None, torch.cat(grads, ctx.dim)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dim: int, *parts: Tensor) -> Tensor:
        ctx.dim, ctx.scalars = dim, dim == 0 and all(p.dim() == 0 for p in parts)
        if ctx.scalars:
            warnings.warn("Was asked to gather along dimension 0, but all input tensors were scalars.", stacklevel=2)
            parts = tuple(p.view(1) for p in parts)
        ctx.sizes = [p.size(dim) for p in parts]
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tuple[Optional[Tensor], ...]:
        grads = grad.split(ctx.sizes, ctx.dim)
        return (None, *(g[0] for g in grads)) if ctx.scalars else (None, *grads)


class _Primitive:
    """Stands in for an autograd function: virtual devices come here, others go to torch's own."""

    def __init__(self, stock: Any, virtual: Callable[..., Any]) -> None:
        self._stock, self._virtual = stock, virtual

    def apply(self, target: Any, *args: Any) -> Any:
        first = target[0] if isinstance(target, (list, tuple)) and target else target
        return self._virtual(target, *args) if isinstance(first, VirtualDevice) else self._stock.apply(target, *args)


def _scatter(devices: Sequence[int], sizes: Any, dim: int, x: Tensor) -> Tuple[Tensor, ...]:
    return _Scatter.apply(len(devices), sizes, dim, x)  # type: ignore[no-any-return]


def _gather(device: int, dim: int, *parts: Tensor) -> Tensor:
    return _Gather.apply(dim, *parts)  # type: ignore[no-any-return]


def _broadcaster(stock: Callable[..., Any]) -> Callable[..., Any]:
    def broadcast(tensors: Sequence[Tensor], devices: Sequence[int], detach: bool = False) -> Any:
        if not isinstance(devices[0], VirtualDevice):
            return stock(tensors, devices, detach)
        if not tensors:  # torch < 2.0 would ask CUDA all the same
            return []
        if detach:
            return _broadcast(tensors, len(devices), _active.ownership)
        flat = _Broadcast.apply(len(devices), _active.ownership, *tensors)
        return [list(flat[i : i + len(tensors)]) for i in range(0, len(flat), len(tensors))]

    return broadcast


class _Stream:
    """A stream of a virtual device; entering it in a worker starts the ownership check there."""

    def __init__(self, ownership: Optional[Ownership], device: int) -> None:
        self._ownership, self._device = ownership, device

    def __enter__(self) -> None:
        if self._ownership is not None:
            self._mode = self._ownership.mode(self._device)
            self._mode.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._ownership is not None:
            self._mode.__exit__(*error)


class _Devices:
    """``torch.cuda`` or ``torch.accelerator`` as ``parallel_apply`` uses it."""

    def __init__(self, stock: Any) -> None:
        self._stock = stock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)

    def current_stream(self, device: Any = None) -> Any:
        if isinstance(device, VirtualDevice):
            return _Stream(_active.ownership, device)
        return self._stock.current_stream(device)

    def stream(self, stream: Any) -> Any:
        return stream if isinstance(stream, _Stream) else self._stock.stream(stream)

    def device(self, device: Any) -> Any:
        return contextlib.nullcontext() if isinstance(device, VirtualDevice) else self._stock.device(device)

    def device_index(self, device: Any) -> Any:
        return contextlib.nullcontext() if isinstance(device, VirtualDevice) else self._stock.device_index(device)

    def is_available(self) -> bool:
        return True if _active.count else bool(self._stock.is_available())

    def current_accelerator(self, *args: Any, **kwargs: Any) -> Any:
        return torch.device("cpu") if _active.count else self._stock.current_accelerator(*args, **kwargs)


class _Torch:
    """The name ``torch`` inside the two modules of ``torch.nn.parallel`` that select devices."""

    cuda = _Devices(torch.cuda)
    accelerator = _Devices(getattr(torch, "accelerator", None))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def is_autocast_enabled(*args: Any) -> bool:
        if _active.count and not args:
            # By device since torch 2.4, which deprecates the other.
            return torch.is_autocast_enabled("cpu") if hasattr(torch, "get_autocast_dtype") else torch.is_autocast_cpu_enabled()
        return torch.is_autocast_enabled(*args)


def _autocast(stock: Any) -> Callable[..., Any]:
    """Older torch binds ``torch.cuda.amp.autocast`` in ``parallel_apply``; workers are on the CPU here."""

    def autocast(*args: Any, **kwargs: Any) -> Any:
        return torch.autocast("cpu", **kwargs) if not torch.cuda.is_available() else stock(*args, **kwargs)

    return autocast


class _TorchOfCpu(_Torch):
    """As :class:`_Torch`, where ``torch.device(type, index)`` is compared with the tensors' device."""

    @staticmethod
    def device(*args: Any) -> torch.device:
        return torch.device(args[0]) if len(args) == 2 and isinstance(args[1], VirtualDevice) else torch.device(*args)


def _replacements() -> Dict[Tuple[str, str], Callable[[Any], Any]]:
    return {
        ("scatter_gather", "Scatter"): lambda stock: _Primitive(stock, _scatter),
        ("scatter_gather", "Gather"): lambda stock: _Primitive(stock, _gather),
        ("replicate", "_broadcast_coalesced_reshape"): _broadcaster,
        ("parallel_apply", "torch"): lambda stock: _Torch(),
        ("parallel_apply", "autocast"): _autocast,
        ("data_parallel", "torch"): lambda stock: _TorchOfCpu(),
        ("data_parallel", "_get_available_device_type"): lambda stock: lambda: "cpu" if _active.count else stock(),
        ("data_parallel", "_get_all_device_indices"): lambda stock: (
            lambda: [VirtualDevice(i) for i in range(_active.count)] if _active.count else stock()
        ),
        ("data_parallel", "_check_balance"): lambda stock: lambda ids: None if _active.count else stock(ids),
    }


_lock = threading.Lock()
_open = 0
_stock: List[Tuple[Any, str, Any]] = []


class virtual_devices:
    """Context manager: in this thread ``nn.DataParallel`` sees ``count`` devices, in CPU memory.

    Parameters
    ----------
    count
        How many devices there are.
    check
        Raise when an operation mixes tensors of two virtual devices, as CUDA would (torch >= 2.0;
        unchecked before).
    """

    def __init__(self, count: int, check: bool = True) -> None:
        if count < 1:
            raise ValueError(f"there must be at least one virtual device, not {count}")
        self._count = count
        self._ownership = Ownership.create() if check else None

    def claim(self, tensor: Tensor, device: int) -> None:
        """Let ``tensor``, which nobody copies to a device, live on virtual device ``device``."""
        if self._ownership is not None:
            self._ownership.claim(tensor, device)

    def __enter__(self) -> virtual_devices:
        global _open
        with _lock:
            if _open == 0:
                for (name, attribute), replace in _replacements().items():
                    module = importlib.import_module(f"torch.nn.parallel.{name}")
                    if hasattr(module, attribute):
                        stock = getattr(module, attribute)
                        _stock.append((module, attribute, stock))
                        setattr(module, attribute, replace(stock))
            _open += 1
        self._outer = (_active.count, _active.ownership)
        _active.count, _active.ownership = self._count, self._ownership
        return self

    def __exit__(self, *error: Any) -> None:
        global _open
        _active.count, _active.ownership = self._outer
        with _lock:
            _open -= 1
            if _open == 0:
                while _stock:
                    setattr(*_stock.pop())
