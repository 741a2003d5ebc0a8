"""What the history keeps of a window, and what the trend gets of all of them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sonde.stats.state import check_number


@dataclass(frozen=True)
class SetAside:
    """A window that would have outweighed all others of its horizon together.

    Attributes:
        window: its number.
        times: how many times its neighbours' squared gradient norm, or their noise, it had.
        group: the parameter group that alone had so much; empty for the whole model.
    """

    window: int
    times: float
    group: str = ""


@dataclass
class SetAsides:
    """The windows that were set aside.

    Attributes:
        n: windows that were left out of everything.
        last: the last of them; None before the first, and after a restart.
        n_in_group: windows that were left out of single groups, by group.
        last_in_groups: the last of them, once for each group that it was left out of; empty before
            the first, and after a restart.
    """

    n: int
    last: SetAside | None
    n_in_group: dict[str, int]
    last_in_groups: tuple[SetAside, ...]

    def count(self, aside: SetAside | None, aside_in: Iterable[SetAside]) -> None:
        """Count a window that is left out of everything, or of some groups."""
        if aside is not None:
            self.n, self.last = self.n + 1, aside
        if in_groups := tuple(aside_in):
            self.last_in_groups = in_groups
        for each in in_groups:
            self.n_in_group[each.group] += 1


NONE_SET_ASIDE = SetAsides(0, None, {}, ())
"""For a model that does not train: its windows are all averaged."""


@dataclass(frozen=True)
class Series:
    """Windows as the trend takes them. A window counts in units of its expected squared gradient norm.

    Attributes:
        trace_cov: tr Σ over the expected |F|²; [series, entries].
        grad_sq: |G|² over the expected |F|²; [series, entries].
        ages: of the entries, in windows, 0 for the last window; [entries].
        counts: windows that share an entry; [entries].
        numbers: of the windows; the mean where several share an entry; [entries].
        mean_trace_cov: tr Σ itself, averaged over the horizon; NaN without windows; [series].
        mean_grad_sq: |G|² itself, likewise; [series].
    """

    trace_cov: Tensor
    grad_sq: Tensor
    ages: Tensor
    counts: Tensor
    numbers: Tensor
    mean_trace_cov: Tensor
    mean_grad_sq: Tensor


@dataclass(frozen=True)
class EntryColumns:
    """The entries of a history, column by column.

    Attributes:
        numbers: of the windows; [entries].
        ages: in windows; [entries].
        counts: windows that share an entry; [entries].
        sizes: expected |F|²; [entries].
    """

    numbers: Tensor
    ages: Tensor
    counts: Tensor
    sizes: Tensor

    def series(self, sums: Tensor, counted: Tensor, kept: Tensor, horizon: float) -> Series:
        """Series of some entries.

        Args:
            sums: tr Σ and |G|² of each series; [series, entries kept, 2].
            counted: 0 where an entry does not count for a series, otherwise 1; [series, entries kept].
            kept: which entries; [entries].
            horizon: of the averages, in windows.
        """
        # Weights count from the last entry: from now on, those of a history that is long past would all be 0.
        weights = torch.exp((self.numbers[kept] - self.numbers[-1:]) / horizon)
        levels = (weights @ sums) / (counted @ (weights * self.counts[kept]))[:, None]  # [series, 2]
        per_size = sums / self.sizes[kept, None]
        return Series(
            trace_cov=per_size[..., 0],
            grad_sq=per_size[..., 1],
            ages=self.ages[kept],
            counts=self.counts[kept],
            numbers=self.numbers[kept],
            mean_trace_cov=levels[:, 0],
            mean_grad_sq=levels[:, 1],
        )


@dataclass
class WindowEntry:
    """One window, or several neighbouring ones.

    Attributes:
        number: of the window, or the mean.
        n_windows: how many they are.
        size: expected |F|², or the mean; of a recent window its own |F|².
        estimates: sums over the windows of tr Σ and |G|², float64; [2, groups].
        aside: groups for which the entry does not count, by index.
    """

    number: float
    n_windows: int
    size: float
    estimates: Tensor
    aside: frozenset[int] = frozenset()

    def sum_with(self, other: WindowEntry) -> WindowEntry:
        """One entry for the windows of both."""
        n = self.n_windows + other.n_windows
        estimates = self.estimates + other.estimates
        # In a group for which one of the two does not count, the other stands in for it.
        for one, missing_in in ((self, other.aside - self.aside), (other, self.aside - other.aside)):
            for i in missing_in:
                estimates[:, i] = one.estimates[:, i] * (n / one.n_windows)
        return WindowEntry(
            (self.number * self.n_windows + other.number * other.n_windows) / n,
            n,
            (self.size * self.n_windows + other.size * other.n_windows) / n,
            estimates,
            self.aside & other.aside,
        )

    @functools.cached_property
    def total(self) -> tuple[float, float]:
        """tr Σ and |G|² of all groups together, summed over the windows."""
        trace_cov, grad_sq = self.estimates.sum(1).tolist()
        return trace_cov, grad_sq

    @functools.cached_property
    def v(self) -> float:
        """v in |F|² = |G|² + v tr Σ, of a single window that still has its own size."""
        noise, signal = self.total
        return (self.size - signal) / noise if noise > 0 else 0.0

    @functools.cached_property
    def noises_and_squares(self) -> Tensor:
        """tr Σ and |F|² of each group and, last, of all together, of a single window likewise; [2, groups + 1]."""
        noises, grad_sq = torch.cat([self.estimates, self.estimates.sum(1, keepdim=True)], 1)
        return torch.stack([noises, grad_sq + self.v * noises])

    def noise_and_square(self, groups: Sequence[int] | None, v: float) -> Tensor:
        """tr Σ and |F|² of some groups, or of all together for None, summed over the windows; [2, groups or 1]."""
        noise, grad_sq = self.estimates.sum(1, keepdim=True) if groups is None else self.estimates[:, groups]
        return torch.stack([noise, grad_sq + v * noise])

    def as_list(self) -> list[float]:
        """All of it, as `entry_from_list` takes it."""
        return [self.number, self.n_windows, self.size, *self.estimates.flatten().tolist(), *sorted(self.aside)]


def entry_from_list(label: str, row: object, n_groups: int) -> WindowEntry:
    """Restore what `WindowEntry.as_list` returned.

    Args:
        label: of the state, for messages.
        row: the list.
        n_groups: of the history.

    Raises:
        ValueError: when it cannot be an entry of so many groups.
    """
    n = 3 + 2 * n_groups  # the groups that are set aside follow
    if not isinstance(row, Sequence) or not n <= len(row) <= n + n_groups:
        raise ValueError(f"{label}: a window must be {n} numbers or more, got {row!r:.60}: is it damaged?")
    if not all(type(value) in (int, float) and abs(value) <= sys.float_info.max for value in row):
        numbers = dict(enumerate(row))
        for i in numbers:
            check_number(label, numbers, i)  # type: ignore[arg-type]
    values, aside = [float(value) for value in row[:n]], frozenset(row[n:])
    if values[1] < 1 or values[2] <= 0:
        raise ValueError(f"{label}: a window must have a count and a size above 0, got {row[:3]!r:.60}: is it damaged?")
    if not aside <= set(range(n_groups)):
        raise ValueError(f"{label}: a window is set aside for unknown groups, got {row[n:]!r:.60}: is it damaged?")
    estimates = torch.tensor(values[3:], dtype=torch.float64, device="cpu").view(2, n_groups)
    return WindowEntry(values[0], int(values[1]), values[2], estimates, aside)
