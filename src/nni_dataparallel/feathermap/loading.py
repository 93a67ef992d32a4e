"""What a state dict must hold to be loaded; nothing is written before it was looked through."""

from __future__ import annotations

import contextlib
from typing import Any, Dict, Iterator, List, MutableMapping

import torch
from torch import Tensor, nn

from .factors import Int8Factor, weight_of
from .pool import Pool
from .upstream import translate

__all__ = ["adopt", "unchanged_on_error"]


def adopt(module: nn.Module, pool: Pool, state: MutableMapping[str, Any], prefix: str, compress: float) -> None:
    """Check the part of ``state`` below ``prefix`` and bring the pool to the form that it holds, float or INT8.

    Raises
    ------
    RuntimeError
        When a shape does not fit, or a factor is not finite; nothing has changed then.
    """
    translate(state, prefix)
    problems: List[str] = []
    fresh: Dict[str, nn.Module] = {}
    for name in ("V1", "V2"):
        _check_factor(pool, name, state, f"{prefix}pool.{name}.", problems, fresh, compress)
    _check_shapes(module, state, f"{prefix}module.", problems)
    if problems:
        raise RuntimeError("this state dict does not fit the FeatherNet, which is unchanged:\n\t" + "\n\t".join(problems))
    pool.cache = None
    for name, factor in fresh.items():
        setattr(pool, name, factor)
    if fresh:
        pool.scheme = None


def _check_factor(
    pool: Pool,
    name: str,
    state: MutableMapping[str, Any],
    start: str,
    problems: List[str],
    fresh: Dict[str, nn.Module],
    compress: float,
) -> None:
    factor: nn.Module = getattr(pool, name)
    size = (pool.layout.n, pool.layout.m)
    codes, weight = state.get(start + "qweight"), state.get(start + "weight")
    key, matrix = (start + "weight", weight) if codes is None else (start + "qweight", codes)
    if not isinstance(matrix, Tensor):
        return
    if tuple(matrix.shape) != size:
        problems.append(
            f"size mismatch for {key}: {tuple(matrix.shape)} in the file, {size} in this net with compress={compress:g}. "
            "The file was saved from another model or with another compression"
        )
    elif codes is None:
        if weight is not None and not bool(torch.isfinite(weight).all()):
            problems.append(f"{key} is not finite: {int((~torch.isfinite(weight)).sum())} of its entries are NaN or infinite")
        if isinstance(factor, Int8Factor):
            like = weight_of(factor)
            fresh[name] = pool.new_factor(like.dtype, like.device).requires_grad_()
    else:
        scale, zero = state.get(start + "scale"), state.get(start + "zero_point")
        if codes.dtype != torch.int8:
            problems.append(f"{key} is {codes.dtype}, not torch.int8")
        elif not isinstance(scale, Tensor) or tuple(scale.shape) not in ((size[0], 1), (1, 1)):
            found = tuple(scale.shape) if isinstance(scale, Tensor) else "missing"
            problems.append(f"{start}scale is {found}, not {(size[0], 1)} or (1, 1)")
        elif not bool(torch.isfinite(scale).all()):
            problems.append(f"{start}scale is not finite")
        elif zero is not None and tuple(zero.shape) != tuple(scale.shape):
            problems.append(f"{start}zero_point is {tuple(zero.shape)}, the scale {tuple(scale.shape)}")
        elif (
            not isinstance(factor, Int8Factor) or factor.scale.shape != scale.shape or (factor.zero_point is None) != (zero is None)
        ):
            like = weight_of(factor)
            fresh[name] = Int8Factor(codes.to(like.device), scale.to(like), None if zero is None else zero.to(like.device))


def _check_shapes(module: nn.Module, state: MutableMapping[str, Any], start: str, problems: List[str]) -> None:
    for path, each in module.named_modules():
        held = {**each._parameters, **each._buffers}
        for name, tensor in held.items():
            key = f"{start}{path + '.' if path else ''}{name}"
            given = state.get(key)
            if tensor is None or not isinstance(given, Tensor) or nn.parameter.is_lazy(tensor):
                continue
            if given.shape != tensor.shape and not (given.numel() == tensor.numel() == 1):
                problems.append(f"size mismatch for {key}: {tuple(given.shape)} in the file, {tuple(tensor.shape)} in this net")


def _holders(module: nn.Module) -> List[Dict[str, Any]]:
    return [module._parameters, module._buffers]  # type: ignore[list-item]


@contextlib.contextmanager
def unchanged_on_error(root: nn.Module, pool: Pool) -> Iterator[None]:
    """Put every tensor below ``root`` back, with its value, if the block raises."""
    factors, scheme = (pool.V1, pool.V2), pool.scheme
    kept = [
        (holder, name, tensor, tensor.detach().clone())
        for each in root.modules()
        for holder in _holders(each)
        for name, tensor in holder.items()
        if tensor is not None and not nn.parameter.is_lazy(tensor)
    ]
    try:
        yield
    except BaseException:
        pool.set_factors(*factors)
        pool.scheme = scheme
        for holder, name, tensor, value in kept:
            holder[name] = tensor
            with torch.no_grad():
                tensor.copy_(value)
        raise
