"""TorchEvaluator of NNI 3.0: DataParallel inside the user's functions, or around the model before the compressor is built."""

from __future__ import annotations

import pytest
from conftest import RELEASE

if not RELEASE.startswith("3.0") or "rc" in RELEASE:
    pytest.skip("NNI 3.0 only", allow_module_level=True)

from evaluating import FUSED, QUANTIZER_SUBJECTS, SUBJECTS, Subject, differences, reference, run, script_for, stock

import nni_dataparallel
from nni_dataparallel import patch, patched

IDS = [f"{subject.name}{'-fused' if subject.config is FUSED else ''}" for subject in SUBJECTS]
each_subject = pytest.mark.parametrize("subject", SUBJECTS, ids=IDS)
each_quantizer = pytest.mark.parametrize("subject", QUANTIZER_SUBJECTS, ids=IDS[: len(QUANTIZER_SUBJECTS)])
each_order = pytest.mark.parametrize("order", ["inside", "before"])


@each_subject
@each_order
@pytest.mark.parametrize("count", [2, 3])
def test_data_parallel_equals_one_device(subject: Subject, order: str, count: int) -> None:
    """Losses, metrics, the whole state, masks or calibration config; names have no prefix wherever the model was wrapped."""
    expected = reference(subject)
    script = script_for(order, count)
    with patched():
        compressor = run(subject, stock(subject), script)
    assert compressor.bound_model is script.net
    assert script.seen
    assert all(model is script.model for model in script.seen)
    assert differences(expected, script.left) == []


@each_quantizer
@each_order
@pytest.mark.parametrize("below", ["stock", "patched"])
def test_a_subclass_equals_one_device(subject: Subject, order: str, below: str) -> None:
    """The same for a class of ours: NNI's evaluator is stock, or patched as well."""
    expected = reference(subject)
    script = script_for(order, 3)
    if below == "patched":
        patch()
    compressor = run(subject, getattr(nni_dataparallel, subject.name), script)
    assert compressor.bound_model is script.net
    assert all(model is script.model for model in script.seen)
    assert differences(expected, script.left) == []


@each_subject
@each_order
@pytest.mark.xfail(reason="the faults that this package repairs")
def test_stock_data_parallel_equals_one_device(subject: Subject, order: str) -> None:
    """Stock NNI leaves something else, or raises what CUDA would: replicas run the original's layers."""
    expected = reference(subject)
    script = script_for(order, 2)
    run(subject, stock(subject), script)
    assert differences(expected, script.left) == []
