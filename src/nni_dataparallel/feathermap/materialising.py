"""The dense weights that the factors stand for."""

from __future__ import annotations

import copy
from typing import Dict

from torch import Tensor, nn

from .converting import evaluating
from .layers import hashed_layers, restore_layer
from .pool import Pool

__all__ = ["all_tensors", "plain_model"]


def all_tensors(model: nn.Module, pool: Pool) -> Dict[int, Tensor]:
    """Every hashed tensor by its slot, without gradient, as evaluation (or deployment, if it is on) computes it."""
    tensors: Dict[int, Tensor] = {}
    with evaluating(pool), pool.working(afresh=True):
        for _, layer, link in hashed_layers(model):
            for name, index in link.slots.items():
                if index not in tensors:
                    tensors[index] = getattr(layer, name).detach()
    return tensors


def plain_model(model: nn.Module, pool: Pool) -> nn.Module:
    """A copy of ``model`` without a pool: its layers have Parameters of their own again, in their old order."""
    parameters = {index: nn.Parameter(tensor.clone()) for index, tensor in all_tensors(model, pool).items()}
    plain = copy.deepcopy(model, {id(pool): pool})
    for _, layer, link in list(hashed_layers(plain)):
        restore_layer(layer, {name: parameters[index] for name, index in link.slots.items()})
    return plain
