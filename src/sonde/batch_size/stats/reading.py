"""A reading of the noise scale, for people and programs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from sonde.batch_size.stats.columns import OF_EACH_UNIT, OF_READING
from sonde.batch_size.stats.noise_scale import RatioAverage
from sonde.stats.columns import taken
from sonde.stats.intervals import RatioInterval, Status
from sonde.wording import in_units, number, plural, units

ENOUGH_COVERED = 0.995
"""Part of |F|² from which on no alert is raised. At most 0.5 % of |F|² = |G|² (1 + B_simple/B) are left out then. Where
B_simple is 20 batches, this moves B_simple by a tenth at most, and ± 20 % counts as well known."""


def in_percent(part: float) -> str:
    """A part of |F|² in words; 99.96 % are never called all of it.

    Example:
        >>> in_percent(0.9996), in_percent(0.5)
        ('99.9 %', '50 %')
    """
    return f"{math.floor(1000 * part) / 10:g} %"


@dataclass(frozen=True)
class Coverage:
    """Which part of a model the noise scale speaks of, where it is read from single examples.

    Attributes:
        n_parameters: parameter tensors that are covered.
        n_all: measured parameter tensors.
        part: of |F|², the squared gradient of the window, that is theirs; an average over windows.
    """

    n_parameters: int
    n_all: int
    part: float

    def with_the_rest(self, known: RatioInterval, units: float) -> RatioInterval:
        """The interval of the whole model, as far as the uncovered part of |F|² leaves it open.

        With |G|² of the covered parameters as 1, theirs of |F|² is 1 + B/units. What the others have of |F|² is all
        signal at one end, and all noise at the other, where it counts `units` times.

        Args:
            known: of the covered parameters.
            units: effective number of units in a window.
        """
        if known.low is None or known.high is None:
            return known

        def rest(b: float) -> float:
            return (1 + b / units) * (1 - self.part) / self.part

        return replace(known, low=known.low / (1 + rest(known.low)), high=known.high + units * rest(known.high))

    def __str__(self) -> str:
        return f"of {self.n_parameters} of {self.n_all} parameters, with {in_percent(self.part)} of |F|²"


class CoveredPart:
    """Averages what the covered parameters are of the whole model.

    Args:
        n_all: measured parameter tensors.
    """

    def __init__(self, n_all: int) -> None:
        self._n_all = self._n_covered = n_all
        self._part = RatioAverage(math.inf)

    def update(self, n_covered: int, sq_norm_covered: float, sq_norm_big: float) -> None:
        """Add a window with |F|² of the covered parameters and of all. With other parameters, begin again."""
        if n_covered != self._n_covered:
            self._n_covered, self._part = n_covered, RatioAverage(math.inf)
        if sq_norm_big > 0:
            self._part.update(sq_norm_covered / sq_norm_big)

    @property
    def coverage(self) -> Coverage | None:
        """The average so far; None if all parameters are covered, or none is."""
        if self._n_covered == self._n_all or not self._part.windows:
            return None
        return Coverage(self._n_covered, self._n_all, self._part.x)


@dataclass(frozen=True)
class GroupReading:
    """The noise scale of one group of parameters; fields as in `NoiseScaleReading`."""

    status: Status
    b_simple: float | None
    low: float | None
    high: float | None
    grad_sq: float | None
    trace_cov: float | None


Series = tuple[RatioInterval, float | None, float | None]
"""The noise scale of the whole model or of a group, its |G|² and its tr Σ."""


def group_reading(known: RatioInterval, grad_sq: float | None, trace_cov: float | None) -> GroupReading:
    """The reading of one series."""
    return GroupReading(known.status, known.ratio, known.low, known.high, grad_sq, trace_cov)


@dataclass(frozen=True)
class ConvertedReading:
    """A reading in a further unit, at the average number of these in one independent sample.

    Attributes:
        unit: plural name of the further unit.
        b_simple: as in `NoiseScaleReading`, likewise the others.
        low: lower end of the interval.
        high: upper end.
        units_per_window: the batch size.
    """

    unit: str
    b_simple: float | None
    low: float | None
    high: float | None
    units_per_window: float | None


@dataclass(frozen=True)
class NoiseScaleReading:
    """A reading of the gradient noise scale. Squares are in units of the rank-averaged gradient before clipping.

    Attributes:
        b_simple: the level of B_simple = tr Σ/|G|² now, in units; None unless resolved. Single steps scatter about it.
        low: lower end of its interval; 0 when only an upper bound is known, None when unresolved.
        high: upper end; infinite when only a lower bound is known, None when unresolved.
        status: "resolved", "lower_bound" (B_simple > low), "upper_bound" (B_simple < high) or "unresolved".
        reason: why B_simple is not resolved; empty when it is resolved.
        advice: what would make it known better; empty when it is known well.
        scatter: standard deviation of log(tr Σ/|G|²) of single windows about the level, to first order: how far single
            steps are from it, at most, since the error of a single window is in it. None unless resolved.
        average: the noise scale of the run so far, which a comparison of whole runs at several batch sizes would show.
            Each step weighs by the progress that it makes (McCandlish et al. 2018, arXiv:1812.06162, appendix D). None
            before the first window.
        grad_sq: |G|², averaged over about the last half of the run; may be negative. None before the first window.
        trace_cov: tr Σ per unit, likewise. Their ratio lags behind `b_simple` while training moves.
        units_per_window: the batch size: average units in a window; None before the first window. In a measurement at
            fixed weights, the batch size that the caller gave to judge.
        effective_units: effective number of units (Kish) in such a batch, if units weigh as in the last window.
        u: Σ a_k/n_k of the last window, the mean of 1/n_k over its pieces; other systems report tr Σ·u/|G|².
        windows: windows measured, without those that were dropped.
        dropped: windows left out because they could not be used, by reason.
        windows_needed: measured windows still needed for ± 20 %; None when their number cannot be estimated.
        consistency: tr Σ within ranks over tr Σ between ranks, about 1 when data are sound; None when there is no
            second rank or no second micro-batch to compare.
        doubts: reasons not to trust the numbers: messages by name; usually empty. A reading with doubts is unresolved
            and gives no numbers.
        scale: κ of the last sound window, the optimizer's gradient over the sum of the pieces' gradients.
        scale_residual: the part of the last window's gradient that κ does not explain.
        unit: plural name of the unit.
        groups: by parameter group, in the model's order; empty where groups were not read.
        n_steps: steps of training that the numbers stand for; None at fixed weights.
        first_step: the first of them; other parameters were trained before.
        warms_up: whether the learning rate is still rising.
        every: one window of training in so many is measured, on average over about the last half of the run.
        further_units: how many of each further unit one unit is, on average; None before the first window.
        coverage: the part of the model that the numbers speak of; None if it is the whole model.
        optimizer: the optimizers that were given to attach, such as "SGD (β = 0.9)"; empty without, and after a reading
            that found β or another of their options changed, as by a cycle of momentum.
        batch_changed: whether the batch was another one at the beginning, so that nothing is said of the whole run.
    """

    b_simple: float | None
    low: float | None
    high: float | None
    status: Status
    reason: str
    advice: str
    scatter: float | None
    average: RatioInterval | None
    grad_sq: float | None
    trace_cov: float | None
    units_per_window: float | None
    effective_units: float | None
    u: float | None
    windows: int
    dropped: Mapping[str, int]
    windows_needed: int | None
    consistency: float | None
    doubts: Mapping[str, str]
    scale: float | None
    scale_residual: float | None
    unit: str
    groups: Mapping[str, GroupReading] = field(repr=False)
    n_steps: int | None = None
    first_step: int = 1
    warms_up: bool = False
    every: float = 1.0
    coverage: Coverage | None = None
    further_units: Mapping[str, float | None] = field(default_factory=dict)
    optimizer: str = ""
    batch_changed: bool = False

    def in_unit(self, name: str) -> ConvertedReading:
        """The batch size and the noise scale in a further unit. This is a conversion, no estimate of its own.

        Args:
            name: of a unit that pieces are counted in.

        Raises:
            ValueError: for a unit that pieces are not counted in.
        """
        if name not in self.further_units and name != self.unit:
            names = ", ".join([self.unit, *self.further_units])
            raise ValueError(f"pieces are counted in {names}, got {name!r}: name it in attach(unit=...)")
        factor = 1.0 if name == self.unit else self.further_units[name]
        values = (self.b_simple, self.low, self.high, self.units_per_window)
        return ConvertedReading(name, *(None if v is None or factor is None else v * factor for v in values))

    def metrics(self) -> dict[str, float | None]:
        """The numbers by metric name; None where a number is unknown or unbounded."""
        numbers = taken(OF_READING, self)
        for unit in self.further_units:
            numbers |= {f"{name}_{unit}": n for name, n in taken(OF_EACH_UNIT, self.in_unit(unit)).items()}
        return numbers

    @property
    def now(self) -> RatioInterval:
        """The noise scale now, as far as it is known."""
        return RatioInterval(self.status, self.low, self.high, self.reason, self.b_simple)

    def __str__(self) -> str:
        batch = f"batch {units(self.units_per_window, self.unit)}, " if self.units_per_window is not None else ""
        of_these = f" measured, one in {number(self.every)}" if self.every >= 1.1 else ""
        dropped = f", {sum(self.dropped.values())} dropped" if self.dropped else ""
        seen = f"{batch}{plural(self.windows, 'window')}{of_these}{dropped}"
        seen += f" ({self.coverage})" if self.coverage is not None else ""
        average = self.average
        if average is not None and average.ratio is not None and self.n_steps:
            over = "over the run" if self.first_step == 1 else f"from step {self.first_step:,} on"
            seen = f"{number(average.ratio)} {over}, {seen}"
        helps = f"; {self.advice}" if self.advice and self.status != "resolved" else ""
        if self.status == "unresolved":
            return f"B_simple not known yet ({self.reason}), {seen}"
        if self.status == "resolved":
            also = "".join(f" = {number(c.b_simple)} {c.unit}" for c in map(self.in_unit, self.further_units))
            return f"B_simple {in_units(self.b_simple, self.low, self.high, self.unit)}{also}, {seen}"
        sign, end = (">", self.low) if self.status == "lower_bound" else ("<", self.high)
        return f"B_simple {sign} {number(end)} {self.unit}, {seen}{helps}"
