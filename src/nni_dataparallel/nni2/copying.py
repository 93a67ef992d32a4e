"""Copies and pickles of a wrapped model: they bring a quantizer of their own along."""

from __future__ import annotations

from typing import Any

__all__ = ["setstate"]


def setstate(stock: None, self: Any, state: Any) -> None:
    """``Quantizer.__setstate__``: the copy's optimizer counts the copy's steps.

    An optimizer loses, when it is copied or pickled, the ``step`` that NNI puts on the instance.
    """
    attributes, slots = state if isinstance(state, tuple) else (state, None)  # a subclass may have __slots__
    self.__dict__.update(attributes or {})
    for name, value in (slots or {}).items():
        setattr(self, name, value)
    if self.__dict__.get("optimizer") is not None:
        self.patch_optimizer(self.step_with_optimizer)
