"""Blocks of `around_step` around an optimizer's step, and the coefficient to hold that they give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sonde.policy.entropy_change import EntropyChangeProbe
from sonde.policy.stats.coefficient_to_hold import CoefficientToHold
from sonde.policy.stats.entropy_forecast import EntropyForecast
from tests.policy.entropy_scene import Scene

FP32, BF16 = torch.float32, torch.bfloat16
RATES = {"sgd": 0.1, "momentum": 0.1, "adamw": 1e-3}
CLIPPED = "gradients were changed in the block of around_step(): clip before the block, and pass applied_scale="
CHANGED = "the optimizer's options, such as its learning rate, were changed in the block of around_step()"


def scene_of(kind: str, dtype: torch.dtype = FP32, *, fused: bool = False) -> Scene:
    scene = Scene(kind, lr=RATES[kind], dtype=dtype)
    if fused:
        scene.optimizer = torch.optim.AdamW(scene.model.parameters(), lr=RATES[kind], fused=True)
    return scene


def around(scene: Scene, block: Callable[[Scene], object], optimizer: Any = None, **arguments: Any) -> EntropyForecast:
    """The forecast, with the coefficient to hold, around this block."""
    options = {name: arguments.pop(name) for name in ("first_order", "grad_scaler") if name in arguments}
    scaler = options.pop("grad_scaler", None)
    probe = scene.probe(coefficient_to_hold=True, **options)
    if optimizer is not None or scaler is not None:
        probe = EntropyChangeProbe(
            scene.model, optimizer or scene.optimizer, probe._options, grad_scaler=scaler, token_statistics=None
        )
    with probe.around_step(scene.E, **arguments) as step:
        block(scene)
    probe.close()
    return step.forecast


def hold_of(*args: Any, **arguments: Any) -> CoefficientToHold:
    hold = around(*args, **arguments).coefficient_to_hold
    assert hold is not None
    return hold


def assert_unknown(hold: CoefficientToHold, reason: str) -> None:
    assert (hold.value, hold.status) == (None, "unresolved")
    assert reason in hold.reason


def assert_alike(hold: CoefficientToHold, other: CoefficientToHold, rel: float = 5e-3) -> None:
    """They have the same slope, which no scatter hides."""
    assert hold.change_per_unit is not None, hold.reason
    assert hold.change_per_unit == pytest.approx(other.change_per_unit, rel=rel)


def gradients(scene: Scene) -> list[Tensor]:
    return [p.grad for p in scene.model.parameters()]  # type: ignore[misc]


def scale_gradients(scene: Scene, factor: float) -> None:
    for gradient in gradients(scene):
        gradient.mul_(factor)


def clipped(factor: float) -> Callable[[Scene], None]:
    """A block that clips to this part of the norm, steps, and clears gradients."""

    def block(scene: Scene) -> None:
        norm = float(torch.nn.utils.get_total_norm(gradients(scene)))
        torch.nn.utils.clip_grad_norm_(scene.model.parameters(), factor * norm)
        scene.optimizer.step()
        scene.optimizer.zero_grad()

    return block


def step(scene: Scene) -> None:
    scene.optimizer.step()
