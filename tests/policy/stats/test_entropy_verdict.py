"""Verdicts on a run's entropy."""

from __future__ import annotations

import pytest

from sonde.policy.stats.entropy_forecast import TOO_LARGE
from sonde.policy.stats.entropy_verdict import judge_entropy
from tests.policy.stats.points import points


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ([], "unknown", "no entropy was measured"),
        ([{}], "unknown", "One measurement shows no trend"),
        ([{"entropy": 2.0}, {"entropy": 1.5}], "holds", "1.50 nats a token at step 2, and was 2 at step 1"),
        ([{"entropy": 2.0}, {"entropy": 0.1}], "collapses", "has collapsed to 0.1"),
        ([{"is_valid": False, "reason": TOO_LARGE}] * 3, "not_linear", "Steps are too large to forecast"),
    ],
)
def test_verdicts(changes: list[dict[str, object]], kind: str, message: str) -> None:
    verdict = judge_entropy(points(*changes))
    assert verdict.kind == kind
    assert message in verdict.headline


def test_a_verdict_names_the_measurements_behind_it() -> None:
    detail = judge_entropy(points({}, {"is_valid": False}, {})).detail
    assert "Step 3 was forecast to change it by −0.02" in detail
    assert "fresh rollouts measured −0.021" in detail
    assert "2 of 2 intervals held" in detail
    assert "Of 3 forecasts, 1 reported" in detail
    assert "importance sampling measured −0.021" in judge_entropy(points({}, {"is_independent": False})).detail
    assert "not to be trusted" in judge_entropy(points({}, {"is_valid": False})).detail
