"""Decides which windows enter the averages, and why the others are left out."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sonde.batch_size.stats.averages import NoiseScaleAverages
from sonde.batch_size.stats.example_sums import Coverage
from sonde.batch_size.stats.expert_sums import joint_scale
from sonde.batch_size.stats.fixed_weights import FixedWeights
from sonde.batch_size.stats.reading import GroupReading, NoiseScaleReading
from sonde.batch_size.stats.scale_witness import RoundingTolerance, rounding_of_sums
from sonde.batch_size.stats.solved_window import SolvedWindow, solve_window
from sonde.batch_size.stats.summary import summarise
from sonde.batch_size.stats.window_row import Drop, WindowRow, why_unusable

_OF_OTHER_STEPS = {"zeroed", "not_zeroed", "several_reductions", "outside_pieces"}
"""Reasons to drop a window whose pieces may be of another step too, so that they do not show the batch."""


class NoiseScaleTracker:
    """Turns window rows into running estimates; drops, counts and explains windows that cannot be used.

    Args:
        unit: plural name of the unit.
        further_units: names of further units, in the order of a row's `further_units`.
        groups: names of the parameter groups, in the order of a row's entries.
        n_ranks: data-parallel ranks; gradients are expressed as their average.
        rounding: the residual that rounding alone explains, and the likely cause of a larger one.
        least_sq_norm: below it, squares of gradients have lost digits to underflow.
        fixed_weights: averages the windows of a model that does not train; None for one that trains.
    """

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
    ) -> None:
        self.unit, self.groups = unit, tuple(groups)
        self.rounding, self.further_units = rounding, tuple(further_units)
        self._n_ranks, self._least_sq_norm = n_ranks, least_sq_norm
        # At fixed weights, all windows count alike.
        memory = {} if fixed_weights is None else {"memory": math.inf}
        self._averages = NoiseScaleAverages(self.groups, further_units, **memory)
        self._fixed_weights = fixed_weights
        self.last: SolvedWindow | None = None
        """The last window; None if it was dropped."""
        self.last_norm: float | None = None
        """The norm of the last window's gradient, as in `SolvedWindow`; None if it was dropped."""
        self.coverage: Coverage | None = None
        """The part of the model that readings speak of; None if it is the whole model."""

    def update(self, row: WindowRow, *, number: int | None = None, rate: float | None = None) -> Drop | None:
        """Take one measured window.

        Args:
            row: its numbers.
            number: of the window in training; by default it follows the last one.
            rate: the learning rate; None where it is not known.

        Returns:
            Why the window was dropped; None when it was averaged.
        """
        self.last = self.last_norm = None
        self._averages.n_seen = self._averages.n_seen + 1 if number is None else number
        # A gradient is added up micro-batch by micro-batch on a rank, then rank by rank. Each addition may round, even
        # to 16 bits.
        n_additions = row.n_pieces / self._n_ranks + self._n_ranks
        tolerance, floor = rounding_of_sums(self.rounding.tolerance, n_additions), self.rounding.floor
        scale = row.read_scale(row.witness_sizes, tolerance=tolerance, floor=floor)
        apart = {
            name: pieces.read_scale(row.witness_sizes, tolerance=tolerance, floor=floor)
            for name, pieces in row.apart.items()
        }
        drop = why_unusable(
            row, scale, apart, least_sq_norm=self._least_sq_norm, likely_cause=self.rounding.likely_cause
        )
        if math.isfinite(row.n_units) and row.n_pieces and not (drop is not None and drop.kind in _OF_OTHER_STEPS):
            self._averages.see_units(row.n_units, row.further_units)
        scale = functools.reduce(joint_scale, apart.values(), scale)
        if drop is not None:
            self._averages.drop(drop, scale)
            return drop
        assert scale.scale is not None
        of_apart = {name: own.scale for name, own in apart.items()}
        solved = solve_window(row, scale=scale.scale, n_ranks=self._n_ranks, apart=of_apart)
        self._averages.add(solved, scale, rate)
        if self._fixed_weights is not None:
            self._fixed_weights.add(solved, weight=row.weight / self._n_ranks)
        dependence = self._averages.dependence
        dependence.update(row.neighbours, row.order, row.repeats)
        if row.examples is not None:
            excess = row.examples.excess_of_pieces(row.pieces(), scale=scale.scale)
            dependence.update(row.examples.order, excess=excess)
        self.last, self.last_norm = solved, solved.norm
        return None

    def begin_anew(self, first: int, *, changed: Collection[str] = (), gone: Collection[str] = ()) -> None:
        """Forget all windows before one: they speak of other parameters.

        Args:
            first: number of the first window that counts.
            changed: groups of which other parameters are trained from now on.
            gone: those of them in which no parameter is trained now.
        """
        run = self._averages.run
        run.begin_anew(first, gone=run.gone - set(changed) | set(gone))

    def reading(self, *, with_groups: bool = True) -> NoiseScaleReading:
        """The present reading.

        Args:
            with_groups: also read each group of parameters.
        """
        if self._fixed_weights is not None:
            reading = self._fixed_weights.reading(self._averages, unit=self.unit, with_groups=with_groups)
            return replace(reading, coverage=self.coverage)
        reading = summarise(self._averages, unit=self.unit, with_groups=with_groups)
        if self.coverage is None:
            return reading
        groups = {name: _known(group) for name, group in reading.groups.items()}
        return replace(reading, groups=groups, coverage=self.coverage)

    @property
    def scale(self) -> float | None:
        """κ of the last sound window."""
        return self._averages.scale

    @property
    def at_fixed_weights(self) -> bool:
        """Whether the model does not train, and all windows are averaged."""
        return self._fixed_weights is not None

    @property
    def windows(self) -> int:
        """Windows measured."""
        return self._averages.windows

    @property
    def units_per_window(self) -> float | None:
        """Average units of a window; None before the first."""
        return self._averages.units_per_window

    @property
    def consistency(self) -> float | None:
        """tr Σ within ranks over tr Σ between ranks; infinite where ranks do not differ; None if not measurable."""
        return self._averages.consistency

    def state_dict(self) -> dict[str, Any]:
        """Everything that `load_state_dict` needs; numbers, strings and containers of them.

        Raises:
            RuntimeError: at fixed weights, since a measurement is not resumed.
        """
        if self._fixed_weights is not None:
            raise RuntimeError("a measurement at fixed weights has no state to resume from: measure again")
        return self._averages.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._averages = NoiseScaleAverages(self.groups, self.further_units)
        self._averages.load_state_dict(state)


def _known(group: GroupReading) -> GroupReading:
    """A group's reading; without numbers if none of its parameters is covered, which leaves it nothing but zeros."""
    if group.trace_cov or group.grad_sq:
        return group
    return GroupReading("unresolved", None, None, None, None, None)
