"""Causes of the optimizer's own step: momentum, this batch, weight decay, and each prompt."""

from __future__ import annotations

import pytest
import torch

from tests.policy.entropy_scene import N_U, Scene
from tests.small_policy import drawn, loss, policy


@pytest.mark.parametrize("kind", ["adamw", "momentum", "sgd"])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_momentum_batch_decay_and_prompts_add_up(kind: str, scale: float) -> None:
    scene = Scene(kind)
    forecast = scene.probe().forecast(scene.E, scene.U, gradient_scale=scale, causes=True)
    causes = forecast.causes
    assert causes is not None
    whole = forecast.first_order.delta
    assert causes.momentum + causes.batch + causes.decay == pytest.approx(whole, rel=1e-6)
    assert (causes.momentum == 0.0) == (kind == "sgd")
    assert (causes.decay == 0.0) == (kind != "adamw")
    assert len(causes.prompts) == N_U
    assert causes.explained == pytest.approx(1.0, rel=2e-2)
    # Without one prompt's part of the gradient, the change differs by this prompt's part.
    worst = causes.prompts[0]
    left = scene.U.prompt == worst.prompt
    others = scene.U.rows((~left).nonzero()[:, 0])
    for p in scene.model.parameters():
        p.grad = None
    (loss(scene.model, others) * len(others) / len(scene.U)).backward()
    if kind != "adamw":  # its second moment would change too
        without = scene.probe().forecast(scene.E, others, gradient_scale=scale, causes=True)
        assert whole - without.first_order.delta == pytest.approx(worst.change, rel=2e-2)


@pytest.mark.parametrize(("dtype", "buffer"), [(torch.float64, "float32"), (torch.float32, "float64")])
def test_central_differences_take_sums_of_any_dtype(dtype: torch.dtype, buffer: str) -> None:
    scene = Scene(dtype=dtype)
    probe = scene.probe(derivatives="central", buffer_dtype=getattr(torch, buffer))
    causes = probe.forecast(scene.E, scene.U, causes=True).causes
    assert causes is not None
    assert causes.explained == pytest.approx(1.0, rel=2e-2)


def test_without_rollouts_of_the_update_causes_are_momentum_and_batch() -> None:
    causes = Scene().probe().forecast(drawn(policy(), 0, 8, seed=1), causes=True).causes
    assert causes is not None
    assert causes.prompts == ()
    assert causes.explained is None
