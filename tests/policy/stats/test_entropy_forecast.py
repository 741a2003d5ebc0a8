"""Forecasts made of given values: intervals, reasons, and unknown numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from sonde.policy.stats.attribution import Cause, Causes, split_gradient, split_step
from sonde.policy.stats.entropy_change import EntropyChange, EntropyObjective, Objective, SequenceWeights
from sonde.policy.stats.entropy_forecast import EntropyForecast, FirstOrder, Truths, entropy_forecast, unknown
from sonde.policy.stats.entropy_gradient import Responses
from sonde.policy.stats.importance import MeasuredChange

# Two prompts with one response each, of 2 tokens with 1 nat each.
RESPONSES = Responses(torch.ones(2, 2), torch.tensor([3, 5]))
ENTROPY = torch.ones(2, 2)
LOG_PROB = torch.tensor([[-0.5, -1.5], [-2.0, -0.0]])
CHANGE = EntropyChange(-0.2, 0.1, -0.4, 0.0, "", torch.tensor([-0.3, -0.1]), torch.tensor([-0.2, 0.0]), 0.01)
FIRST_ORDER = FirstOrder(CHANGE, on_same_prefixes=-0.1, bars_dot=-0.2, derivatives="forward")
TRUTHS = Truths(-0.11, MeasuredChange(-0.21, 0.02, 1.8, 0.9))


def forecast(
    first_order: FirstOrder = FIRST_ORDER,
    truths: Truths | None = TRUTHS,
    kind: Objective = "per_token",
    weights: SequenceWeights = "one",
    log_prob: Tensor = LOG_PROB,
    **options: Any,
) -> EntropyForecast:
    objective = EntropyObjective(kind, weights)
    return entropy_forecast(
        first_order,
        truths,
        log_prob,
        ENTROPY,
        RESPONSES,
        objective=objective,
        update="step",
        level=0.95,
        seconds={"scores": 1.0},
        **options,
    )


def test_the_interval_includes_the_deviation_from_first_order() -> None:
    for truth, low, high in ((-0.11, -0.41, 0.0), (-0.09, -0.4, 0.01), (-0.1, -0.4, 0.0)):
        result = forecast(truths=dataclasses.replace(TRUTHS, on_same_prefixes=truth))
        assert (result.low, result.high) == (pytest.approx(low), pytest.approx(high))
        assert result.is_valid
    # The entropy of a sum over 2 tokens deviates twice as much as that of a token.
    assert forecast(kind="sequence").low == pytest.approx(-0.42)
    assert forecast(kind="sequence", weights="length").low == pytest.approx(-0.41)


def test_numbers_and_parts_are_those_of_the_phases() -> None:
    result = forecast(peak_bytes=7)
    assert (result.delta, result.se, result.entropy, result.v_x, result.bars_dot) == (-0.2, 0.1, 1.0, 0.01, -0.2)
    assert (result.n_evaluation, result.n_update, result.derivatives, result.peak_bytes) == (2, 0, "forward", 7)
    assert [(s.prompt, s.change) for s in result.shares] == [(3, pytest.approx(-0.15)), (5, pytest.approx(-0.05))]
    metrics = result.metrics()
    assert metrics["entropy/linear_over_true"] == pytest.approx(0.1 / 0.11)
    assert (metrics["entropy/delta_importance"], metrics["entropy/delta_rollouts"]) == (-0.21, None)
    assert str(result).endswith("importance sampling -2.10e-01 ± 2.0e-02")
    assert result.surprise_sd == metrics["entropy/surprise_sd"] == pytest.approx(((0.25 + 0.25 + 1 + 1) / 4) ** 0.5)


def test_a_truth_that_few_responses_carry_is_not_known() -> None:
    few = dataclasses.replace(TRUTHS, importance=MeasuredChange(-0.258, 0.002, 0.64, 0.02))
    result = forecast(truths=few)
    assert "importance sampling not known (effective sample size 0.02 of the responses)" in str(result)
    assert "0.258" not in str(result)
    assert "2.58" not in str(result)
    metrics = result.metrics()
    assert (metrics["entropy/delta_importance"], metrics["entropy/ess_fraction"]) == (None, 0.02)
    enough = dataclasses.replace(TRUTHS, importance=MeasuredChange(-0.258, 0.002, 16.0, 0.5))
    assert forecast(truths=enough).metrics()["entropy/delta_importance"] == -0.258


def test_a_policy_that_is_almost_uniform_gets_no_advice_on_the_learning_rate() -> None:
    uniform = -ENTROPY + torch.tensor([[0.05, -0.05], [0.05, -0.05]])
    bent = dataclasses.replace(TRUTHS, on_same_prefixes=-0.5)
    reason = forecast(truths=bent, log_prob=uniform).reason
    assert "the policy is almost uniform, where the entropy has no slope" in reason
    assert "learning rate" not in reason
    assert forecast(log_prob=uniform).is_valid  # as long as first order agrees with the truth
    far = dataclasses.replace(bent, importance=MeasuredChange(-0.5, 0.002, 0.64, 0.02))
    for too_far in (far, dataclasses.replace(far, on_same_prefixes=TRUTHS.on_same_prefixes)):
        reason = forecast(truths=too_far, log_prob=uniform).reason
        assert "almost uniform" in reason
        assert "learning rate" not in reason
        assert "use a smaller learning rate" in forecast(truths=too_far).reason


def test_the_first_of_several_reasons_is_given() -> None:
    bent = dataclasses.replace(TRUTHS, on_same_prefixes=-0.5)
    doubtful = dataclasses.replace(FIRST_ORDER, doubt="lost in rounding")
    few = dataclasses.replace(doubtful, change=dataclasses.replace(CHANGE, reason="too few prompts"))
    assert "the step is too large to be linear" in forecast(truths=bent).reason
    assert forecast(doubtful, bent).reason == "lost in rounding"
    assert forecast(doubtful, None).reason == "the policy's scores are not finite after the step"
    assert forecast(doubtful, None, problem="another step").reason == "another step"
    assert forecast(few, None, problem="another step").reason == "too few prompts"
    assert not forecast(few).is_valid


def test_unknown_numbers_are_none_everywhere() -> None:
    change = EntropyChange(None, None, None, None, "why", torch.tensor([-0.3, -0.1]), None, None)
    result = forecast(FirstOrder(change, -0.1, None, "forward"), None)
    assert (result.delta, result.se, result.low, result.high, result.v_x, result.bars_dot) == (None,) * 6
    assert (result.reason, str(result)) == ("why", "entropy change unknown: why")
    assert [(share.sharpening, share.drift) for share in result.shares] == [(None, None)] * 2
    empty = unknown("why", "sequence", "step")
    assert {name for name, value in empty.metrics().items() if value is not None} == {
        "entropy/is_valid",
        "cost/entropy_seconds",
    }
    still = dataclasses.replace(TRUTHS, on_same_prefixes=0.0)
    assert (
        forecast(dataclasses.replace(FIRST_ORDER, on_same_prefixes=0.0), still).metrics()["entropy/linear_over_true"]
        is None
    )


def test_causes_of_a_step_and_of_gradients() -> None:
    prompts = (Cause(1, -0.2, -0.3, 0.1), Cause(2, 0.1, 0.1, 0.0))
    assert split_step(-0.5, momentum=-0.25, decay=-0.05, prompts=prompts) == Causes(
        -0.25, pytest.approx(-0.2), -0.05, prompts, pytest.approx(0.5)
    )
    assert split_step(-0.5, momentum=-0.25, decay=0.0, prompts=None) == Causes(-0.25, -0.25, 0.0, (), None)
    assert split_step(None, momentum=None, decay=0.0, prompts=prompts) == Causes(None, None, 0.0, prompts, None)
    assert split_gradient(-0.1, prompts) == Causes(None, -0.1, 0.0, prompts, pytest.approx(1.0))
    assert split_gradient(None, prompts).explained is None
