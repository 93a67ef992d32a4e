"""The result of ``diagnose``: what was found, and three ways to look at it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Optional

from .findings import Results
from .page import page
from .text import plain_text

__all__ = ["Diagnosis"]


@dataclass(frozen=True)
class Diagnosis(Results):
    """The result of :func:`nni_dataparallel.diagnose`; its data are those of :class:`Results`.

    Examples
    --------
    >>> import torch
    >>> from nni_dataparallel import diagnose
    >>> diagnosis = diagnose(torch.nn.Linear(4, 3), torch.randn(8, 4))
    >>> print(diagnosis.verdict)
    Nothing found: 2 replicas leave what one device leaves.
    >>> diagnosis.healthy, diagnosis.findings, diagnosis.html()[:15]
    (True, [], '<!DOCTYPE html>')
    """

    def to_json(self, indent: Optional[int] = 2) -> str:
        """The diagnosis as JSON; numbers that JSON does not know (NaN) are null."""
        return json.dumps(_plain(self.to_dict()), indent=indent)

    def table(self) -> str:
        """The diagnosis as plain text."""
        return plain_text(self)

    def html(self) -> str:
        """The diagnosis as one HTML page that needs nothing else."""
        return page(self)

    def __str__(self) -> str:
        return self.table()


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value
