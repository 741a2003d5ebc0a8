"""A GradScaler reaches a probe, and tells whether its scale is in the gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sonde.parallel.unwrap import loss_scale
from sonde.policy.entropy_change import EntropyChangeProbe
from tests.policy.entropy_scene import Scene
from tests.small_policy import drawn

SCALE = 1024.0


def scaled(scene: Scene) -> torch.amp.GradScaler:
    """The scaler of the scene's loss, with its scale in the gradients."""
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    for p in scene.model.parameters():
        p.grad.mul_(float(scaler.scale(torch.ones(()))))  # type: ignore[union-attr]
    return scaler


def test_the_scale_is_left_out_of_a_forecast() -> None:
    found = []
    for is_scaled in (False, True):
        scene = Scene("momentum")
        options: dict[str, Any] = {"grad_scaler": scaled(scene)} if is_scaled else {}
        probe = EntropyChangeProbe(
            scene.model, scene.optimizer, sampler=lambda model: drawn(model, 0, 24, seed=1), **options
        )
        probe.step()
        found.append(probe.metrics()["entropy/delta_forecast"])
        assert probe.metrics()["cost/entropy_seconds_sampling"] > 0
    assert found[1] == pytest.approx(found[0], rel=1e-5)


def test_guard_private_state_of_a_grad_scaler() -> None:
    scene = Scene("sgd")
    scaler = scaled(scene)
    assert loss_scale(scaler, scene.optimizer) == SCALE
    scaler.unscale_(scene.optimizer)
    assert loss_scale(scaler, scene.optimizer) == 1.0
    scaler.step(scene.optimizer)
    scaler.update()
    assert loss_scale(scaler, scene.optimizer) == SCALE
    assert loss_scale(torch.amp.GradScaler("cpu", enabled=False), scene.optimizer) == 1.0
    assert loss_scale(None, scene.optimizer) == 1.0
    with pytest.raises(ValueError, match=r"grad_scaler must be a torch\.amp\.GradScaler, got 3"):
        EntropyChangeProbe(scene.model, scene.optimizer, grad_scaler=3)  # type: ignore[arg-type]
