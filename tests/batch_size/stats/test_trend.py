"""The present noise scale: its confidence set against a search by brute force, and its limits."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import scipy.optimize
import scipy.stats
import torch
from torch import Tensor

from sonde.batch_size.stats.trend import TrendFit, fit_trends
from sonde.batch_size.stats.window_weights import effective_windows, most_effective_windows

F64 = torch.float64


def series(
    n: int, *, ratio: float = 50.0, drift: float = 0.0, noise_x: float = 0.3, noise_y: float = 0.5, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Windows whose present ratio is `ratio`, with independent noise relative to the means; ages run down to 0."""
    generator = torch.Generator().manual_seed(seed)
    ages = torch.arange(n - 1, -1, -1, dtype=F64)
    y = 1.0 + noise_y * torch.randn(n, generator=generator, dtype=F64)
    x = ratio * torch.exp(-drift * ages) * (1.0 + noise_x * torch.randn(n, generator=generator, dtype=F64))
    return x[None], y[None], ages


def ends(fit: TrendFit) -> tuple[float | None, float | None]:
    return fit.interval.low, fit.interval.high


def smallest_statistic(x: Tensor, y: Tensor, ages: Tensor, horizon: float) -> Callable[[float], float]:
    """mᵀV⁻¹m at a ratio, minimised over shapes and drifts by a naive search."""
    horizon = min(horizon, 0.8 * (float(ages.max()) + 1))
    k, tau = torch.exp(-ages / horizon), -ages / horizon
    k = k / k.sum()
    n = float(1 / (k * k).sum())

    def statistic(ratio: float, drift: float, shape: float) -> float:
        residual = x[0] - ratio * torch.exp(drift * (tau - shape * tau**2)) * y[0]
        moments = torch.stack([k * residual, k * tau * residual])
        m = moments.sum(1)
        about_zero = float(m @ torch.linalg.solve(moments @ moments.T, m))
        return about_zero / (1 - about_zero / n) if about_zero < n else math.inf  # about the mean of the residuals

    def smallest(ratio: float) -> float:
        best = math.inf
        for shape in (0.0, 0.5):
            drifts = torch.linspace(-1.5, 3.0, 91).tolist()
            values = [statistic(ratio, drift, shape) for drift in drifts]
            start = drifts[min(range(91), key=values.__getitem__)]
            bounds = (max(start - 0.05, -1.5), min(start + 0.05, 3.0))
            found = scipy.optimize.minimize_scalar(
                lambda d, s=shape: statistic(ratio, d, s), bounds=bounds, method="bounded"
            )
            best = min(best, found.fun, *values)
        return best

    smallest.critical = float(scipy.stats.t.ppf(0.975, n - 2) ** 2 * n / (n - 2))  # type: ignore[attr-defined]
    return smallest


@pytest.mark.parametrize(("drift", "n", "horizon"), [(0.0, 40, 50.0), (0.03, 60, 20.0), (-0.02, 30, math.inf)])
def test_the_interval_is_the_set_of_ratios_that_the_moments_accept(drift: float, n: int, horizon: float) -> None:
    x, y, ages = series(n, drift=drift, seed=3)
    (fit,) = fit_trends(x, y, ages, horizon)
    assert fit.interval.status == "resolved"
    assert fit.interval.low is not None
    assert fit.interval.high is not None
    smallest = smallest_statistic(x, y, ages, horizon)
    critical = smallest.critical  # type: ignore[attr-defined]
    for inside, outside in (
        (fit.interval.low * 1.01, fit.interval.low * 0.97),
        (fit.interval.high * 0.99, fit.interval.high * 1.03),
    ):
        assert smallest(inside) <= critical * 1.02
        assert smallest(outside) > critical * 0.98
    assert fit.ratio is not None
    assert fit.interval.low < fit.ratio < fit.interval.high


def test_exact_windows_give_the_present_ratio_and_drift() -> None:
    x, y, ages = series(80, ratio=70.0, drift=0.02, noise_x=1e-6, noise_y=1e-6)
    (fit,) = fit_trends(x, y, ages, 50.0)
    assert fit.interval.low == pytest.approx(70.0, rel=0.1)  # as if the drift had slowed down
    assert fit.interval.high == pytest.approx(70.0, rel=1e-3)
    assert fit.drift == pytest.approx(0.02, rel=0.3)
    (steady,) = fit_trends(*series(80, ratio=70.0, noise_x=1e-6, noise_y=1e-6), 50.0)
    assert steady.ratio == pytest.approx(70.0, rel=1e-5)
    assert steady.drift == pytest.approx(0.0, abs=1e-6)


def test_a_denominator_lost_in_noise_leaves_a_lower_bound() -> None:
    """|G|² is 0: whatever root the noise happens to have, no upper end is given."""
    outcomes = []
    for seed in range(40):
        x, y, ages = series(60, seed=seed)
        (fit,) = fit_trends(x, y - 1.0, ages, 50.0)
        outcomes.append(fit.interval.status)
        if fit.interval.status != "resolved":
            assert fit.ratio is None
        if fit.interval.status == "lower_bound":
            assert "cannot yet be distinguished from 0" in fit.interval.reason
    assert outcomes.count("resolved") <= 4  # 5 % each for 40 series, of which negative ones give no interval
    assert outcomes.count("lower_bound") >= 25


def test_a_numerator_lost_in_noise_leaves_an_upper_bound() -> None:
    x, y, ages = series(60, noise_y=0.1, seed=1)
    (fit,) = fit_trends(x - x.mean() + 0.01 * x.std(), y, ages, 50.0)
    assert (fit.interval.status, fit.interval.low, fit.ratio) == ("upper_bound", 0.0, None)
    assert fit.interval.high is not None
    assert 0 < fit.interval.high < 50


def test_noise_alone_is_not_known() -> None:
    generator = torch.Generator().manual_seed(5)
    x, y = (torch.randn(1, 60, generator=generator, dtype=F64) for _ in range(2))
    (fit,) = fit_trends(x - x.mean(), y - y.mean(), torch.arange(59, -1, -1, dtype=F64), 50.0)
    assert fit.interval.status == "unresolved"
    assert "neither" in fit.interval.reason


def test_series_do_not_disturb_one_another() -> None:
    parts = [series(50, ratio=ratio, seed=seed) for seed, ratio in enumerate((1e-6, 50.0, 1e9))]
    x, y, ages = torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]), parts[0][2]
    together = fit_trends(x, y, ages, 50.0)
    for (own_x, own_y, _), fit in zip(parts, together, strict=True):
        (alone,) = fit_trends(own_x, own_y, ages, 50.0)
        assert (fit.interval.low, fit.interval.high) == pytest.approx(
            (alone.interval.low, alone.interval.high), rel=1e-9
        )
        assert fit.ratio == pytest.approx(alone.ratio, rel=1e-9)


@pytest.mark.parametrize("scale", [1e-12, 1e12])
def test_the_unit_of_gradients_does_not_matter(scale: float) -> None:
    x, y, ages = series(50)
    (expected,), (got,) = fit_trends(x, y, ages, 50.0), fit_trends(scale * x, scale * y, ages, 50.0)
    assert (got.interval.low, got.interval.high) == pytest.approx(
        (expected.interval.low, expected.interval.high), rel=1e-6
    )


@pytest.mark.parametrize("n", [0, 1, 3])
def test_too_few_windows(n: int) -> None:
    x, y, ages = series(n)
    (fit,) = fit_trends(x, y, ages, 50.0)
    assert fit.interval.status == "unresolved"
    assert "too few" in fit.interval.reason


def test_equal_windows_do_not_break_it() -> None:
    """No scatter at all: the set is a point, and its arithmetic must not divide by it."""
    ages = torch.arange(19, -1, -1, dtype=F64)
    (fit,) = fit_trends(torch.full((1, 20), 6.0, dtype=F64), torch.full((1, 20), 2.0, dtype=F64), ages, 50.0)
    assert fit.interval.status == "resolved"
    assert fit.ratio == pytest.approx(3.0, rel=1e-3)


def test_the_influence_of_a_window_is_the_change_that_it_makes() -> None:
    x, y, ages = series(60, seed=2)
    x[0, 50] *= 4
    (fit,) = fit_trends(x, y, ages, 50.0)
    keep = torch.arange(60) != 50
    (without,) = fit_trends(x[:, keep], y[:, keep], ages[keep], 50.0)
    assert fit.ratio is not None
    assert without.ratio is not None
    assert max(range(60), key=lambda i: abs(fit.influence[i])) == 50
    assert fit.influence[50] == pytest.approx(math.log(fit.ratio / without.ratio), rel=0.35)


def test_effective_windows_of_the_kernel() -> None:
    ages = torch.arange(1000, dtype=F64)
    ones = torch.ones_like(ages)
    assert effective_windows(ages, ones, 50.0) == pytest.approx(100, rel=0.01)  # 2 h of an exponential kernel
    assert effective_windows(ages, ones, math.inf) < 1000  # the horizon stays within the windows seen
    pairs = ages[::2] + 0.5
    assert effective_windows(pairs, 2 * torch.ones_like(pairs), 50.0) == pytest.approx(100, rel=0.01)


@pytest.mark.parametrize("horizon", [1.5, 7.0, 50.0, 333.0])
def test_effective_windows_of_a_filled_horizon(horizon: float) -> None:
    weights = torch.exp(-torch.arange(round(4 * horizon), dtype=F64) / horizon)
    expected = float(weights.sum() ** 2 / weights.square().sum())
    assert most_effective_windows(horizon) == pytest.approx(expected, rel=0.02)
    assert most_effective_windows(math.inf) == math.inf


@pytest.mark.parametrize("factor", [5.0, 0.2])
def test_after_a_jump_the_past_is_given_up(factor: float) -> None:
    """A jump 15 windows ago: one trend over all windows would be far off, and its interval narrow."""
    n_held, n_resolved = 0, 0
    for seed in range(20):
        x, y, ages = series(150, noise_x=0.1, noise_y=0.1, seed=seed)
        before = ages >= 15
        x = torch.where(before, x / factor, x)
        (fit,) = fit_trends(x, y, ages, 50.0)
        low, high = fit.interval.low, fit.interval.high
        n_held += low is None or high is None or low <= 50.0 <= high
        n_resolved += fit.interval.status == "resolved"
    assert n_held >= 16  # an interval that is not known holds every value
    assert n_resolved >= 4


def test_a_steady_series_keeps_its_horizon() -> None:
    """The check for jumps is rarely wrong: intervals of half the horizon would be 1.4 times as wide."""
    widths = []
    for seed in range(100):
        (fit,) = fit_trends(*series(200, noise_x=0.1, noise_y=0.1, seed=seed), 50.0)
        widths.append(math.log((fit.interval.high or math.nan) / (fit.interval.low or math.nan)))
    typical = sorted(widths)[50]
    assert sum(width > 1.3 * typical for width in widths) <= 3


@pytest.mark.parametrize("horizon", [3.0, 5.0, 10.0])
def test_short_horizons_give_two_ends(horizon: float) -> None:
    (fit,) = fit_trends(*series(60, noise_x=0.05, noise_y=0.05), horizon)
    assert fit.interval.status == "resolved"


def test_an_estimate_never_sits_on_the_end_of_its_interval() -> None:
    """Series that rise faster than the range of drifts have no root."""
    for seed in range(30):
        (fit,) = fit_trends(*series(40, drift=0.12, seed=seed), 50.0)
        if fit.ratio is not None:
            assert fit.interval.low is not None
            assert fit.interval.high is not None
            assert fit.interval.low * 1.01 < fit.ratio < fit.interval.high * 0.99
            assert fit.log_error is not None


@pytest.mark.parametrize("horizon", [2.0, 50.0])
def test_windows_of_any_age_give_a_result(horizon: float) -> None:
    """e^(−age/h) of all windows is 0 beyond 745 horizons."""
    x, y, ages = series(60)
    (fit,) = fit_trends(x, y, ages + 800 * horizon, horizon)
    assert fit.interval.status == "unresolved"
    assert f"{800 * horizon:.0f} windows old" in fit.interval.reason
    assert effective_windows(ages + 800 * horizon, torch.ones_like(ages), horizon) > 1
    (long,) = fit_trends(*series(round(1600 * horizon)), horizon)  # the oldest, when the youngest is new
    assert long.interval.low is not None
    assert not math.isnan(long.interval.low)


def test_a_bound_has_a_drift_too() -> None:
    """Advice needs it: a series that drifts does not fit into a longer horizon."""
    fits = [fit_trends(*series(250, drift=0.05, noise_y=4.0, seed=seed), 50.0)[0] for seed in range(40)]
    known = [
        (fit.drift, fit.drift_error)
        for fit in fits
        if fit.interval.status == "lower_bound" and fit.drift is not None and fit.drift_error is not None
    ]
    assert len(known) >= 5
    assert sum(drift > 2 * error for drift, error in known) >= 3
    assert not any(drift < -2 * error for drift, error in known)
