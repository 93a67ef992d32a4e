"""The rows of the fix table for NNI's older line, 1.4 - 3.0rc1.

A row names what is repaired once; where NNI keeps the class in which release is looked up in
``_HOMES``, so that one row here becomes one :class:`~nni_dataparallel.patching.Fix` per home.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, NamedTuple, Tuple

from ..patching import Fix
from . import (
    calibration,
    construction,
    copying,
    export,
    export_files,
    gradient,
    lsq,
    observing,
    qat,
    qat_first,
    qat_legacy,
    signatures,
    steps,
    weights,
    wrapping,
)

__all__ = ["FIXES", "LINE", "PACKAGES", "QUANTIZERS"]

LINE = ">=1.4,<=3.0rc1"
_1, _2, _RC = ">=1.4,<2.0", ">=2.0,<3.0rc1", "==3.0rc1"
_TORCH, _PYTORCH = "nni.compression.torch", "nni.compression.pytorch"
_ALGORITHMS = "nni.algorithms.compression.pytorch.quantization"

PACKAGES: Dict[str, str] = {_1: _TORCH, _2: _ALGORITHMS, _RC: f"{_PYTORCH}.quantization"}
"""Releases -> the package to import a quantizer from."""

QUANTIZERS: Dict[str, str] = {
    "QAT_Quantizer": LINE,
    "LsqQuantizer": ">=2.3,<=3.0rc1",
    "DoReFaQuantizer": LINE,
    "BNNQuantizer": LINE,
    "NaiveQuantizer": LINE,
    "ObserverQuantizer": ">=2.4,<=3.0rc1",
}
"""Every quantizer of this line -> the releases that ship it."""


def _homes_of_quantizer(file: str) -> Dict[str, str]:
    return {
        ">=1.4,<1.7": f"{_TORCH}.quantizers",
        ">=1.7,<2.0": f"{_TORCH}.quantization.quantizers",
        ">=2.0,<2.6": f"{_ALGORITHMS}.quantizers",
        ">=2.6,<3.0rc1": f"{_ALGORITHMS}.{file}",
        _RC: f"{_PYTORCH}.quantization.{file}",
    }


_COMPRESSOR = {_1: f"{_TORCH}.compressor", ">=2.0,<=3.0rc1": f"{_PYTORCH}.compressor"}
_HOMES: Dict[str, Dict[str, str]] = {
    "Quantizer": _COMPRESSOR,
    "QuantizerModuleWrapper": _COMPRESSOR,
    "QAT_Quantizer": _homes_of_quantizer("qat_quantizer"),
    "QATGrad": _homes_of_quantizer("qat_quantizer"),
    "LsqQuantizer": _homes_of_quantizer("lsq_quantizer"),
    "DoReFaQuantizer": _homes_of_quantizer("dorefa_quantizer"),
    "BNNQuantizer": _homes_of_quantizer("bnn_quantizer"),
    "ClipGrad": _homes_of_quantizer("bnn_quantizer"),
    "NaiveQuantizer": _homes_of_quantizer("native_quantizer"),
    "ObserverQuantizer": _homes_of_quantizer("observer_quantizer"),
}

_EXPORT, _LSQ = ">=2.2,<=3.0rc1", ">=2.3,<=3.0rc1"
_LEGACY, _MODERN = ">=2.0,<2.5", ">=2.5,<=3.0rc1"
_DP, _ZERO, _ALIAS, _PREFIX = "nni#3626", "nni#3084", "nni#1854", "nni#5277"


class _Row(NamedTuple):
    path: str
    releases: str
    fix: Callable[..., Any]
    expects: Tuple[str, ...]
    reason: str
    issue: str = _DP


def _rules(
    path: str, rules: Dict[str, Tuple[Callable[..., Any], Tuple[str, ...]]], within: str, reason: str, issue: str
) -> List[_Row]:
    return [_Row(path, f"{releases},{within}", fix, expects, reason, issue) for releases, (fix, expects) in rules.items()]


_SELF, _WRAPPER = ("self",), ("self", "wrapper")
_INPUT, _OUTPUT = ("self", "inputs", "wrapper"), ("self", "output", "wrapper")
_REBOUND = "scale, zero point and quantised weight are rebound and lost on replicas"
_RANGE = "the tracked range is lost, or only replica 0's shard is seen"
_START = "the scale starts from one shard, and is lost"
_WARM = "before quant_start_step gradients are masked by a scale that does not exist"
_IN_PLACE = "autograd's own gradient tensor is zeroed in place, in other branches too"
_ZERO_WEIGHT = "an all-zero weight gives NaN"
_QUANT_BACKWARD = ("tensor", "grad_output", "quant_type", "scale", "zero_point", "qmin", "qmax")

_ROWS: Tuple[_Row, ...] = (
    _Row("Quantizer.__init__", LINE, construction.quantizer_init, ("self", "model", "config_list"),
         "a DataParallel given in place of its model, a prefixed name, a config that matches nothing", _PREFIX),
    _Row("Quantizer.compress", LINE, construction.compress, _SELF,
         "the model comes back without the DataParallel it was given in", _PREFIX),
    _Row("Quantizer.__setstate__", LINE, copying.setstate, (), "a copy's optimizer does not count steps", "nni#5704"),
    _Row("Quantizer._wrap_modules", LINE, wrapping.wrap_modules, ("self", "layer", "config"),
         "the `weight` buffer is the trained Parameter, or shares its storage"),
    _Row("QuantizerModuleWrapper.forward", LINE, wrapping.forward, _SELF,
         "buffers rebound in a forward are lost on replicas and cannot be copied afterwards"),
    _Row("QuantizerModuleWrapper._load_from_state_dict", LINE, wrapping.load_from_state_dict,
         ("self", "state_dict", "prefix", "local_metadata", "strict"),
         "shapes drift from the fresh ones; float weights must reach the trained weight", "nni#3119"),
    _Row("QuantizerModuleWrapper._recomputed_buffers", LINE, wrapping.recomputed_buffers, (),
         "DDP broadcasts the quantised weights before every forward"),
    # QAT_Quantizer, 1.4 - 1.9
    *_rules("QAT_Quantizer.quantize_weight", signatures.weight_rule(qat_first.quantize_weight), "<1.9", _REBOUND, _DP),
    *_rules("QAT_Quantizer.quantize_weight", signatures.weight_rule(qat_first.quantize_bias_in_place), ">=1.9,<2.0", _REBOUND, _DP),
    *_rules("QAT_Quantizer.quantize_output", signatures.output_rule(qat_first.quantize_output), "<2.0", _RANGE, _DP),
    # QAT_Quantizer, 2.0 - 2.4
    _Row("QAT_Quantizer.quantize_weight", ">=2.0,<2.4", qat_legacy.quantize_weight(with_bias=True), _WRAPPER, _REBOUND),
    _Row("QAT_Quantizer.quantize_weight", ">=2.4,<2.5", qat_legacy.quantize_weight(with_bias=False), _WRAPPER, _REBOUND),
    _Row("QAT_Quantizer.quantize_output", ">=2.0,<2.2", qat_legacy.quantize_output(qat_legacy.OUTPUT_2_0), _OUTPUT, _RANGE),
    _Row("QAT_Quantizer.quantize_output", ">=2.2,<2.5", qat_legacy.quantize_output(qat_legacy.OUTPUT_2_2), _OUTPUT, _RANGE),
    # QAT_Quantizer, 2.5 - 3.0rc1
    _Row("QAT_Quantizer.quantize_weight", _MODERN, qat.quantize_weight, _WRAPPER, _REBOUND),
    _Row("QAT_Quantizer.quantize_input", _MODERN, qat.quantize_input, _INPUT, _RANGE),
    _Row("QAT_Quantizer.quantize_output", _MODERN, qat.quantize_output, _OUTPUT, _RANGE),
    _Row("QAT_Quantizer.load_calibration_config", _MODERN, calibration.load_calibration_config, ("self", "calibration_config"),
         "ranges become CPU tensors of another shape, scales stay 0, the first step discards what was loaded"),
    _Row("QAT_Quantizer.step_with_optimizer", ">=2.0,<=3.0rc1", steps.step_with_optimizer, _SELF,
         "the step counter is read from the device in every layer"),
    _Row("QATGrad.forward", ">=2.0,<=3.0rc1", gradient.forward, ("ctx", "tensor", "quant_type", "wrapper"), _WARM),
    _Row("QATGrad.backward", ">=2.0,<=3.0rc1", gradient.backward, ("cls", "ctx", "grad_output"), _WARM),
    _Row("QATGrad.quant_backward", ">=2.0,<=3.0rc1", gradient.quant_backward, _QUANT_BACKWARD, _IN_PLACE),
    # LsqQuantizer, 2.3 - 3.0rc1
    _Row("LsqQuantizer.__init__", _LSQ, lsq.init, ("self", "model", "config_list"), _ZERO_WEIGHT, _ZERO),
    _Row("LsqQuantizer.quantize_weight", _LSQ, lsq.quantize_weight, _WRAPPER,
         "from 2.5 on the weights are not trained", _ALIAS),
    _Row("LsqQuantizer.quantize_input", ">=2.3,<2.5", lsq.quantize_inputs, _INPUT, _START),
    _Row("LsqQuantizer.quantize_input", _MODERN, lsq.quantize_input, _INPUT, _START),
    _Row("LsqQuantizer.quantize_output", _LSQ, lsq.quantize_output, _OUTPUT, _START),
    _Row("LsqQuantizer.load_calibration_config", _MODERN, calibration.load_lsq_calibration_config, ("self", "calibration_config"),
         "scales become CPU tensors, the first step discards what was loaded"),
    # The weight alone
    *_rules("DoReFaQuantizer.quantize_weight", signatures.weight_rule(weights.dorefa), "<=3.0rc1", _ZERO_WEIGHT, _ZERO),
    *_rules("NaiveQuantizer.quantize_weight", signatures.weight_rule(weights.naive), "<=3.0rc1",
            "replicas keep tensors of several devices in one dict", _DP),
    _Row("ClipGrad.quant_backward", LINE, gradient.clip_backward, ("tensor", "grad_output", "quant_type"), _IN_PLACE),
    # ObserverQuantizer, 2.4 - 3.0rc1
    _Row("ObserverQuantizer.record", ">=2.4,<=3.0rc1", observing.record, ("self", "wrapper", "quant_type", "tensor"),
         "all replicas feed one histogram at once"),
    _Row("ObserverQuantizer.quantize_weight", _MODERN, observing.quantize_weight, _WRAPPER,
         "after compress() the weight is evaluated in floating point"),
    # Export
    _Row("Quantizer.export_model_save", _EXPORT, export_files.save, ("self", "model", "model_path"),
         "what a full disk or an interrupt leaves of the files", ""),
    *(_Row(f"{name}.export_model", _EXPORT, export.export_model, ("self", "model_path"),
           "a wrong path or a per-channel range leaves the model half unwrapped; the file does not load into a plain model")
      for name in ("QAT_Quantizer", "DoReFaQuantizer", "BNNQuantizer", "ObserverQuantizer")),
    _Row("LsqQuantizer.export_model", _LSQ, export.export_lsq_model, ("self", "model_path"),
         "a layer whose input is not quantised has no input_scale"),
)  # fmt: skip

_INHERITED = {"Quantizer.compress", "QuantizerModuleWrapper._load_from_state_dict", "QATGrad.forward", "QATGrad.backward"}
_ADDED = {"Quantizer.__setstate__", "QuantizerModuleWrapper._recomputed_buffers"}


def _fixes() -> List[Fix]:
    found = []
    for row in _ROWS:
        owner = row.path.partition(".")[0]
        since = QUANTIZERS.get(owner, LINE)
        for releases, module in _HOMES[owner].items():
            found.append(
                Fix(
                    row.path,
                    f"{module}:{row.path}",
                    row.fix,
                    row.reason,
                    f"{row.releases},{releases},{since}",
                    row.expects,
                    row.issue,
                    inherited=row.path in _INHERITED,
                    added=row.path in _ADDED,
                )
            )
    return found


FIXES: Tuple[Fix, ...] = tuple(_fixes())
