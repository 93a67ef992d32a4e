"""The rows of the fix table for NNI 3.0."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, NamedTuple, Tuple

from ..patching import Fix
from . import (
    calibration,
    construction,
    distilling,
    distilling_ranks,
    dorefa,
    evaluators,
    lsq,
    ranges,
    reducing,
    rounding,
    views,
    wrapping,
)

__all__ = ["FIXES", "PACKAGES", "QUANTIZERS"]

LINE = ">=3.0"
_NNI = "nni.compression"

PACKAGES: Dict[str, str] = {LINE: f"{_NNI}.quantization"}
"""Releases -> the package to import a quantizer from."""

_NAMES = ("QATQuantizer", "LsqQuantizer", "LsqPlusQuantizer", "DoReFaQuantizer", "BNNQuantizer", "PtqQuantizer")
QUANTIZERS: Dict[str, str] = dict.fromkeys(_NAMES, LINE)
"""Every quantizer of this line -> the releases that ship it."""

_HOMES = {
    "ModuleWrapper": "base.wrapper",
    "Compressor": "base.compressor",
    "DistillationTargetSpace": "base.target_space",
    "Quantizer": "base.compressor",
    "QATQuantizer": "quantization.qat_quantizer",
    "LsqQuantizer": "quantization.lsq_quantizer",
    "LsqPlusQuantizer": "quantization.lsqplus_quantizer",
    "DoReFaQuantizer": "quantization.dorefa_quantizer",
    "PtqQuantizer": "quantization.ptq_quantizer",
    "TransformersEvaluator": "utils.evaluator",
    "LightningEvaluator": "utils.evaluator",
    "TeacherModelBasedDistiller": "distillation.basic_distiller",
    "DynamicLayerwiseDistiller": "distillation.basic_distiller",
    "Adaptive1dLayerwiseDistiller": "distillation.basic_distiller",
    "TaylorPruner": "pruning.taylor_pruner",
}
_DP = "nni#5687"
_TRACK = ("self", "wrapper", "target_name", "target")
_TASKS = ("before_step_tasks", "after_step_tasks")
_RANGE = "every replica tracks the range of its own shard, and loses it"
_START = "a learned scale is started by rebinding it: lost on replicas, of another size than the optimizer's"


class _Row(NamedTuple):
    path: str
    fix: Callable[..., Any]
    expects: Tuple[str, ...]
    reason: str


def _in_training(quantizer: Any, wrapper: Any, target_name: str) -> bool:
    return bool(wrapper.training and quantizer.check_target(wrapper, target_name))


def _always(quantizer: Any, wrapper: Any, target_name: str) -> bool:
    return True


_ROWS: Tuple[_Row, ...] = (
    _Row("Compressor.__init__", construction.compressor_init, ("self", "model", "config_list"),
         "every layer of a DataParallel is called module.<name>; a config that matches nothing goes unnoticed"),
    _Row("Compressor.compress", construction.compress, ("self", "max_steps", "max_epochs"),
         "a model that was given in a DataParallel is expected back in it"),
    _Row("Compressor._fusion_compress", construction.fusion_compress, ("self", "max_steps", "max_epochs"),
         "a DataParallel that was given to the compressor is what the user's functions expect"),
    _Row("ModuleWrapper._localise_replica", views.localise, (),
         "every replica runs the original's wrapper, module and fused modules"),
    _Row("ModuleWrapper._recomputed_buffers", wrapping.recomputed_buffers, (),
         "DDP broadcasts the compressed weights before every forward"),
    _Row("ModuleWrapper.forward", wrapping.forward, ("self",),
         "what it assigns is lost on replicas and cannot be copied afterwards; it waits for the device after every layer"),
    _Row("ModuleWrapper.wrap", wrapping.wrap, ("self",), "the folded bias of a layer without one appears in the first forward"),
    _Row("ModuleWrapper.unwrap", wrapping.unwrap, ("self",),
         "the original's forward stays on the unwrapped layer, and every replica of the plain model runs it"),
    _Row("ModuleWrapper._load_from_state_dict", wrapping.load_from_state_dict, ("self", "state_dict", "prefix"),
         "a fresh model refuses its own checkpoint: the buffers are None until the first forward"),
    _Row("ModuleWrapper._apply_quant_helper", rounding.apply_quant_helper, ("self", "target", "target_space"),
         "autograd's own gradient tensor is zeroed in place; an all-zero weight gives NaN"),
    _Row("Quantizer.get_calibration_config", calibration.get_calibration_config, ("self",),
         "on the CPU it is made of the model's own tensors, which go on changing"),
    _Row("Quantizer.update_calibration_config", calibration.update_calibration_config, ("self", "calibration_config"),
         "ranges are not loaded, learned scales fail, a config that does not fit is half loaded"),
    *(_Row(f"{name}.patch_optimizer_param_group", construction.in_the_models_order, ("self",),
           "learned scales come in an order of their own in every process: an optimizer's checkpoint swaps their momenta")
      for name in ("Quantizer", "LsqQuantizer", "LsqPlusQuantizer")),
    _Row("QATQuantizer.track_min_max_val", ranges.tracked_once_per_batch(_in_training), _TRACK, _RANGE),
    _Row("PtqQuantizer.track_min_max_val", ranges.tracked_once_per_batch(_always), _TRACK, _RANGE),
    _Row("DoReFaQuantizer.update_scale_zp", dorefa.update_scale_zp, _TRACK, _RANGE),
    _Row("DoReFaQuantizer._quant_dequant_gradient_hook", dorefa.quant_dequant_gradient_hook, ("self", "target_space"),
         "replicas draw noise of their own; a zero gradient becomes NaN"),
    _Row("LsqQuantizer.register_scale", lsq.register_parameters, ("self",), _START),
    _Row("LsqQuantizer.init_scale", lsq.init_parameters, _TRACK, _START),
    _Row("LsqPlusQuantizer.register_scale_zp", lsq.register_parameters, ("self",), _START),
    _Row("LsqPlusQuantizer.init_scale_zp", lsq.init_parameters, _TRACK, _START),
    _Row("TransformersEvaluator.patch_optimizer_step", evaluators.patch_optimizer_step, ("self", *_TASKS),
         "takes every Trainer since transformers 4.31 for one with DeepSpeed; the last caller's tasks replace all others"),
    _Row("TransformersEvaluator.patch_loss", evaluators.patch_loss, ("self", "patch"),
         "compute_loss has one more argument since transformers 4.46"),
    _Row("LightningEvaluator.patch_loss", evaluators.patch_loss_lightning, ("self", "patch"),
         "the replicas of Lightning's dp run the original's training_step"),
    _Row("LightningEvaluator.revert_loss", evaluators.revert_loss_lightning, ("self",),
         "after compress() the replicas of Lightning's dp run the original's training_step"),
    _Row("LightningEvaluator.train", evaluators.train_lightning, ("self", "max_steps", "max_epochs"),
         "the setting that max_steps is written to cannot be set in Lightning 2.x"),
    _Row("DistillationTargetSpace.__deepcopy__", distilling.copy_without_graph, (),
         "a model cannot be copied while a layer holds a hidden state"),
    _Row("TeacherModelBasedDistiller._register_teacher_wrappers", distilling.register_teacher_wrappers, ("self",),
         "the layers of a teacher in DataParallel are not found"),
    _Row("DynamicLayerwiseDistiller.compute_distill_loss", distilling_ranks.compute_distill_loss, ("self",),
         "every rank of DDP chooses a link by its shard's loss; NaN for an empty one"),
    _Row("Adaptive1dLayerwiseDistiller.compute_distill_loss", distilling_ranks.compute_distill_loss, ("self",),
         "every rank of DDP trains linear layers of its own; NaN for an empty shard"),
    _Row("Adaptive1dLayerwiseDistiller._register_linears_optimization", distilling_ranks.register_linears_optimization,
         ("self", "evaluator"), "the order in the optimizer's checkpoint is another in every process"),
    _Row("TaylorPruner._register_hooks", reducing.register_hooks, ("self", "evaluator"),
         "every rank of DDP squares the gradient of its own shard"),
)  # fmt: skip

_INHERITED = {"ModuleWrapper._load_from_state_dict"}
_ADDED = {"ModuleWrapper._localise_replica", "ModuleWrapper._recomputed_buffers", "DistillationTargetSpace.__deepcopy__"}
_ON_IMPORT = ("TeacherModelBasedDistiller", "DynamicLayerwiseDistiller", "Adaptive1dLayerwiseDistiller", "TaylorPruner")


def _fixes() -> List[Fix]:
    return [
        Fix(
            row.path,
            f"{_NNI}.{_HOMES[row.path.partition('.')[0]]}:{row.path}",
            row.fix,
            row.reason,
            LINE,
            row.expects,
            _DP,
            inherited=row.path in _INHERITED,
            added=row.path in _ADDED,
            on_import=row.path.partition(".")[0] in _ON_IMPORT,
        )
        for row in _ROWS
    ]


FIXES: Tuple[Fix, ...] = tuple(_fixes())
