"""Coverage, collapse and verdicts of forecasts, beside counts made by hand."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from sonde.policy.stats.entropy_forecast import TOO_LARGE
from sonde.policy.stats.forecast_history import Coverage, Point, coverage, find_policy_alerts, judge_entropy, point_of

GOOD = Point(
    step=1, entropy=1.0, delta=-0.02, low=-0.022, high=-0.018, is_valid=True,
    truth=-0.021, truth_se=0.0, is_independent=True,
)  # fmt: skip


def points(*changes: dict[str, object]) -> list[Point]:
    return [dataclasses.replace(GOOD, **{"step": i + 1, **change}) for i, change in enumerate(changes)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "holds"),
    [
        ({}, True),
        ({"truth": -0.0221}, False),
        ({"truth": -0.0221, "truth_se": 0.001}, True),  # its own standard error is allowed for
        ({"truth": -0.0179}, False),
        ({"truth": -0.0179, "high": -0.015}, True),  # an interval that reaches farther to one side
        ({"truth": -0.0221, "high": -0.015}, False),
    ],
)
def test_whether_an_interval_holds_the_truth(change: dict[str, object], holds: bool) -> None:
    assert points(change)[0].held is holds


def test_only_trusted_forecasts_with_a_truth_of_their_own_count() -> None:
    found = coverage(
        points({}, {"truth": 0.0}, {"is_valid": False}, {"is_independent": False}, {"truth": math.nan}, {})
    )
    assert (found.n, found.n_held) == (3, 2)
    assert found.fraction == pytest.approx(2 / 3)
    assert math.isnan(coverage([]).fraction)
    assert (coverage([]).low, coverage([]).high) == (0.0, 1.0)


def test_the_interval_of_coverage_is_wilsons() -> None:
    # By the quadratic that defines it: |p̂ − p| = z √(p (1 − p)/n) at both ends.
    found = Coverage.of(40, 33)
    for p in (found.low, found.high):
        assert abs(33 / 40 - p) == pytest.approx(1.959964 * math.sqrt(p * (1 - p) / 40), rel=1e-6)


def test_intervals_of_both_errors_cover_as_promised() -> None:
    """Forecast and truth each with an error of its own: 95 % of 4,000 hold, ± 0.7 % at two standard errors."""
    rng = np.random.default_rng(0)
    se, truth_se, z = 0.001, 0.0007, 1.959964
    made = [
        dataclasses.replace(GOOD, delta=d, low=d - z * se, high=d + z * se, truth=t, truth_se=truth_se)
        for d, t in zip(rng.normal(-0.02, se, 4000), rng.normal(-0.02, truth_se, 4000), strict=True)
    ]
    assert coverage(made).fraction == pytest.approx(0.95, abs=0.007)


def test_metrics_make_a_point_and_rollouts_come_before_importance_sampling() -> None:
    metrics = {"entropy/per_token": 1.5, "entropy/delta_forecast": -0.1, "entropy/delta_low": -0.2}
    metrics |= {"entropy/delta_high": 0.0, "entropy/is_valid": 1.0, "entropy/delta_importance": -0.11}
    point = point_of(7, metrics)
    assert (point.step, point.truth, point.truth_se, point.is_independent) == (7, -0.11, 0.0, False)
    point = point_of(7, metrics | {"entropy/delta_rollouts": -0.12, "entropy/delta_rollouts_se": 0.01})
    assert (point.truth, point.truth_se, point.is_independent) == (-0.12, 0.01, True)
    empty = point_of(1, {"entropy/per_token": None})
    assert math.isnan(empty.entropy)
    assert not empty.is_valid
    assert not empty.has_truth


def test_a_collapse_is_told_when_it_has_come_and_when_it_is_near() -> None:
    assert not find_policy_alerts(points({"entropy": 2.0}, {"entropy": 1.0}))
    gone = find_policy_alerts(points({"entropy": 2.0}, {"entropy": 0.19}))["entropy_collapse"]
    assert "has collapsed to 0.19" in gone
    assert "step 1" in gone
    near = find_policy_alerts(points({"entropy": 2.0}, {"entropy": 0.3}))["entropy_collapse"]
    assert "is collapsing" in near  # 0.3 nats at 0.02 a step
    assert "15 steps" in near
    for harmless in ({"high": 0.001}, {"is_valid": False}, {"per": "response"}):
        assert not find_policy_alerts(points({"entropy": 2.0}, {"entropy": 0.3, **harmless}))


def test_steps_that_are_too_large_and_intervals_that_miss() -> None:
    large = [{"is_valid": False, "reason": f"{TOO_LARGE}: so"}] * 3
    assert not find_policy_alerts(points(*[{"is_valid": False, "reason": "not to be trusted: lost in rounding"}] * 3))
    assert "steps_too_large" not in find_policy_alerts(points({}, *large[:2]))
    assert "steps_too_large" in find_policy_alerts(points({}, *large))
    misses = [{"truth": 0.0}] * 4
    assert "intervals_miss" not in find_policy_alerts(points(*[{}] * 5, *misses))
    assert "6 of 10 intervals" in find_policy_alerts(points(*[{}] * 6, *misses))["intervals_miss"]


@pytest.mark.parametrize(
    ("changes", "kind", "said"),
    [
        ([], "unknown", "no entropy was measured"),
        ([{}], "unknown", "One measurement makes no course"),
        ([{"entropy": 2.0}, {"entropy": 1.5}], "holds", "1.50 nats a token at step 2, and was 2 at step 1"),
        ([{"entropy": 2.0}, {"entropy": 0.1}], "collapses", "has collapsed to 0.1"),
        ([{"is_valid": False, "reason": TOO_LARGE}] * 3, "not_linear", "Steps are too large to forecast"),
    ],
)
def test_verdicts(changes: list[dict[str, object]], kind: str, said: str) -> None:
    verdict = judge_entropy(points(*changes))
    assert verdict.kind == kind
    assert said in verdict.headline


def test_a_verdict_says_what_it_rests_on() -> None:
    detail = judge_entropy(points({}, {"is_valid": False}, {})).detail
    assert "Step 3 was to change it by −0.02" in detail
    assert "by fresh rollouts it was −0.021" in detail
    assert "2 of 2 intervals held" in detail
    assert "Of 3 forecasts, 1 said" in detail
    assert "by importance sampling" in judge_entropy(points({}, {"is_independent": False})).detail
    assert "not to be trusted" in judge_entropy(points({}, {"is_valid": False})).detail
