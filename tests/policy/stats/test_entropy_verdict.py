"""Verdicts on a run's entropy."""

from __future__ import annotations

import re

import pytest

from sonde.policy.stats.entropy_forecast import TOO_LARGE
from sonde.policy.stats.entropy_verdict import judge_entropy
from sonde.policy.stats.policy_alerts import find_policy_alerts
from tests.policy.stats.points import entropies, points


def plain(text: str) -> str:
    """With ordinary spaces."""
    return text.replace("\N{NO-BREAK SPACE}", " ")


SURE = {"entropy_se": 0.01}


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ([], "unknown", "no entropy was measured"),
        ([SURE], "unknown", "is 1.000 ± 0.010 nats a token at step 1. One measurement shows no trend"),
        (
            [{"entropy": 2.0, **SURE}, {"entropy": 1.8, **SURE}],
            "holds",
            "holds: 1.800 ± 0.010 nats a token at step 2, 2.000 ±",
        ),
        (
            [{"entropy": 2.0, **SURE}, {"entropy": 1.1, **SURE}],
            "falling",
            "is falling: 1.100 ± 0.010 nats a token at step",
        ),
        (
            [{"entropy": 2.0}, {"entropy": 1.1}],
            "unknown",
            "is not known yet whether the policy's entropy holds: 1.100 nats",
        ),
        ([{"entropy": 2.0}, {"entropy": 0.1}], "collapses", "has collapsed to 0.1"),
        ([{"is_valid": False, "reason": TOO_LARGE, **SURE}] * 3, "not_linear", "steps are too large to forecast"),
    ],
)
def test_verdicts(changes: list[dict[str, object]], kind: str, message: str) -> None:
    verdict = judge_entropy(points(*changes))
    assert verdict.kind == kind
    assert message in plain(verdict.headline)


WENT_DOWN = [2.70, 2.41, 1.96, 1.52, 1.11, 0.86, 0.71, 0.60, 0.52, 0.47, 0.43, 0.40]
"""The entropy of a run in 56 steps."""


def test_an_entropy_that_has_become_a_seventh_does_not_hold() -> None:
    falling = judge_entropy(entropies(*WENT_DOWN, error=0.02))
    assert falling.kind == "falling"
    assert re.search(
        r"falling: 0\.43\d ± 0\.0\d+ nats a token at steps 46 to 56, 2\.\d+ ± 0\.0\d+ at steps 1 to 11\.$",
        plain(falling.headline),
    )
    assert "lower the learning rate" in falling.detail
    pace = r"It fell by 2\.2 % a step \(.*\)\. It halves in 31 steps if this pace lasts, and in 2\d at the earliest\."
    assert re.search(pace, plain(falling.detail)), falling.detail
    fallen = judge_entropy(entropies(*WENT_DOWN, *[0.40] * 12, error=0.02))
    assert fallen.kind == "fallen"
    assert "has fallen: 0.400 ±" in plain(fallen.headline)
    assert "this pace" not in fallen.detail
    assert judge_entropy(entropies(*reversed(WENT_DOWN), error=0.02)).kind == "rising"
    assert "becomes more random" in judge_entropy(entropies(*reversed(WENT_DOWN), error=0.02)).detail
    large = {"is_valid": False, "reason": TOO_LARGE}
    assert "Steps are too large to forecast." in judge_entropy(entropies(*WENT_DOWN, error=0.02, **large)).detail


def test_the_change_stands_in_nats_and_per_cent_with_its_interval_and_with_the_last_third() -> None:
    detail = plain(judge_entropy(entropies(1.0, 0.9, 0.8, 0.7, 0.6, error=0.01)).detail)
    assert (
        "It changed by −0.400 nats a token, −40 % of its level at the start (95 % interval: −42 % to −38 %)." in detail
    )
    assert "Over the last 5 steps, it changed by −0.100 nats a token, −14 % of its level before (95 %" in detail


def test_noise_is_called_noise() -> None:
    """A fall by a tenth whose error is as large: neither a fall nor "holds"."""
    verdict = judge_entropy(entropies(1.0, 1.1, 0.95, 0.9, error=0.1))
    assert verdict.kind == "unknown"
    assert "too noisy to say whether it changed by more than 15 %" in plain(verdict.detail)
    assert "so its present direction is not known yet" in verdict.detail
    unknown = judge_entropy(entropies(2.0, 1.1)).detail
    assert "No standard errors of these entropies were logged" in unknown


def test_a_restart_is_said_and_what_it_undid_is_left_out() -> None:
    from_checkpoint = points(*({"step": step, "entropy": 1.0, **SURE} for step in (1, 11, 21, 31, 21)))
    assert (
        "A restart took steps again: 2 measurements of these steps before the restart"
        in judge_entropy(from_checkpoint).basis
    )


def test_a_collapse_that_a_restart_undid_is_no_collapse() -> None:
    run = [(1, 2.0), (11, 1.9), (21, 0.1), (11, 2.0), (21, 2.0)]
    verdict = judge_entropy(points(*({"step": step, "entropy": value, **SURE} for step, value in run)))
    assert verdict.kind == "holds"


@pytest.mark.parametrize("fallen_to", [0.8, 0.6, 0.4, 0.2, 0.09, 0.01])
@pytest.mark.parametrize("pace", [{}, {"delta": -0.1, "low": -0.11, "high": -0.09}])
def test_however_far_a_uniform_start_falls_the_learning_rate_is_not_blamed(
    fallen_to: float, pace: dict[str, float]
) -> None:
    uniform = {"entropy": 2.7, "surprise_sd": 0.1, "entropy_se": 0.02}
    now = {"entropy": 2.7 * fallen_to, "surprise_sd": 0.9, "entropy_se": 0.02, **pace}
    run = points(uniform, {**now, "entropy": 2.7 * (1 + fallen_to) / 2}, now)
    verdict = judge_entropy(run)
    assert verdict.kind in ("falling", "collapses")
    told = " ".join([verdict.headline, verdict.detail, *find_policy_alerts(run).values()])
    assert "learning rate" not in told
    assert "add an entropy bonus" in told
    assert ("had to fall for it to learn" in told) == (verdict.kind == "falling")


def test_entropies_without_forecasts_are_judged_too() -> None:
    nothing = {"delta": None, "low": None, "high": None, "truth": None, "is_valid": False}
    verdict = judge_entropy(entropies(*WENT_DOWN, error=0.02, **nothing))
    assert (verdict.kind, "forecasts" in verdict.detail) == ("falling", False)


def test_a_verdict_says_why_the_last_forecast_is_not_to_be_trusted() -> None:
    doubtful = {"is_valid": False, "reason": "too few prompts"}
    assert "The forecast of step 2: too few prompts." in judge_entropy(points({}, doubtful)).detail
    assert "forecast" not in judge_entropy(points(doubtful, {})).detail


def test_numbers_of_a_verdict_have_no_noise_digits() -> None:
    still = judge_entropy(entropies(*(2.0 + 1e-12 * i for i in range(60)), error=1e-9))
    assert "It changed by 0.000 nats a token, 0 % of its level at the start" in plain(still.detail)
    assert "10⁻" not in f"{still.headline} {still.detail}"


def test_negative_entropies_are_compared_in_nats_with_ordered_intervals() -> None:
    falling = judge_entropy(entropies(*(-1.0 - 0.02 * i for i in range(20)), error=-0.01))
    assert "It changed by −0.340 nats a token (95 % interval: −0.359 to −0.321)." in plain(falling.detail)
    crossing = judge_entropy(entropies(*(0.5 - 0.02 * i for i in range(60)), every=1, error=0.0))
    assert (crossing.kind, "%" in plain(crossing.detail).replace("95 %", "")) == ("falling", False)


def test_forecasts_without_entropies_are_no_run_without_forecasts() -> None:
    assert "Forecasts were logged without" in judge_entropy(points({"entropy": None})).detail
