from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import scipy.stats
import torch

from sonde.stats.intervals import RatioInterval, fieller_interval, signed_ratio_interval, student_t_quantile


@pytest.mark.parametrize("probability", [0.025, 0.5, 0.6, 0.9, 0.975, 0.995, 0.99995])
@pytest.mark.parametrize("dof", [1.0, 1.5, 2.0, 3.7, 10.0, 49.5, 199.0, 1e4, 1e6, 5e7, math.inf])
def test_student_t_quantile_agrees_with_scipy(probability: float, dof: float) -> None:
    expected = scipy.stats.t.ppf(probability, dof)
    # 1e-7: the beta function's logarithm loses digits as the degrees of freedom grow.
    assert student_t_quantile(probability, dof) == pytest.approx(expected, rel=1e-7, abs=1e-9)


@pytest.mark.parametrize(("probability", "dof"), [(0.0, 5), (1.0, 5), (0.9, 0), (math.nan, 5), (0.9, math.nan)])
def test_student_t_quantile_refuses(probability: float, dof: float) -> None:
    with pytest.raises(ValueError, match="need 0 < probability < 1"):
        student_t_quantile(probability, dof)


def test_fieller_is_the_set_of_ratios_that_t_accepts() -> None:
    """Its definition, on a grid: |X̄ − RȲ| ≤ t·sd(X̄ − RȲ)."""
    generator = torch.Generator().manual_seed(1)
    seen = set()
    for _ in range(300):
        x, y, cov = (torch.randn(3, generator=generator, dtype=torch.float64) * torch.tensor([3.0, 1.0, 0.2])).tolist()
        vx, vy = (torch.rand(2, generator=generator, dtype=torch.float64) + 0.3).tolist()
        got = fieller_interval(abs(x), y, var_numerator=vx, var_denominator=vy, covariance=cov, n_samples=20, level=0.9)
        seen.add(got.status)
        t = scipy.stats.t.ppf(0.95, 19)
        for ratio in torch.logspace(-2, 2, 200, dtype=torch.float64).tolist():
            accepted = (abs(x) - ratio * y) ** 2 <= t * t * (vx - 2 * ratio * cov + ratio**2 * vy)
            if got.status == "resolved":
                assert got.low is not None
                assert got.high is not None
                assert accepted == (got.low <= ratio <= got.high)
            elif got.status == "lower_bound":
                assert got.low is not None
                assert accepted == (got.low <= ratio)
    assert seen == {"resolved", "lower_bound", "upper_bound", "unresolved"}


def test_a_denominator_just_resolved_agrees_with_one_just_not() -> None:
    """The lower end is continuous where the upper end goes to infinity."""
    at = scipy.stats.t.ppf(0.975, 49) * 0.1
    spread = {"var_numerator": 0.01, "var_denominator": 0.01, "covariance": 0.0, "n_samples": 50}
    above, below = (fieller_interval(8.0, at * (1 + e), **spread) for e in (1e-9, -1e-9))
    assert (above.status, below.status) == ("resolved", "lower_bound")
    assert above.low == pytest.approx(below.low, rel=1e-6)
    assert above.high is not None
    assert above.high > 1e6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"level": 1.0}, "level must lie between"),
        ({"n_samples": 1.5}, "at least 2 effective samples"),
        ({"covariance": math.nan}, "must be finite"),
    ],
)
def test_fieller_refuses(change: dict[str, float], message: str) -> None:
    arguments = {"var_numerator": 1.0, "var_denominator": 1.0, "covariance": 0.0, "n_samples": 10.0} | change
    with pytest.raises(ValueError, match=message):
        fieller_interval(1.0, 1.0, **arguments)


@pytest.mark.parametrize("interval", [fieller_interval, signed_ratio_interval])
def test_only_a_resolved_ratio_is_given(interval: Callable[..., RatioInterval]) -> None:
    spread = {"var_numerator": 0.01, "var_denominator": 0.01, "covariance": 0.0, "n_samples": 100}
    assert interval(8.0, 2.0, **spread).ratio == 4.0
    assert interval(8.0, 0.1, **spread).ratio is None
    if interval is signed_ratio_interval:
        assert interval(-8.0, 2.0, **spread).ratio == -4.0
        assert interval(-0.1, 2.0, **spread).ratio == -0.05
