"""Decides which windows enter the averages, and why the others are left out; makes readings."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from sonde.batch_size.stats.averages import FixedWeights, WindowsOfRun, what_helps, windows_needed
from sonde.batch_size.stats.dependence import Dependence
from sonde.batch_size.stats.noise_scale import RatioAverage
from sonde.batch_size.stats.reading import Coverage, NoiseScaleReading, Series, group_reading
from sonde.batch_size.stats.window_row import (
    Drop,
    RoundingTolerance,
    ScaleReading,
    SolvedWindow,
    WindowRow,
    WitnessedSums,
    read_scale,
    solve_window,
    why_unusable,
)
from sonde.decision.law import are_alike
from sonde.stats.intervals import RatioInterval, unresolved
from sonde.stats.sealed_state import Stateful
from sonde.wording import plural

_OF_OTHER_STEPS = {"zeroed", "not_zeroed"}
"""Reasons to drop a window whose pieces may be of another step too, so that they do not show the batch."""
_FIXED = 5
"""Measured windows in turn of as many units that show that batches have this size now."""
_MEMORY = 50.0
"""Measured windows over which units and the checks of data are averaged."""
_MOST_MISSING = 5
"""Windows in a row that may be dropped before nothing is known about now; or a tenth of those used, if that is more."""
_NOTHING: dict[str, Any] = {"advice": "", "scatter": None, "average": None, "windows_needed": None, "every": 1.0}
"""What a reading says of windows before there are any, or where they cannot be trusted."""


class NoiseScaleTracker(Stateful):
    """Turns window rows into running estimates; drops, counts and explains windows that cannot be used.

    Args:
        unit: plural name of the unit.
        further_units: names of further units, in the order of a row's `further_units`.
        groups: names of the parameter groups, in the order of a row's entries.
        n_ranks: data-parallel ranks; gradients are expressed as their average.
        rounding: the residual that rounding alone explains, and the likely cause of a larger one.
        least_sq_norm: below it, squares of gradients have lost digits to underflow.
        fixed_weights: averages the windows of a model that does not train; None for one that trains.
        optimizer: says the kind of the optimizers as they are now, for readings.
    """

    STATE = (
        *("run", "windows", "n_seen", "dependence", "dropped", "_last_drop", "_n_missing", "u", "scale"),
        *("scale_residual", "_effective", "_units", "_last_units", "_n_equal", "_further", "_optimizer"),
        *("n_pieces", "_batch_changed"),
    )

    def __init__(
        self,
        *,
        unit: str,
        further_units: Sequence[str] = (),
        groups: Sequence[str],
        n_ranks: int,
        rounding: RoundingTolerance,
        least_sq_norm: float = 0.0,
        fixed_weights: FixedWeights | None = None,
        optimizer: Callable[[], str] = str,
    ) -> None:
        self._kind_now, self._optimizer = optimizer, optimizer()
        self.unit, self.groups, self.further_units = unit, tuple(groups), tuple(further_units)
        self.rounding, self._n_ranks, self._least_sq_norm = rounding, n_ranks, least_sq_norm
        self._fixed_weights, self.at_fixed_weights = fixed_weights, fixed_weights is not None
        # At fixed weights, all windows count alike.
        self._memory = _MEMORY if fixed_weights is None else math.inf
        self.run = WindowsOfRun(self.groups)
        self.rate_factor: Callable[[], float] = lambda: 1.0
        """By what a batch schedule multiplies the learning rate now."""
        self.n_pieces = 1
        """Pieces of the last window that was no short one, on all ranks."""
        self._batch_changed = False
        """Whether batches had another size since this object was made."""
        self.windows = 0
        """Windows that were averaged."""
        self.n_seen = 0
        """The number of the last measured window in training, used or dropped."""
        self.dependence = Dependence(self._memory)
        self.dropped: dict[str, int] = {}
        self._last_drop, self._n_missing = "", 0
        """Why the last window that was dropped was, and how many were since one was averaged."""
        self.last: SolvedWindow | None = None
        """The last window; None if it was dropped."""
        self._effective: float | None = None
        """Effective units over units, in the last window."""
        self.u: float | None = None
        self.scale: float | None = None
        """κ of the last sound window."""
        self.scale_residual: float | None = None
        self._units = RatioAverage(self._memory)
        self._further = {name: RatioAverage(self._memory) for name in self.further_units}
        """Of each further unit: its sum over windows, and the sum of units over the same windows."""
        self._last_units, self._n_equal = 0.0, 0
        """Units of the last window, and how many windows in turn had as many."""
        self.coverage: Coverage | None = None
        """The part of the model that readings speak of; None if it is the whole model."""

    # Windows.

    def update(self, row: WindowRow, *, number: int | None = None, rate: float | None = None) -> Drop | None:
        """Take one measured window.

        Args:
            row: its numbers.
            number: of the window in training; by default it follows the last one.
            rate: the learning rate; None where it is not known.

        Returns:
            Why the window was dropped; None when it was averaged.
        """
        self.last = None
        self.n_seen = self.n_seen + 1 if number is None else number
        scale = self._read_scale(row, row)
        apart = {name: self._read_scale(pieces, row) for name, pieces in row.apart.items()}
        drop = why_unusable(
            row, scale, apart, least_sq_norm=self._least_sq_norm, likely_cause=self.rounding.likely_cause
        )
        if math.isfinite(row.n_units) and row.n_pieces and not (drop is not None and drop.kind in _OF_OTHER_STEPS):
            self.see_units(row.n_units, row.further_units)
        # The last window of an epoch may be short: its pieces say nothing of the others.
        if row.n_pieces and (self.at_fixed_weights or are_alike(row.n_units, self._units.x or row.n_units)):
            self.n_pieces = row.n_pieces
        if drop is None or drop.kind == "changed":
            changed = scale.changed.union(*(each.changed for each in apart.values()))
            why = None if drop is None else drop.reason
            self.dependence.see_change(why, changed, sound=row.witness_sizes.keys() - changed)
        if drop is not None:
            self.drop(drop)
            return drop
        assert scale.scale is not None
        self.last = solved = solve_window(row, scale=scale.scale, n_ranks=self._n_ranks, apart=apart)
        residuals = [each.residual for each in (scale, *apart.values()) if each.residual is not None]
        self.add(solved, scale.scale, max(residuals), rate)
        if self._fixed_weights is not None:
            self._fixed_weights.add(solved, weight=row.weight / self._n_ranks)
        self.dependence.add(row.scores)
        if row.same_ranks is not None:
            self.dependence.see_ranks(row.same_ranks)
        if row.examples is not None:
            self.dependence.add(row.examples.scores | row.examples.excess_of_pieces(row, scale=scale.scale))
            self.dependence.see_window(row.examples.projected_window())
        return None

    def _read_scale(self, pieces: WitnessedSums, row: WindowRow) -> ScaleReading:
        # A gradient is added up micro-batch by micro-batch on a rank, then rank by rank. Each addition may round, even
        # to 16 bits.
        return read_scale(
            pieces.witness_final,
            pieces.witness_sum,
            tolerance=self.rounding.of_sums(row.n_pieces / self._n_ranks + self._n_ranks),
            squares=pieces.witness_squares,
            sizes=row.witness_sizes,
            floor=self.rounding.floor,
        )

    def see_units(self, n_units: float, further_units: Sequence[float] = ()) -> None:
        """Average the units of a window, whether the window is used or dropped."""
        for average, n in zip(self._further.values(), further_units, strict=True):
            if math.isfinite(n):
                average.update(n, n_units)
        self._n_equal = self._n_equal + 1 if n_units == self._last_units else 1
        self._last_units = n_units
        if self._n_equal == _FIXED and n_units != self._units.x:  # a changed batch is not averaged with the one before
            self._batch_changed |= bool(self._units.x) and not are_alike(n_units, self._units.x)
            self._units = RatioAverage(self._memory)
        self._units.update(n_units)

    def drop(self, drop: Drop) -> None:
        """Count a window that cannot be used."""
        self._last_drop, self._n_missing = drop.reason, self._n_missing + 1
        self.dropped[drop.reason] = self.dropped.get(drop.reason, 0) + 1

    def add(self, window: SolvedWindow, scale: float, residual: float, rate: float | None = None) -> None:
        """Average a window."""
        self.run.add(window, self.n_seen, rate)
        self.windows, self._n_missing = self.windows + 1, 0
        self.dependence.add(window.compared)
        if not self.at_fixed_weights:
            self.dependence.see_size(self.n_seen, window.total.grad_sq + window.u * window.total.trace_cov)
        self._effective, self.u = window.effective_units / self._last_units, window.u
        self.scale, self.scale_residual = scale, residual

    # Readings.

    @property
    def units_per_window(self) -> float | None:
        """Average units of a window; None before the first."""
        return self._units.x if self._units.windows else None

    def reading(self, *, with_groups: bool = True) -> NoiseScaleReading:
        """The present reading; without numbers if there is a doubt.

        Args:
            with_groups: also read each group of parameters.
        """
        if self._kind_now() not in (self._optimizer, ""):  # the momentum is cycled, say; none are left after a run
            self._optimizer = ""
        fixed, doubts = self._fixed_weights, self.dependence.doubts()
        if fixed is not None:
            series = fixed.series(len(self.groups) if with_groups else 0)
            facts, batch, stale = fixed.facts(series[0][0], self.unit), fixed.batch, ""
        else:
            series, facts = self._of_run(with_groups=with_groups)
            batch, stale = self.units_per_window, self._stale()
        if why := next(iter(doubts.values()), stale):
            series, facts = [(unresolved(why), None, None)] * len(series), facts | _NOTHING
        units = None if batch is None or self._effective is None else batch * self._effective
        if self.coverage is not None and units:
            (whole, grad_sq, trace_cov), *of_groups = series
            series = [(self.coverage.with_the_rest(whole, units), grad_sq, trace_cov), *of_groups]
            if facts.get("average") is not None:
                facts["average"] = self.coverage.with_the_rest(facts["average"], units)
        own, *groups = [group_reading(*each) for each in series]
        return NoiseScaleReading(
            **vars(own),
            **(_NOTHING | facts),
            reason=why or self._reason(series[0][0]),
            units_per_window=batch,
            effective_units=units,
            u=self.u,
            windows=self.windows,
            dropped=dict(self.dropped),
            consistency=self.dependence.consistency,
            doubts=doubts,
            scale=self.scale,
            scale_residual=self.scale_residual,
            unit=self.unit,
            # A group without any gradient is frozen, or not covered.
            groups={n: g for n, g in zip(self.groups, groups, strict=False) if (g.trace_cov, g.grad_sq) != (0.0, 0.0)},
            coverage=self.coverage,
            optimizer=self._optimizer,
            batch_changed=self._batch_changed,
        )

    def _of_run(self, *, with_groups: bool) -> tuple[list[Series], dict[str, Any]]:
        """The noise scale of a model that trains, and the other fields of its reading."""
        run = self.run
        levels, recent = run.levels(with_groups=with_groups), run.recent()
        facts: dict[str, Any] = {
            "n_steps": run.blocks.n_steps,
            "first_step": run.first_step,
            "warms_up": run.warms_up and self.rate_factor() == 1,  # a larger batch has a larger rate
            "further_units": {name: n.x / n.y if n.y else None for name, n in self._further.items()},
        }
        if recent is None:
            return [(level, None, None) for level in levels], facts
        log_error = levels[0].log_error
        if not log_error and recent.scatter is not None:
            log_error = recent.scatter / math.sqrt(recent.n_windows)
        # A window that was dropped was measured.
        used = self.windows / max(self.windows + sum(self.dropped.values()), 1)
        every = max(recent.n_steps / recent.n_windows * used, 1.0)
        average = run.average()
        facts |= {
            "advice": what_helps(levels[0].status, log_error, n_steps=run.blocks.n_steps, every=every),
            "scatter": recent.scatter if levels[0].status == "resolved" else None,
            "average": average,
            "windows_needed": windows_needed(log_error, recent.n_windows),
            "every": every,
        }
        # All groups, or none, are read.
        return list(zip(levels, recent.grad_sq, recent.trace_cov, strict=False)), facts

    def _stale(self) -> str:
        """Why the last windows say nothing about now; empty where they do."""
        missing = self._n_missing
        if not self.windows or missing <= max(self.windows // 10, _MOST_MISSING):
            return ""
        last = f": {self._last_drop}" if self._last_drop else ""
        return f"the last {plural(missing, 'window')} could not be used{last}"

    def _reason(self, interval: RatioInterval) -> str:
        """Why B_simple is not resolved; empty when it is resolved."""
        dropped = self.dropped
        if interval.status != "unresolved" or self.windows > sum(dropped.values()):
            return interval.reason
        if dropped:
            return max(dropped, key=dropped.__getitem__)
        return interval.reason if self.windows else "no window has ended yet"
