"""The pruners of NNI 3.0 under nn.DataParallel: masks and weights of one device."""

from __future__ import annotations

import copy
import functools
from typing import Any, List

import pytest
from conftest import RELEASE

if RELEASE != "3.0":
    pytest.skip(f"NNI {RELEASE} does not have the pruners of 3.0", allow_module_level=True)

import harness
import torch
from harness import Wrap, data, one_device, replicated
from nni.compression import pruning
from nni3_scripts import Outcome, Run, RunCase, Script, apart, built, layers, run_of

from nni_dataparallel import is_patched, patched

NORM_PRUNERS = [pruning.LevelPruner, pruning.L1NormPruner, pruning.L2NormPruner, pruning.FPGMPruner]
SCHEDULES = [pruning.LinearPruner, pruning.AGPPruner]
HALF = layers(sparse_ratio=0.5)
CONV2 = {"op_names": ["conv2"]}


def one_shot(make: Any, config: Any = HALF) -> Run:
    return run_of(built(make, config, evaluator=False))


def movement(config: Any, **options: Any) -> Run:
    return run_of(built(pruning.MovementPruner, config, 2, 5, **options), 7, None, fine_tune=False)


def scheduled(schedule: Any, make: Any, *args: Any) -> Run:
    def build(script: Script) -> Any:
        return schedule(built(make, HALF, *args)(script), 2, 3)

    return run_of(build, 7, None, fine_tune=False)


def masked_outputs() -> Run:
    """A mask on what the layer returns, of the channels that its weight has lost."""
    align = {
        "align": {"module_name": None, "target_name": "weight", "dims": [0]},
        "granularity": "per_channel",
        "apply_method": "mul",
    }
    config = {"op_types": ["Conv2d"], "sparse_ratio": 0.5, "target_names": ["weight", "_output_"]}

    def build(script: Script) -> Any:
        pruner = pruning.L1NormPruner(script.net, [{**config, "target_settings": {"_output_": align}}])
        pruner.track_forward(data()[0][0])
        return pruner

    return run_of(build)


def loaded_masks(wrap: Any) -> Outcome:
    """Masks of one pruner in another, as after a restart."""
    masks = {}
    for make in (pruning.LevelPruner, pruning.L1NormPruner):
        script = Script(wrap)
        pruner = make(script.net, layers(sparse_ratio=0.5))
        if masks:
            pruner.update_masks(masks)
        else:
            _, masks = pruner.compress()
    script.fine_tune(script.net)
    return script.outcome(pruner)


CASES = [
    *(RunCase(make.__name__, one_shot(make)) for make in NORM_PRUNERS),
    *(
        RunCase(f"L1NormPruner: {granularity}", one_shot(pruning.L1NormPruner, layers(sparse_ratio=0.5, granularity=granularity)))
        for granularity in ("in_channel", "out_channel")
    ),
    RunCase("L2NormPruner: blocks", one_shot(pruning.L2NormPruner, [{**CONV2, "sparse_ratio": 0.5, "granularity": [2, 2, 3, 3]}])),
    RunCase(
        "L1NormPruner: global",
        one_shot(pruning.L1NormPruner, layers(sparse_ratio=0.4, global_group_id="all", max_sparse_ratio=0.8, min_sparse_ratio=0.1)),
    ),
    RunCase("L1NormPruner: masked outputs", masked_outputs()),
    RunCase("loaded masks", loaded_masks),
    RunCase("SlimPruner", run_of(built(pruning.SlimPruner, HALF, 4))),
    RunCase(
        "SlimPruner: norms",
        run_of(built(pruning.SlimPruner, [{"op_types": ["BatchNorm2d"], "sparse_ratio": 0.5}], 4, regular_scale=0.1), norm=True),
    ),
    RunCase("TaylorPruner", run_of(built(pruning.TaylorPruner, HALF, 3))),
    RunCase("TaylorPruner: global", run_of(built(pruning.TaylorPruner, layers(sparse_ratio=0.5, global_group_id=1), 3))),
    RunCase("MovementPruner", movement(HALF)),
    RunCase("MovementPruner: rows", movement(layers(sparse_ratio=0.5, granularity="out_channel"))),
    RunCase(
        "MovementPruner: threshold",
        movement(layers(sparse_threshold=0.502, max_sparse_ratio=0.7, granularity="in_channel"), regular_scale=10.0),
    ),
    *(
        RunCase(f"{schedule.__name__}: {make.__name__}", scheduled(schedule, make))
        for schedule in SCHEDULES
        for make in NORM_PRUNERS
    ),
    *(
        RunCase(f"{schedule.__name__}: {make.__name__}", scheduled(schedule, make, 2))
        for schedule in SCHEDULES
        for make in (pruning.SlimPruner, pruning.TaylorPruner)
    ),
]

each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
each_count = pytest.mark.parametrize("count", [2, 3, 4])


@functools.lru_cache(maxsize=None)
def reference(case: RunCase) -> Outcome:
    """Stock NNI on one device."""
    assert not is_patched()
    return case.run(one_device)


@each_case
@each_count
def test_pruned_on_replicas_equals_one_device(count: int, case: RunCase) -> None:
    """Masks, weights, losses, evaluation, and the plain model afterwards are those of stock NNI on one device."""
    on_one = reference(case)
    with patched():
        assert apart(on_one, case.run(replicated(count))) == []


@each_case
def test_pruned_on_one_device_is_stock(case: RunCase) -> None:
    """On one device nothing changes, not the last bit."""
    on_one = reference(case)
    with patched():
        assert apart(on_one, case.run(one_device), exact=True) == []


@each_case
@pytest.mark.skipif(int(torch.__version__.split(".")[0]) < 2, reason="torch < 2.0 cannot tell the virtual devices apart")
@pytest.mark.xfail(strict=True, raises=(RuntimeError, AssertionError), reason="every replica runs the original's wrapper")
def test_stock_pruner_on_replicas(case: RunCase) -> None:
    """Without the fixes no pruner of 3.0 trains under DataParallel."""
    on_one = reference(case)
    assert apart(on_one, case.run(replicated(2))) == []


@each_case
def test_a_case_prunes_a_part(case: RunCase) -> None:
    """What is compared is masks that keep something and hide something."""
    masks = reference(case).masks
    assert any(0 < mask.mean() < 1 for mask in masks.values())


def after_unwrapping(count: int) -> List[str]:
    """Train a pruned, then unwrapped model on replicas; where it differs from one device."""
    outcomes = []
    for wrap in (one_device, replicated(count)):
        script = Script(one_device)
        pruner = pruning.L1NormPruner(script.net, layers(sparse_ratio=0.5))
        pruner.compress()
        pruner.unwrap_model()
        script.wrap = wrap
        script.fine_tune(script.net)
        outcomes.append({"state": script.net.state_dict(), "losses": script.losses})
    return harness.unequal("after unwrapping", *outcomes, harness.RTOL, harness.ATOL)


@each_count
def test_an_unwrapped_model_trains_on_replicas(count: int) -> None:
    """After unwrap_model() the layers are plain ones again, and DataParallel can copy them."""
    with patched():
        assert after_unwrapping(count) == []


@pytest.mark.skipif(int(torch.__version__.split(".")[0]) < 2, reason="torch < 2.0 cannot tell the virtual devices apart")
@pytest.mark.xfail(strict=True, raises=RuntimeError, reason="the original's forward stays on the layer")
def test_stock_unwrapped_model_on_replicas() -> None:
    """Without the fixes every replica of an unwrapped model runs the original's layers."""
    assert after_unwrapping(2) == []


def test_a_forward_of_the_users_survives_unwrapping() -> None:
    """A forward that a script put on a layer itself is there after unwrap_model()."""
    with patched():
        script = Script(one_device)
        own = script.net.conv1.forward
        script.net.conv1.forward = lambda x: own(x) * 2
        before = script.net(data()[0][0])
        pruner = pruning.L1NormPruner(script.net, HALF)
        pruner.unwrap_model()
        assert torch.equal(script.net(data()[0][0]), before)


def copies(make: Any, wrap: Wrap, **options: Any) -> None:
    """Copy a model under pruning after a training forward, train the copy, and look at both."""
    script = Script(wrap)
    pruner = built(make, HALF, **options)(script)
    pruner.compress(*((6, None) if make is pruning.MovementPruner else ()))
    script.fine_tune(script.net, 1)
    x, twin = data()[0][0], copy.deepcopy(script.net)
    assert torch.equal(script.net(x), twin(x))
    before = harness.snapshot(script.net)  # with the masked weight of this forward
    script.fine_tune(twin, 2)
    assert harness.unequal("original", before, harness.snapshot(script.net)) == []
    assert harness.unequal("copy", before, harness.snapshot(twin)) != []


each_pruner = pytest.mark.parametrize(
    ("make", "options"),
    [
        (pruning.LevelPruner, {"evaluator": False}),
        (pruning.SlimPruner, {"training_steps": 3}),
        (pruning.TaylorPruner, {"training_steps": 3}),
        (pruning.MovementPruner, {"warmup_step": 2, "cooldown_begin_step": 5}),
    ],
)


@each_pruner
@pytest.mark.parametrize("count", [1, 3])
def test_a_model_under_pruning_can_be_copied(count: int, make: Any, options: Any) -> None:
    """copy.deepcopy works after a training forward; the copy computes the same, and trains by itself."""
    with patched():
        copies(make, replicated(count), **options)


@each_pruner
@pytest.mark.xfail(strict=True, raises=RuntimeError, reason="the masked weight is rebound, with its graph")
def test_stock_model_under_pruning_cannot_be_copied(make: Any, options: Any) -> None:
    """Without the fixes copy.deepcopy fails after a training forward."""
    copies(make, one_device, **options)
