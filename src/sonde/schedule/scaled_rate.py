"""The rate of an optimizer at the present batch, in force during each step and no longer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sonde.evidence.rates import RateRule, factor_at, options_at, scaled, set_options
from sonde.parallel.unwrap import outside_graphs


class ScaledRate:
    """Takes each step of an optimizer at the rate of the present batch.

    Hooks scale the rate before a step and give it back after it. Between steps the optimizer shows its own rate, so a
    schedule that computes the next rate from the last one never meets a scaled one, and nothing accumulates.

    Args:
        optimizer: of torch.
        rule: how its rate follows the batch, as of `sonde.branch`, in micro-batches of a window.
        counts: micro-batches that a window may have; the optimizer's own rate is right for the first.
        micro_batches: says how many the present window has.

    Raises:
        ValueError: for an optimizer without hooks, and a rule that has no answer for one of the counts.
    """

    def __init__(
        self, optimizer: Any, rule: Callable[[], RateRule], counts: Sequence[int], micro_batches: Callable[[], int]
    ) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ValueError(
                f"scale_lr takes an optimizer of torch, whose steps have hooks, got {type(optimizer).__name__}: pass "
                "on_change= to BatchSchedule, and set the rate there"
            )
        for n in counts:
            options_at(optimizer, rule(), n, counts[0])
        self.optimizer = optimizer
        self._rule, self._reference, self._micro_batches = rule, counts[0], micro_batches
        self._own: list[dict[str, Any]] = []
        """What the groups had before the step that is being taken."""
        before, after = outside_graphs(self._before), outside_graphs(self._after)
        self._handles = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]

    @property
    def factor(self) -> float:
        """The rate of the present batch over the optimizer's own."""
        return factor_at(self._rule(), self._micro_batches(), self._reference)

    def _before(self, optimizer: torch.optim.Optimizer, args: object = (), kwargs: object = None) -> None:
        self._after(optimizer)  # of a step that has raised
        if (n := self._micro_batches()) == self._reference:
            return
        rule = self._rule()
        for group in optimizer.param_groups:
            options = scaled(group, rule, n, self._reference)
            self._own.append({name: _copy(group[name]) for name in options})
            set_options(group, options)

    def _after(self, optimizer: torch.optim.Optimizer, args: object = (), kwargs: object = None) -> None:
        for group, own in zip(optimizer.param_groups, self._own, strict=False):
            set_options(group, own)
        self._own = []

    def close(self) -> None:
        """Leave the optimizer as it was."""
        for handle in self._handles:
            handle.remove()


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
