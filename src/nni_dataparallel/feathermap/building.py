"""A plain model becomes a hashed one."""

from __future__ import annotations

import contextlib
import copy
import math
from numbers import Real
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple

import torch
from torch import nn

from .choosing import Tensors
from .layers import hash_layer
from .layout import Layout
from .pool import Pool
from .report import CompressionReport, bytes_of

__all__ = ["Built", "build", "check_compress", "plain_on_error"]


class Built(NamedTuple):
    """The model, its layers hashed; the pool that they read; the report."""

    model: nn.Module
    pool: Pool
    report: CompressionReport


@contextlib.contextmanager
def plain_on_error(model: nn.Module) -> Iterator[None]:
    """Give every layer below ``model`` its class, attributes and Parameters back if the block raises."""
    kept = [(each, type(each), dict(each.__dict__), dict(each._parameters)) for each in model.modules()]
    try:
        yield
    except BaseException:
        for each, kind, attributes, parameters in kept:
            if type(each) is not kind:
                each.__class__ = kind
            each.__dict__.clear()
            each.__dict__.update(attributes)
            each._parameters.clear()
            each._parameters.update(parameters)
        raise


def check_compress(compress: Any) -> float:
    """``compress`` as a Python number; raises for what is no ratio."""
    if isinstance(compress, bool) or not isinstance(compress, Real):
        raise TypeError(f"compress is a number, not {compress!r}")
    ratio = float(compress)
    if not 0 < ratio <= 1:
        raise ValueError(f"compress is {compress}: the factors' size over the weights', above 0 and at most 1")
    return ratio


def _copied(module: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(module)
    except Exception as error:  # a tensor with a graph, a lock; parametrised layers before torch 1.13
        first_line = str(error).partition("\n")[0]
        raise ValueError(
            f"this {type(module).__name__} cannot be copied ({first_line}). FeatherNet(model, clone=False) works on the model "
            "itself."
        ) from error


def build(
    module: nn.Module, compress: float, choice: Callable[[nn.Module], List[Tensors]], clone: bool, m: Optional[int] = None
) -> Built:
    """Hash what ``choice`` gives no reason to leave out.

    Parameters
    ----------
    module, compress, clone
        See ``FeatherNet``.
    choice
        Lists the Parameters of a model.
    m
        Width of the factors, if it is given and not computed from ``compress``.

    Raises
    ------
    ValueError
        When nothing is left to hash.
    """
    tensors = choice(module)
    if all(each.reason for each in tensors):
        reasons = "; ".join(f"{each.name}: {each.reason}" for each in tensors[:5]) or "it has no Parameters"
        raise ValueError(f"nothing in this model can be hashed ({reasons})")
    model, dense_bytes = module, bytes_of(module)
    if clone:
        model = _copied(module)
        tensors = choice(model)
    hashed = [each for each in tensors if each.reason is None]
    like = hashed[0].parameter
    layout = Layout([tuple(t.parameter.shape) for t in hashed], compress, m, [t.zero_row for t in hashed])
    pool = Pool(layout, like.dtype, like.device).train(model.training)
    taken: Dict[int, Tuple[nn.Module, Dict[str, int], Dict[str, nn.Parameter]]] = {}
    for index, each in enumerate(hashed):
        start = torch.full((1,), 1 / math.sqrt(3 * each.fan_in), dtype=each.parameter.dtype, device=each.parameter.device)
        scalar = nn.Parameter(start)  # one for all uses: what is tied stays tied
        for _, layer, name in each.uses:
            _, slots, scalars = taken.setdefault(id(layer), (layer, {}, {}))
            slots[name], scalars[name] = index, scalar
    for layer, slots, scalars in taken.values():
        hash_layer(layer, pool, slots, scalars)
    return Built(model, pool, CompressionReport.of(tensors, layout, compress, dense_bytes))
