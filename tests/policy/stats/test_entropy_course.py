"""Where the entropy of a run goes, and how sure that is, from entropies made by hand."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest

from sonde.policy.stats.entropy_course import entropy_course
from tests.policy.stats.points import entropies, points

EXACT = 0.01
"""Standard errors that are small beside every change here, as fractions."""


@pytest.mark.parametrize(
    ("values", "trend"),
    [
        ([1.0, 1.0], "holds"),
        ([1.0, 0.9, 0.9, 0.9], "holds"),
        ([1.0, 0.95, 0.9, 0.8, 0.7, 0.55], "falling"),
        ([1.0, 0.7, 0.6, 0.55, 0.55, 0.55, 0.55, 0.55], "fallen"),  # a fall by 45 %
        ([1.0, 0.8, 0.8, 0.8, 0.8, 0.8], "fallen"),
        ([2.0, 1.5], "falling"),
        ([2.7, 2.49, 2.3, 2.12, 1.96], "falling"),  # a quarter in all, and at the same pace still
        ([2.0, 2.2, 2.4, 2.6], "rising"),
        ([1.0, 1.0, 1.0, 1.0, 1.0, 0.7], "falling"),
        ([2.7, 1.5, 0.9, 0.6, 0.5, 0.4], "falling"),
        ([2.7, 0.8, 0.42, 0.41, 0.4, 0.4], "fallen"),
        ([0.4, 0.5, 0.6, 0.8, 1.0, 1.5], "rising"),
        ([0.4, 1.0, 1.4, 1.5, 1.5, 1.5], "risen"),
        ([2.7, 0.4, 0.3, 0.3, 0.4, 0.6], "rising"),  # what happens now comes before what has happened
        ([1.0, 2.0, 3.0, 3.0, 2.0, 1.5], "falling"),
        ([0.0, 0.0, 0.0], "holds"),
        ([0.02, 0.015, 0.012], "holds"),  # less than a hundredth of a nat
    ],
)
def test_trends(values: list[float], trend: str) -> None:
    assert entropy_course(entropies(*values, error=EXACT)).trend == trend


def test_a_few_noisy_measurements_are_no_trend() -> None:
    """Each is wrong by 12 %: the same numbers with an error of 1 % are a fall."""
    noisy = entropy_course(entropies(1.0, 1.1, 0.85, 0.8, error=0.12))
    assert noisy.trend == "unknown"
    assert noisy.whole.nats == pytest.approx(-0.2)
    assert noisy.whole.half == pytest.approx(1.96 * 0.12 * math.hypot(1.0, 0.8), rel=1e-4)
    assert entropy_course(entropies(1.0, 1.1, 0.85, 0.8, error=EXACT)).trend == "falling"
    assert entropy_course(entropies(1.0, 0.99, error=0.1)).trend == "unknown"  # a fall by 15 % is not excluded


def test_without_standard_errors_a_few_measurements_say_nothing_and_many_show_their_scatter() -> None:
    few = entropy_course(entropies(2.7, 1.5, 0.9, 0.6, 0.5, 0.4))
    assert (few.trend, few.whole.half, few.start.se) == ("unknown", None, None)
    draw = random.Random(0)
    many = entropy_course(entropies(*(draw.gauss(1.0, 0.03) for _ in range(60))))
    assert many.trend == "holds"
    assert many.now.se == pytest.approx(2 * 0.03 / math.sqrt(many.now.n), rel=0.5)  # at the end of a line


def test_measurements_of_the_same_prompts_hardly_scatter_and_keep_an_error() -> None:
    smooth = entropy_course(entropies(*(2.0 - 0.05 * i for i in range(20)), error=0.1))
    assert smooth.trend == "falling"
    assert smooth.now.se is not None
    assert smooth.now.se > 0.3 * 0.1 * 1.05 / 4


def test_the_line_through_the_last_third_says_what_comes() -> None:
    """A straight fall by 0.02 a step: the last 20 steps go on for 20 more."""
    course = entropy_course(entropies(*(2.0 - 0.1 * i for i in range(13)), error=EXACT))
    assert course.n_ahead == 20
    assert course.ahead.nats == pytest.approx(-0.4)
    slow = entropy_course(entropies(1.0, 0.5, 0.1, error=EXACT))
    assert slow.ahead.nats == pytest.approx(-0.1)  # an entropy cannot fall below 0


def test_the_last_third_is_counted_in_steps_not_in_measurements() -> None:
    """Ten measurements in the first ten steps, then four far apart: the last third begins at step 51."""
    steps = [*range(1, 11), 41, 51, 61, 71]
    course = entropy_course(points(*({"step": step, "entropy": 1.0} for step in steps)))
    assert course.n_ahead == 20


@pytest.mark.parametrize("steps", [[7, 7], [1, 50, 100, 1, 6], [100, 1]])
def test_steps_that_a_restart_counts_again(steps: list[int]) -> None:
    course = entropy_course(points(*({"step": step, "entropy": 1.0, "entropy_se": 0.01} for step in steps)))
    assert course.trend == "holds"


def test_what_a_checkpoint_undid_does_not_count() -> None:
    """The run went down to 0.4. Then it took these steps again, from a checkpoint at step 20, and held."""
    values = [(1, 1.0), (11, 1.0), (21, 0.7), (31, 0.4), (21, 1.0), (31, 1.0), (41, 1.0)]
    run = points(*({"step": step, "entropy": value, "entropy_se": 0.01} for step, value in values))
    course = entropy_course(run)
    assert (course.trend, course.kept.n_undone) == ("holds", 2)
    assert [p.step for p in course.kept.points] == [1, 11, 21, 31, 41]


@pytest.mark.parametrize("n", [12, 40, 200])
@pytest.mark.parametrize("error", [0.05, None])
def test_noise_of_single_measurements_is_no_trend(n: int, error: float | None) -> None:
    """Each measurement is of a few prompts only: 5 % of scatter. A fall by e over the run is still one."""
    draw = random.Random(1)

    def trends(pace: float) -> Counter[str]:
        runs = ([math.exp(-pace * i / n) * draw.gauss(1.0, 0.05) for i in range(n)] for _ in range(200))
        return Counter(entropy_course(entropies(*run, error=error)).trend for run in runs)

    still, falls = trends(0.0), trends(1.0)
    assert still["holds"] + still["unknown"] >= 188, still  # 5 % of the intervals miss 0 by chance
    assert still["holds"] >= (120 if n >= 40 else 30), still
    assert falls["falling"] + falls["fallen"] >= (190 if n >= 40 else 160), falls
    assert falls["holds"] == 0


def test_the_intervals_of_the_change_hold_the_truth() -> None:
    """Of a run that falls by 30 %: the change between its ends, with errors of 4 % that vary from one to the next."""
    draw = random.Random(3)
    held = 0
    for _ in range(400):
        true = [1.0 - 0.3 * i / 29 for i in range(30)]
        course = entropy_course(entropies(*(draw.gauss(value, 0.04 * value) for value in true), error=0.04))
        assert course.whole.half is not None
        held += abs(course.whole.nats - (true[-1] - true[0])) <= course.whole.half
    assert 0.92 * 400 <= held <= 0.985 * 400
