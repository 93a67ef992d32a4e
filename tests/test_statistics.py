"""Ranges, scales and zero points against torch's own fake quantisation and plain arithmetic."""

from __future__ import annotations

import math
from typing import Tuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nni_dataparallel.statistics import batch_range, fake_quantize, gradient_within, moving_average, qparams

# torch multiplies by 1 / scale, which overflows for ranges near the smallest floats
finite = st.floats(-1e4, 1e4, width=32).map(lambda v: 0.0 if abs(v) < 1e-20 else v)


@given(st.lists(finite, min_size=1, max_size=20), st.integers(1, 5))
def test_the_range_of_a_batch_is_the_range_of_its_shards(values: list, pieces: int) -> None:
    """min and max over shards, exactly."""
    x = torch.tensor(values)
    low, high = batch_range(x)
    ends = [batch_range(part) for part in x.chunk(pieces)]
    assert low == min(a for a, _ in ends)
    assert high == max(b for _, b in ends)


def test_per_channel_range_keeps_the_channel() -> None:
    """All other dimensions have size 1."""
    x = torch.arange(24.0).reshape(2, 3, 4)
    low, high = batch_range(x, (0, 2))
    assert low.flatten().tolist() == [0, 4, 8]
    assert high.shape == (1, 3, 1)


@given(finite, finite, st.integers(2, 8))
def test_affine_fake_quantisation_is_torchs(a: float, b: float, bits: int) -> None:
    """torch.fake_quantize_per_tensor_affine with the same parameters gives the same grid."""
    low, high = torch.tensor(sorted((a, b)))
    qmax = 2**bits - 1
    scale, zero_point = qparams(low, high, 0, qmax, float(qmax))
    assert scale > 0
    assert 0 <= zero_point <= qmax
    x = torch.linspace(float(low), float(high), 50)
    expected = torch.fake_quantize_per_tensor_affine(x, float(scale), int(zero_point), 0, qmax)
    # torch multiplies by 1 / scale: where a value lies between two levels it may round to the other one
    assert ((fake_quantize(x, scale, zero_point, 0, qmax) - expected).abs() <= scale * 1.001).all()
    assert fake_quantize(torch.zeros(1), scale, zero_point, 0, qmax).item() == 0


def test_symmetric_parameters() -> None:
    """The larger absolute value decides; the zero point is the given middle."""
    scale, zero_point = qparams(torch.tensor([-1.0]), torch.tensor([3.0]), -127, 127, 254.0, True)
    assert scale.item() == pytest.approx(3 / 127)
    assert zero_point.tolist() == [0]
    assert qparams(torch.tensor([-1.0]), torch.tensor([3.0]), 0, 255, 255.0, True, 127)[1].tolist() == [127]


def test_a_zero_range_has_a_usable_scale() -> None:
    """Neither 0 nor NaN: zeros stay zeros."""
    for symmetric in (False, True):
        scale, zero_point = qparams(torch.zeros(2), torch.zeros(2), 0, 255, 255.0, symmetric)
        assert (scale > 0).all()
        assert fake_quantize(torch.zeros(2), scale, zero_point, 0, 255).tolist() == [0, 0]


def test_moving_average_is_fresh() -> None:
    """The old average is not modified: backward may have saved it."""
    old = torch.ones(1)
    assert moving_average(old, torch.tensor([2.0]), 0.75).tolist() == [1.25]
    assert old.tolist() == [1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("ends", [(-128, 127), (0, 255), (-127, 0), (0, 0), (-8, 7), (1, 64), (-64, -1), (-65536, 65535)])
def test_the_gradient_of_a_clamp_is_cut_exactly_at_its_ends(dtype: torch.dtype, ends: Tuple[int, int]) -> None:
    """The numbers at an end and beside it, infinities, NaN and random ones: as comparing them one by one."""
    qmin, qmax = ends
    if max(ends) > torch.finfo(dtype).max or int(torch.tensor(qmax, dtype=dtype)) != qmax:
        pytest.skip("levels of this dtype are not whole numbers up to there")
    around = torch.tensor([float(qmin), float(qmax)], dtype=torch.float64).to(dtype)
    info = torch.finfo(dtype)
    beside = [around * (1 + k * info.eps / 2) + k * info.tiny for k in (-4, -3, -2, -1, 0, 1, 2, 3, 4)]
    odd = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0], dtype=dtype)
    level = torch.cat([*beside, odd, (torch.randn(1000, dtype=torch.float64) * (qmax - qmin + 1)).to(dtype)])
    grad = torch.randn(len(level), dtype=torch.float64).to(dtype)
    expected = torch.stack([g if not (v < qmin or v > qmax) else g.new_zeros(()) for g, v in zip(grad, level)])
    for numbers in (ends, tuple(torch.tensor([float(end)]) for end in ends)):
        assert torch.equal(gradient_within(grad, level, *numbers), expected)
    wide = grad.double() if dtype != torch.float64 else grad.float()
    assert torch.equal(gradient_within(wide, level, *ends), torch.where(expected == 0, torch.zeros_like(wide), wide))
