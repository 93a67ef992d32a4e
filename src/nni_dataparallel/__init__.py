"""NNI's compressors under ``torch.nn.DataParallel``: the same numbers as on one device.

Ways in, see the README:

* ``import nni_dataparallel.auto``: stock NNI is repaired in place;
* ``from nni_dataparallel import QAT_Quantizer``: a repaired subclass, stock NNI untouched;
* ``python -m nni_dataparallel run train.py``, or ``NNI_DATAPARALLEL=1`` in the environment: no line of the script changes.

The names below are loaded when they are asked for: interpreters start with this file, long before torch is wanted.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, List

    from .api import is_patched, patch, patch_map, patched, unpatch
    from .checkpoints import load_checkpoint, load_quantizer_state_dict, quantizer_state_dict, save_checkpoint
    from .ddp import merged_over
    from .doctor import Diagnosis, DoctorError, diagnose
    from .notices import NNIDataParallelRuntimeWarning, NNIDataParallelWarning, PatchError, PatchWarning
    from .overview import status
    from .rehearsal import rehearse
    from .releases import UnsupportedReleaseError

    BNNQuantizer: Any
    DoReFaQuantizer: Any
    LsqPlusQuantizer: Any
    LsqQuantizer: Any
    NaiveQuantizer: Any
    ObserverQuantizer: Any
    PtqQuantizer: Any
    QAT_Quantizer: Any
    QATQuantizer: Any

__version__ = "0.1.0"

# Without the quantizers, which depend on the installed NNI: `import *` would fail for those it does not ship.
__all__ = [
    "Diagnosis",
    "DoctorError",
    "NNIDataParallelRuntimeWarning",
    "NNIDataParallelWarning",
    "PatchError",
    "PatchWarning",
    "UnsupportedReleaseError",
    "diagnose",
    "is_patched",
    "load_checkpoint",
    "load_quantizer_state_dict",
    "merged_over",
    "patch",
    "patch_map",
    "patched",
    "quantizer_state_dict",
    "rehearse",
    "save_checkpoint",
    "status",
    "unpatch",
]

_HOMES = {
    "api": ("is_patched", "patch", "patch_map", "patched", "unpatch"),
    "checkpoints": ("load_checkpoint", "load_quantizer_state_dict", "quantizer_state_dict", "save_checkpoint"),
    "doctor": ("Diagnosis", "DoctorError", "diagnose"),
    "notices": ("NNIDataParallelRuntimeWarning", "NNIDataParallelWarning", "PatchError", "PatchWarning"),
    "overview": ("status",),
    "ddp": ("merged_over",),
    "rehearsal": ("rehearse",),
    "releases": ("UnsupportedReleaseError",),
}
"""Module -> the public names in it."""


def __getattr__(name: str) -> Any:
    from importlib import import_module

    for module, names in _HOMES.items():
        if name in names:
            value = getattr(import_module(f"{__name__}.{module}"), name)
            globals()[name] = value
            return value
    if name.endswith("Quantizer"):  # asked before importing: what is no name of ours must not cost torch
        from .fixes import QUANTIZERS

        if name in QUANTIZERS:
            from .subclasses import quantizer

            return quantizer(name)
    if name.endswith(("Pruner", "Distiller")):
        # ImportError, since `from ... import` replaces the text of an AttributeError.
        raise ImportError(
            f"nni_dataparallel has no {name}: only quantizers exist as subclasses. Import {name} from NNI, and "
            "nni_dataparallel.auto beside it."
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> List[str]:
    from .fixes import QUANTIZERS

    return sorted([*__all__, *QUANTIZERS])
