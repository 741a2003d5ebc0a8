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
        again = self.starts[-1] - self.starts[index]
        where = "" if not again else " before the restart" if again == 1 else f", {again} restarts ago"
        return f"step {self.points[index].step}{where}"


def steps_kept(points: Sequence[Point]) -> StepsKept:
    """Leave out the measurements that a restart undid.

    A step number that is smaller than the one before it marks a restart. If the run already has smaller numbers, the
    restart went back to a checkpoint, and the measurements from that number on are of weights that no longer exist.
    Otherwise steps are counted from the beginning again, and all measurements stay: the weights may have been kept.

    Args:
        points: in the order in which they were measured.

    Example:
        >>> def at(step: int) -> Point:
        ...     return Point(step, 1.0, None, None, None, False, None, None, False)
        >>> [point.step for point in steps_kept([at(1), at(11), at(21), at(31), at(15), at(25)]).points]
        [1, 11, 15, 25]
        >>> steps_kept([at(1), at(11), at(1), at(11)]).positions
        (1, 11, 12, 22)
    """
    kept: list[tuple[Point, int, int]] = []
    offset = start = n_undone = 0
    for point in points:
        if kept and point.step < kept[-1][0].step:
            own = [p.step for p, _, of in kept if of == start]
            if point.step > own[0]:
                n_before = len(kept)
                while kept[-1][0].step >= point.step:
                    kept.pop()
                n_undone += n_before - len(kept)
            else:
                offset, start = kept[-1][1] - point.step + 1, start + 1
        kept.append((point, point.step + offset, start))
    return StepsKept(tuple(p for p, _, _ in kept), tuple(x for _, x, _ in kept), tuple(s for _, _, s in kept), n_undone)
