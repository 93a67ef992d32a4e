"""``diagnose``: run the steps with stock NNI and with the patch, and tell what the patch repairs and what remains."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
from torch import Tensor, nn

from .. import fixes
from ..api import is_patched, patched, unpatch, unpatched
from .comparing import Fault, Trial, faults_of, norm_faults
from .diagnosis import Diagnosis
from .findings import Finding, Range
from .remedies import KINDS, PATCH
from .running import Bench, isolated, rows_of
from .state import is_of_nni, own_names
from .subject import DoctorError, Loss, Subject, from_function, from_model

__all__ = ["diagnose"]

# In double precision what is left to see is not rounding, which fake quantisation turns into whole levels now and then.
RTOL = {torch.float64: 1e-5, None: 2e-3}


def diagnose(
    model: Any, batch: Any = None, replicas: int = 2, loss: Optional[Loss] = None, optimizer: Optional[torch.optim.Optimizer] = None
) -> Diagnosis:
    """Find out what ``nn.DataParallel`` does to a model, and what of it the patch repairs.

    One training step is run on one device and on virtual replicas in CPU memory, with stock NNI and, if the model is one
    of NNI's, with the patch. What the replicas leave is compared with what one device leaves.

    Parameters
    ----------
    model : callable or torch.nn.Module
        A function that builds what is examined, called anew for each run. It returns ``(model, batch)``, ``(model,
        optimizer, batch)``, ``(model, optimizer, quantizer, batch)`` or a dict with these names, and ``loss``. Or a model:
        copies of it are examined, it is not changed.
    batch : tuple, torch.Tensor or dict, optional
        What one step trains on, if the function does not return it: ``(x, target)``, ``x``, or a dict of keywords; tensors of
        shape (rows, ...), at least as many rows as replicas. Floating point is examined in double precision, where the model
        allows it.
    replicas : int
        Number of virtual devices, at least 2.
    loss : callable, optional
        ``loss(model, batch)``. Left out, it is the evaluator's of NNI 3.0, what a model called with a dict returns as its
        ``loss``, cross entropy (whole numbers as target), mean squared error, or the output's mean square.
    optimizer : torch.optim.Optimizer, optional
        Of the parameters of ``model``, if that is no function; SGD without one.

    Returns
    -------
    Diagnosis
        Findings with remedies; :meth:`Diagnosis.table`, :meth:`Diagnosis.to_json`, :meth:`Diagnosis.html`.

    Raises
    ------
    DoctorError
        When the model cannot be built or copied, or the step fails on one device already.
    TypeError, ValueError
        When an argument is of the wrong kind.

    Examples
    --------
    >>> import torch
    >>> from nni_dataparallel import diagnose
    >>> class Counting(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.fc, self.calls = torch.nn.Linear(4, 3), 0
    ...
    ...     def forward(self, x):
    ...         self.calls += 1
    ...         return self.fc(x)
    >>> diagnosis = diagnose(Counting(), torch.randn(8, 4))
    >>> [(finding.kind, finding.names, finding.status) for finding in diagnosis.findings]
    [('lost attribute', ('calls',), 'remains')]
    """
    if isinstance(replicas, bool) or not isinstance(replicas, int):
        raise TypeError(f"replicas is a number, not {type(replicas).__name__}")
    if replicas < 2:
        raise ValueError(f"with {replicas} replica{'s' if replicas != 1 else ''} there is nothing to compare: at least 2")
    if isinstance(model, nn.Module):
        build = from_model(model, batch, optimizer, loss)
    elif callable(model):
        build = from_function(model, batch, loss)
    else:
        raise TypeError(f"diagnose() takes a torch.nn.Module or a function that builds one, not {type(model).__name__}")
    built_before = isinstance(model, nn.Module) and not is_patched()
    with isolated():
        return _examine(build, replicas, built_before)


def _examine(build: Callable[[], Subject], replicas: int, built_before: bool) -> Diagnosis:
    with unpatched():
        subject = _stock(build)
        rows = rows_of(subject.batch)
        if rows is None or rows < replicas:
            what = "no tensor" if rows is None else f"{rows} row{'s' if rows != 1 else ''}"
            raise DoctorError(f"the batch has {what}, {replicas} replicas need at least {replicas} rows (in its first dimension)")
        kind = type(subject.model).__name__
        of_nni = subject.quantizer is not None or any(is_of_nni(module) for module in subject.model.modules())
        trial, bench = _trial(build, replicas)
        norms = _norms(bench, trial) if not of_nni else []
    before = faults_of(trial)
    remaining, mended = before, None
    if of_nni:
        with patched():
            mended, bench = _trial(build, replicas)
            norms = _norms(bench, mended)
        remaining = faults_of(mended)
    names = own_names(subject.model)
    before, remaining = _named(before, names), _named(remaining + norms, names)
    findings = _findings(remaining, "remains")
    if mended is not None:
        left = {fault.identity for fault in remaining}
        findings += _findings([fault for fault in before if fault.identity not in left], "repaired")
    findings += _notes(trial)
    if of_nni and built_before:
        findings += _findings([Fault("built before", "", "", "copies of the model were examined")], "note")
    losses = {"one device": trial.whole.loss, "replicas, stock": trial.replicas.loss}
    if mended is not None:
        losses["replicas, patched"] = mended.replicas.loss
    release = _release()
    ranges = [replace(one, module=names.get(one.module, one.module)) for one in _ranges(trial, mended)]
    return Diagnosis(kind, replicas, torch.__version__, release, of_nni, findings, losses, ranges)


def _named(faults: List[Fault], names: Dict[str, str]) -> List[Fault]:
    """The faults by the user's names of the layers."""
    return [fault._replace(module=names.get(fault.module, fault.module)) for fault in faults]


def _stock(build: Callable[[], Subject]) -> Subject:
    """The first build; a script that patches inside its function does so on import, once."""
    subject = build()
    if is_patched():
        unpatch()
        subject = build()
    return subject


def _release() -> Optional[str]:
    try:
        return fixes.installed_release()
    except fixes.UnsupportedReleaseError:
        return None


def _trial(build: Callable[[], Subject], replicas: int) -> Tuple[Trial, Bench]:
    dtype: Optional[torch.dtype] = torch.float64
    bench = Bench(build, replicas, dtype)
    whole = bench.run("one device")
    if whole.fault is not None:
        # Some forwards make float32 constants, or cast: then in the model's own precision.
        dtype = None
        bench = Bench(build, replicas, dtype)
        whole = bench.run("one device")
    if whole.fault is not None:
        place = f" ({whole.fault.place})" if whole.fault.place else ""
        raise DoctorError(f"the step fails on one device already: {whole.fault.text}{place}")
    again, shard = bench.run("one device", seed=2), bench.run("first shard")
    return Trial(whole, again, shard, bench.replicas(), RTOL[dtype]), bench


def _norms(bench: Bench, trial: Trial) -> List[Fault]:
    if not trial.whole.norms:
        return []
    kinds = ("one device", "first shard", "replicas")
    return norm_faults(*(bench.run(kind, check=False, frozen_norms=False) for kind in kinds))


def _findings(faults: List[Fault], status: str) -> List[Finding]:
    """One finding per module, kind and place, of all names concerned."""
    together: Dict[Tuple[str, str, str], List[Fault]] = {}
    for fault in faults:
        together.setdefault((fault.module, fault.kind, fault.place), []).append(fault)
    order = list(KINDS)
    found = []
    for (module, kind, place), group in sorted(together.items(), key=lambda item: order.index(item[0][1])):
        names = tuple(fault.name for fault in group if fault.name)
        seen = group[0].seen if len(names) < 2 else f"{names[0]}: {group[0].seen}"
        remedy = PATCH if status == "repaired" else KINDS[kind].remedy.format(name=names[0] if names else "")
        found.append(Finding(module, kind, KINDS[kind].title, names, seen, remedy, status, place, group[0].code))
    return found


def _notes(trial: Trial) -> List[Finding]:
    found = []
    if trial.whole.dropouts:
        names = trial.whole.dropouts
        seen = f"{', '.join(names[:4])}{', ...' if len(names) > 4 else ''}"
        found.append(Fault("dropout", "", "", seen))
    random = trial.random
    if random:
        seen = "the loss changes with the seed" if "loss" in random else f"{len(random)} values change with the seed"
        found.append(Fault("random", "", "", f"{seen} on one device"))
    return _findings(found, "note")


def _ranges(trial: Trial, mended: Optional[Trial]) -> List[Range]:
    """Pairs of buffers that are a minimum and a maximum."""
    states = [trial.whole.after, trial.replicas.after, mended.replicas.after if mended is not None else {}]
    failed = [False, trial.replicas.loss is None, mended is None or mended.replicas.loss is None]
    found = []
    for key in states[0]:
        if not key.is_buffer or "min" not in key.name:
            continue
        upper = key._replace(name=key.name.replace("min", "max"))
        ends: List[Optional[Tuple[float, float]]] = []
        for state, fault in zip(states, failed):
            low, high = state.get(key), state.get(upper)
            if fault or not isinstance(low, Tensor) or not isinstance(high, Tensor) or not low.numel() or not high.numel():
                ends.append(None)
            else:
                ends.append((low.min().item(), high.max().item()))
        if ends[0] is not None:
            found.append(Range(key.module, key.name, *ends))
    return found
