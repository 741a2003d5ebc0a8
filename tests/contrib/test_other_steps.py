"""The coefficient to hold around a step: where the step is another than on entry, it is not known, and says why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from sonde.contrib.coefficient_to_hold import CoefficientToHold
from sonde.contrib.hold_entropy import HoldEntropy
from sonde.policy.entropy_change import EntropyChangeProbe
from tests.policy.entropy_scene import Scene
from tests.small_policy import loss, optimizer_of

FP32, BF16 = torch.float32, torch.bfloat16
RATES = {"sgd": 0.1, "momentum": 0.1, "adamw": 1e-3}
GRADIENTS = "the gradients after the block of around_step() are not those on entry"
OFF = "derivatives are along another step"


def scene_of(kind: str, dtype: torch.dtype = FP32, *, fused: bool = False) -> Scene:
    scene = Scene(kind, lr=RATES[kind], dtype=dtype)
    if fused:
        scene.optimizer = torch.optim.AdamW(scene.model.parameters(), lr=RATES[kind], fused=True)
    return scene


def hold_of(scene: Scene, block: Callable[[Scene], Any], scaler: Any = None, **arguments: Any) -> CoefficientToHold:
    probe = EntropyChangeProbe(scene.model, scene.optimizer, grad_scaler=scaler, beside=HoldEntropy())
    with probe.around_step(scene.E, **arguments) as around:
        block(scene)
    hold = around.forecast.coefficient_to_hold
    assert isinstance(hold, CoefficientToHold)
    return hold


def step(scene: Scene) -> None:
    scene.optimizer.step()


def scale(scene: Scene, factor: float) -> None:
    for p in scene.model.parameters():
        p.grad.mul_(factor)  # type: ignore[union-attr]


def clipped(scene: Scene) -> None:
    scale(scene, 0.6)
    step(scene)


def twice(scene: Scene) -> None:
    step(scene)
    step(scene)


def with_another_rate(scene: Scene) -> None:
    scene.optimizer.param_groups[0]["lr"] *= 0.3
    step(scene)


def without_one_gradient(scene: Scene) -> None:
    scene.model.out.weight.grad = None
    step(scene)


def by_closure(scene: Scene) -> None:
    scene.optimizer.step(lambda: scale(scene, 0.6))


def then_cleared(scene: Scene) -> None:
    step(scene)
    scene.optimizer.zero_grad()


@pytest.mark.parametrize("block", [clipped, twice, with_another_rate, without_one_gradient, by_closure])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_what_is_changed_in_the_block(block: Callable[[Scene], None], dtype: torch.dtype) -> None:
    """In 16 bits, rounding hides a step that is a little off, so gradients are compared as well."""
    hold = hold_of(scene_of("sgd", dtype), block)
    assert (hold.value, hold.status) == (None, "unresolved")
    assert any(part in hold.reason for part in (GRADIENTS, OFF, "rounding to 16 bits has moved")), hold.reason


@pytest.mark.parametrize("block", [clipped, by_closure, then_cleared])
def test_adams_first_step_does_not_show_its_gradients(block: Callable[[Scene], None]) -> None:
    scene = scene_of("adamw")
    scene.optimizer = optimizer_of(scene.model, "adamw")
    scene.optimizer.state.clear()
    loss(scene.model, scene.U).backward()
    assert GRADIENTS in hold_of(scene, block).reason


@pytest.mark.parametrize("block", [step, then_cleared])
@pytest.mark.parametrize("kind", ["sgd", "momentum, foreach", "adamw", "adamw, fused"])
def test_a_plain_block_has_the_coefficient_of_a_forecast(kind: str, block: Callable[[Scene], None]) -> None:
    """torch's SGD adds Nesterov's momentum to gradients, with foreach."""
    kind, _, way = kind.partition(", ")
    scenes = [scene_of(kind) for _ in range(2)]
    for scene in scenes:
        if way == "foreach":
            scene.optimizer.param_groups[0].update(nesterov=True, foreach=True)
        if way == "fused":
            scene.optimizer.param_groups[0]["fused"] = True
    probe = EntropyChangeProbe(scenes[0].model, scenes[0].optimizer, beside=HoldEntropy())
    expected = probe.forecast(scenes[0].E).coefficient_to_hold
    assert hold_of(scenes[1], block).change_per_unit == pytest.approx(expected.change_per_unit, rel=5e-3)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("is_unscaled", [False, True])
def test_the_scale_of_a_loss_is_no_change(dtype: torch.dtype, is_unscaled: bool) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    plain, scene = scene_of("sgd", dtype), scene_of("sgd", dtype)
    scale(scene, float(scaler.scale(torch.ones(()))))
    if is_unscaled:
        scaler.unscale_(scene.optimizer)
    found = hold_of(scene, lambda scene: scaler.step(scene.optimizer), scaler)
    assert found.change_per_unit == pytest.approx(hold_of(plain, step).change_per_unit, rel=2e-2), found


@pytest.mark.parametrize("factor", [1.0, 0.75, 0.3])
def test_what_16_bits_round_away_is_unknown_after_a_clip_in_the_block(factor: float) -> None:
    """A step of another size would count as rounded."""
    scene = Scene("sgd", lr=1.0, dtype=BF16)
    with scene.probe().around_step(scene.E) as around:
        scale(scene, factor)
        step(scene)
    assert (around.forecast.rounded_away is not None) == (factor == 1.0)


def test_a_sparse_gradient_and_momentum_without_end() -> None:
    scene = scene_of("sgd")
    scene.model.token.sparse = True
    scene.optimizer.zero_grad()
    loss(scene.model, scene.U).backward()
    assert "is not known for a sparse gradient: build the layer with sparse=False" in hold_of(scene, step).reason
    scene = scene_of("momentum")
    scene.optimizer.param_groups[0]["momentum"] = 1.0
    assert "with a momentum of 1 or more, a bonus moves the policy further" in hold_of(scene, step).reason
