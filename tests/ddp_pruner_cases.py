"""The pruners and distillers that are run under DDP, and what one device leaves."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any, Callable, Iterator, List, Tuple

from conftest import RELEASE
from harness import BATCHES, one_device

NOT_EMPTY = (8, 7, 5, 2, 3)  # where stock stops at a rank without rows, and the others wait for it
EVEN_TOO = (
    *("SlimPruner", "TaylorPruner", "MovementPruner: threshold", "Dynamic: mse", "Dynamic: kl", "Dynamic: a choice of links"),
    *("Adaptive1d: same widths", "Taylor, links: rank 0 validates"),
)
EVEN = (8, 6, 4, 2, 8)  # even shards: the mean of their mean losses is the whole batch's mean loss

if RELEASE == "3.0":
    import nni3_scripts as scripts
    import test_nni3_distillers as distillers
    import test_nni3_pruners as pruners
else:
    import pruners as scripts


@dataclass(frozen=True)
class DdpCase:
    """A script, and the sizes of its batches."""

    name: str
    run: Callable[[Any], Any] = field(hash=False, compare=False)
    sizes: Tuple[int, ...] = BATCHES
    even: bool = False


@contextlib.contextmanager
def in_place(owner: Any, name: str, value: Any) -> Iterator[None]:
    """``owner.name`` is ``value`` inside the block."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def on_one_device(case: DdpCase) -> Any:
    """What the script leaves on one device that gets the whole batches."""
    whole = scripts.data
    with in_place(scripts, "data", lambda *sizes, **seed: whole(*(sizes or (case.sizes,)), **seed)), layers_by_name():
        return case.run(one_device)


@contextlib.contextmanager
def layers_by_name() -> Iterator[None]:
    """NNI 3.0 goes through the layers in the order of a set, which decides what a global group masks: here by name."""
    if RELEASE != "3.0":
        yield
        return
    from nni.compression.base.compressor import Compressor

    compress = Compressor.compress

    def in_order(self: Any, *args: Any) -> Any:
        for layers in (self._target_spaces, self._module_wrappers):
            items = sorted(layers.items())
            layers.clear()
            layers.update(items)
        return compress(self, *args)

    with in_place(Compressor, "compress", in_order):
        yield


def _cases() -> List[DdpCase]:
    if RELEASE != "3.0":
        return [DdpCase(case.name, case.run) for case in scripts.pruner_cases(RELEASE)]
    from ddp_pruner_scripts import EVEN_CASES, MORE_CASES

    known = [*pruners.CASES, *distillers.CASES, *MORE_CASES]
    return [
        *(DdpCase(case.name, case.run, NOT_EMPTY if case in distillers.CHAINS else BATCHES) for case in known),
        *(DdpCase(f"{case.name} (even shards)", case.run, EVEN, True) for case in [*known, *EVEN_CASES] if case.name in EVEN_TOO),
    ]


CASES = _cases()
