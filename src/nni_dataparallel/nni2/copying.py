"""Copies and pickles of a wrapped model: they bring a quantizer of their own along."""

from __future__ import annotations

from typing import Any, Dict

__all__ = ["setstate"]


def setstate(stock: None, self: Any, state: Dict[str, Any]) -> None:
    """``Quantizer.__setstate__``: the copy's optimizer counts the copy's steps.

    An optimizer loses, when it is copied or pickled, the ``step`` that NNI puts on the instance.
    """
    self.__dict__.update(state)
    if state.get("optimizer") is not None:
        self.patch_optimizer(self.step_with_optimizer)
