"""``nn.DataParallel`` rehearsed on virtual devices: multi-device behaviour without a GPU."""

from __future__ import annotations

from typing import Any

from torch import nn

from .virtual import VirtualDevice, virtual_devices

__all__ = ["Rehearsal", "rehearse"]


class Rehearsal(nn.DataParallel):
    """``nn.DataParallel`` over virtual devices, made by :func:`rehearse`.

    Parameters
    ----------
    module : torch.nn.Module
        On the CPU.
    replicas : int
        Number of virtual devices.
    dim : int
        The batch dimension.
    check : bool
        Whether mixing tensors of two virtual devices raises.

    Examples
    --------
    >>> import torch
    >>> from nni_dataparallel import rehearse
    >>> from nni_dataparallel.rehearsal import Rehearsal
    >>> parallel = rehearse(torch.nn.Linear(4, 3))
    >>> isinstance(parallel, Rehearsal), isinstance(parallel, torch.nn.DataParallel)
    (True, True)
    """

    def __init__(self, module: nn.Module, replicas: int, dim: int = 0, check: bool = True) -> None:
        self._replicas, self._check = replicas, check
        with virtual_devices(replicas, check=False):
            super().__init__(module, device_ids=[VirtualDevice(i) for i in range(replicas)], dim=dim)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """``nn.DataParallel.forward``, with the inputs scattered to virtual devices."""
        with virtual_devices(self._replicas, self._check):
            return super().forward(*inputs, **kwargs)


def rehearse(model: nn.Module, replicas: int = 2, dim: int = 0, check: bool = True) -> Rehearsal:
    """Wrap ``model`` as ``nn.DataParallel`` would, on ``replicas`` virtual devices in CPU memory.

    The forward, the replication and the worker threads are torch's own; only the device copies
    and device selection below them are simulated. Use it to see on a laptop what a script will do
    on several GPUs.

    Parameters
    ----------
    model : torch.nn.Module
        Parameters and buffers on the CPU.
    replicas : int
        Number of virtual devices, at least 1.
    dim : int
        The batch dimension: inputs of shape (..., rows, ...) are cut there, outputs joined.
    check : bool
        Raise where an operation in the forward mixes tensors of two virtual devices, as CUDA does
        (torch >= 2.0; earlier versions run unchecked). The backward is not checked.

    Returns
    -------
    Rehearsal
        A subclass of :class:`torch.nn.DataParallel`.

    Raises
    ------
    ValueError
        When there is not at least one replica.
    TypeError
        When ``model`` is no module, or is wrapped for parallel use already.

    Examples
    --------
    >>> import torch
    >>> from nni_dataparallel import rehearse
    >>> class Rows(torch.nn.Module):
    ...     def forward(self, x):
    ...         return torch.full((len(x), 1), len(x))
    >>> rehearse(Rows(), replicas=2)(torch.randn(5, 4)).flatten()  # three rows and two
    tensor([3, 3, 3, 2, 2])
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"rehearse() takes a torch.nn.Module, not {type(model).__name__}")
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise TypeError(f"the model is wrapped in {type(model).__name__} already: rehearse(model.module, replicas)")
    if not isinstance(replicas, int):
        raise TypeError(f"replicas is a number, not {type(replicas).__name__}")
    return Rehearsal(model, replicas, dim, check)
