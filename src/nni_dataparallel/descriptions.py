"""What ``help()`` says of a fixed quantizer: written for the installed release, whose arguments it has."""

from __future__ import annotations

import inspect
from typing import Any, Dict

__all__ = ["describe"]

_PARAMETERS: Dict[str, str] = {
    "model": """torch.nn.Module
    The plain model, on its device. A ``DataParallel`` is taken off, and ``compress()`` returns it.""",
    "config_list": """list of dict
    What is quantised; the keys are NNI's. Names in ``op_names`` may have the prefix ``module.``.""",
    "optimizer": """torch.optim.Optimizer
    Of ``model.parameters()``. Its steps are counted, so it must be the one that trains.""",
    "dummy_input": """torch.Tensor
    An input of the model, (rows, ...), on its device: NNI traces the model with it to find batch norms to fold.""",
    "evaluator": """nni.compression.utils.Evaluator
    Holds the training function, in which ``DataParallel`` has its place, around the model that NNI hands over.""",
    "quant_start_step": """int
    Steps of the optimizer before anything is quantised.""",
    "existed_wrappers": """dict, optional
    For ``from_compressor``: the wrappers of another compressor on the same model.""",
    "is_bias_correction": """bool
    NNI's correction of biases after calibration.""",
}
"""Parameter -> its type and meaning."""

_WHAT: Dict[str, str] = {
    "QAT_Quantizer": "Fake quantisation with the moving average of each batch's range.",
    "QATQuantizer": "Fake quantisation with the moving average of each batch's range.",
    "LsqQuantizer": "Fake quantisation with learned scales.",
    "LsqPlusQuantizer": "Fake quantisation with learned scales and zero points.",
    "DoReFaQuantizer": "Weights of few bits, squashed by tanh.",
    "BNNQuantizer": "Weights and outputs of one bit: their sign.",
    "NaiveQuantizer": "Weights of eight bits, by the largest value that was seen.",
    "ObserverQuantizer": "Calibration after training: histograms of what a model in evaluation mode computes.",
    "PtqQuantizer": "Calibration after training: the range of what a model computes in the training function.",
}

_TEXT = """{what}

NNI {release}'s ``{name}`` with the numbers of one device, under ``torch.nn.DataParallel`` and ``DistributedDataParallel``. A
subclass of NNI's own class, which stays as it is; arguments, methods and checkpoints are the same. More of them in
help({stock}).

Parameters
----------
{parameters}

Raises
------
{raises}RuntimeError
    In the first training forward, when ``DistributedDataParallel`` was built before the quantizer.

Warns
-----
NNIDataParallelWarning
    When ``config_list`` matches no layer, or the model is in a ``DistributedDataParallel``: the text says the order.

Examples
--------
{example}
"""

_MODEL = """>>> import torch
>>> from nni_dataparallel import {name}, rehearse
>>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)){mode}
"""
_OLD = (
    _MODEL
    + """>>> config_list = [{{"op_types": ["Linear"], "quant_types": ["weight"], "quant_bits": {bits}}}]
{build}>>> parallel = rehearse(model, replicas=2)  # with GPUs: torch.nn.DataParallel(model)
"""
)
_STEP = """>>> parallel(torch.randn(6, 4)).square().mean().backward()
>>> optimizer.step()
>>> [name for name in model.state_dict() if name.endswith("old_weight")]
['0.module.old_weight', '2.module.old_weight']
"""
_OBSERVE = """>>> with torch.no_grad():
...     output = parallel(torch.randn(6, 4))
>>> _ = quantizer.compress()
>>> output = parallel(torch.randn(6, 4))
"""
_NEW = (
    _MODEL
    + """>>> config = {{"op_types": ["Linear"], "target_names": ["weight"], "quant_dtype": "int8", "quant_scheme": "{scheme}"}}
>>> def training(net, optimizer, training_step, *_):
...     parallel = rehearse(net, replicas=2)  # with GPUs: torch.nn.DataParallel(net)
...     loss = training_step(torch.randn(6, 4), parallel)
{step}>>> import nni
>>> from nni.compression.utils import TorchEvaluator
>>> optimizer = nni.trace(torch.optim.SGD)(model.parameters(), lr=0.1)
>>> evaluator = TorchEvaluator(training, optimizer, lambda batch, net: net(batch).square().mean())
>>> quantizer = {name}(model, [config], evaluator)
>>> model, calibration = quantizer.compress({duration})
>>> sorted(calibration)
['0', '2']
"""
)


_UNKNOWN = """KeyError
    When a name in ``op_names`` is no layer of the model.
"""


def describe(stock: Any, release: str) -> str:
    """The docstring of the fixed subclass of NNI's quantizer ``stock``."""
    known = inspect.signature(stock).parameters
    parameters = "\n".join(f"{name} : {_PARAMETERS.get(name, 'as in NNI')}" for name in known)
    return _TEXT.format(
        what=_WHAT[stock.__name__],
        release=release,
        name=stock.__name__,
        stock=f"{stock.__module__}.{stock.__name__}",
        parameters=parameters,
        raises=_UNKNOWN if "evaluator" in known else "",
        example=_example(stock.__name__, known).rstrip(),
    )


def _example(name: str, known: Any) -> str:
    if "evaluator" in known:
        watches = name == "PtqQuantizer"
        step = "" if watches else "...     loss.backward()\n...     optimizer.step()\n"
        scheme = "symmetric" if name == "LsqQuantizer" else "affine"  # the one that it takes
        return _NEW.format(name=name, mode="", scheme=scheme, step=step, duration="1, None" if watches else "None, 1")
    observes = name == "ObserverQuantizer"
    optimizer = ">>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    arguments = "model, config_list"
    if "optimizer" in known and not observes:
        arguments += ", optimizer"
    if "dummy_input" in known:
        arguments += ", dummy_input=torch.randn(1, 4)"
    build = f">>> quantizer = {name}({arguments})\n"
    if observes:
        return _OLD.format(name=name, mode=".eval()", bits=8, build=build) + _OBSERVE
    build += ">>> model = quantizer.compress()\n"
    # NNI 1.4 knows no optimizer, and makes Parameters of its own.
    build = optimizer + build if "optimizer" in known else build + optimizer
    return _OLD.format(name=name, mode="", bits=1 if name == "BNNQuantizer" else 8, build=build) + _STEP
