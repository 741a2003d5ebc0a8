"""Forecasts under a GradScaler, whose scale is in the gradients until it is taken out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sonde.config import probes_from_config
from sonde.contrib.hold_entropy import HoldEntropy
from sonde.parallel.unwrap import loss_scale
from sonde.policy.entropy_change import EntropyChangeProbe
from sonde.policy.entropy_options import EntropyChangeOptions
from tests.policy.entropy_scene import Scene
from tests.small_policy import drawn

SCALE = 1024.0


def scaled(kind: str, *, is_unscaled: bool) -> tuple[Scene, torch.amp.GradScaler]:
    """A scene whose gradients are those of a scaled loss, perhaps unscaled again."""
    scene, scaler = Scene(kind), torch.amp.GradScaler("cpu", init_scale=SCALE)
    for p in scene.model.parameters():
        p.grad.mul_(float(scaler.scale(torch.ones(()))))  # type: ignore[union-attr]
    if is_unscaled:
        scaler.unscale_(scene.optimizer)
    return scene, scaler


def probe_of(scene: Scene, scaler: Any = None, beside: Any = None, **options: Any) -> EntropyChangeProbe:
    return EntropyChangeProbe(
        scene.model,
        scene.optimizer,
        EntropyChangeOptions(**options),
        sampler=lambda model: drawn(model, 0, 24, seed=1),
        grad_scaler=scaler,
        beside=beside,
    )


@pytest.mark.parametrize("is_unscaled", [False, True])
@pytest.mark.parametrize("kind", ["momentum", "adamw"])
def test_the_scale_is_left_out(kind: str, is_unscaled: bool) -> None:
    plain, (scene, scaler) = Scene(kind), scaled(kind, is_unscaled=is_unscaled)
    expected = probe_of(plain, beside=HoldEntropy()).forecast(plain.E, plain.U, causes=True)
    probe = probe_of(scene, scaler, HoldEntropy())
    found = probe.forecast(scene.E, scene.U, causes=True)
    assert found.delta == pytest.approx(expected.delta, rel=1e-5)
    assert found.causes.batch == pytest.approx(expected.causes.batch, rel=1e-3)
    assert found.causes.explained == pytest.approx(1.0, rel=2e-2)
    assert found.coefficient_to_hold.value == pytest.approx(expected.coefficient_to_hold.value, rel=1e-3)
    probe.step()
    assert probe.metrics()["entropy/delta_forecast"] == pytest.approx(expected.delta, rel=1e-5)
    assert probe.metrics()["cost/entropy_seconds_sampling"] > 0
    with probe.around_step(scene.E, scene.U, causes=True) as around:
        scaler.step(scene.optimizer)
    assert around.forecast.delta == pytest.approx(expected.delta, rel=1e-4)  # the step itself is rounded in another way
    assert around.forecast.doubt == ""  # the derivatives are along the step that was taken
    assert around.forecast.first_order.delta == pytest.approx(expected.first_order.delta, rel=1e-3)


def test_a_clips_factor_comes_beside_the_scale() -> None:
    plain, (scene, scaler) = Scene("momentum"), scaled("momentum", is_unscaled=False)
    expected = probe_of(plain).forecast(plain.E, gradient_scale=0.5)
    assert probe_of(scene, scaler).forecast(scene.E, gradient_scale=0.5).delta == pytest.approx(
        expected.delta, rel=1e-5
    )


def test_a_configuration_passes_the_scaler_on() -> None:
    plain, (scene, scaler) = Scene("momentum"), scaled("momentum", is_unscaled=False)
    found = []
    for made, options in ((plain, {}), (scene, {"grad_scaler": scaler})):
        config = probes_from_config({"entropy_probe": {"enabled": True, "every": 1}})
        [probe] = config.attach(
            made.model, made.optimizer, sampler=lambda model: drawn(model, 0, 24, seed=1), **options
        ).values()
        probe.step()
        found.append(probe.metrics()["entropy/delta_forecast"])
    assert found[1] == pytest.approx(found[0], rel=1e-5)


def test_guard_private_state_of_a_grad_scaler() -> None:
    scene, scaler = scaled("sgd", is_unscaled=False)
    assert loss_scale(scaler, scene.optimizer) == SCALE
    scaler.unscale_(scene.optimizer)
    assert loss_scale(scaler, scene.optimizer) == 1.0
    scaler.step(scene.optimizer)
    scaler.update()
    assert loss_scale(scaler, scene.optimizer) == SCALE
    assert loss_scale(torch.amp.GradScaler("cpu", enabled=False), scene.optimizer) == 1.0
    assert loss_scale(None, scene.optimizer) == 1.0
    with pytest.raises(ValueError, match=r"grad_scaler must be a torch\.amp\.GradScaler, got 3"):
        probe_of(scene, 3)
