"""The factor by which a GradScaler has multiplied the gradients of an optimizer."""

from __future__ import annotations

from typing import Any

import torch

from sonde.parallel.unwrap import unwrap_optimizer


def check_grad_scaler(grad_scaler: object) -> None:
    """Refuse what is no GradScaler; None is accepted.

    Raises:
        ValueError: naming the argument `grad_scaler`.
    """
    if grad_scaler is not None and (isinstance(grad_scaler, type) or not hasattr(grad_scaler, "is_enabled")):
        raise ValueError(
            f"grad_scaler must be a torch.amp.GradScaler, got {grad_scaler!r:.60}: pass the scaler of the loop, or "
            "leave out grad_scaler= if there is none"
        )


def loss_scale(grad_scaler: torch.amp.GradScaler | None, optimizer: Any) -> float:
    """The scale of the gradients in `.grad` now: 1 without an enabled scaler, and after its `unscale_`.

    Args:
        grad_scaler: the scaler of the loop.
        optimizer: whose gradients are meant.
    """
    if grad_scaler is None or not grad_scaler.is_enabled():
        return 1.0
    # unscale_() leaves a mark for each optimizer, which step() and update() take away. No public method tells it.
    marks = grad_scaler._per_optimizer_states.get(id(unwrap_optimizer(optimizer)))
    if marks is not None and marks["stage"].name != "READY":
        return 1.0
    return float(grad_scaler.get_scale())
