"""The cases: which quantizers, layers, targets, schemes and dtypes each NNI release can quantise."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any, Dict, List

from packaging.specifiers import SpecifierSet

FIRST, LEGACY, MODERN = "<2.0", ">=2.0,<2.5", ">=2.5,<=3.0rc1"
ALL_RELEASES, LSQ, OBSERVER = "<=3.0rc1", ">=2.3,<=3.0rc1", ">=2.4,<=3.0rc1"


@dataclass(frozen=True)
class Case:
    """One configuration of a quantizer to train with."""

    name: str
    releases: str
    config: List[Dict[str, Any]] = field(hash=False)
    fold: bool = False
    start: int = 0
    quantizer: str = "QAT_Quantizer"
    arguments: Dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def id(self) -> str:
        """Name in the test report; the quantizer first."""
        return f"{self.quantizer}: {self.name}"

    @property
    def trains(self) -> bool:
        """ObserverQuantizer and PtqQuantizer only watch a network in evaluation mode."""
        return self.quantizer not in ("ObserverQuantizer", "PtqQuantizer")

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


def _of(quantizer: str, name: str, releases: str, *config: Dict[str, Any], fold: bool = False) -> Case:
    return Case(name, releases, list(config), fold, quantizer=quantizer)


OTHERS: List[Case] = [
    _of("LsqQuantizer", "all", LSQ, _layers(ALL)),
    _of("LsqQuantizer", "weight", LSQ, _layers(["weight"])),
    _of("LsqQuantizer", "output", LSQ, _relu(), _layers(["weight", "output"])),
    _of("LsqQuantizer", "mixed", LSQ, _layers(ALL, {"weight": 4, "input": 6, "output": 8})),
    _of("LsqQuantizer", "folding", MODERN, _layers(ALL), fold=True),
    _of("DoReFaQuantizer", "weight", ALL_RELEASES, _layers(["weight"])),
    _of("DoReFaQuantizer", "three bits", ALL_RELEASES, _layers(["weight"], 3)),
    _of("BNNQuantizer", "weight", ALL_RELEASES, _layers(["weight"], 1)),
    _of("BNNQuantizer", "weight and output", ALL_RELEASES,
        {**_layers(["weight", "output"], 1), "op_types": ["Conv2d"]}, {**_layers(["weight"], 1), "op_types": ["Linear"]}),
    _of("NaiveQuantizer", "weight", ALL_RELEASES, _layers(["weight"])),
    _of("ObserverQuantizer", "all", OBSERVER, _layers(ALL)),
    _of("ObserverQuantizer", "weight", OBSERVER, _layers(["weight"])),
    _of("ObserverQuantizer", "output", OBSERVER, _layers(["output"]), _relu()),
]  # fmt: skip

CASES: List[Case] = [
    Case("weight", FIRST, [_layers(["weight"])]),
    Case("output", FIRST, [_relu(), _layers(["output"])]),
    Case("weight and output", FIRST, [_layers(["weight", "output"]), _relu()]),
    Case("four bits", FIRST, [_layers(["weight", "output"], {"weight": 4, "output": 6})]),
    Case("start step", FIRST, [_layers(["weight", "output"], quant_start_step=3), _relu(quant_start_step=3)], start=3),
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
    *OTHERS,
]


NEW = ">=3.0"
INPUT, WEIGHT, OUTPUT, BIAS = "_input_", "weight", "_output_", "bias"
EVERY = [INPUT, WEIGHT, OUTPUT]


def _new(targets: List[str], dtype: str = "int8", scheme: str = "affine", **more: Any) -> Dict[str, Any]:
    config = {"op_types": ["Conv2d", "Linear"], "target_names": targets, "quant_dtype": dtype, "quant_scheme": scheme}
    return {**config, "granularity": "default", **more}


def _relus(dtype: str = "int8", scheme: str = "affine", **more: Any) -> Dict[str, Any]:
    return {**_new([OUTPUT], dtype, scheme, **more), "op_types": ["ReLU"]}


def _finely(dtype: str, scheme: str, weight: Any, output: Any = "per_channel", linear: Any = None) -> List[Dict[str, Any]]:
    """Weights by one granularity, activations by another; nobody declares the channels of a ReLU."""
    settings = {WEIGHT: weight, INPUT: "per_channel", OUTPUT: output}
    return [
        {**_new(EVERY, dtype, scheme), "op_types": ["Conv2d"],
         "target_settings": {
             target: {"quant_dtype": dtype, "quant_scheme": scheme, "granularity": granularity}
             for target, granularity in settings.items()
         }},
        {**_new([WEIGHT], dtype, scheme, granularity=linear or weight), "op_types": ["Linear"]},
        _relus(dtype, scheme, granularity=output),
    ]  # fmt: skip


def _fused(dtype: str = "int8", scheme: str = "affine") -> List[Dict[str, Any]]:
    names = [("conv1", "bn1", "relu1"), ("conv2", "bn2", "relu2")]
    convolutions = {**_new(EVERY, dtype, scheme, fuse_names=names), "op_names": ["conv1", "conv2"]}
    del convolutions["op_types"]
    return [convolutions, {**_new(EVERY, dtype, scheme), "op_types": ["Linear"]}]


def _new_case(quantizer: str, name: str, *config: Dict[str, Any], fold: bool = False, start: int = 0, **arguments: Any) -> Case:
    if start:
        arguments["quant_start_step"] = start
    return Case(name, NEW, list(config), fold, start + 1 if start else 0, quantizer, arguments)


_QAT, _LSQ, _PLUS, _PTQ, _DOREFA, _BNN = (f"{name}Quantizer" for name in ("QAT", "Lsq", "LsqPlus", "Ptq", "DoReFa", "BNN"))
KERNELS = ([2, 1, 3, 3], [-1, 2, -1, -1], [2, 4])  # of a convolution's weight, its output, a linear layer's weight

CASES += [
    _new_case(_QAT, "weight", _new([WEIGHT])),
    _new_case(_QAT, "input", _new([INPUT])),
    _new_case(_QAT, "output", _new([OUTPUT]), _relus()),
    *(
        _new_case(_QAT, f"{scheme} {dtype}", _new([*EVERY, BIAS], dtype, scheme), _relus(dtype, scheme))
        for scheme, dtype in itertools.product(("affine", "symmetric"), ("int8", "uint8"))
    ),
    _new_case(_QAT, "four bits", _new([WEIGHT, OUTPUT], "int4"), _relus("uint4")),
    _new_case(_QAT, "per channel, out", *_finely("int8", "affine", "out_channel")),
    _new_case(_QAT, "per channel, in", *_finely("int8", "symmetric", "in_channel")),
    _new_case(_QAT, "kernel", *_finely("int8", "affine", *KERNELS)),
    _new_case(_QAT, "start step", _new([*EVERY, BIAS]), _relus(), start=2),
    _new_case(_QAT, "fusion", *_fused(), fold=True),
    _new_case(_QAT, "warm fusion", *_fused(scheme="symmetric"), fold=True, start=1),
    _new_case(_LSQ, "all", _new(EVERY, "int8", "symmetric"), _relus("int8", "symmetric")),
    _new_case(_LSQ, "weight", _new([WEIGHT, BIAS], "int8", "symmetric")),
    _new_case(_LSQ, "per channel, out", *_finely("int8", "symmetric", "out_channel")),
    _new_case(_LSQ, "kernel", *_finely("int4", "symmetric", *KERNELS)),
    _new_case(_LSQ, "fusion", *_fused(scheme="symmetric"), fold=True),
    _new_case(_PLUS, "all", _new(EVERY), _relus()),
    _new_case(_PLUS, "unsigned", _new([*EVERY, BIAS], "uint8"), _relus("uint8")),
    _new_case(_PLUS, "per channel, in", *_finely("int8", "affine", "in_channel")),
    _new_case(_PLUS, "fusion", *_fused(), fold=True),
    _new_case(_DOREFA, "weight", _new([WEIGHT], granularity="default")),
    _new_case(_DOREFA, "input, weight, output", _new([INPUT, WEIGHT, BIAS], "uint4"), _relus("uint4")),
    _new_case(_BNN, "weight", _new([WEIGHT], "int8", "symmetric")),
    _new_case(_BNN, "weight and output", {**_new([WEIGHT, OUTPUT], "int8", "symmetric"), "op_types": ["Conv2d"]},
              {**_new([WEIGHT], "int8", "symmetric"), "op_types": ["Linear"]}),
    _new_case(_PTQ, "all", _new([*EVERY, BIAS]), _relus()),
    _new_case(_PTQ, "per channel, out", *_finely("uint8", "symmetric", "out_channel")),
    _new_case(_PTQ, "fusion", *_fused(), fold=True),
    _new_case(_PTQ, "bias correction", {**_new(EVERY), "op_types": ["Linear"]}, is_bias_correction=True),
]  # fmt: skip


def is_new(release: str) -> bool:
    """Whether this is the newer line, whose quantizers are driven by an evaluator."""
    return SpecifierSet(NEW).contains(release, prereleases=True)


def is_first(release: str) -> bool:
    """Whether this is the 1.x line: no warm-up of ranges, no buffers for the number of steps."""
    return SpecifierSet(FIRST).contains(release, prereleases=True)


def is_modern(release: str) -> bool:
    """Whether QAT_Quantizer is that of 2.5 and later, which needs a ``dummy_input``."""
    return SpecifierSet(MODERN).contains(release, prereleases=True)


def cases_for(release: str, quantizer: str = "") -> List[Case]:
    """The cases that an NNI release offers, of one quantizer or of all."""
    return [case for case in CASES if case.fits(release) and quantizer in ("", case.quantizer)]
