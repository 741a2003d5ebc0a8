"""Alerts of a policy's run, with points made by hand."""

from __future__ import annotations

import random

from sonde.policy.stats.entropy_forecast import NEAR_UNIFORM, TOO_LARGE
from sonde.policy.stats.entropy_verdict import judge_entropy
from sonde.policy.stats.forecast_point import StepsKeeper
from sonde.policy.stats.policy_alerts import PolicyAlerts, find_policy_alerts
from tests.policy.stats.points import course_of, points


def test_a_collapse_is_reported_when_it_has_happened_and_when_it_is_near() -> None:
    assert not find_policy_alerts(points({"entropy": 2.0}, {"entropy": 1.0}))
    gone = find_policy_alerts(points({"entropy": 2.0}, {"entropy": 0.19}))["entropy_collapse"]
    assert "has collapsed to 0.19" in gone
    assert "step 1" in gone
    near = find_policy_alerts(points({"entropy": 2.0}, {"entropy": 0.3}))["entropy_collapse"]
    assert "is collapsing" in near  # 0.3 nats last 15 steps at 0.02 nats a step
    assert "15 steps" in near
    for harmless in ({"high": 0.02}, {"is_valid": False}, {"per": "response"}):
        assert not find_policy_alerts(points({"entropy": 2.0, **harmless}, {"entropy": 0.3, **harmless}))


def test_one_step_that_lowers_the_entropy_much_is_no_collapse() -> None:
    """Among steps that raise it again. Three such steps in a row are one, and the last one must be trusted."""
    down, up = ({"delta": d, "low": d - 0.01, "high": d + 0.01} for d in (-0.09, 0.06))
    course = [{"entropy": 1.0, **up}, {"entropy": 1.06, **up}, {"entropy": 1.1, **down}]
    assert not find_policy_alerts(points(*course))
    near = find_policy_alerts(points(*course, {"entropy": 1.0, **down}, {"entropy": 0.9, **down}))
    assert "at −0.0900 nats a token and step, the remaining 0.900 nats are gone in 10 steps" in near["entropy_collapse"]
    doubtful = {"entropy": 0.9, **down, "is_valid": False}
    assert not find_policy_alerts(points(*course, {"entropy": 1.0, **down}, doubtful))


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
    uniform = {"entropy": 2.7, "surprise_sd": 0.13, **pace}
    assert not find_policy_alerts(points(uniform, {"entropy": 1.9, **pace}))
    other = {"entropy": 2.7, **pace}
    assert "is collapsing" in find_policy_alerts(points(other, {"entropy": 1.9, **pace}))["entropy_collapse"]
    assert "is collapsing" in find_policy_alerts(points(uniform, {"entropy": 1.3, **pace}))["entropy_collapse"]
    assert "has collapsed" in find_policy_alerts(points(uniform, {"entropy": 0.2}))["entropy_collapse"]


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


def test_alerts_point_by_point_are_those_of_all_points_and_look_at_few() -> None:
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
    keeper = StepsKeeper()
    for point in run:
        keeper.add(point)
    assert (len(keeper), len(keeper.kept(150).points)) == (308, 300)
    assert judge_entropy(run).kind == "collapses"
