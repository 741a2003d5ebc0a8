"""Models and responses that cannot be measured: a refusal, or None with a reason."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sonde.contrib.hold_entropy import HoldEntropy
from sonde.policy.entropy_change import EntropyChangeProbe
from sonde.policy.entropy_options import EntropyChangeOptions
from sonde.policy.policy_entropy import PolicyEntropyProbe
from sonde.policy.prompt_noise import PromptNoiseProbe
from sonde.policy.scoring.rollouts import Rollouts
from sonde.policy.scoring.token_statistics import CausalLMStatistics
from sonde.policy.stats.entropy_forecast import EntropyForecast
from tests.policy.entropy_scene import Scene
from tests.small_policy import STATISTICS, SmallPolicy, drawn, loss, optimizer_of, policy, rollouts


def test_dropout_is_off_during_a_measurement() -> None:
    scene = Scene()
    expected = scene.probe().forecast(scene.E)
    scene.model.dropout.p = 0.5
    scene.model.train()
    assert scene.probe().forecast(scene.E).delta == expected.delta
    assert scene.model.dropout.training


def test_a_model_that_is_random_without_dropout_is_refused() -> None:
    class Noisy(SmallPolicy):
        def forward(self, input_ids: Tensor) -> Tensor:
            logits = super().forward(input_ids)
            return logits + torch.randn_like(logits)

    model = Noisy()
    optimizer = optimizer_of(model)
    loss(model, drawn(model, 0, 4, seed=0)).backward()
    with pytest.raises(ValueError, match=r"two forwards of the same responses are .* nats apart"):
        EntropyChangeProbe(model, optimizer).forecast(drawn(model, 0, 4, seed=1))


@pytest.mark.parametrize(
    ("update", "n_e", "n_u", "message"),
    [
        ("step", 1, 12, "at least 2 evaluation prompts, got 1: pass more"),
        ("gradient", 1, 12, "at least 2 prompts to evaluate and 2 to update on, got 1 and 12"),
        ("gradient", 24, 1, "at least 2 prompts to evaluate and 2 to update on, got 24 and 1"),
    ],
)
def test_one_prompt_gives_the_change_without_an_error(update: str, n_e: int, n_u: int, message: str) -> None:
    scene = Scene()
    forecast = scene.probe(update=update).forecast(
        scene.E.rows(torch.arange(4 * n_e)), scene.U.rows(torch.arange(4 * n_u))
    )
    assert math.isfinite(forecast.delta)
    assert (forecast.se, forecast.low, forecast.high) == (None,) * 3
    assert (forecast.n_evaluation, forecast.n_update) == (n_e, n_u)
    assert forecast.reason.startswith(f"its standard error is not known: it needs {message}")
    assert not forecast.is_valid
    assert "± unknown nats a token; " in str(forecast)
    assert str(forecast).endswith(forecast.reason)


def test_gradients_that_are_not_finite() -> None:
    scene = Scene()
    next(scene.model.parameters()).grad[0, 0] = torch.inf  # type: ignore[index]
    forecast = scene.probe().forecast(scene.E)
    assert (forecast.delta, forecast.reason, forecast.is_valid) == (None, "the step is not finite", False)


def test_a_forecast_reports_that_it_is_lost_in_rounding() -> None:
    scene = Scene()

    def rounded(model: nn.Module, rollouts: Rollouts, /) -> tuple[Tensor, Tensor]:
        """Scores with the digits of bf16, and the gradients of scores that are not rounded."""
        s, h = STATISTICS(model, rollouts)
        return tuple(t + ((t * 64).round() / 64 - t).detach() for t in (s, h))  # type: ignore[return-value]

    options = {"update": "gradient"}
    forecast = scene.probe(token_statistics=rounded, **options).forecast(scene.E, scene.U)
    assert "lost in rounding" in forecast.reason
    assert not forecast.is_valid
    assert scene.probe(**options).forecast(scene.E, scene.U).is_valid
    step = scene.probe(token_statistics=rounded).forecast(scene.E, causes=True)
    assert "lost in rounding" in step.doubt
    assert step.is_valid, step.reason  # scores after a finite step need no derivative


def test_scores_that_are_not_finite_before_or_after_the_step() -> None:
    scene = Scene()
    with torch.no_grad():
        next(scene.model.parameters())[1] = torch.nan
    forecast = scene.probe().forecast(scene.E)
    assert (forecast.delta, forecast.reason) == (None, "the policy's scores are not finite")
    scene = Scene()
    with scene.probe().around_step(scene.E) as around, torch.no_grad():
        next(scene.model.parameters())[1] = torch.nan
    assert around.forecast.reason == "the policy's scores are not finite after the step"
    assert not around.forecast.is_valid
    assert around.forecast.delta is around.forecast.importance is None
    assert math.isfinite(around.forecast.entropy)


def test_evaluation_and_update_that_share_prompts() -> None:
    scene = Scene()
    with pytest.warns(UserWarning, match=r"share prompts \(24\), \[0, 1, 2\] among them"):
        scene.probe().forecast(scene.E, scene.E)


def forecast(E: dict[str, Any] | None = None, U: dict[str, Any] | None = None, **options: Any) -> EntropyForecast:
    scene = Scene()
    update = None if U is None else rollouts(**({"prompt": torch.arange(4).repeat_interleave(4) + 50} | U))
    return scene.probe(**options).forecast(rollouts(**(E or {})), update)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: forecast({"log_prob": torch.full((16, 6), 0.7)}), r"is up to 0\.7, and a token's .* never above 0"),
        (
            lambda: (
                Scene()
                .probe(sampler=lambda m: rollouts(log_prob=-torch.ones(16, 6)))
                .forecast(rollouts(), rollouts=True)
            ),
            "the sampler's responses have log_prob=, so another policy sampled them",
        ),
        (
            lambda: EntropyChangeProbe(Scene().model, None).forecast(rollouts()),
            "without its optimizer: use around_step",
        ),
        (lambda: EntropyChangeProbe(None, None), "the model must be a torch.nn.Module, got a NoneType"),  # type: ignore[arg-type]
        (lambda: PromptNoiseProbe([1]), "the model must be a torch.nn.Module, got a list"),  # type: ignore[arg-type]
        (lambda: PolicyEntropyProbe(Scene().model).measure([1]), "the responses must be sonde.Rollouts, got a list"),  # type: ignore[arg-type]
        (lambda: PromptNoiseProbe(Scene().model).measure(None), "the responses must be sonde.Rollouts, got a NoneType"),  # type: ignore[arg-type]
        (
            lambda: EntropyChangeProbe(Scene().model, None, process_group="x"),  # type: ignore[arg-type]
            "process_group must be a torch.distributed.ProcessGroup",
        ),
        (lambda: forecast(token_statistics=lambda m, r: None), r"got \['NoneType'\]"),
        (lambda: EntropyChangeOptions(clip_at="2"), "clip_at must be above 1"),  # type: ignore[arg-type]
        (lambda: Scene().probe().forecast(rollouts(), gradient_scale=-1.0), "gradient_scale must not be negative"),
        (
            lambda: forecast({"log_prob": torch.zeros(16, 6)}, {}, update="gradient"),
            "log_prob=, the sampler's own log-probabilities, and update='gradient' needs responses of the policy as it",
        ),
        (lambda: Scene().probe().forecast({"input_ids": 1}), "evaluation responses must be sonde.Rollouts, got a dict"),
        (lambda: Scene().probe().forecast(rollouts(), [1]), "update responses must be sonde.Rollouts, got a list"),
        (
            lambda: Scene().probe(sampler=lambda model: [1]).forecast(rollouts(), rollouts=True),
            "the sampler's responses must be sonde.Rollouts, got a list",
        ),
        (lambda: forecast(U={"advantage": None}), "update responses need their advantages"),
        (lambda: forecast(update="gradient"), "pass their rollouts"),
        (lambda: forecast(token_statistics=lambda m, r: (torch.zeros(2), torch.zeros(2))), "token statistics must be"),
        (lambda: forecast(objective="tokens"), "objective must be one of per_token, sequence, got 'tokens'"),
        (lambda: forecast(micro_batch_prompts=0), "micro_batch_prompts must be a whole number from 1 up, got 0"),
        (lambda: EntropyChangeOptions(budget=2.0), "budget must be a part of the run's time"),
        (lambda: EntropyChangeOptions(step_size=0.0), "step_size must be positive"),
        (lambda: forecast(clip_at=1.0), "clip_at must be above 1, as a multiple of the mean weight, got 1.0"),
        (lambda: forecast(sequence_weights="shortest"), "sequence_weights must be one of one, length, got"),
        (
            lambda: forecast(token_statistics=CausalLMStatistics),
            r"got the class CausalLMStatistics: pass an object of it, CausalLMStatistics\(\)",
        ),
        (lambda: PolicyEntropyProbe(policy(), token_statistics=3), "token_statistics must be a function .* got 3"),  # type: ignore[arg-type]
        (lambda: PromptNoiseProbe(policy(), token_statistics=3), "token_statistics must be a function .* got 3"),  # type: ignore[arg-type]
        (lambda: forecast(sampler=rollouts()), "sampler must be a function of the model .* got a Rollouts"),
        (lambda: EntropyChangeProbe(policy(), "adam"), "the optimizer must have param_groups, .* got 'adam'"),
        (
            lambda: EntropyChangeProbe(policy(), None, grad_scaler=torch.amp.GradScaler),  # type: ignore[arg-type]
            "grad_scaler must be a torch.amp.GradScaler",
        ),
        (
            lambda: Scene().probe().forecast(rollouts(), gradient_scale=None),  # type: ignore[arg-type]
            "gradient_scale must be a number or a tensor of one element, got None",
        ),
        (lambda: forecast().table(["2+3="]), "texts must map the prompts' numbers to their texts, got a list"),  # type: ignore[arg-type]
    ],
)
def test_bad_input(call: Callable[[], EntropyForecast], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_calls_out_of_order() -> None:
    scene = Scene()
    with (
        pytest.raises(ValueError, match="forecasts along the update prompts' gradients: pass their rollouts"),
        scene.probe(update="gradient").around_step(scene.E),
    ):
        pass
    with pytest.raises(RuntimeError, match="needs a sampler"):
        scene.probe().forecast(scene.E, rollouts=True)
    scene.optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="no parameter has a gradient: call this after the backward"):
        scene.probe().forecast(scene.E)


def test_an_optimizer_without_state_and_one_that_cannot_be_forecast() -> None:
    scene = Scene("rmsprop")
    with pytest.raises(ValueError, match=r"cannot forecast the step of RMSprop: use around_step\(\), which"):
        scene.probe().forecast(scene.E)
    fresh = torch.optim.AdamW(scene.model.parameters(), lr=1e-3)
    with pytest.raises(ValueError, match="no second moment"):
        EntropyChangeProbe(scene.model, fresh, EntropyChangeOptions(update="gradient")).forecast(scene.E, scene.U)
    # The first step can be forecast without state.
    assert math.isfinite(EntropyChangeProbe(scene.model, fresh).forecast(scene.E).delta)


@pytest.mark.parametrize("kind", ["adamw", "sgd", "rmsprop"])
def test_the_optimizer_of_another_model_is_refused(kind: str) -> None:
    scene = Scene(kind)
    other = optimizer_of(policy(seed=1), kind)
    with pytest.raises(ValueError, match=r"holds none of the model's 6 trainable parameters.* of another model"):
        EntropyChangeProbe(scene.model, other)
    part = torch.optim.AdamW(scene.model.out.parameters())
    EntropyChangeProbe(scene.model, part)  # the rest of the model may be trained by nobody


@pytest.mark.parametrize("kind", ["adamw", "sgd", "rmsprop"])
def test_a_step_that_is_skipped_inside_around_step(kind: str) -> None:
    scene = Scene(kind)
    with torch.no_grad():
        _, h = STATISTICS(scene.model, scene.E)
    with scene.probe().around_step(scene.E) as around:
        pass
    forecast = around.forecast
    assert (forecast.delta, forecast.se, forecast.importance, forecast.is_valid) == (None, None, None, False)
    assert "no parameter moved in the block of around_step(): the step was skipped" in forecast.reason
    assert forecast.entropy == pytest.approx(float(h[scene.E.mask].mean()))
    assert forecast.metrics()["entropy/evaluation_per_token"] == forecast.entropy
    with scene.probe().around_step(scene.E) as around:
        scene.optimizer.step()
    assert around.forecast.is_valid, around.forecast.reason


def test_a_step_without_a_gradient_is_not_called_skipped() -> None:
    scene = Scene("sgd")
    scene.optimizer.zero_grad()
    loss(scene.model, dataclasses.replace(scene.U, advantage=torch.zeros(len(scene.U)))).backward()
    with scene.probe().around_step(scene.E) as around:
        scene.optimizer.step()
    assert around.forecast.reason.startswith("all gradients were 0, as where the advantages of a whole batch are")


def test_a_step_that_a_grad_scaler_skips() -> None:
    scene = Scene()
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    next(scene.model.parameters()).grad[0, 0] = torch.inf  # type: ignore[index]
    scaler.scale(torch.ones(()))
    with scene.probe().around_step(scene.E) as around:
        scaler.step(scene.optimizer)
    assert "as a GradScaler does after gradients that are not finite" in around.forecast.reason


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_a_learning_rate_of_0_is_a_step_of_0(kind: str) -> None:
    """A warm-up may begin at 0: the forecast is right, and there is nothing to refuse."""
    scene = Scene(kind)
    scene.optimizer.param_groups[0]["lr"] = 0.0
    with scene.probe().around_step(scene.E) as around:
        scene.optimizer.step()
    assert (around.forecast.delta, around.forecast.is_valid) == (0.0, True)


def test_another_optimizer_that_steps_in_the_same_block_is_noticed() -> None:
    scene = Scene("sgd")
    part = torch.optim.SGD(scene.model.out.parameters(), lr=1e-3)
    rest = torch.optim.SGD([p for n, p in scene.model.named_parameters() if not n.startswith("out")], lr=1e-3)
    probe = EntropyChangeProbe(scene.model, part, beside=HoldEntropy())
    with probe.around_step(scene.E, causes=True) as around:
        part.step()
    assert around.forecast.doubt == ""
    assert around.forecast.coefficient_to_hold.change_per_unit is not None
    with probe.around_step(scene.E, causes=True) as around:
        part.step()
        rest.step()
    assert "parameters moved in the block of around_step() that are not in" in around.forecast.doubt
    assert around.forecast.coefficient_to_hold.reason == around.forecast.doubt
    assert around.forecast.is_valid, around.forecast.reason  # both steps are measured


def detached(model: nn.Module, rollouts: Rollouts, /) -> tuple[Tensor, Tensor]:
    """Token statistics whose entropy passes through numpy."""
    s, h = STATISTICS(model, rollouts)
    return s, torch.from_numpy(h.detach().numpy())


def test_scores_without_a_graph_have_a_finite_step() -> None:
    scene = Scene()
    forecast = scene.probe(token_statistics=detached).forecast(scene.E)
    assert forecast.delta == scene.probe().forecast(scene.E).delta


@pytest.mark.parametrize(
    ("options", "causes"),
    [
        ({"beside": HoldEntropy()}, False),
        ({"update": "gradient"}, False),
        ({}, True),
    ],
)
def test_scores_without_a_graph_are_refused_where_gradients_are_needed(options: dict[str, Any], causes: bool) -> None:
    scene = Scene()
    with pytest.raises(ValueError, match=r"no gradient can be taken of: compute both in torch, without detach\(\)"):
        scene.probe(token_statistics=detached, **options).forecast(scene.E, scene.U, causes=causes)
