from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sonde.batch_size.stats.noise_scale import Pieces, WindowEstimate, effective_units, noise_scale
from tests.oracles import window_by_hand


def solved(
    gradients: list[torch.Tensor], weights: list[float], units: list[float], sq_norm_big: float, *, scale: float
) -> WindowEstimate:
    pieces = Pieces(
        weight=sum(weights),
        weight_over_units=sum(w / n for w, n in zip(weights, units, strict=True)),
        sq_weight_over_units=sum(w * w / n for w, n in zip(weights, units, strict=True)),
        n_pieces=len(gradients),
    )
    small = sum(float(h @ h) / w for h, w in zip(gradients, weights, strict=True))
    return WindowEstimate(*pieces.solve(small, sq_norm_big, scale=scale))


def test_by_hand() -> None:
    # Two pieces of 4 units: |g₁|² = 16, |g₂|² = 4, S = 10; F their mean, |F|² = 9 (parallel). u = 1/4, v = 1/8.
    got = Pieces(2.0, 0.5, 0.5, 2).solve(20.0, 9.0, scale=0.5)
    assert got == ((10 - 9) * 8, (9 / 4 - 10 / 8) * 8)


def test_equal_pieces_are_mccandlish() -> None:
    # Appendix A.1: |G|² = (B_big|G_big|² − B_small|G_small|²)/(B_big − B_small), and S likewise.
    b, k, small, big = 8, 4, 5.0, 2.0
    got = noise_scale(small, big, n_small=b, n_big=b * k)
    assert got.grad_sq == pytest.approx((b * k * big - b * small) / (b * k - b))
    assert got.trace_cov == pytest.approx((small - big) / (1 / b - 1 / (b * k)))
    assert WindowEstimate(*Pieces(float(k), k / b, k / b, k).solve(k * small, big, scale=1 / k)) == got


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.integers(2, 7), st.floats(1e-3, 1e3), st.floats(1e-3, 1e3))
def test_definitions_term_by_term(seed: int, n_pieces: int, kappa: float, weight_unit: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    gradients = list(torch.randn(n_pieces, 11, generator=generator, dtype=torch.float64))
    weights = (torch.rand(n_pieces, generator=generator, dtype=torch.float64) + 0.1).mul(weight_unit).tolist()
    units = torch.randint(1, 9, (n_pieces,), generator=generator).double().tolist()
    final = kappa * torch.stack(gradients).sum(0)
    trace_cov, grad_sq = window_by_hand(gradients, weights, units, final)
    got = solved(gradients, weights, units, float(final @ final), scale=kappa)
    scale = abs(trace_cov) + abs(grad_sq)  # the smaller of the two is a difference of larger terms
    assert got.trace_cov == pytest.approx(trace_cov, abs=1e-10 * scale)
    assert got.grad_sq == pytest.approx(grad_sq, abs=1e-10 * scale)
    assert got.trace_cov >= -1e-10 * scale


def test_unit_of_weights_and_scale_of_loss_do_not_matter() -> None:
    gradients = list(torch.randn(5, 30, dtype=torch.float64))
    weights, units = [1.0, 2.0, 1.0, 3.0, 0.5], [4.0, 8.0, 4.0, 12.0, 2.0]
    final = torch.stack(gradients).sum(0)
    base = solved(gradients, weights, units, float(final @ final), scale=1.0)
    heavier = solved(gradients, [7 * w for w in weights], units, float(final @ final), scale=1.0)
    divided = [h / 5 for h in gradients]
    averaged = solved(divided, weights, units, float(final @ final), scale=5.0)
    for other in (heavier, averaged):
        assert other.trace_cov == pytest.approx(base.trace_cov, rel=1e-12)
        assert other.grad_sq == pytest.approx(base.grad_sq, rel=1e-12)


@pytest.mark.parametrize("n_pieces", [0, 1])
def test_one_piece_is_refused(n_pieces: int) -> None:
    with pytest.raises(ValueError, match="use 2 micro-batches or 2 data-parallel ranks"):
        Pieces(1.0, 0.1, 0.1, n_pieces).solve(1.0, 1.0)


@pytest.mark.parametrize(("small", "big"), [(0, 4), (4, 4), (8, 4), (math.nan, 4)])
def test_noise_scale_refuses_batch_sizes(small: float, big: float) -> None:
    with pytest.raises(ValueError, match="need 0 < n_small < n_big"):
        noise_scale(2.0, 1.0, n_small=small, n_big=big)


def test_effective_units() -> None:
    assert effective_units([1.0] * 7) == 7
    assert effective_units([3.0, 1.0]) == pytest.approx(16 / 10)
    assert effective_units([1.0, 0.0]) == 1
    assert effective_units([1e200, 1e200]) == pytest.approx(2)
    assert effective_units([1e-200, 1e-200]) == pytest.approx(2)


@pytest.mark.parametrize(
    "weights", [[], [0.0, 0.0], [1.0, -1.0], [1.0, math.nan], [math.inf], 5, [[1, 2], [3, 4]], ["a"]]
)
def test_effective_units_refuses(weights: Any) -> None:
    with pytest.raises(ValueError, match="unit_weights"):
        effective_units(weights)
