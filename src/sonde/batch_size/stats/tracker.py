"""From the sums of each window to a reading: what is averaged, what is dropped and why."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from sonde.batch_size.stats.changed_gradients import ChangedGradients
from sonde.batch_size.stats.consistency import same_data
from sonde.batch_size.stats.noise_scale import RunningNoiseScale, WindowEstimate, estimate_window
from sonde.batch_size.stats.reading import GroupReading, NoiseScaleReading
from sonde.batch_size.stats.scale_witness import RoundingTolerance, read_scale, rounding_of_sums
from sonde.batch_size.stats.window_row import Drop, WindowRow, why_unusable
from sonde.stats.intervals import RatioInterval
from sonde.stats.state import check_count, check_keys, check_number

_SAME = 1e-9
"""Noise beside signal below which pieces hold the same data: kernels that add in no fixed order leave 1e-12."""
_CERTAINTY = 0.99


class NoiseScaleTracker:
    """Turns window rows into running estimates; drops, counts and explains what cannot be used.

    Args:
        unit: plural name of the unit.
        groups: names of the parameter groups, in the order of a row's entries.
        horizon: length of the exponential averages, in windows.
        n_ranks: data-parallel ranks; gradients are expressed as their average.
        expected: what rounding alone explains, and what to name when the gradient was changed by something unknown.
        least_sq_norm: below it, squares of gradients have lost digits to underflow.
        level: confidence level of the intervals.
    """

    def __init__(
        self,
        *,
        unit: str,
        groups: Sequence[str],
        horizon: float,
        n_ranks: int,
        expected: RoundingTolerance,
        least_sq_norm: float = 0.0,
        level: float = 0.95,
    ) -> None:
        self.unit, self.groups, self.horizon, self.level = unit, tuple(groups), horizon, level
        self._n_ranks, self._expected, self._least_sq_norm = n_ranks, expected, least_sq_norm
        self._total = RunningNoiseScale(horizon)
        self._per_group = [RunningNoiseScale(horizon) for _ in groups]
        self._within_between = RunningNoiseScale(horizon)  # its ratio is the consistency
        self._units = 0.0
        self._units_weight = 0.0
        self._tampering = ChangedGradients(self._total.decay)
        self.dropped: dict[str, int] = {}
        self._effective_units: float | None = None
        self._squares = self._differences = 0.0
        self._scale: float | None = None
        self._scale_residual: float | None = None
        self.norm: float | None = None
        """Norm of the last window's gradient as the rank average, before any clip; None if it was dropped."""

    def expect(self, expected: RoundingTolerance) -> None:
        """From now on, other rounding of sums and another cause of more."""
        self._expected = expected

    def update(self, row: WindowRow) -> Drop | None:
        """Take one window.

        Returns:
            Why it was dropped; None when it was averaged.
        """
        self.norm = None
        # One after the other on a rank, then over ranks: in 16 bits too, where gradients or what is sent have so many.
        tolerance = rounding_of_sums(self._expected.tolerance, row.n_pieces / self._n_ranks + self._n_ranks)
        scale = read_scale(
            row.witness_final,
            row.witness_sum,
            tolerance=tolerance,
            squares=row.witness_squares,
            sizes=row.witness_sizes,
            floor=self._expected.floor,
        )
        if math.isfinite(row.n_units) and row.n_pieces:
            decay = self._total.decay
            self._units = decay * self._units + row.n_units
            self._units_weight = decay * self._units_weight + 1.0
        drop = why_unusable(row, scale, least_sq_norm=self._least_sq_norm, blame=self._expected.blame)
        why_changed = drop.reason if drop is not None and drop.kind == "changed" else None
        self._tampering.update(scale, why_changed=why_changed, averaged=drop is None)
        if drop is not None:
            self.dropped[drop.reason] = self.dropped.get(drop.reason, 0) + 1
            return drop
        assert scale.scale is not None
        # Everything in units of the rank-averaged sum of the pieces, so that a clip that came first, which differs from
        # window to window, does not weigh windows: B is brought there by κ, S by its definition.
        unit_scale = 1.0 / self._n_ranks
        to_unit = (unit_scale / scale.scale) ** 2
        self.norm = math.sqrt(math.fsum(row.sq_norm_big) * to_unit)
        estimates = [
            estimate_window(row.pieces(small), big * to_unit, scale=unit_scale)
            for small, big in zip(row.sq_norm_over_weight, row.sq_norm_big, strict=True)
        ]
        for running, estimate in zip(self._per_group, estimates, strict=True):
            running.update(estimate)
        self._total.update(
            WindowEstimate(math.fsum(e.trace_cov for e in estimates), math.fsum(e.grad_sq for e in estimates))
        )
        if (pair := self._consistency_pair(row)) is not None:
            self._within_between.update(pair)
        self._effective_units = 1.0 / row.pieces(0.0).v
        # Of the witness's elements, whose sums are in fp64: S − B is 0 but for rounding where all pieces are the same.
        squares = row.weight * row.witness_small
        decay = self._total.decay
        self._squares = decay * self._squares + squares
        self._differences = decay * self._differences + squares - float(row.witness_sum @ row.witness_sum)
        self._scale, self._scale_residual = scale.scale, scale.residual
        return None

    def _consistency_pair(self, row: WindowRow) -> WindowEstimate | None:
        """tr Σ of the witness's elements, within and between ranks; None unless there are two of each.

        The ranks' sums are pieces of their own, with u' = Σ_r (W_r/W)/n_r: S − S' tells of the noise within ranks,
        S' − B of the noise between them.
        """
        pieces = row.pieces(row.witness_small)
        u, v, u_ranks = pieces.u, pieces.v, row.rank_sq_weight_over_units / row.weight
        if self._n_ranks < 2 or row.n_pieces <= self._n_ranks or not u > u_ranks > v:
            return None
        big = float(row.witness_sum @ row.witness_sum)
        small, ranks = row.weight * row.witness_small, row.weight * row.witness_ranks
        return WindowEstimate(trace_cov=(small - ranks) / (u - u_ranks), grad_sq=(ranks - big) / (u_ranks - v))

    @property
    def windows(self) -> int:
        """Windows averaged."""
        return self._total.windows

    @property
    def consistency(self) -> float | None:
        """tr Σ within ranks over tr Σ between ranks; infinite where ranks do not differ; None if not measurable."""
        within, between = self._within_between.trace_cov, self._within_between.grad_sq
        if within is None or between is None:
            return None
        # Ranks with the same data differ by rounding only.
        return within / between if between > 1e-9 * within else math.inf

    def reading(self) -> NoiseScaleReading:
        """The present state of knowledge."""
        doubts = self._doubts()
        doubted = RatioInterval("unresolved", None, None, next(iter(doubts.values()))) if doubts else None
        interval = doubted or self._interval(self._total)
        return NoiseScaleReading(
            b_simple=_ratio(self._total, interval),
            low=interval.low,
            high=interval.high,
            status=interval.status,
            reason=doubted.reason if doubted else self._reason(interval),
            grad_sq=None if doubts else self._total.grad_sq,
            trace_cov=None if doubts else self._total.trace_cov,
            units_per_window=self._units / self._units_weight if self._units_weight else None,
            effective_units=self._effective_units,
            windows=self._total.windows,
            dropped=dict(self.dropped),
            windows_needed=None if doubts else self._total.windows_needed(level=self.level),
            consistency=self.consistency,
            doubts=doubts,
            scale=self._scale,
            scale_residual=self._scale_residual,
            unit=self.unit,
            groups={
                name: self._group(running, doubted) for name, running in zip(self.groups, self._per_group, strict=True)
            },
        )

    def _doubts(self) -> dict[str, str]:
        """Why the averages are not to be trusted, however narrow their interval."""
        doubts = {}
        if (tampered := self._tampering.doubt()) is not None:
            doubts["changed"] = tampered
        same = same_data(
            self._total.windows,
            pieces_differ=self._squares == 0.0 or self._differences > _SAME * self._squares,
            consistency=self.consistency,
            interval=self._within_between.interval(_CERTAINTY),
        )
        return doubts | ({"same_data": same} if same else {})

    def _interval(self, running: RunningNoiseScale) -> RatioInterval:
        return running.interval(self.level)

    def _reason(self, interval: RatioInterval) -> str:
        if interval.status == "resolved":
            return ""
        if not self._total.windows:
            return max(self.dropped, key=self.dropped.__getitem__) if self.dropped else "no window has ended yet"
        if interval.status == "lower_bound":
            return "|G|² is not told from 0 yet: measure more windows"
        if self._total.effective_windows < 2:
            return interval.reason
        return "neither the noise tr Σ nor |G|² is told from 0 yet: measure more windows, or more pieces in each"

    def _group(self, running: RunningNoiseScale, doubted: RatioInterval | None) -> GroupReading:
        interval = doubted or self._interval(running)
        return GroupReading(
            status=interval.status,
            b_simple=_ratio(running, interval),
            low=interval.low,
            high=interval.high,
            grad_sq=None if doubted else running.grad_sq,
            trace_cov=None if doubted else running.trace_cov,
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything that `load_state_dict` needs; numbers, strings and containers of them."""
        return {
            "groups": {n: r.state_dict() for n, r in zip(self.groups, self._per_group, strict=True)},
            "total": self._total.state_dict(),
            "consistency": self._within_between.state_dict(),
            "units": self._units,
            "units_weight": self._units_weight,
            "squares": self._squares,
            "differences": self._differences,
            "effective_units": self._effective_units,
            "scale": self._scale,
            "scale_residual": self._scale_residual,
            "tampering": self._tampering.state_dict(),
            "dropped": dict(self.dropped),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            ValueError: when keys, groups or the horizon differ, or a value cannot be what its name says; nothing is
                changed then.
        """
        what = "noise-scale probe state"
        numbers = ("units", "units_weight", "squares")
        last = ("effective_units", "scale", "scale_residual")  # of the last window averaged, if there was one
        known = {"groups", "total", "consistency", "tampering", "dropped", "differences"}
        check_keys(what, state, {*known, *numbers, *last})
        check_keys("parameter groups of the state", state["groups"], set(self.groups))
        for name in numbers:
            check_number(what, state, name, low=0)
        for name in ("differences", *(name for name in last if state[name] is not None)):
            check_number(what, state, name)
        if not isinstance(dropped := state["dropped"], Mapping):
            raise ValueError(f"{what}: 'dropped' must map reasons to counts, got {dropped!r:.60}: is it damaged?")
        for reason in dropped:
            check_count(f"{what}, dropped", dropped, reason)
        loaded = {key: RunningNoiseScale(self.horizon) for key in ("total", "consistency")}
        for key, running in loaded.items():
            running.load_state_dict(state[key])
        per_group = [RunningNoiseScale(self.horizon) for _ in self.groups]
        for name, running in zip(self.groups, per_group, strict=True):
            running.load_state_dict(state["groups"][name])
        tampering = ChangedGradients(self._total.decay)
        tampering.load_state_dict(state["tampering"])
        self._tampering = tampering
        self._total, self._within_between, self._per_group = loaded["total"], loaded["consistency"], per_group
        self._units, self._units_weight = float(state["units"]), float(state["units_weight"])
        self._squares, self._differences = float(state["squares"]), float(state["differences"])
        self._effective_units, self._scale, self._scale_residual = (state[name] for name in last)
        self.dropped = {str(reason): count for reason, count in dropped.items()}


def _ratio(running: RunningNoiseScale, interval: RatioInterval) -> float | None:
    """tr Σ/|G|², only where the interval says that it is known."""
    if interval.status != "resolved" or running.trace_cov is None or not running.grad_sq:
        return None
    return running.trace_cov / running.grad_sq
