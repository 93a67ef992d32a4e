"""What the ranks of a DDP run do: train a case, and the options and accidents that DDP knows.

Every function takes the folder of the run and returns what the tests compare. A loss is divided by the whole batch, so
that uneven and empty shards add up.
"""

from __future__ import annotations

import contextlib
import copy
import os
import signal
import time
import warnings
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Tuple
from unittest import mock

import harness
import torch
from cases import Case
from conftest import CASES, IS_FIRST, IS_MODERN, IS_NEW, RELEASE
from harness import Record, Wrap, data, stock_class
from references import reference_class
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import nni_dataparallel
from nni_dataparallel import load_quantizer_state_dict, merged_over, quantizer_state_dict, rehearse

Batch = Tuple[Tensor, Tensor]
EVEN = (8, 6, 4, 2, 2)
# Of QAT and LSQ the case that the options are tried with; the first that a release has.
_PREFERRED = {"QAT": ("mixed", "affine int8", "weight and output"), "Lsq": ("all",)}
SUBJECTS: List[Case] = [
    next(case for name in names for case in CASES if case.quantizer.startswith(kind) and case.name == name)
    for kind, names in _PREFERRED.items()
    if any(case.quantizer in (f"{kind}Quantizer", f"{kind}_Quantizer") for case in CASES)
]


def even_data(sizes: Tuple[int, ...] = EVEN, seed: int = 1) -> List[Batch]:
    """Batches that two ranks share evenly: stock NNI cannot observe an empty shard."""
    return data(sizes, seed)


def shard(x: Tensor, group: Any = None) -> Tensor:
    """This rank's rows; none where there are fewer rows than ranks."""
    return x.tensor_split(distributed.get_world_size(group))[distributed.get_rank(group)]


def share_of_loss(model: nn.Module, batch: Batch, group: Any = None) -> Tensor:
    x, target = batch
    return nn.functional.cross_entropy(model(shard(x, group)), shard(target, group), reduction="sum") / len(x)


def summed(loss: Tensor, group: Any = None) -> float:
    total = loss.detach().clone()
    distributed.all_reduce(total, group=group)
    return total.item()


def step(model: nn.Module, optimizer: Any, batch: Batch, group: Any = None) -> float:
    optimizer.zero_grad()
    loss = share_of_loss(model, batch, group)
    (loss * distributed.get_world_size(group)).backward()  # DDP takes the mean of the gradients
    optimizer.step()
    return summed(loss, group)


def watch(model: nn.Module, batch: Batch) -> float:
    with torch.no_grad():
        return summed(share_of_loss(model, batch))


def ddp(**options: Any) -> Wrap:
    return lambda net: DistributedDataParallel(net, **options)


def for_case(case: Case, way: str) -> Wrap:
    """As the user has to, where NNI 3.0 detaches a folded bias, or learns scales of activations per channel."""

    def wrap(net: nn.Module) -> nn.Module:
        if way == "patched" and any(not p.numel() for p in net.parameters()):
            net(data()[0][0])
        return DistributedDataParallel(net, find_unused_parameters=IS_NEW and case.fold)

    return wrap


def train(case: Case, way: str, wrap: Any = None, step: Callable[..., float] = step, **more: Any) -> Record:
    """Five steps of this rank, evaluation and export."""
    quantizer_class = stock_class(case.quantizer)
    if way == "stock":
        quantizer_class = reference_class(quantizer_class)
    batches = even_data if way == "stock" else data
    with mock.patch.multiple(harness, step=step, watch=watch, data=batches):
        return harness.train(quantizer_class, case, RELEASE, wrap or for_case(case, way), **more)


def _each(wrap: Wrap, step: Callable[..., float] = step) -> Dict[str, Record]:
    return {case.id: train(case, "patched", wrap, step) for case in SUBJECTS}


# The options of DistributedDataParallel.


def own_buffers(folder: Path) -> Dict[str, Record]:
    return _each(ddp(broadcast_buffers=False))


def unused_parameters(folder: Path) -> Dict[str, Record]:
    return _each(ddp(find_unused_parameters=True))


def static_graph(folder: Path) -> Dict[str, Record]:
    return _each(ddp(static_graph=True))


def bucket_view(folder: Path) -> Dict[str, Record]:
    return _each(ddp(gradient_as_bucket_view=True))


def inside_ddp(folder: Path) -> Dict[str, Record]:
    """Each rank has two replicas of a DataParallel."""
    return _each(lambda net: DistributedDataParallel(rehearse(net, 2, check=False)))


def accumulating(size: Callable[[], int], share: Callable[..., Tensor], total: Callable[[Tensor], float]) -> Callable[..., float]:
    """A step that adds up the gradients of two micro-batches."""

    def step(model: Any, optimizer: Any, batch: Batch) -> float:
        optimizer.zero_grad()
        losses = 0.0
        micro = list(zip(*(t.chunk(2) for t in batch)))
        for part in micro:
            last = part is micro[-1]
            with contextlib.nullcontext() if last or not hasattr(model, "no_sync") else model.no_sync():
                loss = share(model, part) * (len(part[0]) / len(batch[0]))
                (loss * size()).backward()
            losses += total(loss)
        optimizer.step()
        return losses

    return step


accumulate = accumulating(lambda: distributed.get_world_size(), share_of_loss, summed)
accumulate_alone = accumulating(
    lambda: 1, lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]), lambda loss: loss.item()
)


def no_sync(folder: Path) -> Dict[str, Record]:
    return _each(ddp(), accumulate)


class Checkpointed(nn.Module):
    """The harness' network, whose second half is computed again in backward."""

    def __init__(self, net: Any, reentrant: bool) -> None:
        super().__init__()
        self.net, self.reentrant = net, reentrant

    def _half(self, x: Tensor) -> Tensor:
        return self.net.relu2(self.net.bn2(self.net.conv2(x)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.net.relu1(self.net.bn1(self.net.conv1(x)))
        return self.net.fc(checkpoint(self._half, x, use_reentrant=self.reentrant).flatten(1))


def checkpointed(folder: Path) -> Dict[str, Record]:
    return _each(lambda net: DistributedDataParallel(Checkpointed(net, False)))


def checkpointed_reentrant(folder: Path) -> Dict[str, Record]:
    return _each(lambda net: DistributedDataParallel(Checkpointed(net, True)))


def joined(folder: Path) -> Dict[str, Any]:
    """Rank 0 has two batches, rank 1 three."""
    net, optimizer, _ = harness.start_training(stock_class(SUBJECTS[0].quantizer), SUBJECTS[0], RELEASE)
    model = DistributedDataParallel(net)
    rank, steps = distributed.get_rank(), 0
    with warnings.catch_warnings(record=True) as caught, model.join():
        warnings.simplefilter("always")
        for x, target in data()[: 2 + rank]:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), target).backward()
            optimizer.step()
            steps += 1
    told = [str(w.message) for w in caught if issubclass(w.category, RuntimeWarning) and "join()" in str(w.message)]
    with warnings.catch_warnings(), counted() as calls:
        warnings.filterwarnings("error", message="inside Dist")
        share_of_loss(model, data()[0])
    return {"steps": steps, "told": told, "calls afterwards": calls}


def unwrapped(folder: Path) -> Dict[str, Any]:
    """Train quantised, take the quantizer away, train the plain model in a DDP of its own."""
    net, optimizer, quantizer, model = _started(SUBJECTS[0])
    ignored = sorted(model.parameters_to_ignore)
    step(model, optimizer, data()[0])
    (quantizer.unwrap_model if IS_NEW else quantizer._unwrap_model)()
    plain = DistributedDataParallel(net, find_unused_parameters=not IS_NEW)  # 2.x leaves its `weight` buffers in place
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    step(plain, optimizer, data()[1])
    state = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    return {"ignored": ignored, "ignored afterwards": sorted(plain.parameters_to_ignore), "state": state}


def loaded_by_rank_0(folder: Path) -> Dict[str, Any]:
    """Rank 0 loads a checkpoint, DDP hands it on when it is built, every rank evaluates by itself."""
    found = {}
    for case in SUBJECTS:
        net, optimizer, _ = harness.start_training(stock_class(case.quantizer), case, RELEASE)
        for batch in data()[:2]:
            harness.step(net, optimizer, batch)
        saved = copy.deepcopy(net.state_dict())
        net, _, _ = harness.start_training(stock_class(case.quantizer), case, RELEASE)
        if distributed.get_rank() == 0:
            net.load_state_dict(saved)
        model = DistributedDataParallel(net)
        model.eval()
        with torch.no_grad():
            found[case.id] = model(data()[0][0])
    return found


# Who communicates, and how much.

_COLLECTIVES = ("all_reduce", "all_gather", "all_gather_into_tensor", "broadcast", "reduce", "gather", "scatter", "barrier")


@contextlib.contextmanager
def counted() -> Iterator[List[str]]:
    """The names of the collectives that Python code asks for in the block; those of DDP's own reducer are not among them."""
    calls: List[str] = []

    def noting(name: str) -> Callable[..., Any]:
        original = getattr(distributed, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return original(*args, **kwargs)

        return call

    with mock.patch.multiple(distributed, **{name: noting(name) for name in _COLLECTIVES if hasattr(distributed, name)}):
        yield calls


def _started(case: Case, **options: Any) -> Tuple[Any, Any, Any, Any]:
    net, optimizer, quantizer = harness.start_training(stock_class(case.quantizer), case, RELEASE)
    model = DistributedDataParallel(net, **options)
    model.train()
    return net, optimizer, quantizer, model


def outside(folder: Path) -> Dict[str, Any]:
    """After two steps rank 0 validates by itself, also in training mode; rank 1 waits for the third step."""
    found = {}
    for case in SUBJECTS:
        _, optimizer, _, model = _started(case)
        for batch in data()[:2]:
            step(model, optimizer, batch)
        calls: List[str] = []
        begin = time.monotonic()
        if distributed.get_rank() == 0:
            with counted() as calls:
                for mode in (False, True):
                    model.module.train(mode)
                    with torch.no_grad():
                        model.module(data()[2][0])
                    model.module(data()[2][0]).sum().backward()
        model.train()
        seconds = time.monotonic() - begin
        loss = step(model, optimizer, data()[3])
        found[case.id] = {"calls": calls, "seconds": seconds, "loss": loss}
    return found


def traffic(folder: Path) -> Dict[str, Any]:
    """Collectives of each training forward and of an evaluation; observers there are."""
    found = {}
    for case in SUBJECTS:
        _, optimizer, quantizer, model = _started(case, broadcast_buffers=False)
        forwards = []
        for batch in data()[:3]:
            with counted() as calls:
                loss = share_of_loss(model, batch)
            loss.backward()
            optimizer.step()
            forwards.append(len(calls))
        model.eval()
        with counted() as evaluation, torch.no_grad():
            model(shard(data()[0][0]))
        found[case.id] = {"forwards": forwards, "evaluation": evaluation, "observers": observers(case, quantizer)}
    return found


def observers(case: Case, quantizer: Any) -> int:
    """The activations that a quantizer observes, or has learned scales for."""
    wrappers = harness.wrappers(quantizer)
    if IS_NEW:
        targets = [name for wrapper in wrappers for name in wrapper.quantization_target_spaces]
        return sum(name.startswith(("_input_", "_output_")) for name in targets)
    slots = ["input", "output"]
    if case.quantizer == "QAT_Quantizer" and not IS_MODERN and not IS_FIRST:
        slots = ["weight", "output"]  # 2.0 - 2.4 observe the input of a layer whose weight is quantised
    return sum(slot in wrapper.config["quant_types"] for wrapper in wrappers for slot in slots)


def broadcast(folder: Path) -> Dict[str, Any]:
    """What DDP broadcasts before the third forward, and whether buffers are the same objects in it as in the first."""
    found = {}
    for case in SUBJECTS if nni_dataparallel.is_patched() else SUBJECTS[:1]:  # stock LSQ does not get that far
        net, optimizer, _, model = _started(case)
        before = dict(net.named_buffers())
        sent: List[int] = []
        original = model._distributed_broadcast_coalesced

        def noting(tensors: Any, *more: Any, sent: List[int] = sent, original: Any = original) -> Any:
            sent.append(sum(t.numel() * t.element_size() for t in tensors))
            return original(tensors, *more)

        for batch in data()[:3]:
            step(model, optimizer, batch)
        model._distributed_broadcast_coalesced = noting
        step(model, optimizer, data()[3])
        after = dict(net.named_buffers())
        changed = sorted(name for name, buffer in before.items() if after.get(name) is not buffer)
        weights = sum(buffer.numel() * buffer.element_size() for name, buffer in after.items() if name.endswith(".weight"))
        found[case.id] = {"bytes": sum(sent), "changed": changed, "weights": weights}
    return found


# Accidents.


def _accident(happens: Callable[[], None]) -> None:
    """Two steps; in the second forward it happens to the last rank, between two quantised layers."""
    net, optimizer, _, model = _started(SUBJECTS[0])
    step(model, optimizer, data()[0])
    if distributed.get_rank() == distributed.get_world_size() - 1:
        net.relu1.register_forward_hook(lambda *_: happens())
    step(model, optimizer, data()[1])


def raising(folder: Path) -> None:
    def happens() -> None:
        raise ZeroDivisionError("of the user's")

    _accident(happens)


def killed(folder: Path) -> None:
    _accident(lambda: os.kill(os.getpid(), signal.SIGKILL))


# Stop and go on; other engines.

STOP = 3


def stop(folder: Path) -> Dict[str, str]:
    """Three steps; rank 0 saves."""
    found = {}
    for index, case in enumerate(SUBJECTS):
        net, optimizer, quantizer, model = _started(case)
        losses = [step(model, optimizer, batch) for batch in data()[:STOP]]
        file = folder / f"stopped{index}.pth"
        if distributed.get_rank() == 0:
            state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "losses": losses}
            torch.save({**state, "quantizer": quantizer_state_dict(quantizer)}, file)
        found[case.id] = str(file)
    return found


def go_on(case: Case, file: str, wrap: Wrap, one_step: Callable[..., float], watch: Callable[..., float] = watch) -> Record:
    """The steps that were left, evaluation and export."""
    net, optimizer, quantizer = harness.start_training(stock_class(case.quantizer), case, RELEASE)
    saved = harness.load_file(file)
    net.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    load_quantizer_state_dict(quantizer, saved["quantizer"])
    model = wrap(net)
    model.train()
    record = Record(losses=saved["losses"] + [one_step(model, optimizer, batch) for batch in data()[STOP:]])
    record.state = harness.whole_state(net, quantizer)
    with mock.patch.multiple(harness, step=one_step, watch=watch):
        harness.finish(record, stock_class(case.quantizer), quantizer, net, model, case, RELEASE)
    return record


def resumed(folder: Path) -> Dict[str, Record]:
    """What another run of ``stop`` has left beside this run's folder."""
    return {
        case.id: go_on(case, str(next(folder.parent.glob(f"*/stopped{index}.pth"))), ddp(), step)
        for index, case in enumerate(SUBJECTS)
    }


def by_hand(group: Any) -> Callable[..., float]:
    """A step of an engine without DDP."""

    def step(model: nn.Module, optimizer: Any, batch: Batch) -> float:
        optimizer.zero_grad()
        with merged_over(group):
            loss = share_of_loss(model, batch, group)
        loss.backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                distributed.all_reduce(parameter.grad, group=group)
        optimizer.step()
        return summed(loss, group)

    return step


def own_loop(folder: Path) -> Dict[str, Record]:
    return _each(harness.one_device, by_hand(None))


def _half() -> Any:
    """The group of two of four ranks that this one is in."""
    halves = [distributed.new_group([0, 1]), distributed.new_group([2, 3])]
    return halves[distributed.get_rank() // 2]


def own_loop_in_a_subgroup(folder: Path) -> Dict[str, Record]:
    return _each(harness.one_device, by_hand(_half()))


def ddp_in_a_subgroup(folder: Path) -> Dict[str, Record]:
    group = _half()
    return _each(ddp(process_group=group), lambda *given: step(*given, group=group))


def local(folder: Path) -> Dict[str, Any]:
    """Two steps in which each rank observes by itself."""
    found = {}
    nni_dataparallel.patch(statistics="local")
    try:
        for case in SUBJECTS:
            net, optimizer, _, model = _started(case)
            with counted() as calls:
                share_of_loss(model, data()[0]).backward()
            first = copy.deepcopy(harness.snapshot(net))
            optimizer.step()
            share_of_loss(model, data()[0]).backward()  # before it DDP broadcasts what rank 0 has
            found[case.id] = {"calls": calls, "first": first}
    finally:
        nni_dataparallel.patch(statistics="global")
    return found
