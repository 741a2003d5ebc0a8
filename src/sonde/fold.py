"""Has a fused optimizer scale gradients while it reads them: one pass over them less."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

_told: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def fold(
    optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], coefficient: Tensor, skip: Tensor | None
) -> bool:
    """Have the optimizer's next step multiply gradients by `coefficient`, or be skipped.

    The optimizer is as before once it has stepped.

    Args:
        optimizer: fused ones divide by their `grad_scale` and heed their `found_inf`; others are refused.
        parameters: those that are clipped together.
        coefficient: 0-dim, in (0, 1] or 0.
        skip: 0-dim bool; whether to skip the step, on the device.

    Returns:
        Whether it will. Where it cannot, that and why is warned of once an optimizer, and nothing is changed.
    """
    if why := _why_not(optimizer, parameters):
        if optimizer not in _told:
            _told.add(optimizer)
            warnings.warn(
                f"fold_into={type(optimizer).__name__} cannot scale gradients ({why}): they are scaled in a pass of "
                "their own",
                stacklevel=4,
            )
        return False
    found_inf = torch.zeros((), device=coefficient.device) if skip is None else skip.float()
    scale = coefficient.float().reciprocal()
    optimizer.grad_scale, optimizer.found_inf = scale, found_inf  # type: ignore[attr-defined]

    def restore(stepped: torch.optim.Optimizer, *_: object) -> None:
        handle.remove()
        # A GradScaler that has taken over sets both anew and removes them itself.
        if getattr(stepped, "found_inf", None) is found_inf:
            del stepped.grad_scale, stepped.found_inf  # type: ignore[attr-defined]

    handle = optimizer.register_step_post_hook(restore)
    return True


def _why_not(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> str:
    """Empty where it can."""
    if not getattr(optimizer, "_step_supports_amp_scaling", False) or not all(
        group.get("fused") for group in optimizer.param_groups
    ):
        return "it is not fused: build it with fused=True"
    held = [p for group in optimizer.param_groups for p in group["params"]]
    clipped, holds = {id(p) for p in parameters}, {id(p) for p in held}
    if strays := sum(p.grad is not None and id(p) not in clipped for p in held):
        return f"it holds {strays} parameters that are not clipped, and would scale them too"
    if missing := sum(p.grad is not None and id(p) not in holds for p in parameters):
        return f"{missing} parameters that are clipped are not its"
    return ""
