"""The fix table: every row, read in one look, and the releases it knows."""

from __future__ import annotations

import sys
from importlib import metadata, util
from typing import Dict, List, Tuple

from . import replicas
from .nni2 import calibration, construction, gradient, qat, qat_legacy, steps, wrapping
from .patching import Fix, PatchError

__all__ = ["FIXES", "QUANTIZERS", "RELEASES", "UnsupportedReleaseError", "installed_release", "rows_for"]

RELEASES: Tuple[str, ...] = (
    "1.4", "1.5", "1.6", "1.7", "1.7.1", "1.8", "1.9",
    "2.0", "2.1", "2.2", "2.3", "2.4", "2.5", "2.6", "2.6.1", "2.7", "2.8", "2.9", "2.10", "2.10.1",
    "3.0rc1", "3.0",
)  # fmt: skip
"""Every NNI release on the package registry that has a PyTorch compressor."""

_COMPRESSOR = "nni.compression.pytorch.compressor"
_PACKAGE = "nni.algorithms.compression.pytorch.quantization"
_ONE_FILE, _OWN_FILE = f"{_PACKAGE}.quantizers", f"{_PACKAGE}.qat_quantizer"
_NNI2 = ">=2.0,<3.0rc1"
_DP = "nni#3626"


def _qat(releases: str, file: str, names: Dict[str, object]) -> Tuple[Fix, ...]:
    """Rows for methods of QAT_Quantizer and QATGrad in the file where these releases keep them."""
    reasons = {
        "quantize_weight": "scale, zero point and quantised weight are rebound and lost on replicas",
        "quantize_input": "only replica 0's shard is seen; two device round-trips per layer",
        "quantize_output": "the tracked range is lost, or only replica 0's shard is seen",
        "step_with_optimizer": "the step counter is read from the device in every layer",
        "QATGrad.forward": "before quant_start_step gradients are masked by a scale that does not exist",
        "QATGrad.backward": "before quant_start_step gradients are masked by a scale that does not exist",
        "QATGrad.quant_backward": "autograd's own gradient tensor is zeroed in place, in other branches too",
        "load_calibration_config": "ranges are replaced by CPU tensors of another shape",
        "export_model": "a wrong path or a per-channel range leaves the model half unwrapped",
    }
    expects = {
        "quantize_weight": ("self", "wrapper"),
        "quantize_input": ("self", "inputs", "wrapper"),
        "quantize_output": ("self", "output", "wrapper"),
        "QATGrad.forward": ("ctx", "tensor", "quant_type", "wrapper"),
        "QATGrad.backward": ("cls", "ctx", "grad_output"),
        "QATGrad.quant_backward": ("tensor", "grad_output", "quant_type", "scale", "zero_point", "qmin", "qmax"),
        "load_calibration_config": ("self", "calibration_config"),
        "export_model": ("self", "model_path"),
    }
    rows = []
    for name, fix in names.items():
        path = name if "." in name else f"QAT_Quantizer.{name}"
        rows.append(
            Fix(
                path,
                f"{file}:{path}",
                fix,  # type: ignore[arg-type]
                reasons[name],
                releases,
                expects.get(name, ("self",)),
                _DP,
                inherited=name in ("QATGrad.forward", "QATGrad.backward"),
            )
        )
    return tuple(rows)


_GRADIENT: Dict[str, object] = {
    "step_with_optimizer": steps.step_with_optimizer,
    "QATGrad.forward": gradient.forward,
    "QATGrad.backward": gradient.backward,
    "QATGrad.quant_backward": gradient.quant_backward,
}
_LEGACY_BIAS: Dict[str, object] = {"quantize_weight": qat_legacy.quantize_weight(with_bias=True)}
_LEGACY_EXPORT: Dict[str, object] = {"export_model": calibration.export_model}
_MODERN: Dict[str, object] = {
    **_GRADIENT,
    "quantize_weight": qat.quantize_weight,
    "quantize_input": qat.quantize_input,
    "quantize_output": qat.quantize_output,
    "load_calibration_config": calibration.load_calibration_config,
    "export_model": calibration.export_model,
}

FIXES: Tuple[Fix, ...] = (
    *replicas.FIXES,
    Fix(
        "Quantizer.__init__",
        f"{_COMPRESSOR}:Quantizer.__init__",
        construction.quantizer_init,
        "a config that matches nothing, or a model wrapped before, goes unnoticed",
        _NNI2,
        ("self", "model", "config_list"),
        "nni#5277",
    ),
    Fix(
        "Quantizer._wrap_modules",
        f"{_COMPRESSOR}:Quantizer._wrap_modules",
        wrapping.wrap_modules,
        "the `weight` buffer is the trained Parameter, or shares its storage",
        _NNI2,
        ("self", "layer", "config"),
        _DP,
    ),
    Fix(
        "QuantizerModuleWrapper.forward",
        f"{_COMPRESSOR}:QuantizerModuleWrapper.forward",
        wrapping.forward,
        "buffers rebound in a forward are lost on replicas and cannot be copied afterwards",
        _NNI2,
        ("self",),
        _DP,
    ),
    Fix(
        "QuantizerModuleWrapper._load_from_state_dict",
        f"{_COMPRESSOR}:QuantizerModuleWrapper._load_from_state_dict",
        wrapping.load_from_state_dict,
        "float weights loaded after compress() must reach the trained weight",
        _NNI2,
        ("self", "state_dict", "prefix", "local_metadata", "strict"),
        inherited=True,
    ),
    *_qat(
        ">=2.0,<2.2",
        _ONE_FILE,
        {**_GRADIENT, **_LEGACY_BIAS, "quantize_output": qat_legacy.quantize_output(qat_legacy.OUTPUT_2_0)},
    ),
    *_qat(
        ">=2.2,<2.4",
        _ONE_FILE,
        {**_GRADIENT, **_LEGACY_BIAS, **_LEGACY_EXPORT, "quantize_output": qat_legacy.quantize_output(qat_legacy.OUTPUT_2_2)},
    ),
    *_qat(
        ">=2.4,<2.5",
        _ONE_FILE,
        {
            **_GRADIENT,
            **_LEGACY_EXPORT,
            "quantize_weight": qat_legacy.quantize_weight(with_bias=False),
            "quantize_output": qat_legacy.quantize_output(qat_legacy.OUTPUT_2_2),
        },
    ),
    *_qat(">=2.5,<2.6", _ONE_FILE, _MODERN),
    *_qat(">=2.6,<3.0rc1", _OWN_FILE, _MODERN),
)

QUANTIZERS: Dict[str, Tuple[str, str]] = {"QAT_Quantizer": (_NNI2, _PACKAGE)}
"""Fixed quantizers: name -> (releases that have it, the module to import the stock class from)."""

NOT_YET: Dict[str, str] = {
    "NaiveQuantizer": "1.4 - 2.10.1",
    "DoReFaQuantizer": "1.4 - 3.0",
    "BNNQuantizer": "1.4 - 3.0",
    "LsqQuantizer": "2.3 - 3.0",
    "ObserverQuantizer": "2.4 - 2.10.1",
    "QATQuantizer": "3.0",
    "LsqPlusQuantizer": "3.0",
    "PtqQuantizer": "3.0",
}
"""NNI's quantizers without a fixed subclass here -> the NNI releases that ship them."""


class UnsupportedReleaseError(PatchError):
    """The installed NNI is missing, unknown, or not covered by the fix table."""


def installed_release() -> str:
    """The release of the NNI that an import would find.

    Raises
    ------
    UnsupportedReleaseError
        When NNI is not installed.
    """
    loaded = getattr(sys.modules.get("nni"), "__version__", None)
    if loaded is not None:
        return str(loaded)
    try:
        missing = util.find_spec("nni") is None
    except ValueError:  # a stub without a spec stands in sys.modules
        missing = True
    if missing:
        raise UnsupportedReleaseError(
            "NNI is not installed in this environment. Install the release your script was written for, "
            "for example: pip install nni==2.10.1"
        )
    try:
        return metadata.version("nni")
    except metadata.PackageNotFoundError:
        import nni

        return str(nni.__version__)


def covered_releases() -> List[str]:
    """The releases for which the table has rows of its own."""
    return [r for r in RELEASES if any(fix.releases and fix.fits(r) for fix in FIXES)]


def rows_for(release: str) -> List[Fix]:
    """The rows for an NNI release.

    Raises
    ------
    UnsupportedReleaseError
        When the release is unknown or has no rows.
    """
    rows = [fix for fix in FIXES if fix.fits(release)] if release in RELEASES else []
    if not any(fix.releases for fix in rows):
        known = "is not covered yet by" if release in RELEASES else "is unknown to"
        raise UnsupportedReleaseError(
            f"NNI {release} {known} nni_dataparallel; nothing was patched. "
            f"Covered releases: {', '.join(covered_releases())}. "
            "Install one of them, for example: pip install nni==2.10.1"
        )
    return rows
