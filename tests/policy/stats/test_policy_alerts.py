"""Alerts of a policy's run, with points made by hand."""

from __future__ import annotations

from sonde.policy.stats.entropy_forecast import TOO_LARGE
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


def test_steps_that_are_too_large_and_intervals_that_miss() -> None:
    large = [{"is_valid": False, "reason": f"{TOO_LARGE}: so"}] * 3
    assert not find_policy_alerts(points(*[{"is_valid": False, "reason": "not to be trusted: lost in rounding"}] * 3))
    assert "steps_too_large" not in find_policy_alerts(points({}, *large[:2]))
    assert "steps_too_large" in find_policy_alerts(points({}, *large))
    misses = [{"truth": 0.0}] * 4
    assert "intervals_miss" not in find_policy_alerts(points(*[{}] * 5, *misses))
    assert "6 of 10 intervals" in find_policy_alerts(points(*[{}] * 6, *misses))["intervals_miss"]
