"""Alerts of a policy's run, with points made by hand."""

from __future__ import annotations

from sonde.policy.stats.entropy_forecast import NEAR_UNIFORM, TOO_LARGE
from sonde.policy.stats.policy_alerts import find_policy_alerts
from tests.policy.stats.points import points


def test_a_collapse_is_reported_when_it_has_happened_and_when_it_is_near() -> None:
    assert not find_policy_alerts(points({"entropy": 2.0}, {"entropy": 1.0}))
    gone = find_policy_alerts(points({"entropy": 2.0}, {"entropy": 0.19}))["entropy_collapse"]
    assert "has collapsed to 0.19" in gone
    assert "step 1" in gone
    near = find_policy_alerts(points({"entropy": 2.0}, {"entropy": 0.3}))["entropy_collapse"]
    assert "is collapsing" in near  # 0.3 nats last 15 steps at 0.02 nats a step
    assert "15 steps" in near
    for harmless in ({"high": 0.001}, {"is_valid": False}, {"per": "response"}):
        assert not find_policy_alerts(points({"entropy": 2.0}, {"entropy": 0.3, **harmless}))


def test_an_entropy_below_0_has_nothing_to_collapse_to() -> None:
    assert not find_policy_alerts(points({"entropy": -1.0}, {"entropy": -2.0}))


def test_steps_that_are_too_large_and_intervals_that_miss() -> None:
    large = [{"is_valid": False, "reason": f"{TOO_LARGE}: so"}] * 3
    assert not find_policy_alerts(points(*[{"is_valid": False, "reason": "not to be trusted: lost in rounding"}] * 3))
    assert "steps_too_large" not in find_policy_alerts(points({}, *large[:2]))
    assert "steps_too_large" in find_policy_alerts(points({}, *large))
    misses = [{"truth": 0.0}] * 4
    assert "intervals_miss" not in find_policy_alerts(points(*[{}] * 5, *misses))
    assert "6 of 10 intervals" in find_policy_alerts(points(*[{}] * 6, *misses))["intervals_miss"]


def test_a_policy_that_starts_almost_uniform_may_lose_half_of_its_entropy() -> None:
    """It must lose entropy to learn anything. At 0.1 nats a step, 1.9 nats would last 19 steps."""
    pace = {"delta": -0.1, "low": -0.11, "high": -0.09}
    uniform = {"entropy": 2.7, "surprise_sd": 0.13}
    assert not find_policy_alerts(points(uniform, {"entropy": 1.9, **pace}))
    assert "is collapsing" in find_policy_alerts(points({"entropy": 2.7}, {"entropy": 1.9, **pace}))["entropy_collapse"]
    assert "is collapsing" in find_policy_alerts(points(uniform, {"entropy": 1.3, **pace}))["entropy_collapse"]
    assert "has collapsed" in find_policy_alerts(points(uniform, {"entropy": 0.2}))["entropy_collapse"]


def test_forecasts_near_a_uniform_policy_are_no_steps_that_are_too_large() -> None:
    near = [{"is_valid": False, "reason": f"{NEAR_UNIFORM}: so"}] * 3
    assert "steps_too_large" not in find_policy_alerts(points(*near))
    # A measurement without a forecast says nothing of the steps.
    large, none = {"is_valid": False, "reason": f"{TOO_LARGE}: so"}, {"delta": None, "is_valid": False}
    assert "steps_too_large" in find_policy_alerts(points(large, large, none, large, none))
