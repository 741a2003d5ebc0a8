"""The rate of an optimizer at the present batch, in force during each step and no longer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sonde.decision.rate import rate_factor, usual_rule
from sonde.parallel.unwrap import outside_graphs

RateAt = tuple[str, float, float]
"""A rule of the rate, a batch, and the batch that the optimizer's own rate is right for, as of `rate_factor`."""


def usual_rule_of(optimizers: Sequence[torch.optim.Optimizer]) -> str:
    """The rule that is usual for some optimizers, where B_crit is not known: that of SGD if all of them are SGD."""
    return usual_rule("SGD" if all(isinstance(optimizer, torch.optim.SGD) for optimizer in optimizers) else "")


class ScaledRate:
    """Takes each step of an optimizer at the rate of the present batch.

    Hooks scale the rate before a step and give it back after it. Between steps the optimizer shows its own rate, so a
    schedule that computes the next rate from the last one never meets a scaled one, and nothing accumulates.

    Args:
        optimizer: of torch.
        now: called before each step, it says how the rate follows the batch.

    Raises:
        ValueError: for an optimizer without hooks or without a rate.
    """

    def __init__(self, optimizer: Any, now: Callable[[], RateAt]) -> None:
        groups = optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else [{}]
        if not all("lr" in group for group in groups):
            raise ValueError(
                "scale_lr takes an optimizer of torch, whose steps have hooks, with the rate 'lr' in each group, got "
                f"{type(optimizer).__name__}: pass on_change= to BatchSchedule, and set the rate there"
            )
        self.optimizer, self._now = optimizer, now
        self._own: list[Any] = []
        """The groups' rates before the step that is being taken."""
        before, after = outside_graphs(self._before), outside_graphs(self._after)
        self._handles = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]

    @property
    def factor(self) -> float:
        """The rate of the present batch over the optimizer's own."""
        return rate_factor(*self._now())

    def _before(self, optimizer: torch.optim.Optimizer, args: object = (), kwargs: object = None) -> None:
        self._after(optimizer)  # of a step that has raised
        if (factor := self.factor) == 1:
            return
        # Groups may share one tensor of the rate: all are read before one is set.
        rates = [group["lr"] for group in optimizer.param_groups]
        self._own = [rate.clone() if isinstance(rate, Tensor) else rate for rate in rates]
        for group, rate in zip(optimizer.param_groups, self._own, strict=True):
            _set_rate(group, rate * factor)

    def _after(self, optimizer: torch.optim.Optimizer, args: object = (), kwargs: object = None) -> None:
        for group, rate in zip(optimizer.param_groups, self._own, strict=False):
            _set_rate(group, rate)
        self._own = []

    def close(self) -> None:
        """Leave the optimizer as it was."""
        for handle in self._handles:
            handle.remove()


def _set_rate(group: dict[str, Any], rate: Any) -> None:
    if isinstance(group["lr"], Tensor):  # on the device, where a compiled step reads it
        group["lr"].copy_(rate)
    else:
        group["lr"] = rate
