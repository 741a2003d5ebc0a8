"""Has a fused optimizer scale gradients while it reads them: one pass over them less."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from sonde.call_site import stack_level
from sonde.parallel.devices import to_device
from sonde.parallel.wrappers import unwrap_optimizer

_told: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
_pending: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Fold] = weakref.WeakKeyDictionary()


_LEAST = 2.0**-126
"""What fp32 cannot hold one over: gradients near its largest number are scaled in a pass of their own. (A GPU is not
waited for to see that; there they come out as 0.)"""


def fold(optimizer: Any, parameters: Sequence[Tensor], coefficient: Tensor, skip: Tensor | None) -> bool:
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
    optimizer = unwrap_optimizer(optimizer)
    if coefficient.device.type == "cpu" and 0 < float(coefficient) < _LEAST:
        return False
    if why := _why_not(optimizer, parameters, may_skip=skip is not None):
        if optimizer not in _told:
            _told.add(optimizer)
            warnings.warn(
                f"fold_into={type(optimizer).__name__} cannot scale gradients ({why}): they are scaled in a pass of "
                "their own",
                stacklevel=stack_level(),
            )
        return False
    _pending[optimizer] = _Fold(optimizer, parameters, coefficient, skip)
    return True


def unfold(parameters: Iterable[Tensor]) -> None:
    """Forget what optimizers of any of these parameters were to do and have not done."""
    if not _pending:
        return
    clipped = {id(p) for p in parameters}
    for pending in [p for p in _pending.values() if clipped & p.parameters]:
        pending.forget()


class _Fold:
    """What is set on an optimizer until it has stepped."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], coefficient: Tensor, skip: Tensor | None
    ) -> None:
        self.parameters = {id(p) for p in parameters}
        self._optimizer = weakref.ref(optimizer)
        self._found_inf = torch.zeros((), device=coefficient.device) if skip is None else skip.float()
        optimizer.grad_scale = coefficient.float().reciprocal()  # type: ignore[attr-defined]
        optimizer.found_inf = self._found_inf  # type: ignore[attr-defined]
        self._before = optimizer.register_step_pre_hook(self._join_scaler)
        self._after = optimizer.register_step_post_hook(lambda *_: self.forget())

    def _join_scaler(self, optimizer: Any, *_: object) -> None:
        # A GradScaler that steps the optimizer puts its own finding in place of this one, and removes it itself. It
        # knows of this rank's gradients only, and as they were when it unscaled them.
        theirs = getattr(optimizer, "found_inf", None)
        if theirs is not None and theirs is not self._found_inf:
            optimizer.found_inf = torch.maximum(theirs, to_device(self._found_inf, theirs.device).to(theirs.dtype))

    def forget(self) -> None:
        """Leave the optimizer as it was."""
        self._before.remove()
        self._after.remove()
        optimizer: Any = self._optimizer()
        if optimizer is None:
            return
        _pending.pop(optimizer, None)
        if getattr(optimizer, "found_inf", None) is self._found_inf:
            del optimizer.grad_scale, optimizer.found_inf


def _why_not(optimizer: Any, parameters: Sequence[Tensor], *, may_skip: bool) -> str:
    """Empty where it can."""
    if not getattr(optimizer, "_step_supports_amp_scaling", False) or not all(
        group.get("fused") for group in optimizer.param_groups
    ):
        return "it is not fused: build it with fused=True"
    if getattr(optimizer, "grad_scale", None) is not None:
        return "somebody has set its grad_scale"
    held = [p for group in optimizer.param_groups for p in group["params"]]
    has_momentum = isinstance(optimizer, torch.optim.SGD) and any(g["momentum"] for g in optimizer.param_groups)
    if may_skip and has_momentum and any(_lacks_momentum(optimizer, p) for p in held):
        # torch fills the buffer in the kernel, which does nothing then, and takes it for filled afterwards.
        return "a first step that is skipped would leave its momentum unset"
    clipped, holds = {id(p) for p in parameters}, {id(p) for p in held}
    if strays := sum(p.grad is not None and id(p) not in clipped for p in held):
        return f"it holds {strays} parameters that are not clipped, and would scale them too"
    if missing := sum(p.grad is not None and id(p) not in holds for p in parameters):
        return f"{missing} parameters that are clipped are not its"
    return ""


def _lacks_momentum(optimizer: torch.optim.Optimizer, parameter: Tensor) -> bool:
    return parameter.grad is not None and optimizer.state.get(parameter, {}).get("momentum_buffer") is None
