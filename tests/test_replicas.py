"""Rank, size, local() and collectives among the threads of a parallel forward."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any, Callable, Dict, List

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from nni_dataparallel import rehearse, rendezvous, replicas
from nni_dataparallel.recording import recorded
from nni_dataparallel.virtual import VirtualDevice, virtual_devices

pytestmark = pytest.mark.usefixtures("worker_contexts")
TIMEOUT = 30


class Probe(nn.Module):
    """Runs a function where its replica lives."""

    def __init__(self, work: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = nn.Linear(1, 1)
        self.other = nn.Linear(1, 1)
        self.work = work

    def forward(self, x: Tensor) -> Tensor:
        return self.work(self, x)


def within(seconds: float, function: Callable[[], Any]) -> Any:
    """Run in a thread; fail instead of hanging."""
    box: Dict[str, Any] = {}

    def target() -> None:
        try:
            box["result"] = function()
        except BaseException as error:
            box["error"] = error

    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), f"hangs: not done after {seconds} s"
    if "error" in box:
        raise box["error"]
    return box["result"]


def run(work: Callable[[Any, Tensor], Tensor], count: int = 3, rows: int = 6) -> Tensor:
    model = rehearse(Probe(work), count)
    return within(TIMEOUT, lambda: model(torch.arange(float(rows)).reshape(rows, 1)))


def test_outside_everything_is_the_identity() -> None:
    """One device: rank 0 of 1, the module itself, the tensor itself."""
    module, x = nn.Linear(1, 1), torch.ones(2)
    assert (replicas.rank(), replicas.size(), replicas.current()) == (0, 1, None)
    assert replicas.local(module) is module
    assert replicas.all_reduce(x, "max", module, "x") is x
    assert replicas.all_gather(x, module, "x") == [x]


def test_rank_and_size() -> None:
    """Each worker thread knows its place in the batch, and how many there are."""
    out = run(lambda self, x: torch.full_like(x, replicas.rank() * 10 + replicas.size()), 3, 6)
    assert out.flatten().tolist() == [3, 3, 13, 13, 23, 23]
    assert run(lambda self, x: torch.full_like(x, replicas.size()), 4, 2).flatten().tolist() == [2, 2]


def test_all_reduce() -> None:
    """max, min and sum over the shards, the same on every replica, in the order of the ranks."""

    def work(self: Any, x: Tensor) -> Tensor:
        ends = [replicas.all_reduce(x.sum(), op, self.inner, op) for op in ("max", "min", "sum")]
        return torch.stack(ends).expand(len(x), 3)

    assert run(work, 3, 6).tolist() == [[9, 1, 15]] * 6


def test_all_gather_keeps_the_order_of_the_batch() -> None:
    """The shards joined are the batch, whatever their sizes."""
    out = run(lambda self, x: torch.cat(replicas.all_gather(x, self.inner, "x")).flatten().expand(len(x), -1), 3, 7)
    assert out.tolist() == [list(range(7))] * 7


def test_a_module_used_twice_meets_twice() -> None:
    """The second use of a layer in one forward is another meeting than the first."""

    def work(self: Any, x: Tensor) -> Tensor:
        a = replicas.all_reduce(x.max(), "max", self.inner, "x")
        b = replicas.all_reduce(x.min(), "min", self.inner, "x")
        return (a - b).expand(len(x), 1)

    assert run(work, 2, 6).unique().tolist() == [5]


def test_local_is_this_replicas_copy() -> None:
    """local() maps the network's modules to the copies of this thread, shared children included."""
    network = nn.ModuleDict({"a": nn.Linear(1, 1), "b": nn.ReLU()})

    def work(self: Any, x: Tensor) -> Tensor:
        here = replicas.current()
        assert here is not None
        assert replicas.local(probe.inner) is self.inner
        assert replicas.local(probe) is self
        assert replicas.local(network) is network
        assert here.original(self.inner) is probe.inner
        return x

    probe = Probe(work)
    within(TIMEOUT, lambda: rehearse(probe, 3)(torch.ones(6, 1)))


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_replica_that_raises_does_not_block_the_others(failing: int) -> None:
    """The others go on with what is there, and the user sees the original exception."""

    def work(self: Any, x: Tensor) -> Tensor:
        if replicas.rank() == failing:
            raise ZeroDivisionError("the user's own")
        return replicas.all_reduce(x.sum(), "sum", self.inner, "x").expand(len(x), 1)

    with pytest.raises(ZeroDivisionError, match="the user's own"):
        run(work)


def test_a_replica_that_skips_a_layer_joins_the_next_one() -> None:
    """Who skipped a layer is waited for at the next one, not merged alone."""

    def work(self: Any, x: Tensor) -> Tensor:
        first = torch.zeros(())
        if replicas.rank() != 1:
            first = replicas.all_reduce(torch.ones(()), "sum", self.inner, "x")
        second = replicas.all_reduce(torch.ones(()), "sum", self.other, "x")
        return torch.stack((first, second)).expand(len(x), 2)

    assert run(work, 3, 3).tolist() == [[2, 3], [0, 3], [2, 3]]


def test_a_second_use_meets_a_first_one() -> None:
    """One replica runs a layer twice, the others once: at the layer that all run they all meet."""

    def work(self: Any, x: Tensor) -> Tensor:
        if replicas.rank() == 0:
            replicas.all_reduce(torch.ones(()), "sum", self.inner, "x")
        replicas.all_reduce(torch.ones(()), "sum", self.other, "x")
        return replicas.all_reduce(torch.ones(()), "sum", self.inner, "x").expand(len(x), 1)

    assert run(work, 3, 3).flatten().tolist() == [3, 3, 3]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_what_torchs_workers_lose_is_seen(error: Any) -> None:
    """KeyboardInterrupt and SystemExit in a replica reach the caller as themselves."""

    def work(self: Any, x: Tensor) -> Tensor:
        if replicas.rank() == 1:
            raise error("stop")
        return replicas.all_reduce(x.max(), "max", self.inner, "x").expand(len(x), 1)

    with pytest.raises(error, match="stop"):
        run(work)


def test_an_interrupt_between_two_thread_starts_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the workers are started: those that run do not wait for those that never will."""
    start, started = threading.Thread.start, []

    def interrupted(thread: threading.Thread) -> None:
        if "_worker" in getattr(thread._target, "__qualname__", ""):  # type: ignore[attr-defined]
            if started:
                raise KeyboardInterrupt
            started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(lambda self, x: replicas.all_reduce(x.max(), "max", self.inner, "x").expand(len(x), 1))
    started[0].join(TIMEOUT)
    assert not started[0].is_alive()


def test_a_replica_that_waits_long_says_for_whom(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock held around a layer cannot be seen from here, but the waiting is told."""
    monkeypatch.setattr(rendezvous, "PATIENCE", 0.05)
    late = threading.Event()

    def work(self: Any, x: Tensor) -> Tensor:
        if replicas.rank() == 1:
            late.wait(0.5)
        return replicas.all_reduce(x.max(), "max", self.inner, "x").expand(len(x), 1)

    with pytest.warns(RuntimeWarning, match=r"replica 0 has waited .* at the x of layer .*Linear.* for replicas \[1\]"):
        run(work, 2, 4)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.tuples(st.integers(0, 1), st.sampled_from("xyz")), max_size=5), min_size=2, max_size=4))
def test_no_schedule_hangs(schedule: List[Any]) -> None:
    """Whatever places the replicas visit, in whatever order, every one comes to its end."""

    def work(self: Any, x: Tensor) -> Tensor:
        for layer, slot in schedule[replicas.rank()]:
            total = replicas.all_reduce(torch.ones(()), "sum", (self.inner, self.other)[layer], slot)
            assert 1 <= total <= len(schedule)
        return x

    run(work, len(schedule), len(schedule))


def test_functional_and_subclassed_data_parallel() -> None:
    """The functional form, a subclass, and the two functions called by hand go the same way."""

    class Subclass(nn.DataParallel):
        def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> Any:
            return super().parallel_apply(replicas, inputs, kwargs)

    probe = Probe(lambda self, x: torch.full_like(x, replicas.size()))
    x, ids = torch.ones(6, 1), [VirtualDevice(i) for i in range(3)]
    with virtual_devices(3):
        assert torch.nn.parallel.data_parallel(probe, x, ids).unique().tolist() == [3]
        assert Subclass(probe, ids)(x).unique().tolist() == [3]
        copies = nn.parallel.replicate(probe, ids)
        outputs = nn.parallel.parallel_apply(copies, list(x.chunk(3)), None, ids)
        assert torch.cat(outputs).unique().tolist() == [3]


def test_the_functions_imported_from_where_they_are_defined() -> None:
    """As many subclasses of DataParallel in the wild do it."""
    from torch.nn.parallel.parallel_apply import parallel_apply
    from torch.nn.parallel.replicate import replicate

    ids = [VirtualDevice(i) for i in range(2)]
    with virtual_devices(2):
        copies = replicate(Probe(lambda self, x: torch.full_like(x, replicas.size())), ids)
        outputs = parallel_apply(copies, list(torch.ones(4, 1).chunk(2)), None, ids)
    assert torch.cat(outputs).unique().tolist() == [2]


def test_different_models_side_by_side_are_not_merged() -> None:
    """parallel_apply over an ensemble: each model is alone."""
    models = [Probe(lambda self, x: torch.full_like(x, replicas.size())) for _ in range(2)]
    ids = [VirtualDevice(0), VirtualDevice(1)]
    with virtual_devices(2):
        copies = [nn.parallel.replicate(model, ids)[i] for i, model in enumerate(models)]
        for side_by_side in (models, copies):
            outputs = nn.parallel.parallel_apply(side_by_side, [torch.ones(1, 1)] * 2, None, ids)
            assert torch.cat(outputs).unique().tolist() == [1]


def test_replicas_are_freed_without_the_garbage_collector() -> None:
    """No reference cycle keeps the copies alive after the forward."""
    seen: List[Any] = []
    gc.disable()
    try:
        with torch.no_grad():
            run(lambda self, x: seen.append(weakref.ref(self)) or replicas.all_reduce(x, "max", self.inner, "x"), 2, 4)
        assert [reference() for reference in seen] == [None, None]
    finally:
        gc.enable()


def test_two_parallel_forwards_at_once_do_not_meet() -> None:
    """Two models trained in two threads of one process keep their collectives apart."""
    results: List[Any] = []

    def train(value: float) -> None:
        model = rehearse(Probe(lambda self, x: replicas.all_reduce(x.max(), "max", self.inner, "x").expand(len(x), 1)), 2)
        results.append((value, [model(torch.full((4, 1), value)).unique().tolist() for _ in range(30)]))

    def both() -> None:
        threads = [threading.Thread(target=train, args=(float(v),)) for v in (1, 2, 3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    within(TIMEOUT, both)
    assert len(results) == 3
    assert all(found == [[value]] * 30 for value, found in results)


def test_replicas_run_in_the_callers_inference_mode() -> None:
    """What torch.inference_mode() has made may be updated in place by them, too."""
    modes: List[bool] = []

    def work(module: Any, x: Tensor) -> Tensor:
        modes.append(torch.is_inference_mode_enabled())
        return x.add_(1)

    model = rehearse(Probe(work), 2)
    with torch.inference_mode():
        model(torch.zeros(2, 1))
    model(torch.zeros(2, 1))
    assert modes == [True, True, False, False]


def test_deferred_values_are_settled_once_in_the_order_of_ranks() -> None:
    """In the main thread, when all replicas are done, place by place in the order of use."""
    settled: List[Any] = []

    def work(self: Any, x: Tensor) -> Tensor:
        for slot in ("first", "second"):
            values = (slot, replicas.rank())
            replicas.defer(values, self.inner, slot, lambda seen: settled.append((threading.current_thread().name, seen)))
        assert settled == []
        return x

    run_in_this_thread = rehearse(Probe(work), 3)
    run_in_this_thread(torch.zeros(6, 1))
    main = threading.current_thread().name
    assert settled == [(main, [(slot, rank) for rank in range(3)]) for slot in ("first", "second")]


def test_a_value_deferred_outside_a_replica_is_settled_at_once() -> None:
    """One device: no case of its own in the code that uses it."""
    settled: List[Any] = []
    replicas.defer(1, nn.Linear(1, 1), "slot", settled.append)
    assert settled == [[1]]


def test_nothing_is_settled_when_a_replica_raises() -> None:
    """The forward failed; half a batch is not recorded."""
    settled: List[Any] = []

    def work(self: Any, x: Tensor) -> Tensor:
        replicas.defer(1, self.inner, "slot", settled.append)
        if replicas.rank() == 1:
            raise ArithmeticError("second shard")
        return x

    with pytest.raises(ArithmeticError, match="second shard"):
        run(work)
    assert settled == []


def test_only_those_who_were_there_are_settled() -> None:
    """A replica that skipped the layer is left out; plain Python values of the others are gathered."""
    settled: List[Any] = []
    gathered: List[Any] = []

    def work(self: Any, x: Tensor) -> Tensor:
        if replicas.rank() != 1:
            replicas.defer(replicas.rank(), self.inner, "slot", settled.append)
            gathered.append(replicas.all_gather_object(len(x), self.inner, "count"))
        return x

    run(work)
    assert settled == [[0, 2]]
    assert gathered == [[2, 2], [2, 2]]


def test_a_buffer_that_was_none_is_adopted_by_the_network() -> None:
    """As NNI 1.x registers scale and zero point; from whichever replica made it."""

    class Born(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))
            self.register_buffer("scale", None)

        def forward(self, x: Tensor) -> Tensor:
            if replicas.rank() == replicas.size() - 1:
                with recorded(self, frozenset(["scale"])):
                    self.scale = x.max().reshape(1) * self.weight
            return x

    for count in (1, 2):
        net = Born()
        model = rehearse(net, count) if count > 1 else net
        model(torch.tensor([[1.0], [7.0]]))
        assert net.scale.tolist() == [7.0]
        assert net.scale.is_leaf
        assert not net.scale.requires_grad
