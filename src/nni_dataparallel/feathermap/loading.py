"""What a state dict must hold to be loaded; nothing is written before it was looked through."""

from __future__ import annotations

from typing import Any, Dict, List, MutableMapping, Optional

import torch
from torch import Tensor, nn

from .factors import Int8Factor, is_trained, weight_of
from .layers import hashed_layers
from .pool import Pool
from .upstream import translate

__all__ = ["adopt"]


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
    forms = {name: _form(state, f"{prefix}pool.{name}.") for name in ("V1", "V2")}
    if ("INT8" in forms.values() or isinstance(pool.V1, Int8Factor)) and len(set(forms.values())) > 1:
        told = " and ".join(f"{prefix}pool.{name} {form}" for name, form in forms.items())
        problems.append(f"the file holds {told}: both factors are INT8 or both float")
    for name in ("V1", "V2"):
        _check_factor(pool, name, state, f"{prefix}pool.{name}.", problems, fresh, compress)
    _check_shapes(module, state, f"{prefix}module.", problems)
    _check_scalars(module, state, f"{prefix}module.", problems)
    if problems:
        raise RuntimeError("this state dict does not fit the FeatherNet, which is unchanged:\n\t" + "\n\t".join(problems))
    pool.cache = None
    for name, factor in fresh.items():
        setattr(pool, name, factor)


def _form(state: MutableMapping[str, Any], start: str) -> str:
    if state.get(start + "qweight") is not None:
        return "INT8"
    return "float" if any(key.startswith(start) for key in state) else "missing"


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
    if matrix is None:
        return
    if not isinstance(matrix, Tensor):
        problems.append(f"{key} is a {type(matrix).__name__}, not a Tensor")
    elif tuple(matrix.shape) != size:
        problems.append(
            f"size mismatch for {key}: {tuple(matrix.shape)} in the file, {size} in this net with compress={compress:g}. "
            "The file was saved from another model or with another compression"
        )
    elif codes is None:
        if not matrix.is_floating_point():
            problems.append(f"{key} is {matrix.dtype}, not floating point")
        elif not bool(torch.isfinite(matrix).all()):
            problems.append(f"{key} is not finite: {int((~torch.isfinite(matrix)).sum())} of its entries are NaN or infinite")
        if isinstance(factor, Int8Factor):
            like = weight_of(factor)
            fresh[name] = pool.new_factor(like.dtype, like.device).requires_grad_(factor.trained)
    elif codes.dtype != torch.int8:
        problems.append(f"{key} is {codes.dtype}, not torch.int8")
    else:
        scale: Any = state.get(start + "scale")
        zero = state.get(start + "zero_point")
        problem = _wrong_scale(scale, zero, size[0])
        if problem is not None:
            problems.append(start + problem)
        elif (
            not isinstance(factor, Int8Factor) or factor.scale.shape != scale.shape or (factor.zero_point is None) != (zero is None)
        ):
            like = weight_of(factor)
            zero = None if zero is None else zero.to(like.device)
            fresh[name] = Int8Factor(codes.to(like.device), scale.to(like), zero, is_trained(factor))


def _wrong_scale(scale: Any, zero: Any, n: int) -> Optional[str]:
    if not isinstance(scale, Tensor) or tuple(scale.shape) not in ((n, 1), (1, 1)):
        found = tuple(scale.shape) if isinstance(scale, Tensor) else "missing" if scale is None else type(scale).__name__
        return f"scale is {found}, not {(n, 1)} or (1, 1)"
    if not scale.is_floating_point():
        return f"scale is {scale.dtype}, not floating point"
    if not bool(torch.isfinite(scale).all()):
        return "scale is not finite"
    if not bool((scale > 0).all()):
        return "scale is not positive"
    if zero is None:
        return None
    if not isinstance(zero, Tensor) or zero.is_floating_point() or zero.is_complex() or zero.dtype == torch.bool:
        return f"zero_point is {zero.dtype if isinstance(zero, Tensor) else type(zero).__name__}, not whole numbers"
    return None if zero.shape == scale.shape else f"zero_point is {tuple(zero.shape)}, the scale {tuple(scale.shape)}"


def _check_scalars(module: nn.Module, state: MutableMapping[str, Any], start: str, problems: List[str]) -> None:
    for path, _, link in hashed_layers(module):
        for name in link.slots:
            key = f"{start}{path + '.' if path else ''}{name}_p"
            given = state.get(key)
            if isinstance(given, Tensor) and not bool(torch.isfinite(given).all()):
                problems.append(f"{key} is not finite")


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
