"""Alerts of a policy's run, with points made by hand."""

from __future__ import annotations

import random

from sonde.policy.stats.entropy_forecast import NEAR_UNIFORM, TOO_LARGE
from sonde.policy.stats.entropy_verdict import judge_entropy
from sonde.policy.stats.forecast_point import Point
from sonde.policy.stats.policy_alerts import PolicyAlerts, find_policy_alerts
from tests.policy.stats.points import course_of, entropies, points


def test_a_collapse_is_reported_when_it_has_happened_and_when_it_is_near() -> None:
    assert not find_policy_alerts(points({"entropy": 2.0}, {"entropy": 1.0}))
    gone = find_policy_alerts(points({"entropy": 2.0}, {"entropy": 0.19}))["entropy_collapse"]
    assert "has collapsed to 0.19" in gone
    assert "step 1" in gone


def falling(*values: float, **changes: object) -> list[Point]:
    return entropies(*values, every=2, error=0.01, **changes)


BY_A_TENTH = [2.0 * 0.9**i for i in range(8)]


def test_a_fall_that_halves_the_entropy_soon_is_a_collapse_that_is_near() -> None:
    """By a tenth in two steps. Forecasts of single steps say nothing of the steps that follow."""
    near = find_policy_alerts(falling(*BY_A_TENTH))["entropy_collapse"].replace("\N{NO-BREAK SPACE}", " ")
    assert "is collapsing: over the last 10 steps, it fell by 5.1 % a step (95 % interval: 4." in near
    assert "halves in 13 steps if this pace lasts, and in 12 at the earliest. It is 0.957 nats a token now: " in near
    assert not find_policy_alerts(falling(*BY_A_TENTH[:5]))  # 4 changes do not show their scatter
    assert not find_policy_alerts(falling(*(2.0 * 0.95**i for i in range(8))))  # halves in 27 steps
    assert not find_policy_alerts(falling(2.0, 1.3, 1.9, 1.2, 1.9, 1.1, 1.6, 1.0))
    assert not find_policy_alerts(points(*[{"entropy": 0.3}] * 8))  # the forecasts: 0.02 nats a step


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
    """It must lose entropy to learn anything."""
    uniform = {"surprise_sd": 0.13}
    assert not find_policy_alerts(falling(*BY_A_TENTH, **uniform)[:7])
    assert "is collapsing" in find_policy_alerts(falling(*BY_A_TENTH)[:7])["entropy_collapse"]
    assert "is collapsing" in find_policy_alerts(falling(*BY_A_TENTH, 0.8, **uniform))["entropy_collapse"]
    assert (
        "has collapsed" in find_policy_alerts(points({"entropy": 2.7, **uniform}, {"entropy": 0.2}))["entropy_collapse"]
    )


def test_forecasts_near_a_uniform_policy_are_no_steps_that_are_too_large() -> None:
    near = [{"is_valid": False, "reason": f"{NEAR_UNIFORM}: so"}] * 3
    assert "steps_too_large" not in find_policy_alerts(points(*near))
    # A measurement without a forecast says nothing of the steps.
    large, none = {"is_valid": False, "reason": f"{TOO_LARGE}: so"}, {"delta": None, "is_valid": False}
    assert "steps_too_large" in find_policy_alerts(points(large, large, none, large, none))


NO_FORECAST = {"delta": None, "low": None, "high": None, "truth": None, "is_valid": False}


def measured(*values: tuple[float, float]) -> list[dict[str, object]]:
    return [{"entropy": entropy, "entropy_se": se, **NO_FORECAST} for entropy, se in values]


def test_a_noisy_measurement_is_no_collapse() -> None:
    """Neither a last one of 0.19 ± 0.9, nor an early one of 25 ± 12 that the others lie far below."""
    draw = random.Random(0)
    level = [(draw.gauss(2.0, 0.02), 0.02) for _ in range(58)]
    for run in ([*level, (0.19, 0.9)], [*level[:4], (25.0, 12.0), *level[4:]], [(2.0, 0.02), (0.19, 0.9)]):
        assert "entropy_collapse" not in find_policy_alerts(points(*measured(*run)))
        assert judge_entropy(points(*measured(*run))).kind != "collapses"
    assert judge_entropy(points(*measured(*level, (0.19, 0.9)))).kind == "holds"


def test_a_collapse_is_certain_by_the_levels_at_both_ends() -> None:
    collapsed = [*[(2.0, 0.02)] * 57, *[(0.1, 0.02)] * 5]
    assert "0.100 nats a token, 5" in find_policy_alerts(points(*measured(*collapsed)))["entropy_collapse"]
    assert not find_policy_alerts(points(*measured(*collapsed[:-4])))  # one measurement is no level of a long run
    assert not find_policy_alerts(points(*measured(*[(2.0, 0.02)] * 5, (0.19, 0.02))))  # 0.19 ± 0.04 may be above 0.2
    assert find_policy_alerts(points(*measured(*[(2.0, 0.02)] * 5, (0.15, 0.02))))


def test_an_entropy_that_becomes_negative_has_not_collapsed() -> None:
    assert not find_policy_alerts(points(*measured(*((0.5 - 0.02 * i, 0.01) for i in range(60)))))


def test_alerts_point_by_point_are_those_of_all_points() -> None:
    """With a restart, forecasts that miss, and a collapse: as after each step of a run."""
    draw = random.Random(2)
    entropy = [draw.gauss(2.0, 0.02) for _ in range(300)] + [draw.gauss(0.1, 0.01) for _ in range(8)]
    run = points(*({"step": 1 + i, "entropy": e, "entropy_se": 0.02, "truth": 0.0} for i, e in enumerate(entropy)))
    run = [*run[:250], *run[200:]]
    alerts, names = PolicyAlerts(), []
    for i, point in enumerate(run):
        alerts.add(point)
        if i % 30 == 0 or i > 350:
            assert alerts.messages() == find_policy_alerts(run[: i + 1])
            if i:
                assert ("entropy_collapse" in alerts.messages()) == course_of(run[: i + 1]).has_collapsed
        names.append(tuple(alerts.messages()))
    assert names[8] == ()
    assert names[200] == ("intervals_miss",)
    assert names[-1] == ("entropy_collapse", "intervals_miss")
    assert judge_entropy(run).kind == "collapses"
