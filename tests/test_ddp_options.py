"""``DistributedDataParallel`` over gloo: its options, four ranks, accidents, costs, stopping, subgroups, loops without it.

torch's ``SyncBatchNorm`` works on GPUs only, DDP refuses it on a CPU: it is not tried here.
"""

from __future__ import annotations

import copy
import functools
import re
from pathlib import Path
from typing import Any, Iterator, List
from unittest import mock

import ddp_runs
import ddp_scenarios as scenarios
import harness
import pytest
import torch
from cases import Case
from conftest import CASES, IS_FIRST, IS_NEW, RELEASE, needs_a_quantizer
from ddp_edges import EDGES
from ddp_runs import Ranks, faults
from ddp_scenarios import SUBJECTS
from harness import Record, data, reference, stock_class
from references import reference_class
from torch import nn

import nni_dataparallel
from nni_dataparallel import merged_over, patched

pytestmark = [needs_a_quantizer, pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")]

OPTIONS = ["own_buffers", "unused_parameters", "static_graph", "bucket_view", "inside_ddp", "no_sync"]
OPTIONS += ["checkpointed", "checkpointed_reentrant", "own_loop"]
OTHERS = ["joined", "unwrapped", "loaded_by_rank_0", "outside", "traffic", "broadcast", "stop", "local"]
ON_FOUR = ["resumed", "own_loop_in_a_subgroup", "ddp_in_a_subgroup"]
# One case of each quantizer runs on four ranks, too.
FOUR = list({case.quantizer: case for case in reversed(CASES)}.values())
each_subject = pytest.mark.parametrize("case", SUBJECTS, ids=lambda case: case.id)


@pytest.fixture
def scenarios_of_two(runs: Path) -> Ranks:
    """Two patched ranks, every scenario."""
    return ddp_runs.once(runs, "scenarios", lambda folder: ddp_runs.run(2, folder, "patched", *OPTIONS, *OTHERS))


@pytest.fixture
def edges(runs: Path) -> Ranks:
    """Two patched ranks, what they can do wrong."""
    return ddp_runs.once(runs, "edges", lambda folder: ddp_runs.run(2, folder, "patched", *EDGES))


@pytest.fixture
def four(runs: Path, scenarios_of_two: Ranks) -> Ranks:
    """Four patched ranks; some go on from where two stopped."""
    jobs = [case.id for case in FOUR] + ON_FOUR
    return ddp_runs.once(runs, "four", lambda folder: ddp_runs.run(4, folder, "patched", *jobs))


@pytest.fixture
def stock(runs: Path) -> Ranks:
    """Two ranks of stock NNI, with batches that they share evenly."""
    return ddp_runs.once(runs, "stock broadcast", lambda folder: ddp_runs.run(2, folder, "stock", "broadcast"))


def of(ranks: Ranks, scenario: str, case: Case) -> List[Any]:
    """What a scenario left of a case, by rank; its error in words."""
    return [left[scenario] if isinstance(left[scenario], str) else left[scenario][case.id] for left in ranks]


def whole(ranks: Ranks, scenario: str, case: Case) -> List[Any]:
    """As ``of``, where there should be no error."""
    found = of(ranks, scenario, case)
    assert not [one for one in found if isinstance(one, str)], found
    return found


@pytest.mark.parametrize("case", FOUR, ids=lambda case: case.id)
def test_four_ranks_equal_one_device(four: Ranks, case: Case) -> None:
    """The same, with more ranks than rows in some batches."""
    assert not faults(reference(case, RELEASE), [left[case.id] for left in four])


@functools.lru_cache(maxsize=None)
def _accumulated(case: Case) -> Record:
    with mock.patch.object(harness, "step", scenarios.accumulate_alone):
        return harness.train(reference_class(stock_class(case.quantizer)), case, RELEASE)


@each_subject
@pytest.mark.parametrize("option", OPTIONS)
def test_options_of_ddp(scenarios_of_two: Ranks, option: str, case: Case) -> None:
    """Whatever the options, both ranks equal one device.

    ``no_sync``: two micro-batches add up their gradients, and each is a forward that moves the ranges. ``inside_ddp``: a
    DataParallel with two replicas inside each rank. ``own_loop``: no DDP at all, ``merged_over()`` around the forward.
    """
    expected = _accumulated(case) if option == "no_sync" else reference(case, RELEASE)
    assert not faults(expected, of(scenarios_of_two, option, case))


@each_subject
@pytest.mark.parametrize("scenario", ["own_loop_in_a_subgroup", "ddp_in_a_subgroup"])
def test_ranks_of_a_subgroup(four: Ranks, scenario: str, case: Case) -> None:
    """Two of four ranks share a batch: statistics are merged over these two alone."""
    assert not faults(reference(case, RELEASE), of(four, scenario, case))


def test_join_says_that_statistics_are_not_merged(scenarios_of_two: Ranks) -> None:
    """Ranks with two and three batches both come to their end; each is told why it observes alone."""
    for rank, left in enumerate(scenarios_of_two):
        assert not isinstance(left["joined"], str), left["joined"]
        assert left["joined"]["steps"] == 2 + rank
        assert "same number of batches" in left["joined"]["told"][0]
        assert "all_reduce" in left["joined"]["calls afterwards"]


def test_the_plain_model_trains_in_ddp_when_the_quantizer_is_gone(scenarios_of_two: Ranks) -> None:
    """Its Parameters have the names of what the earlier DDP was told to leave out."""
    assert not [left["unwrapped"] for left in scenarios_of_two if isinstance(left["unwrapped"], str)]
    first, second = (left["unwrapped"] for left in scenarios_of_two)
    assert first["ignored"]
    assert not first["ignored afterwards"]
    assert not harness.unequal("state", first["state"], second["state"])


@each_subject
@pytest.mark.skipif(IS_NEW, reason="what NNI 3.0 adds to a checkpoint, quantizer_state_dict, is loaded by every rank")
def test_a_checkpoint_that_rank_0_has_loaded_is_handed_on(scenarios_of_two: Ranks, case: Case) -> None:
    """Also the quantised weights, with which the older releases evaluate, though they are not broadcast later."""
    first, second = whole(scenarios_of_two, "loaded_by_rank_0", case)
    assert torch.equal(first, second)


@each_subject
def test_nothing_communicates_outside_of_a_forward_of_ddp(scenarios_of_two: Ranks, case: Case) -> None:
    """Rank 0 alone runs ``ddp.module(x)`` in both modes, and waits for nobody; then both train on."""
    first, second = whole(scenarios_of_two, "outside", case)
    assert first["calls"] == []
    assert first["seconds"] < 20
    assert first["loss"] == second["loss"]


@each_subject
def test_one_collective_per_observer_and_forward(scenarios_of_two: Ranks, case: Case) -> None:
    """In training; in evaluation none at all, except in 1.x, whose ranges move there as well."""
    for found in whole(scenarios_of_two, "traffic", case):
        assert found["observers"]
        for count in found["forwards"]:
            assert 0 < count <= found["observers"]
        assert len(found["evaluation"]) == (found["observers"] if IS_FIRST else 0)


@each_subject
def test_buffers_stay_the_objects_that_ddp_knows(scenarios_of_two: Ranks, case: Case) -> None:
    """DDP broadcasts a list of buffers made at its construction."""
    for found in whole(scenarios_of_two, "broadcast", case):
        assert found["changed"] == []


def test_weights_are_not_broadcast(scenarios_of_two: Ranks, stock: Ranks) -> None:
    """Every rank computes the quantised weight anew; stock sends it before each forward."""
    ours, theirs = whole(scenarios_of_two, "broadcast", SUBJECTS[0])[0], whole(stock, "broadcast", SUBJECTS[0])[0]
    assert theirs["bytes"] >= theirs["weights"] > 0
    assert ours["bytes"] <= theirs["bytes"] - theirs["weights"]


@pytest.mark.once
@pytest.mark.parametrize("accident", ["raising", "killed"])
def test_an_accident_of_one_rank_ends_the_others(tmp_path: Path, accident: str) -> None:
    """In the middle of a forward, while the other waits for its range: torch's own error, and nobody hangs."""
    first, last = ddp_runs.launch(ddp_runs.WORKER, 2, tmp_path, "uncaught", accident, limit=60)
    assert (last.status == -9) if accident == "killed" else ("of the user's" in last.errors)
    assert first.status
    assert re.search(r"[Cc]onnection (closed|reset) by peer|Broken pipe", first.errors), first.errors


@each_subject
def test_a_run_goes_on_with_another_number_of_ranks(scenarios_of_two: Ranks, four: Ranks, case: Case) -> None:
    """Saved by rank 0 of two after three steps, gone on with on four ranks and on one device."""
    expected = copy.copy(reference(case, RELEASE))
    expected.first = {}  # the range after the first step was seen before the stop
    assert not faults(expected, of(four, "resumed", case))
    with patched():
        alone = scenarios.go_on(case, scenarios_of_two[0]["stop"][case.id], harness.one_device, harness.step, harness.watch)
    assert not faults(expected, [alone])


@each_subject
def test_ddp_around_a_model_that_gets_its_quantizer_later_is_refused(case: Case) -> None:
    """At the first training forward; DDP knows the Parameters from before. Evaluation, and the right order, work."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        x = data()[0][0]
        with patched():
            net = harness.make_net(case)
            early = nn.parallel.DistributedDataParallel(net)
            early(x).sum().backward()
            optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
            harness.make_quantizer(stock_class(case.quantizer), case, net, optimizer, RELEASE)
            with pytest.raises(RuntimeError, match=r"was built before the quantizer: it does not know conv1\..*plain model first"):
                early(x)
            with torch.no_grad():
                early(x)
            nn.parallel.DistributedDataParallel(net)(x).sum().backward()
    finally:
        torch.distributed.destroy_process_group()


def test_merged_over_needs_a_process_group() -> None:
    """The text says what to do."""
    with pytest.raises(RuntimeError, match=r"there is none: launch with torchrun.*On one device leave merged_over\(\) out"):
        with merged_over():
            pass


@pytest.fixture
def group_of_one() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_merged_over_something_else_is_told(group_of_one: None) -> None:
    """No group, a group that this rank is not in, and stock NNI, of which nobody would ask for the group."""
    with patched():
        with pytest.raises(TypeError, match=r"merged_over\(\) takes a process group.*not 'x'"):
            with merged_over("x"):
                pass
        with pytest.raises(ValueError, match="rank 0 is not in the process group"):
            with merged_over(torch.distributed.GroupMember.NON_GROUP_MEMBER):
                pass
    not_live = mock.patch("nni_dataparallel.ddp.is_live", return_value=False)  # a subclass may have left it there
    with not_live, pytest.warns(UserWarning, match=r"merges nothing: NNI is not patched") as caught:
        with merged_over():
            pass
    assert [w.filename for w in caught] == [__file__]


@each_subject
def test_local_statistics_are_those_of_each_rank(scenarios_of_two: Ranks, case: Case) -> None:
    """With ``statistics="local"`` nobody communicates, and a rank has the range of its own rows after the first forward."""
    found = whole(scenarios_of_two, "local", case)
    for rank, left in enumerate(found):
        assert left["calls"] == []
        with nni_dataparallel.patched():
            net, _, _ = harness.start_training(stock_class(case.quantizer), case, RELEASE)
            net(data()[0][0].tensor_split(2)[rank])
        assert not harness.unequal("state", harness.snapshot(net), left["first"])
    if case is SUBJECTS[0]:  # the learned scales of 3.0 start without a look at the batch
        assert harness.unequal("state", found[0]["first"], found[1]["first"])


def test_ranks_at_different_layers_are_told(edges: Ranks) -> None:
    """Collectives are matched by order: without a look at the place a rank would take another layer's range for its own."""
    for rank, left in enumerate(edges):
        assert not isinstance(left["another_place"], str), left["another_place"]
        for error in left["another_place"]:
            assert re.match(rf"RuntimeError: rank {rank} of 2 observes '(input|rows) of layer{rank}' while another rank", error)


def test_a_nan_of_any_rank_is_one_of_the_batch(edges: Ranks) -> None:
    """As on one device, wherever in the order of ranks it is; infinities stay what they are."""
    for left in edges:
        assert left["nan_of_one_rank"] == [True] * 4


def test_other_models_in_ddp_are_left_alone(edges: Ranks) -> None:
    """An empty Parameter is no learned scale, and torch's own words for a lazy module stay."""
    for left in edges:
        assert not isinstance(left["none_of_our_business"], str), left["none_of_our_business"]
        assert torch.equal(left["none_of_our_business"]["gradient"], torch.full((2, 2), 3.0))
        assert "learned scales" not in left["none_of_our_business"]["lazy"]
        assert "dummy forward pass" in left["none_of_our_business"]["lazy"]


def test_a_destroyed_process_group_is_let_go(edges: Ranks) -> None:
    """A reference would keep its sockets open."""
    assert [left["after_the_group"] for left in edges] == [{"alive": False}] * 2


@pytest.mark.skipif(not IS_NEW, reason="NNI 3.0 puts data of another dtype into the Parameters")
def test_scales_of_a_half_precision_model_are_reduced(edges: Ranks) -> None:
    """All of them have the gradient of all ranks, in the second step too."""
    first, second = (left["half_precision"] for left in edges)
    assert not isinstance(first, str), first
    assert len(first) >= 4
    assert not harness.unequal("gradient", first, second)


@pytest.mark.skipif(not IS_NEW, reason="earlier releases have their buffers from the start")
def test_ranges_that_one_rank_has_alone_are_told(edges: Ranks) -> None:
    """DDP itself would end the process in its first forward."""
    for left in edges:
        assert re.match(
            r"RuntimeError: ranks \[1\] have buffers of other.*load the checkpoint on every rank", left["loaded_by_one"]
        )
