"""Lets a fused optimizer scale gradients while it reads them, which saves one pass over them."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from sonde.console import stack_level
from sonde.parallel.devices import is_at_hand, to_device
from sonde.parallel.placements import local_tensor
from sonde.parallel.unwrap import parameters_of, unwrap_optimizer

_pending: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Fold] = weakref.WeakKeyDictionary()
"""Module-level because a norm that is taken before the step must find the fold, and knows only the parameters."""
_hooked: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
"""Optimizers that have the two step hooks. The hooks stay, since an optimizer whose hooks are removed while it steps
through them raises. Without a fold they do nothing."""

_MIN_COEFFICIENT = 2.0**-126
"""Below it, one over the coefficient overflows in fp32. On the CPU such gradients, near fp32's largest number, are
scaled in a pass of their own. On a GPU the coefficient is not read, since that would wait: such gradients become 0."""


def fold(optimizer: Any, parameters: Sequence[Tensor], coefficient: Tensor, skip: Tensor | None) -> bool:
    """Make the optimizer's next step multiply gradients by `coefficient`, or skip.

    After that step the optimizer is as it was before, except for two step hooks that stay and do nothing.

    Args:
        optimizer: a fused optimizer, which divides gradients by its `grad_scale` and skips if `found_inf` is set.
        parameters: all parameters that are clipped together.
        coefficient: 0-dim, in (0, 1] or 0.
        skip: 0-dim bool; whether to skip the step, on the device.

    Returns:
        Whether the optimizer will scale the gradients. If it cannot, nothing is changed, and the reason is warned of.
    """
    optimizer = unwrap_optimizer(optimizer)
    if is_at_hand(coefficient.device) and 0 < float(coefficient) < _MIN_COEFFICIENT:
        return False
    if reason := _reason_against(optimizer, parameters, may_skip=skip is not None):
        warnings.warn(
            f"fold_into={type(optimizer).__name__} cannot scale gradients ({reason}): they are scaled in a pass of "
            "their own",
            stacklevel=stack_level(),
        )
        return False
    if optimizer not in _hooked:
        _hooked.add(optimizer)
        optimizer.register_step_pre_hook(_before_step)
        optimizer.register_step_post_hook(_after_step)
    _pending[optimizer] = _Fold(optimizer, parameters, coefficient, skip)
    return True


def scale_in_step(optimizer: Any) -> Tensor | float:
    """The factor by which the optimizer's next step multiplies gradients while it reads them; 1 for most.

    Fused optimizers do so for a clip that is folded into them, and in the step of a GradScaler. A fold that the step
    will drop does not count.

    Returns:
        A 0-dim tensor on the gradients' device, or 1.0.
    """
    optimizer = unwrap_optimizer(optimizer)
    divisor = getattr(optimizer, "grad_scale", None)
    if divisor is None:
        return 1.0
    pending = _pending.get(optimizer)
    if pending is not None and pending.is_stale(optimizer):
        divisor = pending.divisor_without(optimizer)
    return 1.0 if divisor is None else torch.as_tensor(divisor).reciprocal()


def apply_folds(tensors: Iterable[Tensor]) -> None:
    """Scale the gradients of folds that involve any of these tensors now: something is about to look at them.

    So whatever comes between a clip and its step sees and leaves the gradients that it would without a fold.

    Args:
        tensors: parameters, or gradients.
    """
    if not _pending:
        return
    looked_at = {id(each) for t in tensors for each in (t, local_tensor(t))}
    for optimizer, pending in [*_pending.items()]:
        if not looked_at.isdisjoint(pending.parameters.keys() | pending.gradients()):
            pending.apply(optimizer)


def alike(gradients: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    """This rank's parts of gradients, in lists of one device and dtype, which one kernel takes."""
    found: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for local in map(local_tensor, gradients):
        found.setdefault((local.device, local.dtype), []).append(local)
    return found.values()


def scale_(grads: list[Tensor], coefficient: Tensor | None, skip: Tensor | None = None) -> None:
    """Multiply gradients of one device, or set them to 0.

    Args:
        grads: changed in place.
        coefficient: 0-dim; None for 1: to multiply by 1 changes nothing and takes as long as the norm.
        skip: 0-dim bool; whether to set all to 0.
    """
    device = grads[0].device
    if coefficient is not None:
        torch._foreach_mul_(grads, to_device(coefficient, device))
    if skip is not None:
        skip = to_device(skip, device)
        for grad in grads:
            grad.masked_fill_(skip, 0.0)  # a product would not do: 0 times NaN is NaN


def _before_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if (pending := _pending.get(optimizer)) is not None:
        pending.begin_step(optimizer, has_closure=any(callable(arg) for arg in (*args[1:], kwargs.get("closure"))))


def _after_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    if (pending := _pending.get(optimizer)) is not None:
        pending.forget()


class _Fold:
    """The scale and the skip flag that are set on an optimizer until it has stepped."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], coefficient: Tensor, skip: Tensor | None
    ) -> None:
        self.parameters = {id(p): _state_of_gradient(p) for p in parameters}
        self._optimizer, self._coefficient, self._skip = weakref.ref(optimizer), coefficient, skip
        self._found_inf = torch.zeros((), device=coefficient.device) if skip is None else skip.float()
        # The kernel divides by `grad_scale`, as it does for a GradScaler: so it is one over the coefficient.
        self._grad_scale = coefficient.float().reciprocal()
        optimizer.grad_scale = self._grad_scale  # type: ignore[attr-defined]
        optimizer.found_inf = self._found_inf  # type: ignore[attr-defined]

    def gradients(self) -> set[int]:
        """The identities of the clipped gradients that are still alive."""
        alive = [state[0]() for state in self.parameters.values() if state is not None]
        return {id(gradient) for gradient in alive if gradient is not None}

    def begin_step(self, optimizer: Any, *, has_closure: bool) -> None:
        """Check that the gradients are those that were clipped, and join the flag of a GradScaler."""
        if has_closure:
            self._withdraw(optimizer, "step(closure) makes gradients anew", "clip inside the closure")
            return
        if self.is_stale(optimizer):
            reason = "gradients were added, replaced or written to after it"
            self._withdraw(optimizer, reason, "clip the gradients that you step with")
            return
        # A GradScaler that steps the optimizer replaces `found_inf` by its own flag, and later removes it. Its flag
        # only covers this rank's gradients as they were when it unscaled them. So the step is skipped if either is set.
        scalers = getattr(optimizer, "found_inf", None)
        if scalers is not None and scalers is not self._found_inf:
            optimizer.found_inf = torch.maximum(scalers, to_device(self._found_inf, scalers.device).to(scalers.dtype))

    def apply(self, optimizer: Any) -> None:
        """Scale the gradients before the step comes. Where they are other ones now, there is nothing to scale."""
        if not self.is_stale(optimizer):
            for gradients in alike(p.grad for p in parameters_of(optimizer) if p.grad is not None):
                scale_(gradients, self._coefficient, self._skip)
        self.forget()

    def is_stale(self, optimizer: Any) -> bool:
        """Whether a gradient is another one than was clipped, was not there, or was written to since."""
        return not all(_is_in_state(p, self.parameters.get(id(p))) for p in parameters_of(optimizer))

    def divisor_without(self, optimizer: Any) -> Tensor | None:
        """The optimizer's `grad_scale` without the fold: a GradScaler has set its own times the fold's."""
        is_own = optimizer.grad_scale is self._grad_scale
        return None if is_own else optimizer.grad_scale / self._grad_scale

    def _withdraw(self, optimizer: Any, reason: str, remedy: str) -> None:
        """Leave the step unscaled: what was clipped is gone."""
        if getattr(optimizer, "found_inf", None) is not self._found_inf:
            optimizer.grad_scale = self.divisor_without(optimizer)  # a GradScaler set both, and removes both later
        self.forget()
        warnings.warn(
            f"the clip folded into {type(optimizer).__name__} is dropped, since {reason}: {remedy}",
            stacklevel=stack_level(),
        )

    def forget(self) -> None:
        """Leave the optimizer as it was."""
        optimizer: Any = self._optimizer()
        if optimizer is None:
            return
        _pending.pop(optimizer, None)
        if getattr(optimizer, "found_inf", None) is self._found_inf:
            del optimizer.grad_scale, optimizer.found_inf


def _reason_against(optimizer: Any, parameters: Sequence[Tensor], *, may_skip: bool) -> str:
    """Why the optimizer cannot scale these gradients; empty if it can."""
    if not all(group.get("fused") for group in optimizer.param_groups):
        return "it is not fused: build it with fused=True"
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        remedy = "use torch 2.13 or later" if isinstance(optimizer, torch.optim.Adagrad) else "clip without fold_into"
        return f"its fused step in torch {torch.__version__} takes no scale: {remedy}"
    if getattr(optimizer, "grad_scale", None) is not None:
        return "its grad_scale is set already"
    held = parameters_of(optimizer)
    has_momentum = isinstance(optimizer, torch.optim.SGD) and any(g["momentum"] for g in optimizer.param_groups)
    without = [p for p in held if p.grad is not None and optimizer.state.get(p, {}).get("momentum_buffer") is None]
    if may_skip and has_momentum and without:
        # torch allocates the momentum buffer before the kernel, and the kernel fills it. A skipped kernel does not, and
        # the next step takes the buffer for filled.
        return "if its first step is skipped, its momentum stays unset"
    clipped_ids, held_ids = {id(p) for p in parameters}, {id(p) for p in held}
    if n_unclipped := sum(p.grad is not None and id(p) not in clipped_ids for p in held):
        return f"it also holds parameters that are not clipped ({n_unclipped}), and would scale their gradients too"
    if n_foreign := sum(p.grad is not None and id(p) not in held_ids for p in parameters):
        return f"it does not hold {n_foreign} of the clipped parameters"
    return ""


def _state_of_gradient(parameter: Tensor) -> tuple[weakref.ref[Tensor], int] | None:
    """Which tensor `.grad` is, and how often it was written to. Keeps no gradient alive."""
    if parameter.grad is None:
        return None
    local = local_tensor(parameter.grad)
    return weakref.ref(local), local._version


def _is_in_state(parameter: Tensor, state: tuple[weakref.ref[Tensor], int] | None) -> bool:
    """Whether `.grad` is still the same tensor, and nobody wrote to it."""
    if parameter.grad is None or state is None:
        return parameter.grad is None and state is None
    # `==` of two live weak references would compare the tensors, element by element.
    local, (gradient, version) = local_tensor(parameter.grad), state
    return gradient() is local and local._version == version
