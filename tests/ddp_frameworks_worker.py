"""One rank of trainings that a framework wraps in DDP: Accelerate, transformers' Trainer, Lightning.

    python tests/ddp_frameworks_worker.py RANK WORLD FOLDER (patched | stock) FRAMEWORK:PORT ...

Scripts as users write them, in the environment that ``torchrun`` makes; the framework joins the process group. With port
0 there is no such environment: Lightning starts the second rank itself. ``train(framework)`` in one process is the
reference: the same script on one device, whose batches are the ranks' shares joined. Started by ``ddp_runs.py``.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any, Callable, Dict, Sequence

import harness
import nni
import torch
from conftest import CASES, IS_NEW
from harness import LEARNING_RATE, Record, ranges, snapshot, stock_class
from references import reference_class
from torch import Tensor, distributed, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import nni_dataparallel

BATCH = 8
STEPS = 5
QUANTIZERS = tuple(name for name in ("QAT_Quantizer", "QATQuantizer", "LsqQuantizer") if any(c.quantizer == name for c in CASES))


class Rows(Dataset):
    """The rows of all batches; of each batch, the last one has the extreme values, and the last rank gets it."""

    def __init__(self) -> None:
        batches = harness.data((BATCH,) * STEPS)
        self.x, self.y = (torch.cat(parts) for parts in zip(*batches))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Dict[str, Tensor]:
        return {"x": self.x[index], "labels": self.y[index]}


class Net(nn.Module):
    """The harness' network, with the loss where Trainer wants it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = harness.Net(norm=False)

    def forward(self, x: Tensor, labels: Any = None) -> Any:
        logits = self.net(x)
        return logits if labels is None else (nn.functional.cross_entropy(logits, labels), logits)


class Watch:
    """Keeps the whole batch's loss, and the ranges after the first step."""

    def __init__(self) -> None:
        self.record = Record()

    def __call__(self, model: nn.Module, loss: Tensor) -> None:
        loss = loss.detach().clone()
        if distributed.is_initialized():
            distributed.all_reduce(loss)
            loss /= distributed.get_world_size()
        self.record.losses.append(loss.item())
        self.record.first = self.record.first or ranges(model)

    def finish(self, model: nn.Module, calibration: Any = None) -> Record:
        self.record.state = snapshot(model)
        self.record.calibration = {
            layer: {name: {k: v for k, v in of.items() if isinstance(v, (Tensor, int))} for name, of in targets.items()}
            for layer, targets in (calibration or {}).items()
        }
        return self.record


def sgd(model: nn.Module) -> Any:
    make = nni.trace(torch.optim.SGD) if IS_NEW else torch.optim.SGD
    return make(model.parameters(), lr=LEARNING_RATE, momentum=0.9)


def quantize(name: str, model: nn.Module, optimizer: Any) -> None:
    """Up to 2.10.1: the quantizer on the plain model, before the framework gets it."""
    config = {"op_types": ["Conv2d", "Linear"], "quant_types": ["input", "weight", "output"], "quant_bits": 8}
    more = {"dummy_input": Rows().x[:1]} if name == "QAT_Quantizer" else {}
    cls = stock_class(name)
    quantizer = (cls if nni_dataparallel.is_patched() else reference_class(cls))(model, [config], optimizer, **more)
    quantizer.compress()


def compress(name: str, model: nn.Module, evaluator: Any, *duration: Any) -> Any:
    """3.0: the evaluator trains."""
    config = {"op_types": ["Conv2d", "Linear"], "target_names": ["_input_", "weight", "_output_"]}
    scheme = "symmetric" if name == "LsqQuantizer" else "affine"
    config.update(quant_dtype="int8", quant_scheme=scheme, granularity="default")
    _, calibration = stock_class(name)(model, [config], evaluator).compress(*duration)
    return calibration


def accelerate(name: str, count: int) -> Record:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, watch = Net(), Watch()
    loader = DataLoader(Rows(), batch_size=BATCH // count)  # Accelerate gives the ranks its batches in turn

    def fit(net: nn.Module, optimizer: Any) -> None:
        parallel, optimizer, batches = accelerator.prepare(net, optimizer, loader)
        parallel.train()
        for batch in batches:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(parallel(batch["x"]), batch["labels"])
            accelerator.backward(loss)
            optimizer.step()
            watch(net, loss)

    optimizer = sgd(model)
    if not IS_NEW:
        quantize(name, model, optimizer)
        fit(model, optimizer)
        return watch.finish(model)
    from nni.compression.utils import TorchEvaluator

    evaluator = TorchEvaluator(lambda net, optimizer, *_: fit(net, optimizer), optimizer, lambda batch, net: None)
    return watch.finish(model, compress(name, model, evaluator, None, 1))


def trainer(name: str, count: int) -> Record:
    from transformers import Trainer, TrainingArguments

    model, watch = Net(), Watch()

    class InOrder(Trainer):
        """Trainer's own samplers shuffle, on one device in another order than on two."""

        def _get_train_sampler(self, *_: Any) -> Any:
            return DistributedSampler(self.train_dataset, count, self.args.process_index, shuffle=False)

        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            loss = super().training_step(*args, **kwargs)
            watch(model, loss)
            return loss

    cpu = "use_cpu" if "use_cpu" in TrainingArguments.__dataclass_fields__ else "no_cuda"
    quiet = {"save_strategy": "no", "report_to": [], "disable_tqdm": True}
    size = {"per_device_train_batch_size": BATCH // count, "max_steps": STEPS}
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(folder, ddp_backend="gloo", **{cpu: True}, **quiet, **size)
        optimizer = sgd(model)
        more = {"model": model, "args": arguments, "train_dataset": Rows(), "optimizers": (optimizer, None)}
        if not IS_NEW:
            quantize(name, model, optimizer)
            InOrder(**more).train()
            return watch.finish(model)
        from nni.compression.utils import TransformersEvaluator

        evaluator = TransformersEvaluator(nni.trace(InOrder)(**more))
        return watch.finish(model, compress(name, model, evaluator, STEPS, None))


def lightning(name: str, count: int) -> Record:
    import pytorch_lightning as pl

    watch = Watch()

    class Data(pl.LightningDataModule):
        def train_dataloader(self) -> Any:
            rows, strategy = Rows(), self.trainer.strategy
            sampler = DistributedSampler(rows, count, strategy.global_rank, shuffle=False)  # Lightning's own shuffles
            return DataLoader(rows, batch_size=BATCH // count, sampler=sampler)

    class Model(pl.LightningModule):
        optimizer: Any = None

        def __init__(self) -> None:
            super().__init__()
            self.inner = Net()

        def forward(self, x: Tensor) -> Any:
            return self.inner(x)

        def training_step(self, batch: Dict[str, Tensor], index: int) -> Tensor:
            return nn.functional.cross_entropy(self(batch["x"]), batch["labels"])

        def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
            watch(self, outputs["loss"])

        def configure_optimizers(self) -> Any:
            return self.optimizer or sgd(self)

    model = Model()
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    ranks = {"devices": count, "strategy": "ddp"} if count > 1 else {"devices": 1}
    more = {"accelerator": "cpu", "max_epochs": 1, **ranks, **quiet}
    if not IS_NEW:
        model.optimizer = sgd(model)
        quantize(name, model.inner, model.optimizer)  # before 2.9 NNI cannot trace a LightningModule
        pl.Trainer(**more).fit(model, Data())
        return watch.finish(model)
    from nni.compression.utils import LightningEvaluator

    evaluator = LightningEvaluator(nni.trace(pl.Trainer)(**more), nni.trace(Data)())
    return watch.finish(model, compress(name, model, evaluator, None, 1))


FRAMEWORKS: Dict[str, Callable[[str, int], Record]] = {"accelerate": accelerate, "trainer": trainer, "lightning": lightning}


def train(framework: str, count: int = 1, names: Sequence[str] = QUANTIZERS) -> Dict[str, Record]:
    """What every quantizer leaves."""
    return {name: FRAMEWORKS[framework](name, count) for name in names}


def main(rank: str, world: str, folder: str, way: str, *jobs: str) -> None:
    warnings.simplefilter("ignore")
    faulthandler.dump_traceback_later(200, exit=True)  # less than the launch waits: a hang says where it is
    if way != "stock":
        nni_dataparallel.patch()
    found: Dict[str, Any] = {}
    for job in jobs:
        framework, port = job.split(":")
        if port != "0":
            os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world, GROUP_RANK="0")
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, TORCHELASTIC_RUN_ID="tests")
        # (LSQ of stock 2.5 - 2.10.1 raises: its scales change their shape under DDP.)
        found[framework] = train(framework, 2, QUANTIZERS[:1] if way == "stock" else QUANTIZERS)
        # For a rank that Lightning has started nobody waits but the others.
        (Path(folder) / f"{os.environ['LOCAL_RANK']}.pickle").write_bytes(pickle.dumps(found))
        distributed.barrier()
        distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
