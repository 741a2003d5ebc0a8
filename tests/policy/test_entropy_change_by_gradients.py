"""Forecasts along the mean gradient of update prompts beside a vector for every prompt."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from sonde.policy.stats.entropy_gradient import Coefficients
from tests.policy.entropy_scene import N_E, N_U, Scene, coefficients, gradient_per_prompt


def update_coefficients(scene: Scene) -> Coefficients:
    credit = scene.U.credit() * scene.U.responses().share[:, None]
    return Coefficients(torch.zeros_like(credit), credit)


def halves_of(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The mean over every second prompt, and over the others."""
    return rows[0::2].mean(0), rows[1::2].mean(0)


@pytest.mark.parametrize(("objective", "weights"), [("per_token", "one"), ("sequence", "one")])
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_both_variances_agree_with_those_of_a_vector_for_every_prompt(kind: str, objective: str, weights: str) -> None:
    scene = Scene(kind)
    x = gradient_per_prompt(scene, scene.E, coefficients(objective, weights, scene))
    y = gradient_per_prompt(scene, scene.U, update_coefficients(scene))
    if kind == "adamw":
        state = [scene.optimizer.state[p] for p in scene.model.parameters()]
        v = torch.cat([s["exp_avg_sq"].flatten().double() / (1 - 0.999 ** float(s["step"])) for s in state])
        y = y / (v.sqrt() + 1e-8)
    eta = 1e-3
    along_y, (a, b) = x @ y.mean(0), (y @ half for half in halves_of(x))
    v_x = float(along_y.var()) / N_E
    v_y = float(((a - a.mean()) * (b - b.mean())).sum()) / (N_U * (N_U - 1))
    probe = scene.probe(update="gradient", objective=objective)
    forecast = probe.forecast(scene.E, scene.U)
    assert forecast.bars_dot == pytest.approx(float(along_y.mean()), rel=2e-3)
    assert forecast.delta == pytest.approx(eta * forecast.bars_dot)
    assert forecast.v_x == pytest.approx(eta**2 * v_x, rel=5e-3)
    assert forecast.v_y == pytest.approx(eta**2 * v_y, rel=5e-3)
    assert forecast.se == pytest.approx(math.sqrt(forecast.v_x + forecast.v_y))
    assert (forecast.n_evaluation, forecast.n_update) == (N_E, N_U)
    assert forecast.causes is not None
    parts = torch.tensor([c.change for c in sorted(forecast.causes.prompts, key=lambda c: c.prompt)])
    expected = eta / N_U * (y @ x.mean(0))
    assert float((parts - expected).norm() / expected.norm()) < 5e-3
    assert forecast.causes.explained == pytest.approx(1.0, rel=1e-2)
    for cause in forecast.causes.prompts:
        assert cause.change == pytest.approx(cause.from_rewarded + cause.from_penalised)


@pytest.mark.parametrize("row_of_update", [True, False])
def test_rows_whose_second_moment_is_0_do_not_blow_up_the_forecast(row_of_update: bool) -> None:
    """A row of the embedding that Adam never moved: the update uses it, or only evaluation responses do."""
    scene = Scene()
    token = scene.model.token.weight
    never = torch.zeros_like(token, dtype=torch.bool)
    never[3] = True
    for name in ("exp_avg", "exp_avg_sq"):
        scene.optimizer.state[token][name][never] = 0.0
    if not row_of_update:  # other responses than those with the token, and their prompts
        is_free = ~(scene.U.inputs["input_ids"] == 3).any(1)
        scene.U = scene.U.rows(is_free.nonzero()[:, 0])
    x = gradient_per_prompt(scene, scene.E, coefficients("per_token", "one", scene))
    y = gradient_per_prompt(scene, scene.U, update_coefficients(scene))
    parameters = list(scene.model.parameters())
    p = []
    split = [half.split([q.numel() for q in parameters]) for half in halves_of(y)]
    for parameter, *parts in zip(parameters, *split, strict=True):
        v, n_steps = (scene.optimizer.state[parameter][name].double().flatten() for name in ("exp_avg_sq", "step"))
        # What this batch adds to a second moment that is 0, in Adam's next step.
        added = torch.stack(parts).square().mean(0) * (1 - 0.999) / (1 - 0.999 ** (n_steps + 1))
        root = torch.where(v > 0, v / (1 - 0.999**n_steps), added).sqrt()
        p.append(torch.where(root > 0, 1.0 / (root + 1e-8), 0.0))
    assert bool(y.mean(0).split(token.numel())[0].view_as(token)[3].any()) is row_of_update
    y = y * torch.cat(p)
    along_y, (a, b) = x @ y.mean(0), (y @ half for half in halves_of(x))
    v_y = float(((a - a.mean()) * (b - b.mean())).sum()) / (len(y) * (len(y) - 1))
    se = 1e-3 * math.sqrt(float(along_y.var()) / N_E + v_y)
    forecast = scene.probe(update="gradient").forecast(scene.E, scene.U)
    assert forecast.delta == pytest.approx(1e-3 * float(along_y.mean()), abs=2e-2 * se)
    assert forecast.se == pytest.approx(se, rel=2e-2)
    assert forecast.is_valid, forecast.reason
