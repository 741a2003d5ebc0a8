"""What the optimizer's real step begins with: are the gradients and the options those that its forecast was made of?"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from sonde.parallel.loss_scale import scale_in_step
from sonde.parallel.unwrap import unwrap_optimizer
from sonde.policy.scoring.optimizer_step import sampled_elements

_LARGEST_CHANGE = 0.01
"""Relative difference between gradients, above which they count as others: 16 bits round by less."""


class Inputs(enum.IntEnum):
    """What a step began with, from the best that can be said to the worst."""

    SAME = 0
    UNSEEN = 1
    """No step began, or a gradient was gone, or `step(closure)` makes gradients anew."""
    SEVERAL = 2
    """Several steps began."""
    OPTIONS = 3
    """The optimizer's options are others."""
    GRADIENTS = 4
    """The gradients are others."""


class StepInputs:
    """Compares what an optimizer's step begins with to what there is before.

    It looks as the step begins: afterwards gradients may be gone, and torch's SGD with Nesterov and foreach writes to
    them. For that, the optimizer has a hook until `close`. It stays between two steps: if it came and went, a compiled
    step would be compiled again each time, and a step that is on its way through its hooks would raise.

    Args:
        optimizer: one of torch's; may be wrapped by Accelerate.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = unwrap_optimizer(optimizer)
        self._watch: InputsWatch | None = None
        self._hook = self._optimizer.register_step_pre_hook(self._begins)

    def close(self) -> None:
        """Take the hook away."""
        self._hook.remove()

    @contextlib.contextmanager
    def watched(self, parameters: Iterable[Tensor], gradient_scale: float) -> Iterator[InputsWatch]:
        """A watch on the step inside the block.

        Args:
            parameters: those whose `.grad` counts; a few hundred elements of each are copied.
            gradient_scale: factor that gradients are still multiplied by before the step, or in it.
        """
        self._watch = watch = InputsWatch(self._optimizer, parameters, gradient_scale)
        try:
            yield watch
        finally:
            self._watch = None

    def _begins(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._watch is not None:
            self._watch.step_begins(has_closure=any(map(callable, (*args[1:], kwargs.get("closure")))))


class InputsWatch:
    """Gradients and options of one block, on entry and as its step begins."""

    def __init__(self, optimizer: Any, parameters: Iterable[Tensor], gradient_scale: float) -> None:
        self._optimizer, self._scale = optimizer, gradient_scale
        self._parameters = [p for p in parameters if _is_dense(p.grad)]
        self._before = self._sampled()
        self._options = self._noted_options()
        self._n_steps = 0
        self._at_step: list[Tensor] | None = None
        self._options_at_step: list[dict[str, Any]] = []
        self._scale_in_step: Tensor | float = 1.0

    def step_begins(self, *, has_closure: bool) -> None:
        """Copy what the step begins with."""
        self._n_steps += 1
        is_seen = not has_closure and all(_is_dense(p.grad) for p in self._parameters)
        self._at_step = self._sampled() if is_seen else None
        self._options_at_step = self._noted_options()
        self._scale_in_step = scale_in_step(self._optimizer)

    def seen(self) -> Inputs:
        """What the step of the block began with, on this rank. Waits for the device."""
        if self._n_steps > 1:
            return Inputs.SEVERAL
        if self._n_steps and not _are_same(self._options, self._options_at_step):
            return Inputs.OPTIONS
        if self._at_step is None:
            return Inputs.UNSEEN
        if not self._before:
            return Inputs.SAME
        now, before = (torch.cat([part.double().cpu() for part in of]) for of in (self._at_step, self._before))
        now, before = now * float(self._scale_in_step), before * self._scale
        is_same = bool((now - before).norm() <= _LARGEST_CHANGE * before.norm())
        return Inputs.SAME if is_same or not before.isfinite().all() else Inputs.GRADIENTS

    @torch.no_grad()
    def _sampled(self) -> list[Tensor]:
        return [sampled_elements(p.grad).clone() for p in self._parameters if p.grad is not None]

    def _noted_options(self) -> list[dict[str, Any]]:
        return [
            {name: _copied(value) for name, value in group.items() if name != "params"}
            for group in self._optimizer.param_groups
        ]


def _is_dense(gradient: Tensor | None) -> bool:
    return gradient is not None and gradient.layout == torch.strided


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _are_same(before: list[dict[str, Any]], now: list[dict[str, Any]]) -> bool:
    """Whether options that are in both are equal; a group that was added since had no step to forecast."""
    return all(
        bool(old[name] == new[name]) for old, new in zip(before, now, strict=False) for name in old.keys() & new.keys()
    )
