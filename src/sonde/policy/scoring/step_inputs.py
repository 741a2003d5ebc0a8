"""What the optimizer's real step begins with: are the gradients and the options those that its forecast was made of?"""

from __future__ import annotations

import contextlib
import enum
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from sonde.gradient_norm.fused_clip import scale_in_step
from sonde.parallel.unwrap import unwrap_optimizer
from sonde.policy.scoring.optimizer_step import options_of_step, sampled_elements

_LARGEST_CHANGE = 0.01
"""Relative difference between the gradients of a parameter, above which they count as others. 16 bits round by less,
except for the smallest numbers."""


class Inputs(enum.IntEnum):
    """What a step began with, from the best that can be said to the worst."""

    SAME = 0
    UNSEEN = 1
    """No step began, or a gradient was gone, or `step(closure)` makes gradients anew."""
    HOOKED = 2
    """A hook that ran later may have changed them."""
    SEVERAL = 3
    """Several steps began."""
    OPTIONS = 4
    """The optimizer's options are others."""
    GRADIENTS = 5
    """The gradients are others."""


class StepInputs:
    """Compares what an optimizer's step begins with to what there is before.

    It looks as the step begins: afterwards gradients may be gone, and torch's SGD with Nesterov and foreach writes to
    them. For that, the optimizer has a pre-hook until `close`, and a post-hook that makes it the last one again. They
    stay between two steps: if they came and went, a compiled step would be compiled again each time, and a step that is
    on its way through its hooks would raise.

    It keeps no reference to the optimizer, which would live on with its state where nobody calls `close`.

    Args:
        optimizer: one of torch's; may be wrapped by Accelerate.
    """

    def __init__(self, optimizer: Any) -> None:
        self._watches: list[InputsWatch] = []
        optimizer = unwrap_optimizer(optimizer)
        # A compiled step would trace the hooks, and torch's compiler shows them options that are not the groups'.
        self._hook = optimizer.register_step_pre_hook(torch.compiler.disable(self._begins))
        self._hook_after = optimizer.register_step_post_hook(torch.compiler.disable(self._ended))

    def close(self) -> None:
        """Take the hooks away."""
        self._hook.remove()
        self._hook_after.remove()

    @contextlib.contextmanager
    def watched(self, optimizer: Any, parameters: Iterable[Tensor], gradient_scale: float) -> Iterator[InputsWatch]:
        """A watch on the step inside the block.

        Args:
            optimizer: the same as before.
            parameters: those whose `.grad` counts; a few hundred elements of each are copied.
            gradient_scale: factor that gradients are still multiplied by before the step, or in it.
        """
        watch = InputsWatch(unwrap_optimizer(optimizer), parameters, gradient_scale)
        self._watches.append(watch)
        try:
            yield watch
        finally:
            self._watches.remove(watch)

    def _begins(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._watches:
            has_closure = any(map(callable, (*args[1:], kwargs.get("closure"))))
            is_last = self._is_last()
            for watch in self._watches:
                watch.step_begins(optimizer, has_closure=has_closure, is_last=is_last)

    def _ended(self, *_: object) -> None:
        """Let later steps run this hook last. A step that is on its way through its pre-hooks would raise."""
        hooks = self._hook.hooks_dict_ref()
        if hooks and self._hook.id in hooks and not self._is_last():
            hooks.move_to_end(self._hook.id)

    def _is_last(self) -> bool:
        """Whether no hook runs after this one, except for sonde's own, which change no gradients."""
        hooks = self._hook.hooks_dict_ref() or {}
        later = itertools.takewhile(lambda k: k != self._hook.id, reversed(hooks))
        return self._hook.id in hooks and all(_is_own(hooks[k]) for k in later)


class InputsWatch:
    """Gradients and options of one block, on entry and as its step begins."""

    def __init__(self, optimizer: Any, parameters: Iterable[Tensor], gradient_scale: float) -> None:
        self._scale = gradient_scale
        self._parameters = [p for p in parameters if _is_dense(p.grad)]
        self._before = self._sampled()
        self._options = self._noted_options(optimizer)
        self._options_at_step = self._options
        self._n_steps = 0
        self._is_last = True
        self._at_step: list[Tensor] | None = None
        self._scale_in_step: Tensor | float = 1.0
        self._error: Exception | None = None

    def step_begins(self, optimizer: Any, *, has_closure: bool, is_last: bool) -> None:
        """Copy what the step begins with. An error is raised by `seen`: here it would end the step of the training.

        Args:
            optimizer: whose step it is.
            has_closure: whether the step makes its gradients by a closure.
            is_last: whether no hook of others runs after this.
        """
        self._n_steps += 1
        self._is_last = is_last
        try:
            is_seen = not has_closure and all(_is_dense(p.grad) for p in self._parameters)
            self._at_step = self._sampled() if is_seen else None
            self._options_at_step = self._noted_options(optimizer)
            self._scale_in_step = scale_in_step(optimizer)
        except Exception as error:
            self._error = error

    def seen(self) -> Inputs:
        """What the step of the block began with, on this rank. Waits for the device.

        Raises:
            Exception: what failed as the step began, such as for lack of memory.
        """
        if self._error is not None:
            raise self._error
        if self._n_steps > 1:
            return Inputs.SEVERAL
        if self._options_at_step != self._options:
            return Inputs.OPTIONS
        if self._at_step is None:
            return Inputs.UNSEEN
        scales = float(self._scale_in_step), self._scale
        if not all(_are_same(*pair, *scales) for pair in zip(self._at_step, self._before, strict=True)):
            return Inputs.GRADIENTS
        return Inputs.SAME if self._is_last else Inputs.HOOKED

    @torch.no_grad()
    def _sampled(self) -> list[Tensor]:
        return [sampled_elements(p.grad).clone() for p in self._parameters if p.grad is not None]

    def _noted_options(self, optimizer: Any) -> list[dict[str, Any]]:
        """What the step of these parameters depends on, by group."""
        names, watched = options_of_step(optimizer), {id(p) for p in self._parameters}
        return [
            {name: _copied(group.get(name)) for name in names}
            for group in optimizer.param_groups
            if any(id(p) in watched for p in group["params"])
        ]


def _is_own(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).partition(".")[0] == "sonde"


def _is_dense(gradient: Tensor | None) -> bool:
    return gradient is not None and gradient.layout == torch.strided


def _copied(value: Any) -> Any:
    """Schedulers write to a learning rate that is a tensor."""
    return value.detach().clone() if isinstance(value, Tensor) else value


def _are_same(now: Tensor, before: Tensor, scale: float, scale_before: float) -> bool:
    """Whether scaled gradients are the same but for rounding; those that are not finite never are."""
    numbers = torch.finfo(now.dtype)
    spacing = numbers.smallest_normal * numbers.eps * max(scale, scale_before)  # of the smallest numbers
    expected = before.double() * scale_before
    limit = _LARGEST_CHANGE * expected.norm() + spacing * math.sqrt(now.numel())
    return bool((now.double() * scale - expected).norm() <= limit)
