"""Pieces or single examples: which of the two gives the narrower interval for the same time, from windows with both."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from sonde.batch_size.stats.noise_scale import WindowEstimate

FEWEST_PAIRS = 8
"""Windows with both from which a choice is made."""


@dataclass
class MechanismTrial:
    """Windows that were solved from their pieces and from their single examples, and what both cost.

    The standard error of B_simple after some time is in proportion to √(variance of a window × time for each measured
    one). With a budget, a mechanism that costs more is used in fewer windows; without, it makes windows longer.

    Attributes:
        budget: part of the time that measuring may cost; None if one window in `every` is measured, whatever it costs.
        every: see `budget`.
        of_pieces: each window's estimate from its pieces.
        of_examples: the same windows' estimates from their examples.
        seconds: what the probe has cost in measured windows, without single examples.
        example_seconds: what single examples have cost in windows in which they were read, besides.
        durations: of measured windows without single examples, in seconds.
    """

    budget: float | None
    every: int = 1
    of_pieces: list[WindowEstimate] = field(default_factory=list)
    of_examples: list[WindowEstimate] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    example_seconds: list[float] = field(default_factory=list)
    durations: list[float] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """Whether a choice can be made."""
        return len(self.of_pieces) >= FEWEST_PAIRS and bool(self.durations)

    def narrower_by(self) -> float:
        """The width of the pieces' interval over that of the examples', for the same time: above 1, examples win."""
        times = [self._time(0.0), self._time(_middle(self.example_seconds))]
        variances = self._variances()
        if not all(variances):
            return 1.0 if variances[0] == variances[1] else (0.0 if not variances[0] else math.inf)
        return math.sqrt(variances[0] * times[0] / (variances[1] * times[1]))

    def _time(self, besides: float) -> float:
        """Seconds for each measured window, itself and its cost included, where it costs so much besides."""
        cost = _middle(self.seconds) + besides
        window = max(_middle(self.durations) - _middle(self.seconds), 0.0)
        every = float(self.every)
        if self.budget is not None and window > 0:
            every = max(cost / (window * self.budget / (1 - self.budget)), 1.0)
        return every * window + cost or 1.0

    def _variances(self) -> tuple[float, float]:
        """Of tr Σ − B |G|² over windows, from pieces and from examples, with the same B = tr Σ/|G|² of both together.

        To first order, this is the variance of B_simple but for a factor that both have. Where |G|² cannot be
        distinguished from 0, its own variance decides.
        """
        both = [*self.of_pieces, *self.of_examples]
        trace_cov, grad_sq = (statistics.fmean(values) for values in _columns(both))
        error = statistics.stdev([each.grad_sq for each in both]) / math.sqrt(len(both))
        if grad_sq > 2 * error:
            ratio = trace_cov / grad_sq
            residuals = [[e.trace_cov - ratio * e.grad_sq for e in each] for each in (self.of_pieces, self.of_examples)]
        else:
            residuals = [[e.grad_sq for e in each] for each in (self.of_pieces, self.of_examples)]
        return statistics.variance(residuals[0]), statistics.variance(residuals[1])


def _columns(estimates: Sequence[WindowEstimate]) -> tuple[list[float], list[float]]:
    return [e.trace_cov for e in estimates], [e.grad_sq for e in estimates]


def _middle(values: Sequence[float]) -> float:
    """The median, since the first windows allocate and compile."""
    return statistics.median(values) if values else 0.0
