"""The forecast of an entropy change beside loops over prompts, real steps, and responses sampled after them."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor, nn

from sonde.policy.entropy_change import EntropyChangeProbe
from sonde.policy.scoring.rollouts import Rollouts
from tests.policy.entropy_scene import N_E, N_U, Scene, coefficients, first_order, gradient_per_prompt
from tests.small_policy import STATISTICS, drawn, policy, real_step, sample


@pytest.mark.parametrize("kind", ["adamw", "momentum"])
@pytest.mark.parametrize(
    ("objective", "weights"),
    [("per_token", "one"), ("sequence", "one"), ("sequence", "length"), ("sequence", "longest")],
)
def test_each_prompts_derivative_is_its_gradient_along_the_real_step(kind: str, objective: str, weights: str) -> None:
    scene = Scene(kind)
    x = gradient_per_prompt(scene, scene.E, coefficients(objective, weights, scene))
    step = torch.cat([d.flatten() for d in real_step(scene.model, scene.optimizer).values()]).double()
    expected = x @ step
    found = first_order(scene, objective=objective, sequence_weights=weights)
    # Central differences of fp32 scores keep 2 to 3 digits; the real step is rounded to the parameters' fp32.
    off = 6e-3
    assert float((found.change.per_prompt - expected).norm() / expected.norm()) < off
    assert found.change.delta == pytest.approx(float(expected.mean()), abs=off * float(expected.std()))
    assert found.bars_dot == found.change.delta
    assert found.change.se == pytest.approx(math.sqrt(found.change.v_x))
    if objective == "sequence":
        assert found.change.se == pytest.approx(float(expected.std()) / N_E**0.5, rel=off)


@pytest.mark.parametrize(("objective", "weights"), [("per_token", "one"), ("sequence", "one"), ("sequence", "length")])
@pytest.mark.shows("entropy change", "one process")
def test_a_small_step_is_the_derivative_along_it(objective: str, weights: str) -> None:
    """The derivative has a baseline, which takes away a part of the scatter that the finite step has."""
    scene = Scene(lr=1e-5, dtype=torch.float64)
    probe = scene.probe(objective=objective, sequence_weights=weights)
    forecast = probe.forecast(scene.E, causes=True)
    assert forecast.first_order is not None
    assert abs(forecast.delta - forecast.first_order.delta) < 0.2 * forecast.se
    assert forecast.se == pytest.approx(forecast.first_order.se, rel=0.15)
    assert sum(s.change for s in forecast.shares) == pytest.approx(forecast.delta, rel=1e-6)
    assert (forecast.n_evaluation, forecast.n_update, forecast.v_y) == (N_E, 0, 0.0)
    assert forecast.metrics()["entropy/n_update_prompts"] is None
    assert probe.forecast(scene.E, scene.U).metrics()["entropy/n_update_prompts"] == N_U
    assert forecast.low < forecast.delta < forecast.high
    if weights == "one":
        assert forecast.sharpening + forecast.drift == pytest.approx(forecast.delta)
        assert all(s.change == pytest.approx(s.sharpening + s.drift) for s in forecast.shares)
    assert abs(forecast.fixed_prefixes.true - forecast.fixed_prefixes.linear) < 0.01 * forecast.first_order.se


def test_the_truth_is_the_effect_of_a_real_step() -> None:
    scene = Scene(lr=5e-4)
    with torch.no_grad():
        _, before = STATISTICS(scene.model, scene.E)
    forecast = scene.probe().forecast(scene.E, causes=True)
    scene.optimizer.step()
    with torch.no_grad():
        _, after = STATISTICS(scene.model, scene.E)
    mask = scene.E.mask
    true = float((after - before)[mask].double().sum() / mask.sum())
    assert forecast.fixed_prefixes is not None
    assert forecast.importance is not None
    # The real step rounds its last bits differently.
    assert forecast.fixed_prefixes.true == pytest.approx(true, rel=1e-3)
    assert forecast.fixed_prefixes.linear_over_true == pytest.approx(1.0, abs=0.1)
    assert forecast.is_valid, forecast.reason
    # Both scatter with the responses, in different ways.
    assert abs(forecast.delta - forecast.importance.delta) < 2 * forecast.se
    assert 0.9 < forecast.importance.ess_fraction <= 1.0
    assert "nats a token" in str(forecast)


@pytest.mark.parametrize("objective", ["per_token", "sequence"])
def test_fresh_rollouts_agree_within_their_errors(objective: str) -> None:
    scene = Scene(lr=2e-3)
    E = drawn(scene.model, 0, 150, seed=3, n_each=8)
    probe = scene.probe(
        objective=objective, micro_batch_prompts=50, sampler=lambda m: sample(m, list(range(150)), n_each=16)
    )
    forecast = probe.measure(E)
    assert forecast.rollouts is not None
    assert forecast.rollouts.se > 0
    error = math.hypot(forecast.se, forecast.rollouts.se)
    assert abs(forecast.delta - forecast.rollouts.delta) < 3 * error
    assert forecast.rollouts.se < 10 * abs(forecast.rollouts.delta)
    assert 0 < forecast.rollouts.n_differ < 150 * 16


def test_a_step_beyond_all_support_is_not_to_be_trusted() -> None:
    scene = Scene(lr=0.3)
    forecast = scene.probe().forecast(drawn(policy(), 0, N_E, seed=1))
    assert not forecast.is_valid
    assert "the step is too large for these responses: their effective sample size is 26\xa0%" in forecast.reason
    assert math.isfinite(forecast.delta)
    assert math.isfinite(forecast.se)
    assert forecast.support.unsupported > 0.5


@pytest.mark.parametrize("kind", ["adamw", "momentum", "rmsprop"])
def test_around_a_real_step(kind: str) -> None:
    scene = Scene(kind)
    expected = None if kind == "rmsprop" else scene.probe().forecast(scene.E, causes=True)
    before = [p.detach().clone() for p in scene.model.parameters()]
    step = real_step(scene.model, scene.optimizer)
    probe = scene.probe(sampler=lambda m: sample(m, list(range(20))))
    with probe.around_step(scene.E, causes=True) as around:
        with pytest.raises(RuntimeError, match="known after the with block"):
            _ = around.forecast
        scene.optimizer.step()
    for p, old, delta in zip(scene.model.parameters(), before, step.values(), strict=True):
        assert torch.allclose(p.detach() - old, delta, atol=1e-7)
    forecast = around.forecast
    assert forecast.is_valid, forecast.reason
    assert forecast.rollouts is not None
    assert forecast.fixed_prefixes is not None
    assert (forecast.first_order is None) == (expected is None)
    if expected is not None:
        assert abs(forecast.fixed_prefixes.true - forecast.fixed_prefixes.linear) < 0.5 * forecast.se
        # The real step rounds its last bits differently.
        assert forecast.delta == pytest.approx(expected.delta, rel=1e-3)
        assert forecast.first_order.delta == pytest.approx(expected.first_order.delta, rel=1e-3)


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


def test_a_gradient_scale_scales_the_step() -> None:
    scene = Scene("sgd")
    whole = scene.probe().forecast(scene.E)
    half = scene.probe().forecast(scene.E, gradient_scale=0.5)
    assert half.delta == pytest.approx(0.5 * whole.delta, rel=2e-2)


def test_an_optimizer_may_hold_parameters_of_other_models() -> None:
    scene = Scene("sgd")
    alone = scene.probe().forecast(scene.E, scene.U, causes=True)
    critic = nn.Linear(3, 1)
    critic(torch.ones(1, 3)).sum().backward()
    both = torch.optim.SGD([*scene.model.parameters(), *critic.parameters()], lr=1e-3)
    forecast = EntropyChangeProbe(scene.model, both).forecast(scene.E, scene.U, causes=True)
    assert forecast.delta == alone.delta
    assert forecast.causes is not None
    assert forecast.causes.explained == pytest.approx(1.0, rel=2e-2)


def test_a_step_of_no_optimizer_of_torch_is_measured() -> None:
    scene = Scene()
    probe = EntropyChangeProbe(scene.model, None)
    with probe.around_step(scene.E) as around:
        scene.optimizer.step()
    other = Scene()
    assert around.forecast.delta == pytest.approx(other.probe().forecast(other.E).delta, rel=1e-3)
    with pytest.raises(ValueError, match="use around_step"):
        probe.forecast(scene.E)


def test_the_growth_of_the_peak_memory_counts_from_the_first_forward_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of the first check, which reach the peak. Here the peak is the number of forwards."""
    n_forwards = 0

    def statistics(model: nn.Module, rollouts: Rollouts) -> tuple[Tensor, Tensor]:
        nonlocal n_forwards
        n_forwards += 1
        return STATISTICS(model, rollouts)

    monkeypatch.setattr("sonde.policy.entropy_measurement._peak_bytes", lambda device: n_forwards)
    scene = Scene()
    assert scene.probe(token_statistics=statistics).forecast(scene.E).peak_bytes == n_forwards


def test_a_mask_that_is_not_that_of_the_sampled_tokens_causes_a_warning() -> None:
    scene = Scene()
    mask = torch.cat([torch.ones(len(scene.E), 1, dtype=torch.bool), scene.E.mask], 1)
    with pytest.warns(UserWarning, match="the mask begins with the same token in all responses to a prompt"):
        scene.probe().forecast(dataclasses.replace(scene.E, mask=mask))
