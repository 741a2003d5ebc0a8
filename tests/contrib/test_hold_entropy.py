"""The probe's coefficient to hold the entropy: beside gradients prompt by prompt, and put into a loss."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from sonde.contrib.hold_entropy import HoldEntropy
from sonde.policy.stats.entropy_gradient import on_same_prefixes_coefficients, per_token_coefficients
from sonde.policy.stats.importance import prefix_weights
from tests.policy.entropy_scene import N_E, Scene, gradient_per_prompt, stale
from tests.small_policy import STATISTICS, drawn, optimizer_of, policy


def answer(scene: Scene, gradient: Tensor, kind: str, size: float) -> Tensor:
    """What the optimizer makes of a small ascent in every step, over its size; flat, by the optimizer's formulas."""
    [group] = scene.optimizer.param_groups
    if kind == "sgd":
        return group["lr"] * gradient
    if kind == "momentum":
        return group["lr"] / (1 - group["momentum"]) * gradient
    state = [scene.optimizer.state[p] for p in group["params"]]
    g = torch.cat([p.grad.double().flatten() for p in group["params"]])
    v = torch.cat([s["exp_avg_sq"].double().flatten() for s in state])
    m = torch.cat([s["exp_avg"].double().flatten() for s in state])
    (beta1, beta2), t = group["betas"], float(state[0]["step"]) + 1
    v = (beta2 * v + (1 - beta2) * g.square()) / (1 - beta2**t)
    m = -(beta1 * m + (1 - beta1) * g) / (1 - beta1**t)  # uphill
    m = torch.where(m.abs() > v.sqrt(), v.sqrt() * m.sign(), m)
    new = (1 - beta2**20) / (1 - beta2 ** (t + 20))
    b, eps = size * gradient, group["eps"]
    step = (m + b) / ((v + new * (2 * m * b + b.square())).sqrt() + eps) - m / (v.sqrt() + eps)
    return group["lr"] * torch.where(v > 0.0, step, 0.0) / size


def mean_entropy_gradient(scene: Scene, factor: float = 1.0) -> Tensor:
    """∇H̄ over all tokens of E; flat, fp64."""
    own = on_same_prefixes_coefficients(scene.E.responses())
    return factor * gradient_per_prompt(scene, scene.E, own).mean(0)


@pytest.mark.parametrize(
    ("kind", "is_stale"),
    [("sgd", False), ("sgd", True), ("momentum", False), ("adamw", False), ("adamw, tokens unseen so far", False)],
)
def test_the_effect_is_that_of_gradients_prompt_by_prompt(
    monkeypatch: pytest.MonkeyPatch, kind: str, is_stale: bool
) -> None:
    """Along a step and a trial so small that first order is exact. Prefix weights have no baseline."""
    size = 1e-3
    monkeypatch.setattr(HoldEntropy, "_trial_size", lambda *_: size)
    kind, *unseen = kind.split(", ")
    scene = Scene(kind, lr=1e-4, dtype=torch.float64)
    if unseen:  # no training batch has had them, and E has: 1/(√v̂ + ε) would be 1e8 there
        table, rows = scene.model.token.weight, slice(0, 3)
        for t in (table.grad, *(scene.optimizer.state[table][name] for name in ("exp_avg", "exp_avg_sq"))):
            t[rows] = 0.0
        assert bool(torch.isin(scene.E.inputs["input_ids"], torch.arange(3)).any())
    if is_stale:
        scene.E = stale(scene.model, N_E, 2)
    responses, weights = scene.E.responses(), None
    with torch.no_grad():
        s, h = STATISTICS(scene.model, scene.E)
    if is_stale:
        weights = prefix_weights(s, torch.where(scene.E.mask, scene.E.log_prob, 0.0), responses)
    x = gradient_per_prompt(
        scene, scene.E, per_token_coefficients(h, responses, has_baseline=False, prefix_weights=weights)
    )
    of_h = gradient_per_prompt(scene, scene.E, on_same_prefixes_coefficients(responses))
    length = responses.per_prompt(responses.length)
    slope = torch.zeros((), dtype=torch.float64)
    halves = [torch.arange(N_E) % 2 == k for k in (0, 1)]
    for own, other in (halves, halves[::-1]):
        bonus = (of_h[other] * length.mean()).sum(0) / length[other].sum()
        slope += 0.5 * x[own].mean(0) @ answer(scene, bonus, kind, size)
    hold = scene.probe(beside=HoldEntropy()).forecast(scene.E).coefficient_to_hold
    assert hold is not None
    assert hold.change_per_unit == pytest.approx(float(slope), rel=1e-3)


def test_with_the_coefficient_in_the_loss_the_entropy_holds() -> None:
    """SGD without momentum answers at once. The bonus is that of all prompts, not of halves: 0.1 allows for that."""
    scene = Scene("sgd", lr=0.5)
    scene.E = drawn(scene.model, 0, 200, seed=1)
    plain = scene.probe(beside=HoldEntropy()).forecast(scene.E)
    hold = plain.coefficient_to_hold
    assert hold is not None
    assert hold.value is not None
    bonus = mean_entropy_gradient(scene).float()
    at = 0
    for p in scene.model.parameters():
        p.grad -= hold.value * bonus[at : at + p.numel()].view_as(p)  # type: ignore[operator]
        at += p.numel()
    now = scene.probe(beside=HoldEntropy(entropy_coefficient=hold.value)).forecast(scene.E)
    assert abs(now.delta) < 0.1 * abs(plain.delta)
    assert plain.coefficient_to_hold.low > 0.0
    # Asked again with the bonus in the loss, it says the same.
    assert now.coefficient_to_hold.value == pytest.approx(hold.value, rel=0.1)
    assert "entropy/coefficient_to_hold" in now.metrics()


def test_responses_of_one_length_have_the_same_coefficient_by_both_objectives() -> None:
    """Entropy, change and slope of 4 tokens are 4 times those of a token. Positions are weighted apart: 2 %."""
    scene = Scene("sgd", lr=0.1)
    E = drawn(scene.model, 0, 200, seed=1)
    E = E.rows((E.mask.sum(1) >= 4).nonzero()[:, 0])
    E = dataclasses.replace(E, mask=E.mask & (E.mask.cumsum(1) <= 4))
    by_token, by_response = (
        scene.probe(objective=objective, beside=HoldEntropy()).forecast(E).coefficient_to_hold
        for objective in ("per_token", "sequence")
    )
    assert by_response.delta == pytest.approx(4 * by_token.delta, rel=0.02)
    assert by_response.change_per_unit == pytest.approx(4 * by_token.change_per_unit, rel=0.02)
    ends = (by_token.value, by_token.low, by_token.high)
    assert (by_response.value, by_response.low, by_response.high) == pytest.approx(ends, rel=0.02)


@pytest.mark.parametrize("case", ["plain", "tiny second moments", "a first step", "a large mean"])
def test_a_trial_has_the_wanted_effect(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """Adam's answer to a bonus bends down where second moments are tiny, and up where gradients hardly scatter."""
    scene = Scene("adamw", lr=1e-3)
    for p in list(scene.model.parameters())[:2]:
        if case == "tiny second moments":
            scene.optimizer.state[p]["exp_avg_sq"].fill_(1e-20)
            scene.optimizer.state[p]["exp_avg"].zero_()
            p.grad.fill_(1e-10)
    if case == "a first step":
        scene.optimizer.state.clear()
    if case == "a large mean":
        for p in scene.model.parameters():
            state = scene.optimizer.state[p]
            state["exp_avg"].copy_(p.grad)
            state["exp_avg_sq"].copy_(p.grad.square())
    tried: list[tuple[float, float, float]] = []
    trial_size = HoldEntropy._trial_size

    def noted(bonus: HoldEntropy, wanted: float, slope: float) -> float | None:
        size = trial_size(bonus, wanted, slope)
        tried.append((wanted, size * bonus._slope(size), size * slope))
        return size

    monkeypatch.setattr(HoldEntropy, "_trial_size", noted)
    scene.probe(beside=HoldEntropy()).forecast(scene.E)
    [(wanted, effect, linear)] = tried
    assert effect == pytest.approx(wanted, rel=0.1)
    if case in ("tiny second moments", "a first step"):  # so the size differs from that of a straight line
        assert not 0.7 < linear / wanted < 1.3


def test_a_clip_and_a_loss_scale_are_allowed_for() -> None:
    """Gradients of 16 times the loss, clipped to a quarter: the bonus goes through both."""
    plain = Scene("sgd", lr=1e-4).probe(beside=HoldEntropy())
    scene = Scene("sgd", lr=1e-4)
    for p in scene.model.parameters():
        p.grad *= 16 / 4
    probe = scene.probe(beside=HoldEntropy(applied_scale=4.0))
    kept = probe.forecast(scene.E, gradient_scale=1 / 16).coefficient_to_hold
    expected = plain.forecast(scene.E).coefficient_to_hold
    assert kept.value == pytest.approx(expected.value, rel=5e-3)
    assert kept.change_per_unit == pytest.approx(0.25 * expected.change_per_unit, rel=5e-3)


def test_maximized_losses_have_their_bonus_added() -> None:
    plain, flipped = Scene("sgd"), Scene("sgd")
    flipped.optimizer.param_groups[0]["maximize"] = True
    for p in flipped.model.parameters():
        p.grad.neg_()  # type: ignore[union-attr]
    values = [s.probe(beside=HoldEntropy()).forecast(s.E).coefficient_to_hold.value for s in (plain, flipped)]
    assert values[0] == pytest.approx(values[1], rel=1e-5)


def test_around_a_real_step_it_is_the_same_and_nothing_changes() -> None:
    forecast, taken = Scene(), Scene()
    probe = forecast.probe(beside=HoldEntropy(entropy_coefficient=0.01))
    expected = probe.forecast(forecast.E).coefficient_to_hold
    watched = taken.probe(beside=HoldEntropy(entropy_coefficient=0.01))
    rng = torch.get_rng_state()
    with watched.around_step(taken.E) as around:
        taken.optimizer.step()
    assert around.forecast.coefficient_to_hold.value == pytest.approx(expected.value, rel=1e-3)
    assert around.forecast.coefficient_to_hold.present == 0.01
    assert torch.equal(torch.get_rng_state(), rng)
    forecast.optimizer.step()
    for p, q in zip(forecast.model.parameters(), taken.model.parameters(), strict=True):
        assert torch.equal(p, q)


def test_what_no_bonus_undoes_has_no_coefficient() -> None:
    """Of a step by a momentum that is far larger than what Adam's elements move by in the long run."""
    scene = Scene("adamw", lr=1e-3)
    for p in scene.model.parameters():
        scene.optimizer.state[p]["exp_avg"].mul_(300.0)
    hold = scene.probe(beside=HoldEntropy()).forecast(scene.E).coefficient_to_hold
    assert (hold.status, hold.reason[:29]) == ("unresolved", "no bonus undoes this change: ")


def test_parameters_that_are_unfrozen_later_lack_momentum_alone() -> None:
    scene = Scene("momentum")
    del scene.optimizer.state[next(scene.model.parameters())]["momentum_buffer"]
    hold = scene.probe(beside=HoldEntropy()).forecast(scene.E).coefficient_to_hold
    assert hold.change_per_unit is not None


def test_betas_may_be_tensors() -> None:
    plain, scene = Scene("adamw"), Scene("adamw")
    [group] = scene.optimizer.param_groups
    group["betas"] = tuple(map(torch.tensor, group["betas"]))
    values = [s.probe(beside=HoldEntropy()).forecast(s.E).coefficient_to_hold.value for s in (plain, scene)]
    assert values[0] == pytest.approx(values[1], rel=1e-3)


def test_a_first_step_lacks_the_momentum_of_later_ones() -> None:
    scene = Scene("momentum")
    scene.optimizer.state.clear()
    hold = scene.probe(beside=HoldEntropy()).forecast(scene.E).coefficient_to_hold
    assert hold.reason.startswith("the optimizer has taken no step yet, so this step lacks the momentum")
    assert not scene.optimizer.state  # a checkpoint that is loaded now has its momentum restored only if this is empty


def test_a_change_that_is_no_number_is_refused() -> None:
    hold = Scene("adamw", lr=1e-3).probe(beside=HoldEntropy()).forecast(drawn(policy(), 0, 200, seed=1))
    with pytest.raises(ValueError, match="must be a finite number of nats, got nan"):
        hold.coefficient_to_hold.for_change(float("nan"))


def test_three_prompts_are_too_few() -> None:
    scene = Scene()
    hold = scene.probe(beside=HoldEntropy()).forecast(drawn(scene.model, 0, 3, seed=1)).coefficient_to_hold
    assert hold.value is None
    assert hold.reason.endswith("needs at least 4 evaluation prompts, two in each half, got 3")
    with scene.probe(beside=HoldEntropy()).around_step(drawn(scene.model, 0, 3, seed=1)) as around:
        scene.optimizer.step()
    assert around.forecast.coefficient_to_hold.reason == hold.reason


@pytest.mark.parametrize("precision", ["model", "float32"])
def test_a_trial_that_16_bits_round_away(precision: str) -> None:
    """Scored as the model computes, parameters of 16 bits do not hold it."""
    scene = Scene("sgd", lr=1e-3, dtype=torch.bfloat16)
    hold = scene.probe(beside=HoldEntropy(), precision=precision).forecast(scene.E).coefficient_to_hold
    is_lost = "parameters of 16 bits round a trial with a bonus away: use precision=" in hold.reason
    assert is_lost == (precision == "model"), hold


def test_a_uniform_policy_has_no_slope() -> None:
    scene = Scene()
    with torch.no_grad():
        scene.model.out.weight.zero_()
        scene.model.out.bias.zero_()
    evaluation = drawn(scene.model, 0, 8, seed=1)
    hold = scene.probe(beside=HoldEntropy()).forecast(evaluation).coefficient_to_hold
    assert hold.value is None
    assert hold.reason


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"entropy_coefficient": float("nan")}, "entropy_coefficient must be finite"),
        ({"entropy_coefficient": "x"}, "entropy_coefficient must be a number or a tensor of one element, got 'x'"),
        ({"applied_scale": 0.0}, "applied_scale must be positive"),
        ({"applied_scale": torch.ones(2)}, r"applied_scale must be a number or a tensor of one element, got \[2\]"),
    ],
)
def test_bad_input(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HoldEntropy(**arguments)
    with pytest.raises(ValueError, match="beside= is about the optimizer's own step"):
        Scene().probe(update="gradient", beside=HoldEntropy())


def test_an_optimizer_without_a_forecast_is_refused_at_once() -> None:
    scene = Scene()
    scene.optimizer = optimizer_of(scene.model, "rmsprop")
    with pytest.raises(ValueError, match="SGD, Adam and AdamW, got RMSprop: leave it out"):
        scene.probe(beside=HoldEntropy())


def test_a_step_that_changes_nothing_needs_no_coefficient() -> None:
    """A window whose rewards are all equal has no gradient."""
    scene = Scene("sgd")
    scene.E = drawn(scene.model, 0, 200, seed=1)
    for p in scene.model.parameters():
        p.grad.zero_()  # type: ignore[union-attr]
    forecast = scene.probe(beside=HoldEntropy(entropy_coefficient=0.02)).forecast(scene.E)
    assert forecast.delta == 0.0
    assert forecast.coefficient_to_hold.value == 0.02


def test_gradients_that_are_not_finite_have_no_coefficient() -> None:
    scene = Scene()
    next(scene.model.parameters()).grad.fill_(torch.nan)  # type: ignore[union-attr]
    forecast = scene.probe(beside=HoldEntropy()).forecast(scene.E)
    assert (forecast.delta, forecast.coefficient_to_hold, forecast.reason) == (None, None, "the step is not finite")
    with scene.probe(beside=HoldEntropy()).around_step(scene.E) as around:
        scene.optimizer.step()
    assert around.forecast.coefficient_to_hold is None
    assert not around.forecast.is_valid


@pytest.mark.parametrize("ends", ["forecast", "step", "no step", "another step", "error"])
def test_nothing_of_parameter_size_is_kept(ends: str) -> None:
    scene, hold = Scene("sgd"), HoldEntropy()
    probe = scene.probe(beside=hold)
    if ends == "forecast":
        probe.forecast(scene.E)
    else:
        with contextlib.suppress(ZeroDivisionError), probe.around_step(scene.E):
            if ends == "error":
                raise ZeroDivisionError
            if ends == "another step":
                scene.optimizer.param_groups[0]["lr"] *= 3.0
            if ends != "no step":
                scene.optimizer.step()
    assert not {"_answer", "_of_bonus", "_of_entropy"} & vars(hold).keys()
