from __future__ import annotations

import pytest
import torch

from sonde.batch_size.stats.window_row import read_scale

SUMMED = torch.randn(256, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("kappa", [1.0, 0.125, 65536.0, -2.0])
def test_a_multiple_is_read_exactly(kappa: float) -> None:
    got = read_scale(kappa * SUMMED, SUMMED, tolerance=1e-9)
    assert got.is_sound
    assert got.scale == pytest.approx(kappa, rel=1e-12)
    assert got.residual == pytest.approx(0.0, abs=1e-12)


def test_a_change_other_than_a_scale_is_found() -> None:
    noise = torch.randn(256, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    noisy = read_scale(SUMMED + 0.1 * noise, SUMMED, tolerance=1e-4)
    assert not noisy.is_sound
    assert noisy.residual == pytest.approx(0.1, rel=0.2)
    assert not read_scale((0.5 * SUMMED).clamp(-0.4, 0.4), SUMMED, tolerance=1e-4).is_sound
    rounded = read_scale(SUMMED.bfloat16().double(), SUMMED, tolerance=1e-2)
    assert rounded.is_sound
    assert rounded.residual is not None
    assert 1e-4 < rounded.residual < 4e-3  # half a unit in the last place of 8 bits, at most


def test_parameters_are_judged_one_by_one() -> None:
    """The third has small gradients, which hide in the whole; the fourth has none."""
    summed = torch.cat([SUMMED[:100], 1e-6 * SUMMED[100:200], 0.0 * SUMMED[200:]])
    sizes = {1: 50, 3: 50, 7: 100, 9: 50}  # zeros follow the last
    assert read_scale(summed, summed, tolerance=1e-4, sizes=sizes).is_sound
    final = summed.clone()
    final[100:200] *= 1.01
    assert read_scale(final, summed, tolerance=1e-4).is_sound
    found = read_scale(final, summed, tolerance=1e-4, sizes=sizes)
    assert not found.is_sound
    assert found.residual == pytest.approx(0.01, rel=0.02)
    assert found.changed == {7}
    final[100] = torch.nan
    assert not read_scale(final, summed, tolerance=1e-1, sizes=sizes).is_sound


def test_a_large_changed_gradient_does_not_accuse_the_others() -> None:
    """It moves κ, so that others seem changed: the usual κ of a parameter tells."""
    final = torch.cat([100 * SUMMED[:100].flip(0), SUMMED[100:]])
    summed = torch.cat([100 * SUMMED[:100], SUMMED[100:]])
    found = read_scale(final, summed, tolerance=1e-4, sizes={0: 100, 1: 100, 2: 56})
    assert found.changed == {0}


@pytest.mark.parametrize(("final", "summed"), [(0.0, 1.0), (1.0, 0.0), (0.0, 0.0)])
def test_nothing_to_compare(final: float, summed: float) -> None:
    found = read_scale(final * SUMMED, summed * SUMMED, tolerance=1e-4)
    assert (found.scale, found.residual, found.is_sound) == (None, None, False)


@pytest.mark.parametrize(("scale", "found"), [(1.0, 1.0), (0.5, 0.5), (1 + 2e-7, 1 + 2e-7)])
def test_rounding_in_fp32_is_no_scale(scale: float, found: float) -> None:
    """|G|² may be a thousandth of the squares whose difference it is, so a κ of 1 must be 1."""
    first, second = torch.randn(2, 32, generator=torch.Generator().manual_seed(3))
    summed = first.double() + second.double()
    reading = read_scale((first + second).double() * scale, summed, tolerance=1e-6)
    assert reading.scale is not None
    rounded = float((first + second).double() @ summed / (summed @ summed))
    assert rounded != 1.0
    assert reading.scale == (1.0 if found == 1.0 else pytest.approx(found * rounded, rel=1e-12))
