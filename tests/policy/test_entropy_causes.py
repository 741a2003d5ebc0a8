"""Causes of the optimizer's own step: momentum, this batch, weight decay, and each prompt."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from sonde.policy.stats.attribution import Cause, Causes
from tests.policy.entropy_scene import N_U, Scene
from tests.small_policy import STATISTICS, drawn, loss, policy


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


def test_without_rollouts_of_the_update_causes_are_momentum_and_batch() -> None:
    causes = Scene().probe().forecast(drawn(policy(), 0, 8, seed=1), causes=True).causes
    assert causes is not None
    assert causes.prompts == ()
    assert causes.explained is None


def test_causes_of_another_loss_are_doubted() -> None:
    """Gradients that have little to do with advantages, as those of a value loss of the policy's own parameters."""
    scene = Scene("sgd")
    generator = torch.Generator().manual_seed(0)
    for p in scene.model.parameters():
        assert p.grad is not None
        p.grad += 20.0 * p.grad.norm() * torch.randn(p.shape, generator=generator)
    forecast = scene.probe().forecast(scene.E, scene.U, causes=True)
    assert forecast.causes is not None
    assert forecast.causes.cosine < 0.1
    assert forecast.doubt == forecast.causes.doubt
    assert "the loss's gradient differs from that of advantage × log-probability (cosine 0.0" in forecast.doubt
    assert forecast.is_valid  # δH needs no causes
    sound = Scene("sgd")
    plain = sound.probe().forecast(sound.E, sound.U, causes=True)
    assert plain.doubt == ""
    assert plain.causes.cosine == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("coefficient", [0.1, 2.0])
def test_the_part_of_an_entropy_bonus_is_no_prompts(coefficient: float) -> None:
    """Along SGD's step, it is the change by the bonus alone, as far as its gradient is not along the prompts'."""

    def bonus() -> Tensor:
        _, h = STATISTICS(scene.model, scene.U)
        return -coefficient * (h * scene.U.mask).sum() / scene.U.mask.sum()

    scene = Scene("sgd")
    plain = scene.probe().forecast(scene.E, scene.U, causes=True).causes
    scene.optimizer.zero_grad()
    bonus().backward()
    alone = scene.probe().forecast(scene.E, causes=True).first_order.delta
    loss(scene.model, scene.U).backward()
    forecast = scene.probe().forecast(scene.E, scene.U, causes=True)
    causes = forecast.causes
    assert plain.other == pytest.approx(0.0, abs=0.02 * abs(plain.batch))
    assert causes.batch == pytest.approx(plain.batch + alone, rel=1e-3)
    assert causes.other == pytest.approx(alone, rel=0.5)
    assert sum(c.change for c in causes.prompts) + causes.other == pytest.approx(causes.batch)
    assert f"in this batch's, {causes.other:+.2e} from terms other than the advantages" in forecast.table()
    assert ("such as a KL penalty or an entropy bonus" in forecast.doubt) == (coefficient > 1.0)


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_a_value_loss_on_parameters_of_its_own_changes_no_part(kind: str) -> None:
    """Its gradient is far larger, and moves no score."""
    plain, scene = Scene(kind), Scene(kind)
    scene.model.register_parameter("value", nn.Parameter(torch.zeros(5)))
    scene.model.value.grad = torch.full((5,), 100.0)
    scene.optimizer.add_param_group({"params": [scene.model.value]})
    expected, found = (s.probe().forecast(s.E, s.U, causes=True) for s in (plain, scene))
    assert found.doubt == ""
    assert found.causes.cosine == pytest.approx(1.0, abs=1e-3)
    for part, other in zip(found.causes.prompts, expected.causes.prompts, strict=True):
        assert part.prompt == other.prompt
        assert part.change == pytest.approx(other.change, rel=1e-4)


def test_advantages_of_the_wrong_sign_are_doubted() -> None:
    scene = Scene("sgd")
    update = dataclasses.replace(scene.U, advantage=-scene.U.advantage)
    forecast = scene.probe().forecast(scene.E, update, causes=True)
    assert forecast.causes.cosine == pytest.approx(-1.0, abs=1e-3)
    assert "against that of advantage × log-probability (cosine -1.00): pass the advantages" in forecast.doubt


@pytest.mark.parametrize("unit", [1e4, 1e-9])
def test_advantages_have_any_unit(unit: float) -> None:
    scene = Scene("sgd")
    update = dataclasses.replace(scene.U, advantage=unit * scene.U.advantage)
    causes = scene.probe().forecast(scene.E, update, causes=True).causes
    assert causes.explained == pytest.approx(1.0, rel=2e-2)
    assert causes.cosine == pytest.approx(1.0, abs=1e-3)


def test_without_advantages_no_prompt_has_a_part() -> None:
    scene = Scene("sgd")
    update = dataclasses.replace(scene.U, advantage=0.0 * scene.U.advantage)
    forecast = scene.probe().forecast(scene.E, update, causes=True)
    assert (forecast.causes.prompts, forecast.causes.explained, forecast.doubt) == ((), None, "")
    assert forecast.causes.batch != 0.0


def test_gradients_of_another_optimizers_parameters_do_not_matter() -> None:
    """As of Muon for some matrices, whose gradients are clipped or scaled in another way, or not finite."""
    scene = Scene("sgd")
    others = list(scene.model.hidden.parameters())
    held = [p for p in scene.model.parameters() if all(p is not other for other in others)]
    scene.optimizer = torch.optim.AdamW(held, lr=1e-3)
    for p in others:
        p.grad.fill_(torch.nan)
    forecast = scene.probe().forecast(scene.E, scene.U, causes=True)
    assert forecast.doubt == ""
    assert forecast.causes.cosine == pytest.approx(1.0, abs=1e-3)
    assert forecast.causes.explained == pytest.approx(1.0, rel=2e-2)


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_a_maximized_loss_has_the_same_parts(kind: str) -> None:
    plain, flipped = Scene(kind), Scene(kind)
    flipped.optimizer.param_groups[0]["maximize"] = True
    for p in flipped.model.parameters():
        p.grad.neg_()
    if kind == "adamw":  # torch keeps the moments of what it steps along
        for state in (*plain.optimizer.state.values(), *flipped.optimizer.state.values()):
            state["exp_avg"].zero_()
    expected, found = (s.probe().forecast(s.E, s.U, causes=True).causes for s in (plain, flipped))
    assert found.cosine == pytest.approx(expected.cosine, rel=1e-6)
    assert [c.prompt for c in found.prompts] == [c.prompt for c in expected.prompts]
    assert [c.change for c in found.prompts] == pytest.approx([c.change for c in expected.prompts], rel=1e-5)


def doubt(batch: float, explained: float | None, *parts: float, cosine: float | None = None) -> str:
    prompts = tuple(Cause(n, part, part, 0.0) for n, part in enumerate(parts))
    return Causes(None, batch, 0.0, prompts, explained, cosine).doubt


def test_parts_that_cancel_may_miss_a_small_sum() -> None:
    assert doubt(1e-4, -6.0, 0.01, -0.0101, 0.02, -0.0205) == ""
    assert "add up to -6.0e-04 nats, and the batch's part is +1.0e-04" in doubt(1e-4, -6.0, -3e-4, -3e-4)
    assert doubt(1e-4, 0.6, 3e-5, 3e-5) == ""  # as with clipped ratios
    assert doubt(1e-4, 1.0, 1e-4, cosine=0.9) == ""
    assert "cosine 0.80" in doubt(1e-4, 1.0, 1e-4, cosine=0.8)
    assert doubt(0.0, None, 1.0) == ""
