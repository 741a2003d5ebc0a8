"""Decides which windows enter the averages, and why the others are left out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sonde.batch_size.stats.averages import NoiseScaleAverages
from sonde.batch_size.stats.example_sums import Coverage
from sonde.batch_size.stats.expert_sums import joint_scale
from sonde.batch_size.stats.fixed_weights import FixedWeights
from sonde.batch_size.stats.reading import GroupReading, NoiseScaleReading
from sonde.batch_size.stats.scale_witness import RoundingTolerance, read_scale, rounding_of_sums
from sonde.batch_size.stats.solved_window import SolvedWindow, solve_window
from sonde.batch_size.stats.summary import summarise
from sonde.batch_size.stats.window_entry import NONE_SET_ASIDE, SetAsides
from sonde.batch_size.stats.window_row import Drop, WindowRow, why_unusable
from sonde.stats.state import check_keys

_WHOLE = ("all",)
"""The only group of the averages of a whole model, where groups do not add up to it."""


_OF_OTHER_STEPS = {"zeroed", "not_zeroed", "left_over", "several_reductions", "outside_pieces", "ended_late"}
"""Reasons to drop a window whose pieces may be of another step too, so that they do not show the batch."""


class NoiseScaleTracker:
    """Turns window rows into running estimates; drops, counts and explains windows that cannot be used.

    Args:
        unit: plural name of the unit.
        further_units: names of further units, in the order of a row's `further_units`.
        groups: names of the parameter groups, in the order of a row's entries.
        horizon: of the trend and of the averages, in measured windows.
        n_ranks: data-parallel ranks; gradients are expressed as their average.
        rounding: the residual that rounding alone explains, and the likely cause of a larger one.
        least_sq_norm: below it, squares of gradients have lost digits to underflow.
        level: confidence level of the intervals.
        fixed_weights: averages the windows of a model that does not train; None for one that trains.
        groups_add_up: whether squares of groups add up to those of the whole model. Otherwise both are averaged apart.
    """

    def __init__(
        self,
        *,
        unit: str,
        further_units: Sequence[str] = (),
        groups: Sequence[str],
        horizon: float,
        n_ranks: int,
        rounding: RoundingTolerance,
        least_sq_norm: float = 0.0,
        level: float = 0.95,
        fixed_weights: FixedWeights | None = None,
        groups_add_up: bool = True,
    ) -> None:
        self._apart = None if groups_add_up else NoiseScaleAverages(tuple(groups), horizon, further_units)
        """The averages of the groups, where they do not add up."""
        groups = tuple(groups) if groups_add_up else _WHOLE
        self.unit, self.groups, self.horizon, self.level = unit, groups, horizon, level
        self.rounding, self.further_units = rounding, tuple(further_units)
        self._n_ranks, self._least_sq_norm = n_ranks, least_sq_norm
        self._averages = NoiseScaleAverages(self.groups, horizon, further_units)
        self._fixed_weights = fixed_weights
        self.last: SolvedWindow | None = None
        """The last window; None if it was dropped."""
        self.last_norm: float | None = None
        """The norm of the last window's gradient, as in `SolvedWindow`; None if it was dropped."""
        self.coverage: Coverage | None = None
        """The part of the model that readings speak of; None if it is the whole model."""

    def update(self, row: WindowRow, *, number: int | None = None, every: float = 1.0) -> Drop | None:
        """Take one measured window.

        Args:
            row: its numbers.
            number: of the window in training, which sets ages; by default it follows the last one.
            every: one window in so many is measured at that time, on average.

        Returns:
            Why the window was dropped; None when it was averaged.
        """
        self.last = self.last_norm = None
        number = self._averages.n_seen + 1 if number is None else number
        for averages in self._all_averages:
            averages.see(number, every)
        # A gradient is added up micro-batch by micro-batch on a rank, then rank by rank. Each addition may round, even
        # to 16 bits.
        n_additions = row.n_pieces / self._n_ranks + self._n_ranks
        tolerance, floor = rounding_of_sums(self.rounding.tolerance, n_additions), self.rounding.floor
        scale = read_scale(
            row.witness_final,
            row.witness_sum,
            tolerance=tolerance,
            squares=row.witness_squares,
            sizes=row.witness_sizes,
            floor=floor,
        )
        experts = None
        if row.experts is not None:
            experts = row.experts.read_scale(row.witness_sizes, tolerance=tolerance, floor=floor)
        drop = why_unusable(
            row,
            scale,
            least_sq_norm=self._least_sq_norm,
            likely_cause=self.rounding.likely_cause,
            expert_scale=experts,
        )
        if math.isfinite(row.n_units) and row.n_pieces and not (drop is not None and drop.kind in _OF_OTHER_STEPS):
            for averages in self._all_averages:
                averages.see_units(row.n_units, row.further_units)
        scale = scale if experts is None else joint_scale(scale, experts)
        if drop is not None:
            for averages in self._all_averages:
                averages.drop(drop, scale)
            return drop
        assert scale.scale is not None
        expert_scale = None if experts is None else experts.scale
        solved = solve_window(row, scale=scale.scale, n_ranks=self._n_ranks, expert_scale=expert_scale)
        if self._apart is not None:
            self._apart.add(solved.of_groups_alone, scale)
            solved = replace(solved, per_group=(solved.total,))
        self._averages.add(solved, scale)
        if self._fixed_weights is not None:
            self._fixed_weights.add(solved, weight=row.weight / self._n_ranks, number=self._averages.n_seen)
        for averages in self._all_averages:
            averages.neighbours.update(row.neighbours)
            averages.repeats.update(row.repeats)
            if row.examples is not None:
                excess = row.examples.excess_of_pieces(row.pieces(0.0), scale=scale.scale)
                averages.examples.update(row.examples.order, excess)
        self.last, self.last_norm = solved, solved.norm
        return None

    def parameters_changed(self, groups: Sequence[str], *, gone: Sequence[str], first: int) -> None:
        """Forget the windows in which other parameters of these groups were trained than are trained now.

        Args:
            groups: names of all groups that changed.
            gone: those in which no parameter is trained now; they leave the past of the total too.
            first: number of the first window with the parameters of now.
        """
        number = max(first, 0)
        if self._apart is not None:
            self._apart.history.parameters_changed(groups, gone=gone, number=number)
            groups, gone = _WHOLE, ()
        self._averages.history.parameters_changed(groups, gone=gone, number=number)

    def begin_anew(self, first: int, *, every: float) -> None:
        """Forget all windows before one: they speak of other parameters.

        Args:
            first: number of the first window that counts.
            every: windows of training for each measured one, from then on.
        """
        for averages in self._all_averages:
            averages.history.begin_anew(max(first, 0), every=every)

    def reading(
        self, *, with_groups: bool = True, as_if_last: bool = True, now: int | None = None
    ) -> NoiseScaleReading:
        """The present reading.

        Args:
            with_groups: also read each group of parameters, which costs as much time for eight of them as the total.
            as_if_last: judge the last windows as if none followed; otherwise they wait for their neighbours.
            now: number of the present window, measured or not; by default the last measured one.
        """
        if self._fixed_weights is not None:
            reading = self._fixed_weights.reading(
                self._averages, unit=self.unit, level=self.level, with_groups=with_groups
            )
            return replace(reading, coverage=self.coverage)
        summaries = [
            summarise(
                averages,
                unit=self.unit,
                level=self.level,
                with_groups=with_groups,
                as_if_last=as_if_last,
                now=now,
            )
            for averages in (self._all_averages if with_groups else [self._averages])
        ]
        groups = summaries[-1].groups
        if self.coverage is not None:
            groups = {name: _known(group) for name, group in groups.items()}
        return replace(summaries[0], groups=groups, coverage=self.coverage)

    @property
    def _all_averages(self) -> list[NoiseScaleAverages]:
        return [self._averages] if self._apart is None else [self._averages, self._apart]

    @property
    def scale(self) -> float | None:
        """κ of the last sound window."""
        return self._averages.scale

    @property
    def set_asides(self) -> SetAsides:
        """Windows that were set aside, without the last five, which wait for neighbours; none at fixed weights."""
        return self._averages.history.set_asides if self._fixed_weights is None else NONE_SET_ASIDE

    def set_asides_now(self) -> SetAsides:
        """The same with the last five, judged as if no window followed."""
        return self._averages.history.set_asides_now() if self._fixed_weights is None else NONE_SET_ASIDE

    @property
    def at_fixed_weights(self) -> bool:
        """Whether the model does not train, and all windows are averaged."""
        return self._fixed_weights is not None

    @property
    def gone_groups(self) -> frozenset[str]:
        """The groups in which no parameter is trained now."""
        return self._all_averages[-1].history.gone

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
        if self._apart is None:
            return self._averages.state_dict()
        return {"whole": self._averages.state_dict(), "groups": self._apart.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; see `NoiseScaleAverages.load_state_dict`."""
        if self._apart is None:
            self._averages.load_state_dict(state)
            return
        check_keys("noise-scale probe state", state, {"whole", "groups"})
        # All or nothing: the first is loaded into a copy.
        whole = NoiseScaleAverages(self.groups, self.horizon, self.further_units)
        whole.load_state_dict(state["whole"])
        self._apart.load_state_dict(state["groups"])
        self._averages = whole


def _known(group: GroupReading) -> GroupReading:
    """A group's reading; without numbers if none of its parameters is covered, which leaves it nothing but zeros."""
    if group.trace_cov or group.grad_sq:
        return group
    return GroupReading("unresolved", None, None, None, None, None)
