"""Quantization-aware training with Hugging Face's Trainer, with NNI 2.5 - 2.10.1 and with NNI 3.0.

    python examples/hf_trainer.py                                # all GPUs: Trainer makes the DataParallel
    torchrun --nproc_per_node=2 examples/hf_trainer.py           # Trainer makes the DistributedDataParallel

Needs transformers and accelerate: pip install '.[evaluators]'. Where there are fewer GPUs than processes, they share the CPU; by
python alone, without torchrun, one CPU trains then.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import nni
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

import nni_dataparallel.auto  # noqa: F401 <- the one line; its place among the imports does not matter

images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16, torch.tensor(labels)
rows = [{"pixel_values": image, "labels": label} for image, label in zip(x, y)]


class Classifier(nn.Module):
    """As models of transformers: with labels the loss comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 10))

    def forward(self, pixel_values: Tensor, labels: Any = None) -> Any:
        logits = self.net(pixel_values)
        return (logits,) if labels is None else (nn.functional.cross_entropy(logits, labels), logits)


def trainer_arguments(folder: str) -> TrainingArguments:
    """Trainer averages the losses of replicas and ranks: ``drop_last`` keeps their shards even."""
    cpu = "use_cpu" if "use_cpu" in TrainingArguments.__dataclass_fields__ else "no_cuda"
    gpus = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    without_gpu = {} if gpus else {cpu: True, "ddp_backend": "gloo"}
    quiet = {"save_strategy": "no", "logging_strategy": "no", "report_to": [], "disable_tqdm": True}
    training = {"num_train_epochs": 3, "learning_rate": 0.05, "dataloader_drop_last": True, "per_device_train_batch_size": 32}
    return TrainingArguments(folder, **training, **quiet, **without_gpu)


def with_nni_2(arguments: TrainingArguments) -> None:
    """First the quantizer, on the plain model; then Trainer, with the optimizer that the quantizer was given."""
    from nni.algorithms.compression.pytorch.quantization import QAT_Quantizer

    model.to(arguments.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.learning_rate, momentum=0.9)
    config = [{"op_types": ["Conv2d", "Linear"], "quant_types": ["weight", "input", "output"], "quant_bits": 8}]
    QAT_Quantizer(model, config, optimizer, dummy_input=x[:1].to(arguments.device)).compress()
    Trainer(model=model, args=arguments, train_dataset=rows, optimizers=(optimizer, None)).train()


def with_nni_3(arguments: TrainingArguments) -> None:
    """NNI trains, with the Trainer that its evaluator holds; both are traced, for NNI makes its own from them."""
    from nni.compression.quantization import QATQuantizer
    from nni.compression.utils import TransformersEvaluator

    optimizer = nni.trace(torch.optim.SGD)(model.parameters(), lr=arguments.learning_rate, momentum=0.9)
    trainer = nni.trace(Trainer)(model=model, args=arguments, train_dataset=rows, optimizers=(optimizer, None))
    config = [{"op_types": ["Conv2d", "Linear"], "target_names": ["_input_", "weight", "_output_"], "quant_dtype": "int8"}]
    QATQuantizer(model, config, TransformersEvaluator(trainer)).compress(None, arguments.num_train_epochs)


torch.manual_seed(0)
model = Classifier()
with tempfile.TemporaryDirectory() as folder:
    arguments = trainer_arguments(folder)
    with_nni_3(arguments) if nni.__version__.startswith("3.") else with_nni_2(arguments)
if arguments.process_index == 0:
    model.eval()
    with torch.no_grad():
        accuracy = (model(x.to(arguments.device))[0].argmax(1).cpu() == y).float().mean()
    print(f"trained in {arguments.world_size} processes, {max(1, arguments.n_gpu)} devices each")
    print(f"quantised accuracy on the training images: {accuracy:.1%}")
