"""The measurements of the steps that a run still rests on: a restart takes steps again, or counts them again from 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sonde.policy.stats.forecast_point import Point


@dataclass(frozen=True)
class StepsKept:
    """The measurements of a run, without the measurements that a restart undid.

    Attributes:
        points: the measurements, in the order in which their steps were taken.
        positions: the number of steps that the run had taken at each measurement. It never falls. It is the number of
            the step, unless a restart counted steps from 1 again.
        starts: to which start of the counting each measurement belongs, from 0.
        n_undone: measurements of steps that a restart from a checkpoint took again.
    """

    points: tuple[Point, ...]
    positions: tuple[int, ...]
    starts: tuple[int, ...]
    n_undone: int

    def label(self, index: int) -> str:
        """The step of one measurement, in words."""
        return f"step {self.points[index].step:,}{self._where(index)}"

    def labels(self, first: int, last: int) -> str:
        """The steps of neighbouring measurements, in words."""
        if self.starts[first] != self.starts[last] or self.points[first].step == self.points[last].step:
            return self.label(last)
        return f"steps {self.points[first].step:,} to {self.points[last].step:,}{self._where(last)}"

    def _where(self, index: int) -> str:
        again = self.starts[-1] - self.starts[index]
        return "" if not again else " before the restart" if again == 1 else f", {again} restarts ago"


@dataclass(frozen=True)
class _Kept:
    point: Point
    position: int
    start: int


class StepsKeeper:
    """Leaves out the measurements that a restart undid, as they come in. See `steps_kept`."""

    def __init__(self) -> None:
        self._kept: list[_Kept] = []
        self._n_undone = 0

    def add(self, point: Point) -> None:
        """Add the next measurement."""
        kept, before = self._kept, len(self._kept)
        if kept and point.segment != kept[-1].point.segment:
            while kept and kept[-1].point.step >= point.step:
                kept.pop()
        elif kept and point.step < kept[-1].point.step:
            first = next(k.point.step for k in kept if k.start == kept[-1].start)
            if point.step <= first:
                kept.append(_Kept(point, kept[-1].position + 1, kept[-1].start + 1))
                return
            while kept[-1].point.step >= point.step:
                kept.pop()
        self._n_undone += before - len(kept)
        offset = kept[-1].position - kept[-1].point.step if kept else 0
        kept.append(_Kept(point, point.step + offset, kept[-1].start if kept else 0))

    def __len__(self) -> int:
        return len(self._kept)

    def kept(self, at_each_end: int | None = None) -> StepsKept:
        """The measurements that count: all of them, or so many at each end of the run."""
        some = self._kept
        if at_each_end is not None and len(some) > 2 * at_each_end:
            some = [*some[:at_each_end], *some[-at_each_end:]]
        return StepsKept(
            tuple(k.point for k in some), tuple(k.position for k in some), tuple(k.start for k in some), self._n_undone
        )


def steps_kept(points: Sequence[Point]) -> StepsKept:
    """Leave out the measurements that a restart undid.

    A new start of the run takes all steps again from its first measured step on: earlier measurements of these steps
    are of weights that no longer exist. Within one start, a step number that falls has two meanings. If the start
    already has smaller numbers, it went back to a checkpoint. Otherwise it counts steps from the beginning again, and
    all measurements stay: the weights may have been kept.

    Args:
        points: in the order in which they were measured.

    Example:
        >>> def at(step: int, segment: int = 0) -> Point:
        ...     return Point(step, 1.0, None, None, None, False, None, None, False, segment=segment)
        >>> [point.step for point in steps_kept([at(10), at(20), at(30), at(30, 1), at(40, 1)]).points]
        [10, 20, 30, 40]
        >>> steps_kept([at(1), at(11), at(1), at(11)]).positions
        (1, 11, 12, 22)
    """
    keeper = StepsKeeper()
    for point in points:
        keeper.add(point)
    return keeper.kept()
