"""The last windows, each beside its neighbours: what size was to be expected of it, and how far it stands out."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

import torch
from torch import Tensor

from sonde.batch_size.stats.window_entry import WindowEntry

NEIGHBOURS = 5
"""Windows on each side that a window is compared with. Their median is its expected size."""


class RecentWindows:
    """It never changes: one window more, or fewer, makes another. So it may keep what it has worked out.

    Args:
        entries: raw single windows, in order.
    """

    def __init__(self, entries: Iterable[WindowEntry] = ()) -> None:
        self.entries = tuple(entries)
        self._times: dict[int, tuple[Tensor, float]] = {}

    def neighbours(self, index: int) -> list[WindowEntry]:
        """The windows around one, without it; a single window is its own neighbour."""
        near = self.entries[max(index - NEIGHBOURS, 0) : index + NEIGHBOURS + 1]
        return [entry for entry in near if entry is not self.entries[index]] or list(near)

    def expected_size(self, index: int) -> float:
        """The median of its neighbours' |F|²."""
        return median(other.size for other in self.neighbours(index))

    def times(self, index: int) -> tuple[Tensor, float]:
        """How many times its neighbours' median a window's noise or squared norm is; 0 where the median is 0.

        Returns:
            For each group and, last, for all together, float64, [groups + 1]; and the largest of them.
        """
        if index not in self._times:
            near = torch.stack([other.noises_and_squares for other in self.neighbours(index)])
            usual = near.sort(dim=0).values[(len(near) - 1) // 2 : len(near) // 2 + 1].mean(0)
            times = torch.where(usual > 0, self.entries[index].noises_and_squares / usual, 0.0).amax(0)
            self._times[index] = times, float(times.max())
        return self._times[index]
