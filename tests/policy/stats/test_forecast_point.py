"""Points made of metrics, whether their intervals held the truth, and which of them count after restarts."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from sonde.policy.stats.entropy_verdict import judge_entropy
from sonde.policy.stats.forecast_point import Coverage, StepsKept, coverage, forecast_point, steps_kept
from tests.policy.stats.points import GOOD, points


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


SURE = {"entropy_se": 0.01}


def kept(*steps: int) -> StepsKept:
    return steps_kept(points(*({"step": step} for step in steps)))


def steps(run: StepsKept) -> list[int]:
    return [point.step for point in run.points]


def test_without_a_restart_everything_counts() -> None:
    run = kept(1, 6, 11, 11)
    assert (steps(run), run.n_undone) == ([1, 6, 11, 11], 0)


def test_two_restarts_from_checkpoints() -> None:
    run = kept(1, 11, 21, 31, 15, 25, 35, 16, 26)
    assert (steps(run), run.n_undone) == ([1, 11, 15, 16, 26], 4)


def test_steps_that_are_counted_again_from_1_undo_all_before() -> None:
    run = kept(1, 11, 21, 1, 11, 1)
    assert (steps(run), run.n_undone) == ([1], 5)


def in_starts(*starts: list[tuple[int, float]]) -> list[dict[str, object]]:
    return [
        {"step": step, "entropy": entropy, "segment": segment, **SURE}
        for segment, start in enumerate(starts)
        for step, entropy in start
    ]


@pytest.mark.parametrize(
    ("starts", "left"),
    [
        ([[(10, 2.7), (20, 2.0), (30, 0.5)], [(30, 1.9), (40, 1.85)]], [10, 20, 30, 40]),
        ([[(100, 2.7), (200, 2.0), (300, 0.5)], [(50, 2.7), (150, 2.0), (300, 1.9)]], [50, 150, 300]),
        ([[(1, 2.7), (11, 2.0)], [(1, 2.7), (11, 1.9)], [(11, 1.9), (21, 1.8)]], [1, 11, 21]),
    ],
)
def test_a_new_start_takes_all_steps_again_from_its_first_one(
    starts: list[list[tuple[int, float]]], left: list[int]
) -> None:
    """The first measured step of a start may equal the last one of the start before, or lie before all of them."""
    run = steps_kept(points(*in_starts(*starts)))
    assert steps(run) == left
    assert run.n_undone == sum(map(len, starts)) - len(left)
    verdict = judge_entropy(points(*in_starts(*starts)))
    assert verdict.kind in ("falling", "fallen")
    are = "measurement of these steps before the restart is" if run.n_undone == 1 else "restart are"
    assert f"{are} left out." in verdict.basis


def test_a_new_start_after_the_last_step_undoes_nothing() -> None:
    run = steps_kept(points(*in_starts([(1, 1.0), (11, 1.0)], [(12, 1.0), (22, 1.0)])))
    assert (steps(run), run.n_undone) == ([1, 11, 12, 22], 0)
