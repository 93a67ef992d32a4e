"""The pruners and distillers under DistributedDataParallel: one device on the joined batch, the same on all ranks."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any, Dict, List

import ddp_runs
import pytest
import torch
from conftest import RELEASE

if RELEASE not in ("2.10.1", "3.0"):
    pytest.skip(f"DDP is not tested with the pruners of NNI {RELEASE}", allow_module_level=True)

import harness
from ddp_pruner_cases import CASES, DdpCase, on_one_device, scripts

from nni_dataparallel import is_patched, patched

WORLD = 2
WORKER = Path(__file__).parent / "ddp_pruner_worker.py"


@functools.lru_cache(maxsize=None)
def reference(case: DdpCase) -> Any:
    """Stock NNI on one device."""
    assert not is_patched()
    return on_one_device(case)


@pytest.fixture
def ranks(runs: Path) -> ddp_runs.Ranks:
    """What every rank of the one run over all cases, patched and stock, left."""
    return ddp_runs.once(runs, "pruners", lambda folder: ddp_runs.run(WORLD, folder, "stock", worker=WORKER))


def left(ranks: ddp_runs.Ranks, way: str, case: DdpCase) -> List[Any]:
    """What every rank left of a case; a copy, since comparing joins them."""
    return copy.deepcopy([found[f"{way}: {case.name}"] for found in ranks])


def mean(values: List[Any]) -> Any:
    return torch.as_tensor(values).double().mean().item()


def joined(outcomes: List[Any]) -> Any:
    """What the ranks left together: the losses are parts of a mean, each evaluates its own rows."""
    first = outcomes[0]
    first.losses = [mean(step) for step in zip(*(outcome.losses for outcome in outcomes))]
    first.evaluation = torch.cat([outcome.evaluation for outcome in outcomes])
    more = getattr(first, "more", {})
    more.update({name: mean([own.more[name] for own in outcomes]) for name in more if name.startswith("distillation loss")})
    return first


def apart_of_ranks(outcomes: List[Any]) -> List[str]:
    """In words, where what all ranks hold is not the same to the last bit."""
    lines: List[str] = []
    for rank, other in enumerate(outcomes[1:], 1):
        for name in ("masks", "state", "plain", "weights", "metrics", "more"):
            mine, yours = (vars(outcome).get(name, {}) for outcome in (outcomes[0], other))
            if name == "more":
                mine, yours = ({k: v for k, v in more.items() if not k.startswith("distillation loss")} for more in (mine, yours))
            lines += harness.unequal(f"{name} of rank 0 and rank {rank}", mine, yours)
    return lines


def apart_from_one_device(case: DdpCase, outcomes: List[Any]) -> List[str]:
    """In words, where the ranks differ from each other or from one device."""
    errors = [f"rank {rank}: {outcome}" for rank, outcome in enumerate(outcomes) if isinstance(outcome, str)]
    return errors or [*apart_of_ranks(outcomes), *scripts.apart(reference(case), joined(outcomes))]


SHARE, GRADIENT = "every rank ranks by its own share of the batch", "every rank squares its own gradient"
EMPTY, TEACHER, RANGES = (
    "NaN on a rank without rows",
    "layers of a teacher in DDP are not found",
    "every rank tracks its own ranges",
)
WRONG: Dict[str, str] = {
    # 2.10.1
    "ActivationMeanRankFilterPruner": SHARE,
    **dict.fromkeys(("v2.TaylorFOWeightPruner", "v2.TaylorFOWeightPruner.evaluator"), GRADIENT),
    **{f"v2.Activation{kind}RankPruner{how}": SHARE for kind in ("APoZ", "Mean") for how in ("", ".evaluator")},
    # 3.0
    "L1NormPruner: global": "every process goes through the layers in another order, which decides the threshold",
    **dict.fromkeys(("TaylorPruner", "TaylorPruner: global", "TaylorPruner (even shards)"), GRADIENT),
    **dict.fromkeys(("LinearPruner: TaylorPruner", "AGPPruner: TaylorPruner", "TaylorPruner: two backwards per step"), GRADIENT),
    "Taylor, links: rank 0 validates (even shards)": GRADIENT,
    **dict.fromkeys(("Dynamic: mse", "Dynamic: kl", "Dynamic: links", "Dynamic: teacher_predict in parallel"), EMPTY),
    **dict.fromkeys(("Adaptive1d: same widths", "Dynamic: a choice of links"), EMPTY),
    "Dynamic: a choice of links (even shards)": "every rank chooses by its own loss",
    "Dynamic: teacher in parallel": TEACHER,
    "Adaptive1d: wider than the student": "trans_linears start apart and are trained by each rank alone",
    "Adaptive1d: wider than the student, teacher in parallel": TEACHER,
    "Adaptive1d: stopped and resumed": "trans_linears start apart and are trained by each rank alone",
    **dict.fromkeys(("Taylor, QAT", "QAT, Movement", "Slim, LSQ", "QAT, distiller", "Taylor, QAT, distiller"), RANGES),
    "AGP of L1, distiller": "the mean of uneven shards' means is not the batch's",
    "Taylor, QAT, distiller, all in parallel": TEACHER,
}
# Each rank ranks by its share here too; the masks come out the same.
LUCKY = {"ActivationAPoZRankFilterPruner"}


def stock_params() -> List[Any]:
    def marks(case: DdpCase) -> List[Any]:
        reason = WRONG.get(case.name)
        return [pytest.mark.xfail(strict=True, raises=AssertionError, reason=reason)] if reason else []

    return [pytest.param(case, marks=marks(case), id=case.name) for case in CASES if case.name not in LUCKY]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_pruned_or_distilled_on_ranks_equals_one_device(ranks: ddp_runs.Ranks, case: DdpCase) -> None:
    """Masks, weights, losses, gradients, evaluation are those of stock NNI on one device; all ranks hold the same bits."""
    assert apart_from_one_device(case, left(ranks, "patched", case)) == []


@pytest.mark.parametrize("case", stock_params())
def test_stock_pruner_or_distiller_on_ranks(ranks: ddp_runs.Ranks, case: DdpCase) -> None:
    """Without the fixes: what ranks compute from weights and what DDP reduces is right, all else is each rank's own."""
    assert apart_from_one_device(case, left(ranks, "stock", case)) == []


@pytest.mark.skipif(RELEASE != "3.0", reason=f"NNI {RELEASE} has no distillers")
def test_what_a_distiller_trains_is_saved() -> None:
    """quantizer_state_dict holds trans_linears, by name; what does not fit is refused before anything is loaded."""
    import ddp_pruner_scripts as more
    import test_nni3_distillers as distillers

    from nni_dataparallel import load_quantizer_state_dict, quantizer_state_dict

    script = more.InOneGo(harness.one_device, distillers.narrow())
    distiller = more.start(script, 0, 2)
    assert quantizer_state_dict(distiller) == {"quantizer": "Adaptive1dLayerwiseDistiller", "trans_linears": {}}
    distiller.compress(2, None)
    state = quantizer_state_dict(distiller)
    assert sorted(state["trans_linears"]) == ["first/_output_0", "second/_output_0"]
    fresh = more.start(more.InOneGo(harness.one_device, distillers.narrow()), 0, 2)
    with pytest.raises(
        ValueError, match=r"nothing was loaded\. NNI makes them when compress\(\) begins: load in the training func"
    ):
        load_quantizer_state_dict(fresh, state)


@pytest.mark.skipif(RELEASE != "3.0", reason=f"NNI {RELEASE} has no distillers")
def test_the_order_in_a_distillers_optimizer_is_that_of_names() -> None:
    """A checkpoint of the optimizer goes by order; stock's is that of a set, another in every process."""
    import ddp_pruner_scripts as more
    import test_nni3_distillers as distillers

    with patched():
        script = more.InOneGo(harness.one_device, distillers.narrow())
        distiller = more.start(script, 0, 1)
        spaces = dict(sorted(distiller._target_spaces.items(), reverse=True))
        distiller._target_spaces.clear()
        distiller._target_spaces.update(spaces)
        distiller.compress(1, None)
        assert list(distiller.trans_linears) == ["fc", "first", "second"]
