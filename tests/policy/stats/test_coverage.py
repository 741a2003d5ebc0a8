"""Coverage beside counts made by hand, the quadratic of Wilson's interval, and simulated forecasts."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from sonde.policy.stats.forecast_point import Coverage, coverage
from tests.policy.stats.points import GOOD, points


def test_only_trusted_forecasts_with_an_independent_truth_count() -> None:
    result = coverage(points({}, {"truth": 0.0}, {"is_valid": False}, {"is_independent": False}, {"truth": None}, {}))
    assert (result.n, result.n_held) == (3, 2)
    assert result.fraction == pytest.approx(2 / 3)
    assert coverage([]).fraction is None
    assert (coverage([]).low, coverage([]).high) == (0.0, 1.0)


def test_the_interval_of_coverage_is_wilsons() -> None:
    # The quadratic that defines the interval: |p̂ − p| = z √(p (1 − p)/n) at both ends.
    result = Coverage.of(40, 33)
    for p in (result.low, result.high):
        assert abs(33 / 40 - p) == pytest.approx(1.959964 * math.sqrt(p * (1 - p) / 40), rel=1e-6)


def test_intervals_of_both_errors_cover_as_promised() -> None:
    """Forecast and truth have independent errors: 95 % of 4,000 intervals hold, ± 0.7 % at two standard errors."""
    rng = np.random.default_rng(0)
    se, truth_se, z = 0.001, 0.0007, 1.959964
    made = [
        dataclasses.replace(GOOD, delta=d, low=d - z * se, high=d + z * se, truth=t, truth_se=truth_se)
        for d, t in zip(rng.normal(-0.02, se, 4000), rng.normal(-0.02, truth_se, 4000), strict=True)
    ]
    assert coverage(made).fraction == pytest.approx(0.95, abs=0.007)
