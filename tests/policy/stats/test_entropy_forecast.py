"""Forecasts made of given values: intervals, reasons, and unknown numbers."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from sonde.policy.stats.attribution import Cause, Causes
from sonde.policy.stats.entropy_change import EntropyChange, EntropyObjective, Objective, SequenceWeights
from sonde.policy.stats.entropy_forecast import (
    TOO_LARGE,
    EntropyForecast,
    Estimate,
    FixedPrefixes,
    Update,
    before_update,
    judged,
    with_change,
)
from sonde.policy.stats.entropy_gradient import Responses
from sonde.policy.stats.importance import MeasuredChange, Support
from sonde.policy.stats.own_policy import OwnPolicyTest
from tests.policy.stats.tiny_batches import Scores

# Two prompts with one response each, of 2 tokens with 1 nat each.
RESPONSES = Responses(torch.ones(2, 2), torch.tensor([3, 5]))
ENTROPY = torch.ones(2, 2)
LOG_PROB = torch.tensor([[-0.5, -1.5], [-2.0, -0.0]])


def change(delta: float, se: float, half: float) -> EntropyChange:
    """With an interval of this half width."""
    parts = torch.tensor([-0.3, -0.1]), torch.tensor([-0.2, 0.0])
    return EntropyChange(delta, *parts, se**2, degrees=math.inf, widened=half / se / 1.959963984540054)


CHANGE, STEP = change(-0.2, 0.1, 0.2), change(-0.21, 0.11, 0.24)
WHOLE = Support(0.9, 0.0, None)
FIRST_ORDER: dict[str, Any] = {"first_order": CHANGE, "bars_dot": -0.2}
AFTER: dict[str, Any] = {
    "finite_step": STEP,
    "support": WHOLE,
    "fixed_prefixes": FixedPrefixes(-0.11, -0.1),
    "importance": MeasuredChange(-0.22, 0.02, 0.9),
}


def forecast(
    *,
    kind: Objective = "per_token",
    weights: SequenceWeights = "one",
    log_prob: Tensor = LOG_PROB,
    update: Update = "step",
    **found: Any,
) -> EntropyForecast:
    objective = EntropyObjective(kind, weights)
    made = before_update(Scores(log_prob, ENTROPY, RESPONSES), objective, update)
    found = FIRST_ORDER | AFTER | found
    for name in ("first_order", "finite_step"):
        if (change := found.pop(name)) is not None:
            made = with_change(made, name, change, RESPONSES)  # type: ignore[arg-type]
    return judged(dataclasses.replace(made, **found), RESPONSES, objective)


def on_same_prefixes(true: float, linear: float | None = -0.1) -> dict[str, Any]:
    return {"fixed_prefixes": FixedPrefixes(true, linear)}


NO_FIRST_ORDER: dict[str, Any] = {"first_order": None, "bars_dot": None, "fixed_prefixes": FixedPrefixes(-0.11)}


def of(change: EntropyChange) -> Estimate:
    return Estimate(change.delta, change.se, change.low, change.high)


def test_along_a_step_the_numbers_are_those_of_the_finite_step() -> None:
    result = forecast()
    numbers = (result.delta, result.se, result.low, result.high, result.v_x)
    assert numbers == pytest.approx((-0.21, 0.11, -0.45, 0.03, 0.0121))
    assert (result.first_order, result.finite_step) == (of(CHANGE), of(STEP))
    assert (result.entropy, result.bars_dot, result.support) == (1.0, -0.2, WHOLE)
    assert (result.n_evaluation, result.n_update) == (2, 0)
    assert result.frac_var == pytest.approx((0.11 / 0.21) ** 2)
    metrics = result.metrics()
    assert metrics["entropy/linear_over_true"] == pytest.approx(0.1 / 0.11)
    assert (metrics["entropy/delta_importance"], metrics["entropy/delta_rollouts"]) == (-0.22, None)
    assert (metrics["entropy/delta_first_order"], metrics["entropy/delta_finite_step"]) == (-0.2, None)
    assert str(result).endswith("forecast -2.10e-01 ± 1.1e-01 nats a token; first order -2.00e-01 ± 1.0e-01")
    assert (
        result.surprise_sd
        == metrics["entropy/evaluation_surprise_sd"]
        == pytest.approx(((0.25 + 0.25 + 1 + 1) / 4) ** 0.5)
    )
    alone = forecast(**NO_FIRST_ORDER)
    assert (alone.delta, alone.first_order, alone.bars_dot) == (-0.21, None, None)
    assert alone.fixed_prefixes == FixedPrefixes(-0.11)
    assert alone.is_valid


def test_along_gradients_the_numbers_are_those_to_first_order() -> None:
    result = forecast(update="gradient")
    assert (result.delta, result.se, result.finite_step) == (-0.2, pytest.approx(0.1), of(STEP))
    assert [(s.prompt, s.change) for s in result.shares] == [(3, pytest.approx(-0.15)), (5, pytest.approx(-0.05))]
    metrics = result.metrics()
    assert (metrics["entropy/delta_finite_step"], metrics["entropy/delta_finite_step_se"]) == (
        -0.21,
        pytest.approx(0.11),
    )
    assert "the step -2.10e-01 ± 1.1e-01" in str(result)


def test_along_gradients_the_interval_includes_the_deviation_from_first_order() -> None:
    for truth, low, high in ((-0.11, -0.41, 0.0), (-0.09, -0.4, 0.01), (-0.1, -0.4, 0.0)):
        result = forecast(**on_same_prefixes(truth), update="gradient")
        assert (result.low, result.high) == (pytest.approx(low), pytest.approx(high, abs=1e-12))
        assert result.is_valid
    # The entropy of a sum over 2 tokens deviates twice as much as that of a token.
    assert forecast(kind="sequence", update="gradient").low == pytest.approx(-0.42)
    assert forecast(kind="sequence", weights="length", update="gradient").low == pytest.approx(-0.41)
    # Another step on the same prefixes says nothing of this one.
    assert forecast(**on_same_prefixes(-0.11, None), update="gradient").low == pytest.approx(-0.4)


def test_a_change_that_few_responses_carry_is_not_known() -> None:
    few = MeasuredChange(-0.258, 0.002, 0.02)
    assert str(few) == "not known (effective sample size 0.02 of the responses)"
    metrics = forecast(importance=few).metrics()
    assert (metrics["entropy/delta_importance"], metrics["entropy/ess_fraction"]) == (None, 0.02)
    assert forecast(importance=few).is_valid  # whole responses say nothing of the positions
    assert forecast(importance=MeasuredChange(-0.258, 0.002, 0.5)).metrics()["entropy/delta_importance"] == -0.258


def test_a_step_without_support_is_not_to_be_trusted() -> None:
    assert forecast(support=Support(0.55, 0.4, 12)).is_valid
    few = forecast(support=Support(0.45, 0.0, None)).reason
    assert "their effective sample size is 45\xa0% of their number, a mean over positions: use a smaller" in few
    result = forecast(support=Support(0.1, 0.6, 12))
    assert result.reason.startswith(f"{TOO_LARGE} for these responses: their effective sample")
    assert "; from token 12 on it falls below 20\xa0%, and tokens of which" in result.reason
    assert "carry 60\xa0% of the entropy after the step" in result.reason
    metrics = result.metrics()
    assert (metrics["entropy/support"], metrics["entropy/unsupported"]) == (0.1, 0.6)


def test_a_policy_that_is_almost_uniform_gets_no_advice_on_the_learning_rate() -> None:
    uniform = -ENTROPY + torch.tensor([[0.05, -0.05], [0.05, -0.05]])
    bent = on_same_prefixes(-0.5)
    reason = forecast(**bent, log_prob=uniform, update="gradient").reason
    assert "the policy is almost uniform, where the entropy has no slope" in reason
    assert "learning rate" not in reason
    assert forecast(log_prob=uniform, update="gradient").is_valid  # as long as first order agrees with the truth
    assert forecast(**bent, log_prob=uniform).is_valid  # a finite step needs no slope


def test_responses_of_another_policy_are_named() -> None:
    """256 tokens whose surprise is 1.5 nats where the entropy is 1, and less than the entropy for the other sign."""
    responses = Responses(torch.ones(16, 16), torch.arange(16) // 2)
    for surprise, sign, cause in ((1.5, "less likely", "older weights"), (0.5, "more likely", "lower temperature")):
        log_prob, entropy = torch.full((16, 16), -surprise), torch.ones(16, 16)
        test = OwnPolicyTest.of(log_prob, entropy, responses)
        assert test is not None
        reason = test.why_not
        assert f"{sign} than the policy's entropy says, by 50\xa0% of it (16 standard errors)" in reason
        assert cause in reason


def test_the_first_of_several_reasons_is_given() -> None:
    bent, doubtful, no_after = on_same_prefixes(-0.5), {"doubt": "lost in rounding"}, dict.fromkeys(AFTER)
    few = {**doubtful, "first_order": dataclasses.replace(CHANGE, reason="too few prompts")}
    assert "the step is too large to be linear" in forecast(**bent, update="gradient").reason
    assert forecast(**bent, **doubtful, update="gradient").reason == "lost in rounding"
    unknown = forecast(**no_after, **doubtful, update="gradient")
    assert unknown.reason == "the policy's scores are not finite after the step"
    assert forecast(**no_after, **few, update="gradient").reason == "too few prompts"
    # A finite step stands without derivatives.
    result = forecast(**bent, **few)
    assert (result.is_valid, result.doubt) == (True, "lost in rounding")


def test_unknown_numbers_are_none_everywhere() -> None:
    result = forecast(**dict.fromkeys([*FIRST_ORDER, *AFTER]))
    assert (result.delta, result.se, result.low, result.high, result.v_x, result.bars_dot) == (None,) * 6
    assert str(result) == "entropy change unknown: the policy's scores are not finite after the step"
    assert (result.frac_var, result.sharpening, result.drift, result.shares) == (None, None, None, ())
    empty = EntropyForecast(reason="why", objective="sequence", update="step")
    assert {name for name, value in empty.metrics().items() if value} == set()
    assert forecast(**on_same_prefixes(0.0)).metrics()["entropy/linear_over_true"] is None
    assert forecast(**NO_FIRST_ORDER).metrics()["entropy/linear_over_true"] is None


def test_causes_of_a_step_and_of_gradients() -> None:
    prompts = (Cause(1, -0.2, -0.3, 0.1), Cause(2, 0.1, 0.1, 0.0))
    assert Causes.of(-0.5, prompts, momentum=-0.25, decay=-0.05) == Causes(
        -0.25, pytest.approx(-0.2), -0.05, prompts, pytest.approx(0.5)
    )
    assert Causes.of(-0.5, momentum=-0.25) == Causes(-0.25, -0.25, 0.0, (), None)
    assert Causes.of(-0.1, prompts) == Causes(None, -0.1, 0.0, prompts, pytest.approx(1.0))
    assert Causes.of(0.0, prompts).explained is None
