"""What of a step on replicas is not what one device leaves: the faults of one trial, with or without the patch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Set, Tuple

import torch
from torch import Tensor

from .running import Outcome
from .state import MISSING, Key, same, shown

__all__ = ["Fault", "Trial", "faults_of", "norm_faults"]


class Fault(NamedTuple):
    """One thing that is wrong in one trial."""

    kind: str
    module: str
    name: str
    seen: str
    place: str = ""
    code: str = ""

    @property
    def identity(self) -> Tuple[str, str, str]:
        """The same in two trials, however it shows."""
        family = self.kind if self.kind in ("non-leaf", "asked for parameters", "fails", "mixed devices") else "value"
        return family, self.module, self.place if family == "mixed devices" else self.name


@dataclass
class Trial:
    """The same step on one device (with two seeds), on the first shard alone, and on replicas."""

    whole: Outcome
    again: Outcome
    shard: Outcome
    replicas: Outcome
    rtol: float

    @property
    def random(self) -> Set[Any]:
        """What changes with the seed on one device already."""
        a, b = self.whole, self.again
        drawn: Set[Any] = {key for key, value in a.after.items() if not same(value, b.after.get(key, MISSING), self.rtol)}
        for mine, yours in ((a.gradients, b.gradients), (a.parameters, b.parameters)):
            drawn |= {name for name, value in mine.items() if not same(value, yours.get(name), self.rtol)}
        return drawn | ({"loss"} if not same(a.loss, b.loss, self.rtol) else set())


def faults_of(trial: Trial) -> List[Fault]:
    """Everything that is wrong in a trial."""
    found: List[Fault] = []
    replicas = trial.replicas
    if replicas.mixed is not None:
        place = replicas.mixed.place
        text = replicas.mixed.text.split(". ")[0]
        found.append(Fault("mixed devices", "", "", text, str(place or ""), place.code if place else ""))
    for module, place in replicas.asked.items():
        text = "parameters() yields nothing on a replica"
        found.append(Fault("asked for parameters", module, "", text, str(place), place.code))
    found += _hanging(trial)
    if replicas.fault is not None:
        place = replicas.fault.place
        found.append(Fault("fails", "", "", replicas.fault.text, str(place or ""), place.code if place else ""))
        return found
    random = trial.random
    found += _state(trial, random)
    return found + list(_numbers(trial, random))


def _hanging(trial: Trial) -> List[Fault]:
    kept = {key: graph for outcome in (trial.replicas, trial.whole) for key, graph in outcome.hanging}
    text = "still hangs on the graph ({}) after the step"
    return [Fault("non-leaf", key.module, key.name, text.format(graph)) for key, graph in kept.items()]


def _state(trial: Trial, random: Set[Key]) -> List[Fault]:
    found = []
    whole, replicas = trial.whole, trial.replicas
    for key in sorted(set(whole.after) | set(replicas.after)):
        expected, kept = whole.after.get(key, MISSING), replicas.after.get(key, MISSING)
        if same(expected, kept, trial.rtol):
            continue
        before = whole.before.get(key, MISSING)
        unmoved = same(kept, replicas.before.get(key, MISSING)) and not same(expected, before)
        if unmoved:
            found.append(_lost(trial, key, expected, before))
        elif key not in random:
            found.append(_other(trial, key, expected, kept))
    return found


def _lost(trial: Trial, key: Key, expected: Any, before: Any) -> Fault:
    states = trial.replicas.replicas
    changed = [i for i, state in enumerate(states) if not same(state.get(key, MISSING), before)]
    there = f"; on replica{'s' if len(changed) > 1 else ''} {', '.join(map(str, changed))} it changes" if changed else ""
    if changed and not _is_large(expected):
        there += f" ({', '.join(dict.fromkeys(shown(states[i].get(key, MISSING)) for i in changed))})"
    kind = "lost buffer" if key.is_buffer else "lost attribute"
    if not key.is_buffer and any(isinstance(item, Tensor) for item in (expected if isinstance(expected, tuple) else (expected,))):
        kind = "lost activation"
    old = "the model keeps what it had, " if _is_large(expected) and isinstance(before, Tensor) else ""
    return Fault(kind, key.module, key.name, f"{old}{_beside(expected, before, 'the model stays at')}{there}")


def _other(trial: Trial, key: Key, expected: Any, kept: Any) -> Fault:
    shard = trial.shard.after.get(key, MISSING)
    text = _beside(expected, kept, "replicas:")
    if same(kept, shard, trial.rtol):
        return Fault("one shard", key.module, key.name, f"{text}, what the first shard alone gives")
    shared = not key.is_buffer and isinstance(kept, (tuple, dict))
    return Fault("shared attribute" if shared else "state differs", key.module, key.name, text)


def _is_large(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() > 1


def _beside(expected: Any, kept: Any, kept_by: str) -> str:
    """One device's value and the one beside it, in words."""
    if _is_large(expected) and isinstance(kept, Tensor) and kept.numel() == expected.numel():
        return _apart(expected.double(), kept.double().reshape(expected.shape))
    return f"one device: {shown(expected)}, {kept_by} {shown(kept)}"


def _numbers(trial: Trial, random: Set[Any]) -> Iterator[Fault]:
    whole, replicas = trial.whole, trial.replicas
    if "loss" not in random and not same(whole.loss, replicas.loss, trial.rtol):
        yield Fault("loss differs", "", "loss", f"one device: {whole.loss:.6g}, replicas: {replicas.loss:.6g}")
    for name, gradient in whole.gradients.items():
        module, _, parameter = name.rpartition(".")
        other = replicas.gradients.get(name)
        if name in random:
            continue
        if not same(gradient, other, trial.rtol) and not (_is_nothing(gradient) and _is_nothing(other)):
            yield Fault("gradients differ", module, parameter, _apart(gradient, other))
        elif not same(whole.parameters.get(name), replicas.parameters.get(name), trial.rtol):
            text = _apart(whole.parameters.get(name), replicas.parameters.get(name))
            yield Fault("parameters differ", module, parameter, text)


def _is_nothing(gradient: Optional[Tensor]) -> bool:
    """A parameter that is not used has no gradient on one device, and zeros on replicas."""
    return gradient is None or not gradient.any()


def _apart(a: Optional[Tensor], b: Optional[Tensor]) -> str:
    if a is None or b is None:
        return f"one device: {'none' if a is None else 'there'}, replicas: {'none' if b is None else 'there'}"
    if a.shape != b.shape:
        return f"one device: {tuple(a.shape)}, replicas: {tuple(b.shape)}"
    largest = a.abs().max().item()
    off = (a - b).abs().max().item()
    return f"off by {off:.2g}" + (f", {off / largest:.1%} of the largest" if largest else "")


def norm_faults(whole: Outcome, shard: Outcome, replicas: Outcome) -> List[Fault]:
    """What each batch norm in training mode does; these runs are made with the norms as the user has them."""
    found = []
    losses = ""
    if whole.loss is not None and replicas.loss is not None:
        losses = f"; loss {whole.loss:.5g} on one device, {replicas.loss:.5g} on replicas"
    for name in whole.norms:
        key = Key(name, "running_mean", True)
        kept: Dict[str, Any] = {k: o.after.get(key) for k, o in (("whole", whole), ("shard", shard), ("replicas", replicas))}
        text = "normalises each shard by the shard's own statistics"
        if all(isinstance(value, Tensor) for value in kept.values()):
            off = (kept["whole"] - kept["replicas"]).abs().max().item()
            if torch.allclose(kept["replicas"], kept["shard"], rtol=1e-4, atol=1e-6):
                text += f"; running_mean is the first shard's, off by {off:.2g}"
        found.append(Fault("batch norm", name, "", text + losses))
    return found
