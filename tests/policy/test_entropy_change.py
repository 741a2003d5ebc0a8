"""Forecasts beside responses sampled after the step, of steps that change on the way, and of few responses."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from sonde.policy.scoring.rollouts import Rollouts
from tests.policy.entropy_scene import N_E, Scene
from tests.small_policy import drawn, policy, sample


@pytest.mark.parametrize("objective", ["per_token", "sequence"])
def test_fresh_rollouts_agree_within_their_errors(objective: str) -> None:
    scene = Scene(lr=2e-3)
    E = drawn(scene.model, 0, 150, seed=3, n_each=8)
    probe = scene.probe(
        objective=objective, micro_batch_prompts=50, sampler=lambda m: sample(m, list(range(150)), n_each=16)
    )
    forecast = probe.forecast(E, rollouts=True)
    assert forecast.rollouts is not None
    assert forecast.rollouts.se > 0
    error = math.hypot(forecast.se, forecast.rollouts.se)
    assert abs(forecast.delta - forecast.rollouts.delta) < 3 * error
    assert forecast.rollouts.se < 10 * abs(forecast.rollouts.delta)
    assert f"fresh rollouts {forecast.rollouts}" in str(forecast)


def test_a_step_beyond_all_support_is_not_to_be_trusted() -> None:
    scene = Scene(lr=0.3)
    forecast = scene.probe().forecast(drawn(policy(), 0, N_E, seed=1))
    assert not forecast.is_valid
    assert "the step is too large for these responses: their effective sample size is 26\xa0%" in forecast.reason
    assert math.isfinite(forecast.delta)
    assert math.isfinite(forecast.se)
    assert forecast.support.unsupported > 0.5


def test_a_step_is_measured_though_it_was_clipped_after_the_derivatives() -> None:
    scene = Scene("sgd")
    with scene.probe().around_step(scene.E, causes=True) as around:
        torch.nn.utils.clip_grad_norm_(scene.model.parameters(), 1e-3)
        scene.optimizer.step()
    forecast = around.forecast
    assert forecast.is_valid, forecast.reason
    assert abs(forecast.delta) < 0.1 * abs(forecast.first_order.delta)
    assert "derivatives are along another step" in forecast.doubt


def test_a_forecast_along_gradients_beside_the_real_step() -> None:
    scene = Scene("sgd", lr=1e-3)
    with scene.probe(update="gradient").around_step(scene.E, scene.U) as around:
        scene.optimizer.step()
    forecast = around.forecast
    expected = Scene("sgd", lr=1e-3)
    step = expected.probe().forecast(expected.E)
    assert forecast.finite_step.delta == pytest.approx(step.delta, rel=1e-3)
    assert forecast.delta == pytest.approx(
        expected.probe(update="gradient").forecast(expected.E, expected.U).delta, rel=1e-6
    )
    # SGD's step is η times the mean gradient: both are of the same step here.
    assert forecast.delta == pytest.approx(forecast.finite_step.delta, abs=0.2 * forecast.se)
    assert forecast.fixed_prefixes.linear is None
    assert "the step " in str(forecast)
    assert forecast.metrics()["entropy/delta_finite_step"] == forecast.finite_step.delta


def one_each(scene: Scene) -> Rollouts:
    return scene.E.rows(torch.arange(0, len(scene.E), 4))


@pytest.mark.parametrize(
    "options", [{}, *({"objective": "sequence", "sequence_weights": w} for w in ("one", "length"))]
)
def test_one_response_to_each_prompt_is_enough_for_a_finite_step(options: dict[str, Any]) -> None:
    scene = Scene()
    forecast = scene.probe(**options).forecast(one_each(scene))
    assert forecast.is_valid, forecast.reason
    assert forecast.low < forecast.delta < forecast.high
    assert forecast.n_evaluation == N_E


def test_derivatives_need_two_responses_only_where_weights_depend_on_them() -> None:
    scene = Scene()
    assert scene.probe().forecast(one_each(scene), causes=True).first_order.se is not None
    with pytest.raises(ValueError, match="leave-one-out needs at least 2 responses to every prompt"):
        scene.probe(objective="sequence", sequence_weights="length").forecast(one_each(scene), causes=True)


def test_a_mask_that_is_not_that_of_the_sampled_tokens_causes_a_warning() -> None:
    scene = Scene()
    mask = torch.cat([torch.ones(len(scene.E), 1, dtype=torch.bool), scene.E.mask], 1)
    with pytest.warns(UserWarning, match="the mask begins with the same token in all responses to a prompt"):
        scene.probe().forecast(dataclasses.replace(scene.E, mask=mask))
