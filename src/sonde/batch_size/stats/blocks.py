"""Windows in blocks that are equally long in log time: all that is kept of a run.

Training resembles itself in log time, so a block that ends at step t is about `_LENGTH` t steps long. A run of a
million steps has some 60 blocks, whatever part of its windows is measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sonde.stats.sealed_state import Stateful

_LENGTH = 0.2
"""Length of a block in log time."""
_BEGINNING = 30.0
"""Steps that are added to the time: log time begins slowly, since the first steps do not resemble each other."""
_FEWEST = 8
"""Fewest windows of a block."""
_JUMPS = math.log(1.5)
"""A change of the log of the learning rate between two windows that ends a block, which would be of two levels."""
_SHORTEST, _FEWEST_BEFORE_JUMP = _LENGTH / 4, 2
"""Log time and windows of a block that ends so; they bound the number of blocks."""


@dataclass(frozen=True)
class Block:
    """Neighbouring windows. A series is the whole model, or a group of parameters.

    Attributes:
        end: steps of training up to its last window, from where the series begin.
        n_steps: steps of training that it stands for: those since the block before.
        n_windows: how many of them were measured and could be used.
        sizes: mean |F|² of each series; [series].
        means: of tr Σ and |G|², over the size; [series, 2].
        scatter: sums of products of the windows' deviations from these means, likewise over the size; [series, 2, 2].
        rate: the learning rate at its end; None where it is not known.
    """

    end: int
    n_steps: int
    n_windows: int
    sizes: Tensor
    means: Tensor
    scatter: Tensor
    rate: float | None = None

    @property
    def log_time(self) -> float:
        """Its length in log time."""
        return _log_time(self.n_steps, self.end)


def _log_time(n_steps: int, end: int) -> float:
    return math.log((end + _BEGINNING) / (end - n_steps + _BEGINNING))


def change_of_rate(before: float | None, now: float | None) -> float:
    """By how much the log of a learning rate has changed, up or down; 0 where it is not known."""
    if before is None or now is None or before == now:
        return 0.0
    low, high = sorted((before, now))
    return math.log(high / low) if low > 0 else math.inf


class Blocks(Stateful):
    """Collects windows, and makes a block of them when it is long enough."""

    STATE = ("n_steps", "rate", "n_windows", "_n")

    def __init__(self) -> None:
        self.complete: list[Block] = []
        """In order."""
        self.n_windows = self.n_steps = 0
        """All windows so far, and steps of training up to the last of them, from where the series begin."""
        self.rate: float | None = None
        """The learning rate of the last window; None where it is not known."""
        self._n = 0
        """Windows since the last complete block. No window is kept: a block of a long run may have many thousands."""
        self._means = self._scatter = on_host([])
        """Their mean tr Σ, |G|² and |F|², [series, 3], and sums of products of deviations, [series, 2, 2]."""

    def add(self, end: int, estimates: Tensor, v: float, rate: float | None = None) -> Block | None:
        """Add a window.

        Args:
            end: steps of training up to it, from where the series begin.
            estimates: unbiased tr Σ and |G|²; float64 on the CPU, [series, 2].
            v: of the window, in |F|² = |G|² + v tr Σ.
            rate: the learning rate; None where it is not known.

        Returns:
            The block that it completes, or that ends before it, if one does.
        """
        has_jumped = change_of_rate(self.rate, rate) > _JUMPS
        ended = self._complete(_SHORTEST, _FEWEST_BEFORE_JUMP) if has_jumped else None
        sizes = (estimates[:, 1] + v * estimates[:, 0]).clamp(min=0.0)
        window = torch.cat([estimates, sizes[:, None]], 1)
        if self._n == 0:
            self._means, self._scatter = torch.zeros_like(window), estimates.new_zeros(len(estimates), 2, 2)
        self.n_steps, self.rate, self._n, self.n_windows = end, rate, self._n + 1, self.n_windows + 1
        # Means and sums of products as each window comes, without the cancellation that sums of squares would have:
        # B. P. Welford, "Note on a method for calculating corrected sums of squares and products", Technometrics 4
        # (1962) 419–420.
        away = window - self._means
        self._means = self._means + away / self._n
        self._scatter = self._scatter + (1 - 1 / self._n) * away[:, :2, None] * away[:, None, :2]
        return ended or self._complete(_LENGTH, _FEWEST)

    def _complete(self, shortest: float, fewest: int) -> Block | None:
        """End the block under way, if it is as long as this in log time and has windows enough."""
        if self._n < fewest or _log_time(self.n_steps - self._before, self.n_steps) < shortest:
            return None
        block = self.unfinished
        assert block is not None
        self._n = 0
        self.complete.append(block)
        return block

    @property
    def unfinished(self) -> Block | None:
        """The windows since the last complete block; None if there are none."""
        if not self._n:
            return None
        sizes = self._means[:, 2]
        # A group whose parameters got no gradient has no size, and nothing to be divided.
        scale = torch.where(sizes > 0, sizes, 1.0)
        means, scatter = self._means[:, :2] / scale[:, None], self._scatter / scale.square()[:, None, None]
        return Block(self.n_steps, self.n_steps - self._before, self._n, sizes, means, scatter, self.rate)

    @property
    def _before(self) -> int:
        """Steps of training up to the last complete block."""
        return self.complete[-1].end if self.complete else 0

    @property
    def all(self) -> list[Block]:
        """The complete blocks, and the one under way."""
        return self.complete if (last := self.unfinished) is None else [*self.complete, last]

    def state_dict(self) -> dict[str, Any]:
        """Everything that `load_state_dict` needs, as JSON values."""
        blocks = [[b.sizes.tolist(), b.means.tolist(), b.scatter.tolist()] for b in self.complete]
        numbers = [[b.end, b.n_steps, b.n_windows, b.rate] for b in self.complete]
        under_way = [self._means.tolist(), self._scatter.tolist()]
        return super().state_dict() | {"blocks": blocks, "numbers": numbers, "under_way": under_way}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        super().load_state_dict(state)
        pairs = zip(state["numbers"], state["blocks"], strict=True)
        self.complete = [Block(*n[:3], *map(on_host, tensors), *n[3:]) for n, tensors in pairs]
        self._means, self._scatter = map(on_host, state["under_way"])


def on_host(numbers: Sequence[Any]) -> Tensor:
    """Numbers in float64 on the CPU, whatever torch's defaults are."""
    return torch.tensor(numbers, dtype=torch.float64, device="cpu")
