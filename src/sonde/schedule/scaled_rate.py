"""The rate of an optimizer at the present batch, in force during each step and no longer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from sonde.parallel.unwrap import outside_graphs
from sonde.schedule.rates import RateRule, factor_at, options_at, set_options

RateAt = tuple[RateRule, float, float]
"""A rule of the rate, a batch, and the batch that the optimizer's own rate is right for."""


class ScaledRate:
    """Takes each step of an optimizer at the rate of the present batch.

    Hooks scale the rate before a step and give it back after it. Between steps the optimizer shows its own rate, so a
    schedule that computes the next rate from the last one never meets a scaled one, and nothing accumulates.

    Args:
        optimizer: of torch.
        now: called before each step, it says how the rate follows the batch.
        allowed: whatever `now` may return.

    Raises:
        ValueError: for an optimizer without hooks or without a rate, and a rule that has no answer for a batch.
    """

    def __init__(self, optimizer: Any, now: Callable[[], RateAt], allowed: Iterable[RateAt]) -> None:
        groups = optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else [{}]
        if not all("lr" in group for group in groups):
            raise ValueError(
                "scale_lr takes an optimizer of torch, whose steps have hooks, with the rate 'lr' in each group, got "
                f"{type(optimizer).__name__}: pass on_change= to BatchSchedule, and set the rate there"
            )
        for each in allowed:
            options_at(optimizer, *each)
        self.optimizer, self._now = optimizer, now
        self._own: list[dict[str, Any]] = []
        """What the groups had before the step that is being taken."""
        before, after = outside_graphs(self._before), outside_graphs(self._after)
        self._handles = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]

    @property
    def factor(self) -> float:
        """The rate of the present batch over the optimizer's own."""
        return factor_at(*self._now())

    def _before(self, optimizer: torch.optim.Optimizer, args: object = (), kwargs: object = None) -> None:
        self._after(optimizer)  # of a step that has raised
        if self.factor == 1:
            return
        # Groups may share one tensor of the rate: all are read before one is set.
        options = options_at(optimizer, *self._now())
        groups = [*zip(optimizer.param_groups, options, strict=True)]
        self._own = [{k: v.clone() if isinstance(v := group[k], Tensor) else v for k in new} for group, new in groups]
        for group, new in groups:
            set_options(group, new)

    def _after(self, optimizer: torch.optim.Optimizer, args: object = (), kwargs: object = None) -> None:
        for group, own in zip(optimizer.param_groups, self._own, strict=False):
            set_options(group, own)
        self._own = []

    def close(self) -> None:
        """Leave the optimizer as it was."""
        for handle in self._handles:
            handle.remove()
