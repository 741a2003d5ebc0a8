"""The last windows' tr Σ and |G|², group by group: what the trend and the run's average are made of."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sonde.batch_size.stats.group_estimates import estimates_table
from sonde.batch_size.stats.noise_scale import RunningNoiseScale, WindowEstimate
from sonde.batch_size.stats.recent_windows import NEIGHBOURS, RecentWindows
from sonde.batch_size.stats.solved_window import SolvedWindow
from sonde.batch_size.stats.spacing import Spacing
from sonde.batch_size.stats.window_entry import (
    EntryColumns,
    Series,
    SetAside,
    SetAsides,
    WindowEntry,
    entry_from_list,
)
from sonde.batch_size.stats.window_weights import REACH
from sonde.stats.state import check_count, check_keys, check_number

_MOST_ENTRIES, _MOST_NUMBERS, _FEWEST_ENTRIES = 512, 2**20, 64
"""Entries kept. If the horizon is longer, neighbouring windows share an entry. The more groups there are, the fewer
entries are kept, down to the fewest, so that a thousand parameters with a group each do not take gigabytes."""
_LEAST_OUTWEIGHING = 100.0
"""Fewest times its neighbours' size at which a window is set aside, however short the history: ten times the gradient.
Sound training has spikes below that when the learning rate has just risen."""
_MOST_SET_ASIDE = 0.05
"""If more windows than this part of all would be set aside, they are what training is like, and are kept."""


class WindowHistory:
    """Keeps a few hundred windows, and the average over the run.

    A window's expected squared norm E|F|² is the median of its ten neighbours' |F|². Estimates are divided by it, so
    that all windows count alike, however the gradient shrinks. In the run's average this is also the weight of
    McCandlish et al. 2018, arXiv:1812.06162, appendix D: steps at batch size B make progress in proportion to
    1/(1 + B_simple/B) = |G|²/E|F|², so that the critical batch of the whole run is Σ(tr Σ/E|F|²) / Σ(|G|²/E|F|²).

    Args:
        groups: names of the parameter groups, in the order of a window's entries.
        horizon: of the trend, in measured windows.
    """

    def __init__(self, groups: Sequence[str], horizon: float) -> None:
        if not horizon > 1:
            raise ValueError(
                f"horizon must be more than 1 window, got {horizon}: use 50, or math.inf for the whole run"
            )
        self.groups, self.horizon = tuple(groups), float(horizon)
        self._index = {name: i for i, name in enumerate(self.groups)}
        self.windows = 0
        """Windows added, those set aside included."""
        self.spacing = Spacing()
        """How many windows of training there are for each measured one."""
        self.set_asides = SetAsides(0, None, dict.fromkeys(self.groups, 0), ())
        """Of settled windows, which have all of their neighbours."""
        self._settled: list[WindowEntry] = []
        self._recent = RecentWindows()
        """Up to NEIGHBOURS before and NEIGHBOURS after the window that is settled next."""
        self._since = dict.fromkeys(self.groups, 0)
        """First window of each group whose parameters are those of today."""
        self._gone: set[str] = set()
        self._average = RunningNoiseScale(math.inf)
        self._most_entries = min(max(_MOST_NUMBERS // max(len(self.groups), 1), _FEWEST_ENTRIES), _MOST_ENTRIES)

    def add(self, window: SolvedWindow, number: int) -> None:
        """Add a window.

        Args:
            window: its estimates.
            number: of the window in the run; it sets the ages, so that dropped windows count.
        """
        self.windows += 1
        entry = WindowEntry(float(number), 1, window.sq_norm, estimates_table(window.per_group))
        self._recent = RecentWindows([*self._recent.entries, entry])
        if (n_recent := len(self._recent.entries)) > NEIGHBOURS:
            self._settle(n_recent - 1 - NEIGHBOURS)
        if n_recent > 2 * NEIGHBOURS:
            self._recent = RecentWindows(self._recent.entries[1:])
        oldest = number - REACH * self._horizon_of_training
        while self._settled and self._settled[0].number < oldest:
            del self._settled[0]
        if len(self._settled) > self._most_entries:
            pairs = zip(self._settled[::2], self._settled[1::2], strict=False)
            self._settled = [a.sum_with(b) for a, b in pairs] + self._settled[len(self._settled) // 2 * 2 :]

    @property
    def _horizon_of_training(self) -> float:
        """The horizon in windows of training."""
        return self.spacing.windows_in(self.horizon)

    def _settle(self, index: int) -> None:
        aside, aside_in = self._set_aside(index)
        self.set_asides.count(aside, aside_in.values())
        if aside is not None:
            return
        entry = self._sized(index, aside_in)
        self._settled.append(entry)
        self._add_to(self._average, entry)

    def _sized(self, index: int, aside_in: Iterable[int]) -> WindowEntry:
        """A recent window with the squared norm that its neighbours let expect, and groups it does not count in."""
        size = self._recent.expected_size(index)
        return replace(self._recent.entries[index], size=size, aside=frozenset(aside_in))

    def _set_aside(self, index: int) -> tuple[SetAside | None, dict[int, SetAside]]:
        """Whether a recent window outweighs all others of its horizon.

        Returns:
            For the whole model; and for single groups, by index, since a small group hardly moves the whole.
        """
        times, largest = self._recent.times(index)
        most, number = self._most_times(), round(self._recent.entries[index].number)
        if largest <= most:
            return None, {}
        if times[-1] > most and self._may_set_aside(index, 0) and bool(self._outweighs(index, None)):
            return SetAside(number, float(times[-1])), {}
        large = [
            i
            for i in (times[:-1] > most).nonzero().flatten().tolist()
            if self.groups[i] not in self._gone
            and self._may_set_aside(index, self.set_asides.n_in_group[self.groups[i]])
        ]
        if len(self.groups) < 2 or not large:
            return None, {}
        outweighs = self._outweighs(index, large).tolist()
        return None, {
            i: SetAside(number, float(times[i]), self.groups[i])
            for i, is_aside in zip(large, outweighs, strict=True)
            if is_aside
        }

    def _most_times(self) -> float:
        n_others = self.windows if math.isinf(self.horizon) else min(self.horizon, self.windows)
        return max(n_others, _LEAST_OUTWEIGHING)

    def _outweighs(self, index: int, groups: Sequence[int] | None) -> Tensor:
        """Whether a window has more noise, or a larger gradient, in a group than all others of its horizon.

        It must have more than their sum, and many times their mean, each in units of its expected size. Where gradients
        have few dimensions, or rest in most windows (a single parameter, rare tokens, experts), many windows are a
        hundred times the median of their neighbours, and outweigh nothing.

        Args:
            index: of a recent window.
            groups: which, by index; None for all together.

        Returns:
            For each of the groups; bool, [groups or 1].
        """
        entry, most = self._recent.entries[index], self._most_times()
        first = entry.number - self._horizon_of_training
        settled = [e for e in self._settled if e.number > first]
        counts = [self._counts(e, groups) for e in settled]
        others = [e.noise_and_square(groups, entry.v) / e.size for e in settled]
        settled_up_to = self._settled[-1].number if self._settled else -math.inf
        for i, recent in enumerate(self._recent.entries):  # without others that may be set aside themselves
            if recent.number > settled_up_to:
                times, _ = self._recent.times(i)
                counts.append((times[[-1] if groups is None else groups] <= most).double())
                others.append(recent.noise_and_square(groups, entry.v) / self._recent.expected_size(i))
        own = entry.noise_and_square(groups, entry.v) / self._recent.expected_size(index)
        table, counted = torch.stack(others), torch.stack(counts)
        factor = (_LEAST_OUTWEIGHING / counted.sum(0).clamp(min=1.0)).clamp(min=1.0)
        return (own > factor * (table * counted[:, None]).sum(0)).any(0)

    def _counts(self, entry: WindowEntry, groups: Sequence[int] | None) -> Tensor:
        """1 for each of the groups for which an entry counts, otherwise 0; float64, [groups or 1]."""
        if groups is None:
            counts = [float(len(entry.aside) < len(self.groups))]
        else:
            counts = [float(i not in entry.aside) for i in groups]
        return torch.tensor(counts, dtype=torch.float64, device="cpu")

    def _may_set_aside(self, index: int, n_in_group: int) -> bool:
        n_set_aside = self.set_asides.n + n_in_group
        has_neighbours = len(self._recent.neighbours(index)) >= NEIGHBOURS
        return has_neighbours and n_set_aside + 1 <= max(1.0, _MOST_SET_ASIDE * self.windows)

    def _last_indices(self) -> range:
        """Indices of the recent windows that wait for their neighbours."""
        n_recent = len(self._recent.entries)
        return range(max(n_recent - NEIGHBOURS, 0), n_recent)

    def _unsettled(self) -> list[WindowEntry]:
        """The windows that wait for their neighbours, as they would count now."""
        judged = [(i, *self._set_aside(i)) for i in self._last_indices()]
        return [self._sized(i, aside_in) for i, aside, aside_in in judged if aside is None]

    def set_asides_now(self) -> SetAsides:
        """The windows that were set aside, and those that would be if no window followed."""
        now = replace(self.set_asides, n_in_group=dict(self.set_asides.n_in_group))
        for i in self._last_indices():
            aside, aside_in = self._set_aside(i)
            now.count(aside, aside_in.values())
        return now

    def _add_to(self, average: RunningNoiseScale, entry: WindowEntry) -> None:
        if entry.number < max(self._since.values(), default=0):  # it waited for its neighbours when something changed
            return
        trace_cov, grad_sq = self._of_living(entry)
        average.update(WindowEstimate(trace_cov / entry.size, grad_sq / entry.size))

    def _of_living(self, entry: WindowEntry) -> tuple[float, float]:
        """tr Σ and |G|² of an entry in all groups that train, together."""
        if not self._gone:
            return entry.total
        alive = [i for i, name in enumerate(self.groups) if name not in self._gone]
        trace_cov, grad_sq = entry.estimates[:, alive].sum(1).tolist()
        return trace_cov, grad_sq

    def series(
        self, now: float | None = None, *, with_groups: bool = True
    ) -> list[tuple[tuple[str | None, ...], Series]]:
        """The windows of the total, under None, and of each group that trains, under its name.

        Args:
            now: number of the present window, from which ages are counted; by default the last window added.
            with_groups: also give those of the groups.

        Returns:
            Names, and their series as rows of one `Series`; one pair for each set of windows. The sets differ only if
            parameters were frozen or released on the way. A window that was set aside for a group is 0 there, which
            adds nothing to the sums that the trend is made of.
        """
        entries = [*self._settled, *self._unsettled()]
        columns = self._columns(entries, now=self.last_window if now is None else now)
        totals = _table([self._of_living(entry) for entry in entries]).view(1, len(entries), 2)
        of_groups = counted = None
        since = self._first_windows()
        if with_groups:
            of_groups, counted = self._of_groups(entries)
        else:
            since = {None: since[None]}
        series = []
        for first in dict.fromkeys(since.values()):
            names = tuple(name for name in since if since[name] == first)
            rows = [self._index[name] for name in names if name is not None]
            sums = totals if None in names else totals[:0]
            counts = torch.ones_like(sums[..., 0])
            if of_groups is not None and counted is not None:
                counts = torch.cat([counts, counted[rows]])
                sums = torch.cat([sums, of_groups[rows] * counted[rows, :, None]])
            kept = columns.numbers >= first
            series.append((names, columns.series(sums[:, kept], counts[:, kept], kept, self._horizon_of_training)))
        return series

    def _of_groups(self, entries: Sequence[WindowEntry]) -> tuple[Tensor, Tensor]:
        """tr Σ and |G|² of each group in each entry, and 0 where the entry does not count for it, otherwise 1.

        Returns:
            [groups, entries, 2] and [groups, entries], float64.
        """
        counted = torch.ones(len(self.groups), len(entries), dtype=torch.float64, device="cpu")
        for i, entry in enumerate(entries):
            if entry.aside:  # rare, and an assignment takes longer than all the rest
                counted[list(entry.aside), i] = 0.0
        if not entries:
            return counted.new_zeros(len(self.groups), 0, 2), counted
        return torch.stack([entry.estimates for entry in entries]).permute(2, 0, 1), counted

    def _columns(self, entries: Sequence[WindowEntry], *, now: float) -> EntryColumns:
        numbers = _table([entry.number for entry in entries])
        counts, sizes = (_table(column) for column in ([e.n_windows for e in entries], [e.size for e in entries]))
        return EntryColumns(numbers, now - numbers, counts, sizes)

    @property
    def last_window(self) -> float:
        """Number of the last window added; 0 before the first."""
        return self._recent.entries[-1].number if self._recent.entries else 0.0

    @property
    def gone(self) -> frozenset[str]:
        """The groups in which no parameter is trained now."""
        return frozenset(self._gone)

    def _first_windows(self) -> dict[str | None, int]:
        """The first window that counts: for the total, under None, and for each group that trains."""
        since: dict[str | None, int] = {n: first for n, first in self._since.items() if n not in self._gone}
        return {None: max(since.values(), default=0), **since}

    def run_average(self) -> RunningNoiseScale:
        """tr Σ and |G|² of the whole model, each over E|F|², averaged over the run so far."""
        average = copy.copy(self._average)
        for entry in self._unsettled():
            self._add_to(average, entry)
        return average

    def parameters_changed(self, groups: Iterable[str], *, gone: Iterable[str], number: int) -> None:
        """Forget the windows of groups whose measured parameters are no longer the same.

        Args:
            groups: all groups that changed.
            gone: those of which no parameter is left. They leave the total's past windows too. If other groups
                changed, the total begins anew. The run's average begins anew in any case.
            number: the first window with the new parameters.
        """
        gone = set(gone)
        for name in groups:
            self._since[name] = number
            (self._gone.add if name in gone else self._gone.discard)(name)
        self._average = RunningNoiseScale(math.inf)

    def begin_anew(self, number: int, *, every: float) -> None:
        """Forget all windows before one, since they speak of something else.

        Args:
            number: of the first window that counts, which may have been added already.
            every: windows of training for each measured one, from then on.
        """
        self.parameters_changed(self.groups, gone=self._gone, number=number)
        self._recent = RecentWindows(entry for entry in self._recent.entries if entry.number >= number)
        self._settled = [entry for entry in self._settled if entry.number >= number]
        self.windows = len(self._recent.entries)
        self.spacing = Spacing()
        self.spacing.measured(number, every)

    def state_dict(self) -> dict[str, Any]:
        """Everything that `load_state_dict` needs; numbers, strings and containers of them."""
        return {
            "groups": list(self.groups),
            "horizon": 0.0 if math.isinf(self.horizon) else self.horizon,  # JSON has no infinity
            "windows": self.windows,
            "n_set_aside": self.set_asides.n,
            "group_set_aside": dict(self.set_asides.n_in_group),
            "settled": [entry.as_list() for entry in self._settled],
            "recent": [entry.as_list() for entry in self._recent.entries],
            "since": dict(self._since),
            "gone": sorted(self._gone),
            "average": self._average.state_dict(),
            "spacing": self.spacing.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            ValueError: when keys, groups or the horizon differ, or a value cannot be what its name says.
        """
        label = "window history of the state"
        # States from before windows were spaced out are still read.
        known = set(self.state_dict())
        if isinstance(state, Mapping) and "spacing" not in state:
            known.discard("spacing")
        check_keys(label, state, known)
        if state["groups"] != list(self.groups):
            raise ValueError(f"{label}: it has the groups {state['groups']}, this probe has {list(self.groups)}")
        check_number(label, state, "horizon", low=0)
        if (float(state["horizon"]) or math.inf) != self.horizon:
            raise ValueError(
                f"{label}: it was kept for a horizon of {state['horizon']:g} windows, this probe uses {self.horizon:g}"
            )
        for name in ("windows", "n_set_aside"):
            check_count(label, state, name)
        for per_group in ("since", "group_set_aside"):
            check_keys(f"{label}, {per_group}", state[per_group], set(self.groups))
            for name in self.groups:
                check_count(f"{label}, {per_group}", state[per_group], name)
        if not isinstance(state["gone"], Sequence) or not set(state["gone"]) <= set(self.groups):
            raise ValueError(f"{label}: unknown groups in {state['gone']!r:.60}: is it damaged?")
        for name in ("settled", "recent"):
            if not isinstance(state[name], Sequence):
                raise ValueError(f"{label}: {name} must be a list of windows, got {state[name]!r:.60}: is it damaged?")
        settled, recent = (
            [entry_from_list(label, row, len(self.groups)) for row in state[name]] for name in ("settled", "recent")
        )
        average = RunningNoiseScale(math.inf)
        average.load_state_dict(state["average"])
        last = recent[-1].number if recent else 0.0
        self.spacing.load_state_dict(label, state.get("spacing", [last, 1.0, 1.0]))
        self.windows = state["windows"]
        n_in_group = {name: state["group_set_aside"][name] for name in self.groups}
        self.set_asides = SetAsides(state["n_set_aside"], None, n_in_group, ())
        self._settled, self._recent, self._average = settled, RecentWindows(recent), average
        self._since = {name: state["since"][name] for name in self.groups}
        self._gone = set(state["gone"])


def _table(numbers: Sequence[object]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64, device="cpu")
