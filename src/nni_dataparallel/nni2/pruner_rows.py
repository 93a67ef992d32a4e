"""The rows of the fix table for the pruners of 1.4 - 3.0rc1."""

from __future__ import annotations

from typing import Any, Callable, List, NamedTuple, Tuple

from ..patching import Fix
from . import export_files, pruning

__all__ = ["FIXES"]

_TORCH, _PRUNING = "nni.compression.torch", "nni.algorithms.compression.pytorch.pruning"
_V2, _RC = "nni.algorithms.compression.v2.pytorch", "nni.compression.pytorch"
_HOOKS = "every replica's shard is counted as a batch, in the order of the threads"
_GRADIENT = "every rank of DDP squares the gradient of its own shard"
_FILES = "what a full disk or an interrupt leaves: half a file, one without the other, a model half unwrapped"
_COPY = "the masked weight is rebound in a forward: lost on replicas, and the model cannot be copied afterwards"


class _Row(NamedTuple):
    releases: str
    module: str
    path: str
    fix: Callable[..., Any]
    expects: Tuple[str, ...]
    reason: str


def _everywhere(since: str, file: str, path: str, fix: Callable[..., Any], expects: Tuple[str, ...], reason: str) -> List[_Row]:
    """A row of the second pruning API, which 3.0rc1 keeps in another package."""
    return [
        _Row(f">={since},<3.0rc1", f"{_V2}.{file}", path, fix, expects, reason),
        _Row("==3.0rc1", f"{_RC}.{file}", path, fix, expects, reason),
    ]


_MASKER = "ActivationFilterPrunerMasker._add_activation_collector"
_OWN, _PRUNER, _LAYER = ("self",), ("self", "pruner"), ("self", "layer", "config")
_ROWS: Tuple[_Row, ...] = (
    # The first pruning API
    _Row(">=1.5,<1.7", f"{_TORCH}.activation_rank_filter_pruners", "ActivationRankFilterPruner._add_activation_collector",
         pruning.add_activation_collector, _OWN, _HOOKS),
    _Row(">=1.7,<2.0", f"{_TORCH}.pruning.structured_pruning", _MASKER, pruning.add_activation_collector, _PRUNER, _HOOKS),
    _Row(">=2.0,<2.3", f"{_PRUNING}.structured_pruning", _MASKER, pruning.add_activation_collector, _PRUNER, _HOOKS),
    _Row(">=2.3,<3.0rc1", f"{_PRUNING}.structured_pruning_masker", _MASKER, pruning.add_activation_collector, _PRUNER, _HOOKS),
    *(_Row(releases, module, path, export_files.export_pruned, ("self", "model_path"), _FILES) for releases, module, path in (
        (">=1.4,<2.0", f"{_TORCH}.compressor", "Pruner.export_model"),
        (">=2.0,<=3.0rc1", f"{_RC}.compressor", "Pruner.export_model"),
        (">=1.7,<2.0", f"{_TORCH}.pruning.auto_compress_pruner", "AutoCompressPruner.export_model"),
        (">=2.0,<3.0rc1", f"{_PRUNING}.auto_compress_pruner", "AutoCompressPruner.export_model"),
    )),
    # The second
    *_everywhere("2.5", "base.pruner", "Pruner.export_model", export_files.export_pruned, ("self", "model_path"), _FILES),
    *_everywhere("2.5", "pruning.basic_pruner", "ActivationPruner._collector", pruning.collector, ("self", "buffer"), _HOOKS),
    *_everywhere("2.7", "pruning.basic_pruner", "TaylorFOWeightPruner._collector", pruning.taylor_collector,
                 ("self", "buffer", "weight_tensor"), _GRADIENT),
    *_everywhere("2.7", "base.pruner", "Pruner._wrap_modules", pruning.wrap_modules, _LAYER, _COPY),
    *_everywhere("2.7", "base.pruner", "PrunerModuleWrapper._weight2buffer", pruning.weight_to_buffer, _OWN, _COPY),
    *_everywhere("2.7", "base.pruner", "PrunerModuleWrapper.forward", pruning.forward, _OWN, _COPY),
    *_everywhere("2.6", "pruning.movement_pruner", "MovementPruner._wrap_modules", pruning.wrap_modules, _LAYER, _COPY),
    *_everywhere("2.6", "pruning.movement_pruner", "PrunerScoredModuleWrapper.forward", pruning.forward, _OWN, _COPY),
    _Row(">=2.6,<2.7", f"{_V2}.pruning.movement_pruner", "PrunerScoredModuleWrapper._weight2buffer",
         pruning.weight_to_buffer, _OWN, _COPY),
)  # fmt: skip


# On import: those of 2.0 - 2.3 import TensorBoard, which the quantizers do not need and NNI does not install.
FIXES: Tuple[Fix, ...] = tuple(
    Fix(row.path, f"{row.module}:{row.path}", row.fix, row.reason, row.releases, row.expects, on_import=True) for row in _ROWS
)
