"""NNI 3.0 driven step by step: what its evaluator does around a user's training function, without the function.

The tests of the older line train with a loop of their own. Here the quantizer is bound and prepared as
``compress()`` does it, so that the same loop can go through it one step at a time.
"""

from __future__ import annotations

import copy
from typing import Any, Dict, List

import torch
from cases import Case
from torch import nn

_TARGETS = {"input": "_input_", "weight": "weight", "output": "_output_"}
_SCHEMES = {"LsqQuantizer": "symmetric"}


def _new_style(config: Dict[str, Any], quantizer: str) -> Dict[str, Any]:
    """A config of the older line (one bit width) in the words of 3.0."""
    if "quant_types" not in config:
        return config
    return {
        **{key: config[key] for key in ("op_types", "op_names") if key in config},
        "target_names": [_TARGETS[slot] for slot in config["quant_types"]],
        "quant_dtype": f"int{max(config['quant_bits'], 2)}",
        "quant_scheme": _SCHEMES.get(quantizer, "affine"),
    }


def make(quantizer_class: Any, case: Case, net: nn.Module, optimizer: Any) -> Any:
    """A quantizer ready to train; ``optimizer`` becomes the one that the evaluator made of it."""
    import nni
    from nni.compression.utils import TorchEvaluator

    hyperparameters = {name: optimizer.defaults[name] for name in ("lr", "momentum")}
    traced = nni.trace(torch.optim.SGD)(net.parameters(), **hyperparameters)
    evaluator = TorchEvaluator(lambda *args: None, traced, lambda batch, model: None)
    config: List[Dict[str, Any]] = [_new_style(one, case.quantizer) for one in copy.deepcopy(case.config)]
    quantizer = quantizer_class(net, config, evaluator, **case.arguments)
    evaluator.bind_model(quantizer.bound_model, quantizer._get_param_names_map())
    quantizer._fuse_preprocess(evaluator)
    optimizer.__class__, optimizer.__dict__ = type(evaluator._optimizers[0]), evaluator._optimizers[0].__dict__
    return quantizer


def complete(quantizer: Any, watch_again: Any) -> None:
    """What ``compress()`` does after the training function; ``watch_again`` shows the model the batches once more."""
    if getattr(quantizer, "is_bias_correction", False):
        quantizer.evaluator.evaluating_func = lambda model: watch_again()
    quantizer._fuse_postprocess(quantizer.evaluator)
