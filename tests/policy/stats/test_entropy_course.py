"""Where the entropy of a run goes, from entropies made by hand."""

from __future__ import annotations

import math
import random

import pytest

from sonde.policy.stats.entropy_course import entropy_course
from tests.policy.stats.points import entropies, points


@pytest.mark.parametrize(
    ("values", "trend"),
    [
        ([1.0, 1.0], "holds"),
        ([1.0, 0.9, 0.9, 0.9], "holds"),
        ([2.0, 1.5], "falling"),
        ([2.7, 2.49, 2.3, 2.12, 1.96], "falling"),  # a quarter in all, and at the same pace still
        ([2.0, 2.2, 2.4, 2.6], "rising"),
        ([1.0, 1.0, 1.0, 1.0, 1.0, 0.7], "falling"),
        ([2.7, 1.5, 0.9, 0.6, 0.5, 0.4], "falling"),
        ([2.7, 0.8, 0.42, 0.41, 0.4, 0.4], "fallen"),
        ([1.0, 0.8, 0.7, 0.6, 0.6, 0.6], "holds"),  # lower, but more than half, and it stays
        ([0.4, 0.5, 0.6, 0.8, 1.0, 1.5], "rising"),
        ([0.4, 1.0, 1.4, 1.5, 1.5, 1.5], "risen"),
        ([2.7, 0.4, 0.3, 0.3, 0.4, 0.6], "rising"),  # what happens now comes before what has happened
        ([1.0, 2.0, 3.0, 3.0, 2.0, 1.5], "falling"),
        ([0.0, 0.0, 0.0], "holds"),
        ([0.02, 0.015, 0.012], "holds"),  # less than a hundredth of a nat
    ],
)
def test_trends(values: list[float], trend: str) -> None:
    assert entropy_course(entropies(*values)).trend == trend


def test_the_last_third_is_one_of_steps_not_of_measurements() -> None:
    """Ten measurements in the first ten steps, then four far apart: the last third begins at step 51."""
    changes = [{"step": step, "entropy": 1.0} for step in [*range(1, 11), 41, 51, 61]]
    course = entropy_course(points(*changes, {"step": 71, "entropy": 0.5}))
    assert (course.since.step, course.trend) == (51, "falling")


@pytest.mark.parametrize("steps", [[7, 7], [1, 50, 100, 1, 6], [100, 1]])
def test_steps_that_a_restart_counts_again(steps: list[int]) -> None:
    course = entropy_course(points(*({"step": step, "entropy": 1.0} for step in steps)))
    assert course.trend == "holds"


@pytest.mark.parametrize("n", [12, 40, 200])
def test_noise_of_single_measurements_is_no_trend(n: int) -> None:
    """Each measurement is of a few prompts only: 5 % of scatter. A fall by e over the run is still one."""
    draw = random.Random(1)
    trends = [entropy_course(entropies(*(draw.gauss(1.0, 0.05) for _ in range(n)))).trend for _ in range(200)]
    assert trends.count("holds") >= 196
    falls = [
        entropy_course(entropies(*(math.exp(-i / n) * draw.gauss(1.0, 0.05) for i in range(n)))).trend
        for _ in range(200)
    ]
    assert falls.count("falling") + falls.count("fallen") >= 196
