"""What a run is beside another one: noise scales from point to point, and means of values."""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from sonde.evidence.stats.loss_curves import Curve, falling, units_at
from sonde.runs.compare.side_by_side import By, ComparedRun, Comparison, Series, T
from sonde.runs.compare.stats.differences import Difference, last_stretch, mean_difference, ratio_between
from sonde.runs.run import AnyReading, PolicyReading
from sonde.stats.intervals import RatioInterval

_MOST_VALUES = 4
"""Values of the user's own that are compared."""
Value = Callable[[ComparedRun, AnyReading], float | None]


@dataclass(frozen=True)
class Quantity:
    """Something that is compared.

    Attributes:
        name: as it is shown.
        of: its number in a reading of a run, None where it is not known.
        is_ratio: whether runs differ by a factor, and not by a difference.
    """

    name: str
    of: Value
    is_ratio: bool = False

    def beside(self, ours: ComparedRun, theirs: ComparedRun, by: By) -> Difference | None:
        """The difference or ratio of two runs over the last quarter of what they have in common on an axis."""
        if not self.is_ratio:
            return mean_difference(ours.series(self.of, by), theirs.series(self.of, by))
        ours_in_logs, theirs_in_logs = (
            [(at, math.log(value)) for at, value in run.series(self.of, by) if value > 0] for run in (ours, theirs)
        )
        of = mean_difference(ours_in_logs, theirs_in_logs)
        return of and Difference(math.exp(of.value), math.exp(of.low), math.exp(of.high))


def _metric(name: str) -> Value:
    return lambda _, reading: reading.metrics.get(name)


def entropy(_: ComparedRun, reading: AnyReading) -> float | None:
    """The entropy of the policy before a step; None of a reading of something else."""
    return reading.point.entropy if isinstance(reading, PolicyReading) else None


@functools.lru_cache(maxsize=1)
def quantities(found: Comparison) -> list[Quantity]:
    """What is compared beside the noise scale; the user's losses first."""
    own = [Quantity(name, _metric(name)) for name in found.values[:_MOST_VALUES]]
    norm = Quantity("gradient norm", _metric("grad/norm"), is_ratio=True)
    speed = Quantity(f"{found.unit} per second", ComparedRun.speed, is_ratio=True)
    return [*own, norm, Quantity("entropy", entropy), speed]


@dataclass(frozen=True)
class NoiseBeside:
    """The noise scale of a run over that of another one.

    Attributes:
        ratio: at the last common reading.
        at: position of that reading.
        since: from here on, each interval of the ratio lies on that side of 1; None where the last contains 1.
    """

    ratio: RatioInterval
    at: float
    since: float | None = None


@functools.lru_cache(maxsize=100)
def noise_beside(ours: ComparedRun, theirs: ComparedRun, by: By) -> NoiseBeside | None:
    """Compare two noise scales from point to point; None where the runs have no reading in common.

    Points are the readings of the run that has fewer in the common part, each with the other's nearest.
    """
    points = list(_ratios(ours.series(ComparedRun.noise, by), theirs.series(ComparedRun.noise, by)))
    if not points or ours.metric != theirs.metric:
        return None
    end, last = points[-1]
    first = last_stretch([ratio for _, ratio in points])
    return NoiseBeside(last, end, None if first is None else points[first][0])


def _ratios(ours: Series[RatioInterval], theirs: Series[RatioInterval]) -> Iterator[tuple[float, RatioInterval]]:
    if ours and theirs:
        start, end = max(ours[0][0], theirs[0][0]), min(ours[-1][0], theirs[-1][0])
        within = [[at for at, _ in each if start <= at <= end] for each in (ours, theirs)]
        for at in min(filter(None, within), key=len, default=[]):
            yield at, ratio_between(nearest(ours, at), nearest(theirs, at))


def nearest(series: Series[T], at: float) -> T:
    """The value that is nearest to a position."""
    after = bisect.bisect_left(series, at, key=lambda point: point[0])
    return min(series[max(after - 1, 0) : after + 1], key=lambda point: abs(point[0] - at))[1]


def noise_at_equal_loss(loss: Quantity, ours: ComparedRun, theirs: ComparedRun) -> RatioInterval | None:
    """The ratio of two noise scales where both runs have come down to the same loss: the higher of their last ones.

    The noise scale grows with progress. Runs with other batches are alike in progress where they have the same loss.
    """
    points, noises = ([run.series(of, "steps") for run in (ours, theirs)] for of in (loss.of, ComparedRun.noise))
    if not all(points) or not all(noises) or ours.metric != theirs.metric:
        return None
    curves = [falling(Curve(*zip(*each, strict=True))) for each in points]
    level = max(curve.losses[-1] for curve in curves)
    places = [units_at(curve, level) for curve in curves]
    if None in places:  # a run began below the other's last loss
        return None
    return ratio_between(*(nearest(noise, at or 0.0) for noise, at in zip(noises, places, strict=True)))
