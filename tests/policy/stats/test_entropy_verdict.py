"""Verdicts on a run's entropy."""

from __future__ import annotations

import dataclasses

import pytest

from sonde.policy.stats.entropy_forecast import TOO_LARGE
from sonde.policy.stats.entropy_verdict import judge_entropy
from tests.policy.stats.points import entropies, points


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ([], "unknown", "no entropy was measured"),
        ([{}], "unknown", "One measurement shows no trend"),
        ([{"entropy": 2.0}, {"entropy": 1.8}], "holds", "is 1.80 nats a token at step 2, and was 2 at step 1."),
        ([{"entropy": 2.0}, {"entropy": 1.5}], "falling", "is falling: 1.50 at step 2, 2 at step 1 (nats"),
        ([{"entropy": 2.0}, {"entropy": 0.1}], "collapses", "has collapsed to 0.1"),
        ([{"is_valid": False, "reason": TOO_LARGE}] * 3, "not_linear", "Steps are too large to forecast"),
    ],
)
def test_verdicts(changes: list[dict[str, object]], kind: str, message: str) -> None:
    verdict = judge_entropy(points(*changes))
    assert verdict.kind == kind
    assert message in verdict.headline


WENT_DOWN = [2.70, 2.41, 1.96, 1.52, 1.11, 0.86, 0.71, 0.60, 0.52, 0.47, 0.43, 0.40]
"""The entropy of a run in 56 steps."""


def test_an_entropy_that_has_become_a_seventh_does_not_hold() -> None:
    falling = judge_entropy(entropies(*WENT_DOWN))
    assert falling.kind == "falling"
    assert "is falling: 0.400 at step 56, 0.520 at step 41, 2.70 at step 1 (nats a token)." in falling.headline
    assert "lower the learning rate" in falling.detail
    fallen = judge_entropy(entropies(*WENT_DOWN, *[0.40] * 12))
    assert fallen.kind == "fallen"
    assert "has fallen, and holds now: 0.400 at step 116, 0.400 at step 81, 2.70 at step 1" in fallen.headline
    assert judge_entropy(entropies(*reversed(WENT_DOWN))).kind == "rising"
    assert "becomes more random" in judge_entropy(entropies(*reversed(WENT_DOWN))).detail
    large = {"is_valid": False, "reason": TOO_LARGE}
    assert "Steps are too large to forecast." in judge_entropy(entropies(*WENT_DOWN, **large)).detail


def test_a_fall_from_an_almost_uniform_policy_gets_no_advice_on_the_learning_rate() -> None:
    run = entropies(*WENT_DOWN, surprise_sd=0.9)
    run[0] = dataclasses.replace(run[0], surprise_sd=0.1)
    verdict = judge_entropy(run)
    assert verdict.kind == "falling"
    assert "had to fall for it to learn" in verdict.detail
    assert "learning rate" not in verdict.detail


def test_entropies_without_forecasts_are_judged_too() -> None:
    nothing = {"delta": None, "low": None, "high": None, "truth": None, "is_valid": False}
    verdict = judge_entropy(entropies(*WENT_DOWN, **nothing))
    assert (verdict.kind, "forecasts" in verdict.detail) == ("falling", False)


def test_a_verdict_names_the_measurements_behind_it() -> None:
    detail = judge_entropy(points({}, {"is_valid": False}, {})).detail
    assert "Step 3 was forecast to change it by −0.02" in detail
    assert "fresh rollouts measured −0.021" in detail
    assert "2 of 2 intervals held" in detail
    assert "Of 3 forecasts, 1 reported" in detail
    assert "importance sampling measured −0.021" in judge_entropy(points({}, {"is_independent": False})).detail
    assert "not to be trusted" in judge_entropy(points({}, {"is_valid": False})).detail
