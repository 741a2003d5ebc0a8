"""Points made of metrics, and whether their intervals held the truth."""

from __future__ import annotations

import math

import pytest

from sonde.policy.stats.forecast_point import forecast_point
from tests.policy.stats.points import points


@pytest.mark.parametrize(
    ("change", "holds"),
    [
        ({}, True),
        ({"truth": -0.0221}, False),
        ({"truth": -0.0221, "truth_se": 0.001}, True),  # the truth's standard error widens the interval
        ({"truth": -0.0179}, False),
        ({"truth": -0.0179, "high": -0.015}, True),  # the interval reaches farther to this side
        ({"truth": -0.0221, "high": -0.015}, False),
    ],
)
def test_whether_an_interval_holds_the_truth(change: dict[str, object], holds: bool) -> None:
    assert points(change)[0].held is holds


def test_metrics_make_a_point_and_rollouts_come_before_the_finite_step() -> None:
    metrics = {"entropy/evaluation_per_token": 1.5, "entropy/delta_forecast": -0.1, "entropy/delta_low": -0.2}
    metrics |= {"entropy/delta_high": 0.0, "entropy/is_valid": 1.0, "entropy/delta_finite_step": -0.11}
    point = forecast_point(7, metrics)
    assert (point.step, point.truth, point.truth_se, point.is_independent) == (7, -0.11, 0.0, False)
    point = forecast_point(7, metrics | {"entropy/delta_rollouts": -0.12, "entropy/delta_rollouts_se": 0.01})
    assert (point.truth, point.truth_se, point.is_independent) == (-0.12, 0.01, True)
    empty = forecast_point(1, {"entropy/evaluation_per_token": None})
    assert empty.entropy is None
    assert not empty.is_valid
    assert not empty.has_truth


def test_a_change_by_weights_of_whole_responses_is_no_truth() -> None:
    metrics = {"entropy/delta_forecast": -0.1, "entropy/delta_importance": -0.258, "entropy/ess_fraction": 0.6}
    assert (forecast_point(7, metrics).truth, forecast_point(7, metrics).ess_fraction) == (None, 0.6)


def test_entropy_on_the_steps_own_responses_stands_in_for_that_on_evaluation_responses() -> None:
    own = {"entropy/update_token_weighted": 1.4}
    assert forecast_point(7, own).entropy == 1.4
    assert forecast_point(7, own | {"entropy/evaluation_per_token": 1.5}).entropy == 1.5


@pytest.mark.parametrize(
    ("entropy", "scatter", "is_uniform"),
    [(2.70, 0.13, True), (2.55, 0.57, False), (0.5, 0.9, False), (0.0, 0.0, False), (2.7, None, False)],
)
def test_a_policy_is_almost_uniform_if_the_surprise_hardly_varies(
    entropy: float, scatter: float | None, is_uniform: bool
) -> None:
    point = forecast_point(1, {"entropy/evaluation_per_token": entropy, "entropy/evaluation_surprise_sd": scatter})
    assert point.is_near_uniform is is_uniform


def test_a_number_that_no_policy_has_is_not_known() -> None:
    """1e308 is what overflowing weights leave. Its square would end the training in which it is logged."""
    for value in (1e308, -1e60, math.inf, math.nan):
        point = forecast_point(3, {"entropy/evaluation_per_token": value, "entropy/delta_forecast": value})
        assert (point.entropy, point.delta) == (None, None)
