"""From trained factors, whoever quantised them, to INT8."""

from __future__ import annotations

import contextlib
from typing import Iterator, Optional, Tuple

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from .factors import Int8Factor, effective, is_plain, is_trained
from .integers import Scheme, codes_on_grid, quantise
from .layers import hashed_layers
from .pool import Pool

__all__ = ["check_scalars", "evaluating", "int8_factors"]


@contextlib.contextmanager
def evaluating(*roots: nn.Module) -> Iterator[None]:
    """Evaluation mode, and no gradients, inside the block: a toolkit's observers must not move."""
    modes = [(module, module.training) for root in roots for module in root.modules()]
    try:
        for module, _ in modes:
            module.training = False
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def check_scalars(model: nn.Module) -> None:
    """Raise if a scalar is not finite: its layer would be NaN in the file that is shipped."""
    for path, layer, link in hashed_layers(model):
        for name in link.slots:
            if not bool(torch.isfinite(getattr(layer, name + "_p")).all()):
                where = f"{path}.{name}_p" if path else f"{name}_p"
                raise ValueError(
                    f"module.{where} is NaN or infinite: training diverged. Load an earlier checkpoint; the net is unchanged"
                )


def int8_factors(pool: Pool, bits: Optional[int], per_row: Optional[bool]) -> Tuple[Int8Factor, Int8Factor]:
    """The INT8 form of both factors; the pool is not changed. See ``FeatherNet.convert``."""
    if isinstance(pool.V1, Int8Factor):
        raise RuntimeError("the factors are INT8 already: convert() works on what was trained in float")
    given = (bits, per_row) != (None, None)
    if pool.scheme is None:
        scheme = Scheme(8 if bits is None else bits, True if per_row is None else per_row).checked()
    else:
        scheme = pool.scheme
        if bits not in (None, scheme.bits) or per_row not in (None, scheme.per_row):
            raise ValueError(
                f"the factors were trained with {scheme.bits} bits, per_row={scheme.per_row}: convert() takes these. For others, "
                "call prepare_qat() with them and train on"
            )
    if given and not pool.plain:
        raise ValueError("a toolkit quantises the factors and has its own bits: call convert() without arguments")
    pool.refuse_two_quantizers()
    with evaluating(pool):
        return _int8(pool, "V1", scheme), _int8(pool, "V2", scheme)


def _int8(pool: Pool, name: str, scheme: Scheme) -> Int8Factor:
    factor: nn.Module = getattr(pool, name)
    matrix = effective(factor, pool.layout.m)
    _check_finite(matrix, f"pool.{name}")
    if is_plain(factor) or pool.scheme is not None:
        return Int8Factor(*quantise(matrix, scheme), trained=is_trained(factor))
    if torch.finfo(matrix.dtype).bits < 32:
        raise TypeError(f"pool.{name} is {matrix.dtype}, too coarse to tell a toolkit's scale from: net.float() first")
    found = codes_on_grid(matrix)
    if found is None and prune.is_pruned(factor):
        raise ValueError(
            f"pool.{name} is pruned by torch.nn.utils.prune, which keeps its mask as a hook: call "
            f"torch.nn.utils.prune.remove(net.pool.{name}, 'weight') to make it permanent, then convert(). The net is unchanged"
        )
    if found is None:
        raise ValueError(
            f"pool.{name} is wrapped ({type(factor).__name__}), but its values are not multiples of one scale per row within 8 "
            "bits, so it cannot be shipped as INT8. Either the toolkit has not begun to quantise (run a training step after its "
            "start step), or it quantises the layer's output as well, or with more bits: ask it for int8 weights only."
        )
    codes, scale, zero_point = found
    return Int8Factor(codes, scale, zero_point if bool(zero_point.any()) else None, is_trained(factor))


def _check_finite(matrix: Tensor, name: str) -> None:
    wrong = ~torch.isfinite(matrix)
    if bool(wrong.any()):
        rows = wrong.any(1).nonzero().flatten().tolist()
        shown = ", ".join(str(row) for row in rows[:5]) + (", ..." if len(rows) > 5 else "")
        raise ValueError(
            f"{name} has {int(wrong.sum())} entries that are NaN or infinite, in rows {shown}: training diverged. Load an earlier "
            "checkpoint; the net is unchanged"
        )
