"""Nothing of the training changes while an entropy change is measured, wherever the measurement fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sonde.contrib.hold_entropy import HoldEntropy
from sonde.policy.scoring.rollouts import Rollouts
from tests.policy.entropy_scene import Scene, assert_untouched, held
from tests.small_policy import STATISTICS, loss, policy, sample


class Failing:
    """Token statistics that raise at the k-th call."""

    def __init__(self, k: int) -> None:
        self.left = k

    def __call__(self, model: nn.Module, rollouts: Rollouts, /) -> tuple[Tensor, Tensor]:
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("out of memory, say")
        return STATISTICS(model, rollouts)


@pytest.mark.parametrize("update", ["step", "gradient"])
def test_nothing_changes_wherever_it_fails(update: str) -> None:
    """Every single call of the model fails, through all phases, and the sampler fails."""
    scene = Scene()
    options: dict[str, Any] = {"update": update, "micro_batch_prompts": 12}
    options["beside"] = HoldEntropy() if update == "step" else None
    before = held(scene)
    n_failures = 0
    while True:
        probe = scene.probe(
            token_statistics=Failing(n_failures), sampler=lambda m: sample(m, list(range(6))), **options
        )
        error: BaseException | None = None
        try:
            probe.forecast(scene.E, scene.U, causes=update == "step", rollouts=True)
        except RuntimeError as raised:
            error = raised
        assert_untouched(scene, before)
        if error is None:
            break
        assert "out of memory, say" in str(error)
        n_failures += 1
    assert n_failures >= 12

    def failing_sampler(model: nn.Module) -> Rollouts:
        raise RuntimeError("no sample")

    with pytest.raises(RuntimeError, match="no sample"):
        scene.probe(sampler=failing_sampler, **options).forecast(scene.E, scene.U, rollouts=True)
    assert_untouched(scene, before)


@pytest.mark.parametrize("kind", ["adamw", "rmsprop"])
def test_around_a_step_the_state_is_that_before_or_after_the_step_wherever_it_fails(kind: str) -> None:
    """Every single call of the model fails, before and after the step; the step is forecast, or measured."""
    n_failures = n_after = 0
    while True:
        scene, twin = Scene(kind), Scene(kind)
        before = held(scene)
        twin.optimizer.step()
        after = held(twin)
        after[1], after[5] = before[1], before[5]
        probe = scene.probe(
            token_statistics=Failing(n_failures), sampler=lambda m: sample(m, list(range(6))), micro_batch_prompts=12
        )
        is_taken = has_failed = False
        try:
            with probe.around_step(scene.E, scene.U, causes=kind == "adamw"):
                scene.optimizer.step()
                is_taken = True
        except RuntimeError:
            has_failed = True
        assert_untouched(scene, after if is_taken else before)
        if not has_failed:
            break
        n_failures += 1
        n_after += is_taken
    assert n_failures > n_after >= 3


@pytest.mark.parametrize("leaves_training", [False, True])
def test_a_sampler_may_leave_the_model_in_training_mode(leaves_training: bool) -> None:
    def sampler(model: nn.Module) -> Rollouts:
        sampled = sample(model, list(range(6)))
        model.train(leaves_training)
        return sampled

    plain, scene = Scene(), Scene()
    scene.model.dropout.p = 0.3
    expected = plain.probe().forecast(plain.E)
    forecast = scene.probe(sampler=sampler).forecast(scene.E, rollouts=True)
    assert (forecast.delta, forecast.fixed_prefixes) == (expected.delta, expected.fixed_prefixes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_goes_on_bit_for_bit(dtype: torch.dtype) -> None:
    weights = []
    for is_watched in (False, True):
        scene = Scene(dtype=dtype)
        probe, along = scene.probe(), scene.probe(update="gradient")
        for k in range(4):
            U = sample(policy(), list(range(300 + 10 * k, 310 + 10 * k)))
            scene.optimizer.zero_grad()
            loss(scene.model, U).backward()
            if is_watched:
                along.forecast(scene.E, scene.U)
                with probe.around_step(scene.E):
                    scene.optimizer.step()
            else:
                scene.optimizer.step()
        weights.append([p.detach().clone() for p in scene.model.parameters()])
        torch.manual_seed(0)
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
