from __future__ import annotations

import pytest
import torch

from sonde.batch_size.stats.scale_witness import read_scale

SUMMED = torch.randn(256, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("kappa", [1.0, 0.125, 65536.0, -2.0])
def test_a_multiple_is_read_exactly(kappa: float) -> None:
    got = read_scale(kappa * SUMMED, SUMMED, tolerance=1e-9)
    assert got.kind == "scaled"
    assert got.scale == pytest.approx(kappa, rel=1e-12)
    assert got.residual == pytest.approx(0.0, abs=1e-12)


def test_a_change_other_than_a_scale_has_its_kind() -> None:
    noise = torch.randn(256, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    noisy = read_scale(SUMMED + 0.1 * noise, SUMMED, tolerance=1e-4)
    assert noisy.kind == "changed"
    assert noisy.residual == pytest.approx(0.1, rel=0.2)
    clipped = read_scale((0.5 * SUMMED).clamp(-0.4, 0.4), SUMMED, tolerance=1e-4)
    assert clipped.kind == "clipped by value"
    # Clipped by value, then by norm: still recognised, as the rest is one multiple.
    assert read_scale(0.3 * SUMMED.clamp(-1, 1), SUMMED, tolerance=1e-4).kind == "clipped by value"
    rounded = read_scale(SUMMED.bfloat16().double(), SUMMED, tolerance=1e-2)
    assert rounded.kind == "scaled"
    assert rounded.residual is not None
    assert 1e-4 < rounded.residual < 4e-3  # half a unit in the last place of 8 bits, at most


def test_nothing_to_compare() -> None:
    zero = torch.zeros_like(SUMMED)
    assert read_scale(zero, SUMMED, tolerance=1e-4).kind == "zero"
    assert read_scale(SUMMED, zero, tolerance=1e-4).kind == "zero"
    assert read_scale(zero, zero, tolerance=1e-4).scale is None


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
