"""Causes of the optimizer's own step: momentum, this batch, weight decay, and each prompt."""

from __future__ import annotations

import pytest
import torch

from sonde.policy.stats.attribution import doubt_of_parts
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


def test_causes_of_another_loss_are_doubted() -> None:
    """Gradients that have little to do with advantages, as those of a value loss: the prompts' parts do not add up."""
    scene = Scene("sgd")
    generator = torch.Generator().manual_seed(0)
    for p in scene.model.parameters():
        assert p.grad is not None
        p.grad += 20.0 * p.grad.norm() * torch.randn(p.shape, generator=generator)
    forecast = scene.probe().forecast(scene.E, scene.U, causes=True)
    assert forecast.causes is not None
    assert not 0.5 < forecast.causes.explained < 1.5
    assert forecast.doubt == forecast.causes.doubt
    assert "the loss has terms other than advantage × log-probability" in forecast.doubt
    assert forecast.is_valid  # δH needs no causes
    sound = Scene("sgd")
    assert sound.probe().forecast(sound.E, sound.U, causes=True).doubt == ""


def test_parts_that_cancel_may_miss_a_small_sum() -> None:
    assert doubt_of_parts(1e-4, -6.0, [0.01, -0.0101, 0.02, -0.0205]) == ""
    assert "add up to -6.0e-04 nats, and the batch's part is +1.0e-04" in doubt_of_parts(1e-4, -6.0, [-3e-4, -3e-4])
    assert doubt_of_parts(1e-4, 0.6, [3e-5, 3e-5]) == ""  # as with clipped ratios
    assert doubt_of_parts(None, None, []) == doubt_of_parts(0.0, None, [1.0]) == ""
