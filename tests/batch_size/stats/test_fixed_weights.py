"""Plain averages at fixed weights: by hand, and over many repetitions with real gradients."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor, nn

from sonde.batch_size.stats.averages import FixedWeights, window_lengths
from sonde.batch_size.stats.noise_scale import Pieces
from sonde.batch_size.stats.reading import NoiseScaleReading
from sonde.batch_size.stats.window_row import SolvedWindow
from sonde.stats.intervals import fieller_interval
from tests.batch_size.stats import windows
from tests.batch_size.stats.windows import tracker_of
from tests.oracles import per_example_gradients, population


def solved(estimates: list[tuple[float, float]], units: float) -> SolvedWindow:
    total = tuple(sum(each) for each in zip(*estimates, strict=True))
    return windows.solved([total, *estimates], units)


def reading(
    fixed: FixedWeights, n_windows: int, groups: tuple[str, ...] = ("a",), *, differences: float = 1.0
) -> NoiseScaleReading:
    tracker = tracker_of(groups, fixed_weights=fixed)
    tracker.n_seen = tracker.windows = n_windows
    for _ in range(n_windows):
        tracker.dependence.add({"differences": (differences, 1.0)})
    return tracker.reading()


WINDOWS = [([(10.0, 1.0), (6.0, 0.5)], 4.0), ([(14.0, 2.0), (4.0, 0.7)], 8.0), ([(9.0, 1.4), (5.0, 0.6)], 12.0)]
WINDOWS += [([(12.0, 1.6), (7.0, 0.4)], 16.0), ([(11.0, 1.2), (5.5, 0.3)], 20.0)]


def by_hand(series: list[tuple[float, float]], units: list[float]) -> dict[str, float]:
    """Weighted means and the covariance of the means, term by term."""
    weights = [n / sum(units) for n in units]
    x = sum(w * a for w, (a, _) in zip(weights, series, strict=True))
    y = sum(w * b for w, (_, b) in zip(weights, series, strict=True))
    terms = [(w * w / (1 - w), a - x, b - y) for w, (a, b) in zip(weights, series, strict=True)]
    return {
        "numerator": x,
        "denominator": y,
        "var_numerator": sum(k * a * a for k, a, _ in terms),
        "var_denominator": sum(k * b * b for k, _, b in terms),
        "covariance": sum(k * a * b for k, a, b in terms),
        "n_samples": 1 / sum(w * w for w in weights),
    }


def test_a_reading_is_the_weighted_average_with_fiellers_interval() -> None:
    fixed = FixedWeights(batch=32)
    for estimates, units in WINDOWS:
        fixed.add(solved(estimates, units), weight=1.0)
    found = reading(fixed, 5, ("a", "b"))
    units = [n for _, n in WINDOWS]
    for own, series in (
        (found, [tuple(map(sum, zip(*estimates, strict=True))) for estimates, _ in WINDOWS]),
        (found.groups["a"], [estimates[0] for estimates, _ in WINDOWS]),
        (found.groups["b"], [estimates[1] for estimates, _ in WINDOWS]),
    ):
        expected = by_hand(series, units)  # type: ignore[arg-type]
        interval = fieller_interval(**expected)
        assert own.status == "resolved"
        assert own.trace_cov == pytest.approx(expected["numerator"], rel=1e-12)
        assert own.grad_sq == pytest.approx(expected["denominator"], rel=1e-12)
        assert own.b_simple == pytest.approx(expected["numerator"] / expected["denominator"], rel=1e-12)
        assert (own.low, own.high) == pytest.approx((interval.low, interval.high), rel=1e-9)
    assert (found.windows, found.units_per_window, found.scatter) == (5, 32, None)
    assert found.average is not None
    assert found.average.ratio == found.b_simple


def test_windows_are_averaged_as_means_of_their_pieces() -> None:
    """The same gradient, summed over more pieces, must not weigh more."""
    one, other = FixedWeights(), FixedWeights()
    for i, (estimates, units) in enumerate(WINDOWS):
        one.add(solved(estimates, units), weight=1.0)
        scaled = [(x * (i + 1) ** 2, y * (i + 1) ** 2) for x, y in estimates]
        other.add(solved(scaled, units), weight=i + 1.0)
    assert other.total().b_simple == pytest.approx(one.total().b_simple, rel=1e-12)
    assert other.total().low == pytest.approx(one.total().low, rel=1e-12)


def test_too_little_gives_a_reason() -> None:
    fixed = FixedWeights()
    nothing = reading(fixed, 0)
    assert (nothing.status, nothing.reason, nothing.trace_cov) == ("unresolved", "no window has ended yet", None)
    for i in range(3):
        fixed.add(solved([(10.0 + i, 1.0)], 4.0), weight=1.0)
    few = reading(fixed, 3)
    assert few.reason == "too few windows for an interval: measure more"
    assert few.trace_cov == pytest.approx(11.0)
    assert few.b_simple is None
    # One window that holds nearly all units leaves no scatter to see.
    for i in range(3):
        fixed.add(solved([(10.0, 1.0)], 1e6 if i == 2 else 4.0), weight=1.0)
    assert fixed.total().status == "unresolved"


def test_bounds_and_advice() -> None:
    fixed = FixedWeights()
    for i, y in enumerate((1.0, -0.9, 1.1, -0.8, 0.9, -0.7)):
        fixed.add(solved([(100.0 + i, y)], 10.0), weight=1.0)
    found = reading(fixed, 6)
    assert found.status == "lower_bound"
    assert found.advice == "measure more rows; how many cannot be computed before |G|² is known better"
    wide = FixedWeights()
    for y in (1.0, 0.6, 1.4, 0.8, 1.2, 1.0):
        wide.add(solved([(100.0, y)], 10.0), weight=1.0)
    found = reading(wide, 6)
    # Standard error of log B: √(0.4/30)/1 = 0.115; at ± 20 % it is 0.102: (0.115/0.102)² − 1 of 60 rows.
    assert found.advice == "measure about 17 more rows"
    assert found.windows_needed == 1


# Over many repetitions.


def gradients_of_a_network() -> Tensor:
    """Gradients of all examples of a small network that has learnt a little; [examples, parameters]."""
    generator = torch.Generator().manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    x = torch.randn(4000, 8, generator=generator)
    y = x[:, :2] + 0.5 * torch.randn(4000, 2, generator=generator)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(40):
        rows = slice(64 * i, 64 * i + 64)
        (model(x[rows]) - y[rows]).square().sum(-1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return per_example_gradients(model, lambda out, target: (out - target).square().sum(-1).mean(), x, y)


def measured(gradients: Tensor, n_windows: int, *, piece: int, repetitions: int, seed: int) -> list[FixedWeights]:
    """As many measurements, of windows of pieces drawn with replacement."""
    generator = torch.Generator().manual_seed(seed)
    measurements = [FixedWeights() for _ in range(repetitions)]
    for n in itertools.islice(window_lengths(1), n_windows):
        picked = torch.randint(0, len(gradients), (repetitions, n, piece), generator=generator)
        pieces = torch.stack([gradients[rows].mean(1) for rows in picked])  # [repetitions, n, parameters]
        small, big = pieces.square().sum((1, 2)).tolist(), pieces.sum(1).square().sum(1).tolist()
        for fixed, s, b in zip(measurements, small, big, strict=True):
            estimates = Pieces(n, n / piece, n / piece, n_pieces=n).solve(s, b)
            fixed.add(solved([estimates], n * piece), weight=n)
    return measurements


@pytest.mark.parametrize(("n_windows", "repetitions"), [(8, 600), (20, 300)])
def test_intervals_hold_the_exact_value(n_windows: int, repetitions: int) -> None:
    gradients = gradients_of_a_network()
    exact = population(gradients)
    measurements = measured(gradients, n_windows, piece=4, repetitions=repetitions, seed=5)
    totals = [fixed.total() for fixed in measurements]
    held = [t.low is None or t.high is None or t.low <= exact.b_simple <= t.high for t in totals]
    n_known = sum(t.low is not None for t in totals)
    assert n_known >= 0.98 * repetitions
    assert 0.93 <= sum(held) / repetitions <= 0.985  # nor wider than they must be
    # Unbiased: within 3.5 standard errors of the mean over all repetitions.
    for values, truth in (
        ([t.trace_cov for t in totals], exact.trace_cov),
        ([t.grad_sq for t in totals], exact.grad_sq),
    ):
        means = torch.tensor(values, dtype=torch.float64)
        assert abs(float(means.mean()) - truth) < 3.5 * float(means.std()) / math.sqrt(repetitions)
