"""Which windows are measured: all at first, then about as many in each doubling of the run, or one in N.

Nothing here knows tensors or ranks. Every rank has a `Pace` of its own, and all of them must choose the same windows:
a measured window has a collective that the others lack. So a pace decides by numbers that were summed over ranks
alone, every 16 windows, about windows that are at least 15 windows old. Their numbers must have arrived: a rank
waits for them (`window_ends.py`).
"""

from __future__ import annotations

import math
import zlib
from collections import deque
from collections.abc import Mapping
from typing import Any

from sonde.batch_size.measuring_cost import (
    FEWEST,
    MOST_EVERY,
    Cost,
    CostRow,
    WindowCosts,
    affordable_every,
    measured_share,
    per_rank,
    since_change,
)

DEFAULT_BUDGET: float | None = 0.01
"""Part of the run's time that measuring may cost, unless the user says otherwise; None measures every window."""
DEFAULT_ALLOWANCE = 10.0
"""Seconds that measuring may take in any case, unless the user says otherwise."""
PER_DOUBLING = 150
"""Windows that are measured while the run doubles in steps, as long as the allowance lasts."""
FEWEST_PER_DOUBLING = 16
"""Windows that are measured while the run doubles in steps, whatever that costs."""
REVIEW = 16
"""Windows between two decisions."""
_ARRIVAL = 15
"""Windows that the numbers of a window have to arrive on the host, on all ranks, before a decision uses them."""
_REMEMBERED = 64
"""Measured windows whose cost is remembered."""
_LEAST_CHANGE = (0.75, 1.1)
"""Factors between which another number of windows is not worth a change."""
_MOST_SLOWER = 4
"""The largest factor by which N grows in one decision, once windows are left out."""
RANKS_DISAGREE = (
    "ranks began with different budget=, every= or saved states, and would choose different windows, so every window "
    "is measured: give all ranks the same options, and load the state on every rank"
)
_DIGEST_BITS = 20
"""Bits of a digest, or fewer: the sum over ranks of their squares must be exact."""


class Pace:
    """Chooses the windows that are measured, one in each stretch of N, at a place that is as good as random.

    A period in the data therefore cannot fall in step with the choice. The place follows from the stretch's number
    alone, so that it is the same on every rank and after a restart. The first window after attach is always measured.

    With a budget, measured windows are spread over log time, as training resembles itself there: N grows with the run,
    so that each doubling has `PER_DOUBLING` of them until measuring has taken the allowance, and at least
    `FEWEST_PER_DOUBLING` in any case. Where the budget allows more, N is the smallest that keeps the cost within it,
    computed again as costs become known better. With several ranks, the first 16 windows are all measured, until the
    ranks have been seen to have the same options and state.

    Args:
        every: N, from 1 up; None to choose it by the budget.
        budget: part of the run's time that measuring may cost, from 0 to 1; None for no limit.
        allowance: seconds that measuring may take in any case.
        n_ranks: ranks whose costs are summed.
        exact_bits: bits of whole numbers whose sum over these ranks is exact.
    """

    def __init__(
        self,
        *,
        every: int | None = None,
        budget: float | None = None,
        allowance: float = DEFAULT_ALLOWANCE,
        n_ranks: int = 1,
        exact_bits: int = 41,
    ) -> None:
        self._fixed, self.budget, self._n_ranks = every, (budget if every is None else None), n_ranks
        self._allowance, self._spent = allowance, 0.0
        self.windows = 0
        """Windows ended, those before a restart included."""
        self.is_measured = True
        """Whether the present window is measured."""
        self.n_quiet = 0
        """How many windows, from the present one on, are not measured, nor the next, with no decision between them."""
        self.disagrees = False
        """Whether ranks began with different options or states. Then every window is measured."""
        self._digest_bits = min(_DIGEST_BITS, exact_bits // 2)
        self._n_here = 0
        self._every = every or 1
        self._base = 0
        self._rows: deque[CostRow] = deque(maxlen=_REMEMBERED)
        self._arrived: deque[CostRow] = deque()
        self._awaited: deque[tuple[int, int]] = deque()
        """Measured windows whose costs have not been taken: their number, and N at that time."""
        self._agrees = n_ranks == 1
        self._start: int | None = None

    @property
    def every(self) -> int:
        """N: one window in so many is measured now."""
        return self._every if self._agrees else 1

    @property
    def start(self) -> int:
        """A digest of the options and of the state that this rank began with, below 2²⁰; fixed from the first call."""
        if self._start is None:
            text = repr((self._fixed, self.budget, self._allowance, self.state_dict()))
            self._start = zlib.crc32(text.encode()) % 2**self._digest_bits
        return self._start

    @property
    def cost(self) -> Cost:
        """What measuring costs: at the present N, or, so soon after a change of N, since windows are left out."""
        alike = self._alike(self.every)
        rows = [row for row in alike if row.every == self.every]
        if len(rows) < FEWEST and self.every < MOST_EVERY:
            rows = alike
        share, error = measured_share(rows)
        if share is None:  # at the slowest pace, too few windows so far
            share, _ = measured_share(alike)
        return Cost(self.every, share, error, self.budget)

    def _alike(self, every: int) -> list[CostRow]:
        """The rows that tell of a pace: costs depend on whether windows are left out before, not on how many."""
        return [row for row in self._rows if (row.every > 1) == (every > 1)]

    def take(self, number: int, costs: WindowCosts) -> None:
        """Take the costs of a measured window, summed over ranks, once they are on the host; in order.

        Once windows are measured in another way, costs of earlier ones say nothing of later ones, and are forgotten.

        Args:
            number: what `windows` was when the window had ended.
            costs: summed over ranks.
        """
        if self._awaited and self._awaited[0][0] == number:
            _, every = self._awaited.popleft()
            self._arrived.append(CostRow(number, every, per_rank(costs, self._n_ranks)))

    @property
    def awaits(self) -> int | None:
        """The measured window whose costs must be taken before the present window may end; None if all are there.

        On one rank nothing is waited for: no other rank has to decide alike.
        """
        if self._n_ranks == 1 or not self._decides_next or not self._awaited:
            return None
        number, _ = self._awaited[0]
        return number if number <= self._decided_up_to else None

    @property
    def _decides_next(self) -> bool:
        return (self._n_here + 1) % REVIEW == 0

    @property
    def _decided_up_to(self) -> int:
        """The last window whose costs a decision at the end of the present window uses."""
        return self.windows + 1 - _ARRIVAL

    def quiet_windows_end(self, n: int) -> None:
        """Note the end of quiet windows, the present one included.

        Args:
            n: how many, at most `n_quiet`.
        """
        self.n_quiet -= n
        self.windows += n
        self._n_here += n

    def window_ends(self) -> None:
        """Note the end of the present window, and choose whether the next one is measured."""
        if self.n_quiet:
            self.quiet_windows_end(1)
            return
        up_to, decides = self._decided_up_to, self._decides_next
        self.windows += 1
        self._n_here += 1
        if self.is_measured:
            self._awaited.append((self.windows, self.every))
        if decides:
            self._decide(up_to)
        n_before = self._next_measured() - self.windows
        self.is_measured = n_before == 0
        self.n_quiet = max(min(n_before - 1, REVIEW - 1 - self._n_here % REVIEW), 0)

    def _next_measured(self) -> int:
        """The next window that is measured, from the present one on: each stretch has one."""
        every = self.every
        stretch = self._base + (self.windows - self._base) // every * every
        here = stretch + _place(stretch, every)
        return here if here >= self.windows else stretch + every + _place(stretch + every, every)

    def _decide(self, up_to: int) -> None:
        """Choose N from the costs of the windows up to a number that all ranks have."""
        if not self._arrived or self._arrived[0].number > up_to:  # nothing new to decide by
            return
        while self._arrived and self._arrived[0].number <= up_to:
            row = self._arrived.popleft()
            self._compare_starts(row.costs)
            self._spent += row.costs.of_measuring
            self._rows.append(row)
        self._rows = deque(since_change(self._rows), maxlen=_REMEMBERED)
        if self.budget is None or not self._agrees:
            return
        rows, alike = list(self._rows), self._alike(self._every)
        # Where few rows are alike, the last ones may show already that windows are dearer now.
        looked_at = [alike] if len(alike) >= FEWEST else [rows, rows[-FEWEST:]]
        affordable = [n for each in looked_at if (n := affordable_every(each, self.budget)) is not None]
        if not affordable:
            return
        wanted = max(affordable)
        if self._every > 1:  # a few windows may have been dear by accident, and a slow pace learns it late
            wanted = min(wanted, _MOST_SLOWER * self._every)
        per_doubling = PER_DOUBLING if self._spent < self._allowance else FEWEST_PER_DOUBLING
        wanted = max(min(wanted, int(self.windows * math.log(2) / per_doubling)), 1)
        low, high = _LEAST_CHANGE
        # The slowest pace is reached in any case: there, a cost above the budget is told.
        if not low * self._every <= wanted <= high * self._every or wanted == MOST_EVERY > self._every:
            self._every = wanted
            self._base = self.windows

    def _compare_starts(self, costs: WindowCosts) -> None:
        """Let the pace slow down only if all ranks began alike: only equal numbers have a mean square of (mean)²."""
        if not (self._agrees or self.disagrees):
            self._agrees = costs.sq_start == costs.start**2
            self.disagrees = not self._agrees

    def state_dict(self) -> dict[str, Any]:
        """Everything that `load_state_dict` needs; numbers and lists of them."""
        rows = since_change([*self._rows, *self._arrived])
        return {
            "windows": self.windows,
            "every": self._every,
            "base": self._base,
            "spent": self._spent + math.fsum(row.costs.of_measuring for row in self._arrived),
            "costs": [[row.number, row.every, *row.costs.numbers()] for row in rows],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another run stopped, if no window has ended yet.

        Later, a state is ignored: only some of the ranks may have loaded it, and they would choose other windows.
        """
        if self._n_here:
            return
        self.windows, self._base = state["windows"], state["base"]
        self._spent = state["spent"]
        self._every = self._fixed or (state["every"] if self.budget is not None else 1)
        rows = (CostRow(number, every, WindowCosts(*costs)) for number, every, *costs in state["costs"])
        self._rows = deque(rows, maxlen=_REMEMBERED)


def _place(stretch: int, every: int) -> int:
    """Which window of a stretch is measured, from 0: the splitmix64 hash of the window before it."""
    mask = 2**64 - 1
    x = (stretch + 1) * 0x9E3779B97F4A7C15 & mask
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
    return (x ^ x >> 31) % every
