from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sonde.batch_size.stats.noise_scale import Pieces, RatioAverage, WindowEstimate, effective_units, noise_scale
from sonde.batch_size.stats.window_row import read_scale
from sonde.stats.intervals import fieller_interval
from tests.batch_size.stats.windows import gaussian_windows
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


# κ, and what a witness shows besides.


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


# Averages of two numbers that fade.


def running_over(windows: Tensor, horizon: float = math.inf) -> RatioAverage:
    running = RatioAverage(horizon)
    for trace_cov, grad_sq in windows.tolist():
        running.update(trace_cov, grad_sq)
    return running


@pytest.mark.parametrize("horizon", [2.5, 30.0, math.inf])
def test_running_averages_are_the_weighted_sums(horizon: float) -> None:
    windows = gaussian_windows([96.0] * 77, n_runs=1, seed=0)[:, 0]
    running = running_over(windows, horizon)
    weights = (1 - 1 / horizon) ** torch.arange(76, -1, -1, dtype=torch.float64)
    weights /= weights.sum()
    mean = weights @ windows
    deviations = windows - mean
    cov = (weights[:, None] * deviations).T @ deviations / (1 - weights.square().sum()) * weights.square().sum()
    assert (running.x, running.y) == pytest.approx(mean.tolist(), rel=1e-9)
    assert running.effective_windows == pytest.approx(1 / float(weights.square().sum()), rel=1e-12)
    sq_error = float(weights @ deviations[:, 0].square()) * float(weights.square().sum())
    assert running.error_of_x == pytest.approx(math.sqrt(sq_error), rel=1e-9)
    got = running.interval()
    expected = fieller_interval(
        *mean.tolist(),
        var_numerator=float(cov[0, 0]),
        var_denominator=float(cov[1, 1]),
        covariance=float(cov[0, 1]),
        n_samples=running.effective_windows,
    )
    assert got.status == expected.status
    assert (got.low, got.high) == pytest.approx((expected.low, expected.high), rel=1e-9)


def test_averages_are_not_clamped() -> None:
    """Clamping |G|² at 0 before averaging turns a true B_simple of 4096 into less than half of it at B = 64."""
    windows = gaussian_windows([4096.0] * 20_000, n_runs=1, seed=3, batch=64.0, n_pieces=8, rank=40)[:, 0]
    assert float((windows[:, 1] < 0).double().mean()) > 0.4
    running = running_over(windows)
    # |G|² is known to 6 % (one standard error) from this many windows.
    assert running.x / running.y == pytest.approx(4096, rel=0.25)
    assert float(windows[:, 0].mean() / windows[:, 1].clamp(min=0).mean()) < 1500


@pytest.mark.parametrize("ratio", [1, 4, 16, 64])
@pytest.mark.parametrize("n", [50, 300])
def test_interval_coverage(ratio: int, n: int) -> None:
    """The claim is 93–97 % at any noise scale; 600 runs tell it to 2.2 %, at 2.5 standard errors."""
    runs = gaussian_windows([64.0 * ratio] * n, n_runs=600, seed=n, batch=64.0, n_pieces=8, rank=40).unbind(1)
    intervals = [running_over(run).interval() for run in runs]
    # Unresolved is the whole line: it holds the truth, and says nothing.
    held = sum(i.low is None or i.high is None or i.low <= 64.0 * ratio <= i.high for i in intervals)
    assert 0.908 <= held / 600 <= 0.992


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_window_is_refused_and_poisons_nothing(bad: float) -> None:
    running = running_over(torch.tensor([[2.0, 1.0], [3.0, 1.5]]), 100.0)
    before = running.state_dict()
    for window in ((bad, 1.0), (1.0, bad)):
        with pytest.raises(ValueError, match="must be finite"):
            running.update(*window)
    assert running.state_dict() == before


@pytest.mark.parametrize("horizon", [1.0, 0.0, -5.0, math.nan])
def test_horizon_must_exceed_one_window(horizon: float) -> None:
    with pytest.raises(ValueError, match="horizon must be more than 1"):
        RatioAverage(horizon)
