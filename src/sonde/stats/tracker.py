"""From the sums of each window to a reading: what is averaged, what is dropped and why."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from sonde.stats.consistency import same_data
from sonde.stats.intervals import RatioInterval, Status
from sonde.stats.noise_scale import (
    PieceSums,
    RunningNoiseScale,
    WindowEstimate,
    check_count,
    check_keys,
    check_number,
    estimate_window,
)
from sonde.stats.scale_witness import ScaleReading, read_scale, rounding_of_sums
from sonde.wording import number

SINGLE_PIECE = (
    "a window held a single piece, from which noise cannot be told from signal: "
    "accumulate gradients over 2 micro-batches or more, or train on 2 data-parallel ranks or more"
)


_ROUNDING_OF_SQUARES = 1e-2
_MIN, _MAX = 1e-100, 1e100
_CHANGED_BY_CHANCE = 1.5
"""Changed gradients within the horizon beyond which they are no accident, and the windows between are not trusted."""


@dataclass(frozen=True)
class Drop:
    """Why a window was left out: a short name, and the cause with the way out."""

    kind: str
    reason: str


@dataclass(frozen=True)
class WindowRow:
    """Everything one window measured. Sums run over all pieces of all ranks.

    Attributes:
        sq_norm_over_weight: Σ |h_k|²/w_k per parameter group, [groups].
        weight: Σ w_k.
        weight_over_units: Σ w_k/n_k.
        sq_weight_over_units: Σ w_k²/n_k.
        n_pieces: pieces.
        n_units: units as counted, not effective.
        problems: why its pieces cannot be used; empty for a sound window.
        witness_small: Σ |h_k|²/w_k over the witness's elements only.
        witness_ranks: Σ_r |R_r|²/W_r over them, R_r and W_r being the sums of h_k and w_k within rank r.
        rank_sq_weight_over_units: Σ_r (Σ_{k in r} w_k²/n_k)/W_r.
        witness_sizes: how many elements the witness has of each parameter it reads; zeros follow the last.
        witness_sum: H = Σ h_k, the witness's elements, float64; [witness].
        sq_norm_big: |F|² per parameter group, [groups].
        witness_final: F, the witness's elements, float64; [witness].
    """

    sq_norm_over_weight: Sequence[float]
    weight: float
    weight_over_units: float
    sq_weight_over_units: float
    n_pieces: int
    n_units: float
    problems: Sequence[Drop]
    witness_small: float
    witness_ranks: float
    rank_sq_weight_over_units: float
    witness_sizes: Sequence[int]
    witness_sum: Tensor
    sq_norm_big: Sequence[float]
    witness_final: Tensor


@dataclass(frozen=True)
class GroupReading:
    """The noise scale of one group of parameters; fields as in `NoiseScaleReading`."""

    status: Status
    b_simple: float | None
    low: float | None
    high: float | None
    grad_sq: float | None
    trace_cov: float | None


@dataclass(frozen=True)
class NoiseScaleReading:
    """What is known of the gradient noise scale. Squares are in units of the rank-averaged gradient before clipping.

    Attributes:
        b_simple: B_simple = tr Σ/|G|² in units; None unless resolved.
        low: lower end of its interval; None when unresolved.
        high: upper end; infinite when only a lower bound is known, None when unresolved.
        status: "resolved", "lower_bound" (B_simple > low) or "unresolved".
        reason: why it is not resolved; empty when it is.
        grad_sq: running |G|², which may be negative; None before the first window.
        trace_cov: running tr Σ per unit; None before the first window.
        units_per_window: units in a window, averaged as the rest: the batch size; None before the first window.
        effective_units: their effective number (Kish) in the last window.
        windows: windows averaged.
        dropped: windows left out, by reason.
        windows_needed: windows still needed for ± 20 %; None when it cannot be said.
        consistency: tr Σ within ranks over tr Σ between ranks, about 1 when data are sound; None when there is no
            second rank or no second micro-batch to compare.
        doubts: what makes the numbers untrustworthy, a message by name; empty when nothing does. A reading in doubt is
            unresolved and gives no number.
        scale: κ of the last sound window, the optimizer's gradient over the sum of the pieces' gradients.
        scale_residual: the part of the last window's gradient that is not that multiple.
        unit: plural name of the unit.
        groups: by parameter group, in the model's order.
    """

    b_simple: float | None
    low: float | None
    high: float | None
    status: Status
    reason: str
    grad_sq: float | None
    trace_cov: float | None
    units_per_window: float | None
    effective_units: float | None
    windows: int
    dropped: Mapping[str, int]
    windows_needed: int | None
    consistency: float | None
    doubts: Mapping[str, str]
    scale: float | None
    scale_residual: float | None
    unit: str
    groups: Mapping[str, GroupReading] = field(repr=False)

    def __str__(self) -> str:
        batch = f"batch {number(self.units_per_window, 4)}" if self.units_per_window is not None else "no window yet"
        seen = f"{batch}, {self.windows} windows" + (f", {sum(self.dropped.values())} dropped" if self.dropped else "")
        if self.status == "resolved":
            return f"B_simple {number(self.b_simple)} {self.unit} [{number(self.low)} – {number(self.high)}], {seen}"
        if self.status == "lower_bound":
            more = f", about {self.windows_needed} more for ± 20 %" if self.windows_needed else ""
            return f"B_simple > {number(self.low)} {self.unit}, {seen}{more}"
        return f"B_simple not known yet ({self.reason}), {seen}"


class NoiseScaleTracker:
    """Turns window rows into running estimates; drops, counts and explains what cannot be used.

    Args:
        unit: plural name of the unit.
        groups: names of the parameter groups, in the order of a row's entries.
        horizon: length of the exponential averages, in windows.
        n_ranks: data-parallel ranks; gradients are expressed as their average.
        tolerance: the residual of the scale witness that rounding alone explains, for 16 additions or fewer.
        least_sq_norm: below it, squares of gradients have lost digits to underflow.
        blame: what to name when the gradient was changed by something unknown.
        level: confidence level of the intervals.
    """

    def __init__(
        self,
        *,
        unit: str,
        groups: Sequence[str],
        horizon: float,
        n_ranks: int,
        tolerance: float,
        blame: str,
        least_sq_norm: float = 0.0,
        level: float = 0.95,
    ) -> None:
        self.unit, self.groups, self.horizon, self.level = unit, tuple(groups), horizon, level
        self._n_ranks, self._tolerance, self._blame = n_ranks, tolerance, blame
        self._least_sq_norm = least_sq_norm
        self._total = RunningNoiseScale(horizon)
        self._per_group = [RunningNoiseScale(horizon) for _ in groups]
        self._within_between = RunningNoiseScale(horizon)  # its ratio is the consistency
        self._units = 0.0
        self._units_weight = 0.0
        self._changed = 0.0
        self._why_changed = ""
        self.dropped: dict[str, int] = {}
        self._effective_units: float | None = None
        self._scale: ScaleReading | None = None
        self.norm: float | None = None
        """Norm of the last window's gradient as the rank average, before any clip; None if it was dropped."""

    def update(self, row: WindowRow) -> Drop | None:
        """Take one window.

        Returns:
            Why it was dropped; None when it was averaged.
        """
        self.norm = None
        # One after the other on a rank, then over ranks: in 16 bits too, where gradients or what is sent have so many.
        tolerance = rounding_of_sums(self._tolerance, row.n_pieces / self._n_ranks + self._n_ranks)
        scale = read_scale(row.witness_final, row.witness_sum, tolerance=tolerance, sizes=row.witness_sizes)
        if math.isfinite(row.n_units) and row.n_pieces:
            decay = self._total.decay
            self._units = decay * self._units + row.n_units
            self._units_weight = decay * self._units_weight + 1.0
        drop = self._why_unusable(row, scale)
        self._changed *= self._total.decay
        if drop is not None:
            if drop.kind == "changed":
                self._changed, self._why_changed = self._changed + 1.0, drop.reason
            self.dropped[drop.reason] = self.dropped.get(drop.reason, 0) + 1
            return drop
        assert scale.scale is not None
        # Everything in units of the rank-averaged sum of the pieces, so that a clip or a loss scale that came first,
        # which differs from window to window, does not weigh windows: B is brought there by κ, S by its definition.
        unit_scale = 1.0 / self._n_ranks
        to_unit = (unit_scale / scale.scale) ** 2
        self.norm = math.sqrt(math.fsum(row.sq_norm_big) * to_unit)
        estimates = [
            estimate_window(self._pieces(row, small), big * to_unit, scale=unit_scale)
            for small, big in zip(row.sq_norm_over_weight, row.sq_norm_big, strict=True)
        ]
        for running, estimate in zip(self._per_group, estimates, strict=True):
            running.update(estimate)
        self._total.update(
            WindowEstimate(math.fsum(e.trace_cov for e in estimates), math.fsum(e.grad_sq for e in estimates))
        )
        if (pair := self._consistency_pair(row)) is not None:
            self._within_between.update(pair)
        self._effective_units = 1.0 / self._pieces(row, 0.0).v
        self._scale = scale
        return None

    def _why_unusable(self, row: WindowRow, scale: ScaleReading) -> Drop | None:
        if row.problems:
            return row.problems[0]
        if row.n_pieces == 0:
            return Drop(
                "called_twice",
                "no backward ran since the window before it, so it was ended twice: "
                "call probe.step() or probe.clip_grad_norm_() once per optimizer step",
            )
        if row.n_pieces < 2:
            return Drop("single_piece", SINGLE_PIECE)
        if not all(_MIN < x < _MAX for x in (row.weight, row.weight_over_units, row.sq_weight_over_units)):
            return Drop("weights", "weights or units are too large or too small to be added up: scale them all alike")
        pieces = self._pieces(row, 0.0)
        if not pieces.u - pieces.v > 1e-9 * pieces.u:
            return Drop("weights", "one piece has all the weight of its window, so there is nothing to compare it with")
        if not all(map(math.isfinite, row.sq_norm_big)):
            return Drop("not_finite", "the gradient at the end of the window was not finite")
        sizes = (math.fsum(row.sq_norm_big), row.weight * math.fsum(row.sq_norm_over_weight))
        if max(sizes) > _MAX or (min(sizes) > 0 and min(sizes) < self._least_sq_norm):
            return Drop("out_of_range", "squares of the gradient leave the range of fp32: scale the loss")
        if scale.kind == "zero" and not row.witness_sum.any() and any(row.sq_norm_big):
            return Drop("not_seen", "the few hundred elements that are compared were all 0 in this window")
        if scale.kind == "zero":
            return Drop("zero", "the gradient was 0: was it zeroed, or clipped to 0, before probe.step()?")
        if scale.kind == "clipped by value":
            return Drop("changed", "the gradient was clipped by value before probe.step(): clip by norm, or later")
        if scale.kind == "changed":
            return Drop("changed", f"the gradient is not a multiple of the sum of its pieces: {self._blame}")
        assert scale.scale is not None
        # |Σ h_k|² ≤ Σ w_k · Σ |h_k|²/w_k (Cauchy–Schwarz), to the rounding of squares and of 16-bit sums.
        at_most = row.weight * math.fsum(row.sq_norm_over_weight) * (1 + _ROUNDING_OF_SQUARES)
        if math.fsum(row.sq_norm_big) / scale.scale**2 > at_most:
            return Drop(
                "changed",
                f"the gradient is larger than its pieces can add up to, outside what is compared: {self._blame}",
            )
        return None

    @staticmethod
    def _pieces(row: WindowRow, sq_norm_over_weight: float) -> PieceSums:
        return PieceSums(sq_norm_over_weight, row.weight, row.weight_over_units, row.sq_weight_over_units, row.n_pieces)

    def _consistency_pair(self, row: WindowRow) -> WindowEstimate | None:
        """tr Σ of the witness's elements, within and between ranks; None unless there are two of each.

        The ranks' sums are pieces of their own, with u' = Σ_r (W_r/W)/n_r: S − S' tells of the noise within ranks,
        S' − B of the noise between them.
        """
        pieces = self._pieces(row, row.witness_small)
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
            scale=self._scale.scale if self._scale else None,
            scale_residual=self._scale.residual if self._scale else None,
            unit=self.unit,
            groups={
                name: self._group(running, doubted) for name, running in zip(self.groups, self._per_group, strict=True)
            },
        )

    def _doubts(self) -> dict[str, str]:
        """Why the averages are not to be trusted, however narrow their interval."""
        doubts = {}
        if self._changed > _CHANGED_BY_CHANCE:
            doubts["changed"] = (
                f"{self._why_changed}; where {self._changed:.0f} of the last windows were changed, others may have "
                "been without its being seen"
            )
        same = same_data(self._total.windows, self._total.trace_cov, self._total.grad_sq, consistency=self.consistency)
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
        return interval.reason

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
            "changed": self._changed,
            "why_changed": self._why_changed,
            "dropped": dict(self.dropped),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            ValueError: when keys, groups or the horizon differ, or a value cannot be what its name says; nothing is
                changed then.
        """
        what = "noise-scale probe state"
        numbers = ("units", "units_weight", "changed")
        check_keys(what, state, {"groups", "total", "consistency", "why_changed", "dropped", *numbers})
        check_keys("parameter groups of the state", state["groups"], set(self.groups))
        for name in numbers:
            check_number(what, state, name, low=0)
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
        self._total, self._within_between, self._per_group = loaded["total"], loaded["consistency"], per_group
        self._units, self._units_weight = float(state["units"]), float(state["units_weight"])
        self._changed, self._why_changed = float(state["changed"]), str(state["why_changed"])
        self.dropped = {str(reason): count for reason, count in dropped.items()}


def _ratio(running: RunningNoiseScale, interval: RatioInterval) -> float | None:
    """tr Σ/|G|², only where the interval says that it is known."""
    if interval.status != "resolved" or running.trace_cov is None or not running.grad_sq:
        return None
    return running.trace_cov / running.grad_sq
