"""Points of a run whose forecasts are right, with whatever a test changes in them."""

from __future__ import annotations

import dataclasses

from sonde.policy.stats.entropy_course import Course, entropy_course
from sonde.policy.stats.forecast_point import Point, steps_kept

GOOD = Point(
    step=1, entropy=1.0, delta=-0.02, low=-0.022, high=-0.018, is_valid=True,
    truth=-0.021, truth_se=0.0, is_independent=True,
)  # fmt: skip


def points(*changes: dict[str, object]) -> list[Point]:
    return [dataclasses.replace(GOOD, **{"step": i + 1, **change}) for i, change in enumerate(changes)]  # type: ignore[arg-type]


def entropies(*values: float, every: int = 5, error: float | None = None, **changes: object) -> list[Point]:
    """Points of a run, one every so many steps. `error` is the standard error of each entropy, as a fraction of it."""
    return points(
        *(
            {"step": 1 + every * i, "entropy": value, "entropy_se": error and error * value, **changes}
            for i, value in enumerate(values)
        )
    )


def course_of(run: list[Point]) -> Course:
    """The course of the entropy in the measurements that no restart has undone."""
    return entropy_course(steps_kept(run).points)
