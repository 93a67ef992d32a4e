"""The QAT cases: which layers, targets, schemes and dtypes each NNI 2.x release can quantise."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any, Dict, List

from packaging.specifiers import SpecifierSet

LEGACY, MODERN, FOLDING = ">=2.0,<2.5", ">=2.5,<3.0rc1", ">=2.4,<3.0rc1"


@dataclass(frozen=True)
class Case:
    """One configuration of ``QAT_Quantizer`` to train with."""

    name: str
    releases: str
    config: List[Dict[str, Any]] = field(hash=False)
    fold: bool = False
    start: int = 0

    def fits(self, release: str) -> bool:
        """Whether the release offers what the case asks for."""
        return SpecifierSet(self.releases).contains(release, prereleases=True)


def _layers(targets: List[str], bits: Any = 8, **more: Any) -> Dict[str, Any]:
    return {"quant_types": targets, "quant_bits": bits, "op_types": ["Conv2d", "Linear"], **more}


def _relu(bits: Any = 8, **more: Any) -> Dict[str, Any]:
    return {"quant_types": ["output"], "quant_bits": bits, "op_types": ["ReLU"], **more}


def _everything(**more: Any) -> List[Dict[str, Any]]:
    # Not the input of the linear layer: behind a ReLU some of its columns are all zero, for which stock
    # NNI divides by zero (there is a test of its own for that).
    conv = {**_layers(["weight", "input", "output"], **more), "op_types": ["Conv2d"]}
    return [conv, {**_layers(["weight", "output"], **more), "op_types": ["Linear"]}, _relu()]


SCHEMES = ("per_tensor_affine", "per_tensor_symmetric", "per_channel_affine", "per_channel_symmetric")
DTYPES = ("uint", "int")
ALL = ["weight", "input", "output"]

CASES: List[Case] = [
    Case("weight", LEGACY, [_layers(["weight"])]),
    Case("output", LEGACY, [_relu(), _layers(["output"])]),
    Case("weight and output", LEGACY, [_layers(["weight", "output"]), _relu()]),
    Case("four bits", LEGACY, [_layers(["weight", "output"], {"weight": 4, "output": 6})]),
    Case(
        "start step",
        LEGACY,
        [_layers(["weight", "output"], quant_start_step=3), _relu(quant_start_step=3)],
        start=3,
    ),
    # Without a warm-up the legacy range of an output grows from 0 and clamps nearly everything.
    Case("warm output", LEGACY, [_relu(quant_start_step=2), _layers(["output"], quant_start_step=2)], start=2),
    Case("warm four bits", LEGACY, [_layers(["weight", "output"], 4, quant_start_step=2)], start=2),
    Case("folding", ">=2.4,<2.5", [_layers(["weight"]), _relu()], fold=True),
    Case(
        "warm folding",
        ">=2.4,<2.5",
        [_layers(["weight"], quant_start_step=2), _relu(quant_start_step=2)],
        fold=True,
        start=2,
    ),
    Case("weight", MODERN, [_layers(["weight"])]),
    Case("input", MODERN, [_layers(["input"])]),
    Case("output", MODERN, [_layers(["output"]), _relu()]),
    *(
        Case(f"{scheme} {dtype}", MODERN, _everything(quant_scheme=scheme, quant_dtype=dtype))
        for scheme, dtype in itertools.product(SCHEMES, DTYPES)
    ),
    Case(
        "mixed",
        MODERN,
        [
            _layers(
                ALL,
                {"weight": 4, "input": 6, "output": 8},
                quant_scheme={"weight": "per_channel_symmetric", "input": "per_tensor_affine", "output": "per_tensor_symmetric"},
                quant_dtype={"weight": "int", "input": "uint", "output": "int"},
            )
        ],
    ),
    Case("start step", MODERN, [_layers(ALL, quant_start_step=3), _relu(quant_start_step=3)], start=3),
    Case("folding", MODERN, [_layers(ALL), _relu()], fold=True),
    Case("warm folding", MODERN, [_layers(ALL, quant_start_step=2), _relu(quant_start_step=2)], fold=True, start=2),
]


def is_modern(release: str) -> bool:
    """Whether QAT_Quantizer is that of 2.5 and later, which needs a ``dummy_input``."""
    return SpecifierSet(MODERN).contains(release, prereleases=True)


def cases_for(release: str) -> List[Case]:
    """The cases that an NNI release offers."""
    return [case for case in CASES if case.fits(release)]
