"""NNI's compressors under ``torch.nn.DataParallel``: the same numbers as on one device.

Three ways in, see the README:

* ``import nni_dataparallel.auto``: stock NNI is repaired in place;
* ``from nni_dataparallel import QAT_Quantizer``: a repaired subclass, stock NNI untouched;
* ``python -m nni_dataparallel run train.py``: no line of the script changes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, List

from .api import is_patched, patch, patch_map, patched, unpatch
from .checkpoints import load_quantizer_state_dict, quantizer_state_dict
from .fixes import QUANTIZERS, UnsupportedReleaseError
from .patching import PatchError, PatchWarning
from .ranks import merged_over
from .rehearsal import rehearse

if TYPE_CHECKING:
    from .doctor import Diagnosis, DoctorError, diagnose

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
    "PatchError",
    "PatchWarning",
    "UnsupportedReleaseError",
    "diagnose",
    "is_patched",
    "load_quantizer_state_dict",
    "merged_over",
    "patch",
    "patch_map",
    "patched",
    "quantizer_state_dict",
    "rehearse",
    "unpatch",
]


def __getattr__(name: str) -> Any:
    if name in ("Diagnosis", "DoctorError", "diagnose"):
        from . import doctor

        return getattr(doctor, name)
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
    return sorted([*__all__, *QUANTIZERS])
