"""What the doctor found, as plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Dict, List, Optional, Tuple

__all__ = ["Finding", "Range", "Results"]


@dataclass(frozen=True)
class Finding:
    """One thing that DataParallel does to a module.

    Attributes
    ----------
    module
        Its name in the model; empty for the model as a whole.
    kind
        A key of the table of remedies, ``"lost buffer"`` for example.
    title
        The kind in words.
    names
        The buffers, attributes or parameters of the module that are concerned.
    seen
        What was seen, in numbers.
    remedy
        What to do.
    status
        ``"remains"`` (with the patch, too), ``"repaired"`` (by the patch) or ``"note"`` (harmless).
    place, code
        ``file:line`` in the user's code, and what stands there; empty where no line is to blame.

    Examples
    --------
    >>> import torch
    >>> from nni_dataparallel import diagnose
    >>> class Last(torch.nn.Linear):
    ...     def forward(self, x):
    ...         self.last = super().forward(x)
    ...         return self.last
    >>> finding = diagnose(Last(4, 3), torch.randn(8, 4)).of("remains")[0]
    >>> finding.where, finding.what
    ('(model)', 'activation kept on self is lost: last')
    """

    module: str
    kind: str
    title: str
    names: Tuple[str, ...]
    seen: str
    remedy: str
    status: str
    place: str = ""
    code: str = ""

    @property
    def where(self) -> str:
        """The module, as it is shown."""
        return self.module or "(model)"

    @property
    def what(self) -> str:
        """The kind and the names concerned, as they are shown."""
        shown = ", ".join(self.names[:4]) + (f" and {len(self.names) - 4} more" if len(self.names) > 4 else "")
        return f"{self.title}: {shown}" if shown else self.title


@dataclass(frozen=True)
class Range:
    """A tracked range after the step: ``(min, max)`` of each run, None where there is none."""

    module: str
    name: str
    one_device: Optional[Tuple[float, float]]
    stock: Optional[Tuple[float, float]]
    patched: Optional[Tuple[float, float]]


@dataclass(frozen=True)
class Results:
    """What the runs of one model showed.

    Attributes
    ----------
    model
        The model's class.
    replicas
        Number of virtual devices.
    nni
        The release of NNI; None without it.
    with_patch
        Whether the step was run with the patch, too: the model is one of NNI's.
    findings
        What remains first, then what the patch repairs, then notes.
    losses
        Run -> loss of the step; None where it failed.
    ranges
        Tracked ranges, to be drawn.
    """

    model: str
    replicas: int
    torch: str
    nni: Optional[str]
    with_patch: bool
    findings: List[Finding] = field(default_factory=list)
    losses: Dict[str, Optional[float]] = field(default_factory=dict)
    ranges: List[Range] = field(default_factory=list)

    def of(self, status: str) -> List[Finding]:
        """The findings that are ``"remains"``, ``"repaired"`` or ``"note"``."""
        return [finding for finding in self.findings if finding.status == status]

    @property
    def healthy(self) -> bool:
        """Whether nothing remains with the patch."""
        return not self.of("remains")

    @property
    def conditions(self) -> str:
        """What was left out to compare the runs; empty where nothing was."""
        kinds = {finding.kind for finding in self.findings}
        left_out = [text for kind, text in (("batch norm", "batch norms frozen"), ("dropout", "no dropout")) if kind in kinds]
        return f" ({', '.join(left_out)})" if left_out else ""

    @property
    def verdict(self) -> str:
        """The result in a sentence."""
        remains, repaired = len(self.of("remains")), len(self.of("repaired"))
        if not remains and not repaired:
            return f"Nothing found: {self.replicas} replicas leave what one device leaves."
        mended = f"the patch repairs {repaired} finding{'s' if repaired != 1 else ''}"
        if not self.with_patch:
            found = f"{remains} finding{'s' if remains != 1 else ''}"
            return f"{found}; there is no compressor of NNI's in this model, so nothing for the patch to repair."
        if not remains:
            return f"{mended[0].upper()}{mended[1:]}, nothing remains: {self.replicas} replicas then leave what one device leaves."
        return f"{remains} finding{'s' if remains != 1 else ''} remain{'s' if remains == 1 else ''} with the patch; {mended}."

    def to_dict(self) -> Dict[str, Any]:
        """Everything, in plain dicts and lists."""
        return {"verdict": self.verdict, "healthy": self.healthy, **asdict(self)}
