"""Where the entropy of a run goes, and how sure that is, from entropies made by hand."""

from __future__ import annotations

import dataclasses
import math
import random
from collections import Counter
from statistics import linear_regression

import pytest

from tests.policy.stats.points import course_of, entropies, points

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
    assert course_of(entropies(*values, error=EXACT)).trend == trend


def test_a_few_noisy_measurements_are_no_trend() -> None:
    """Each is wrong by 12 %: the same numbers with an error of 1 % are a fall."""
    noisy = course_of(entropies(1.0, 1.1, 0.85, 0.8, error=0.12))
    assert noisy.trend == "unknown"
    assert noisy.whole.nats == pytest.approx(-0.2)
    assert noisy.whole.half == pytest.approx(1.96 * 0.12 * math.hypot(1.0, 0.8), rel=1e-4)
    assert course_of(entropies(1.0, 1.1, 0.85, 0.8, error=EXACT)).trend == "falling"
    assert course_of(entropies(1.0, 0.99, error=0.1)).trend == "unknown"  # a fall by 15 % is not excluded


def test_without_standard_errors_nothing_is_certain_and_one_that_is_missing_has_the_median_of_the_others() -> None:
    unknown = course_of(entropies(2.7, 1.5, 0.9, 0.6, 0.5, 0.4, *[0.4] * 30))
    assert (unknown.trend, unknown.whole.half, unknown.start.se) == ("unknown", None, None)
    run = entropies(*[1.0] * 9, error=0.03)
    run[0] = dataclasses.replace(run[0], entropy_se=None)
    assert course_of(run).start.se == pytest.approx(0.03)


def test_measurements_of_the_same_prompts_hardly_scatter_and_keep_their_error() -> None:
    smooth = course_of(entropies(*(2.0 - 0.05 * i for i in range(20)), error=0.1))
    assert smooth.trend == "falling"
    assert smooth.now.se is not None
    assert smooth.now.se >= 0.1 * 1.05 / math.sqrt(3)


def test_the_last_third_says_where_the_entropy_goes() -> None:
    """A straight fall by 0.02 a step. The last third has 4 measurements, but two levels of 3 need 6 of them."""
    course = course_of(entropies(*(2.0 - 0.1 * i for i in range(13)), error=EXACT))
    assert course.n_recent == 25
    assert course.recent.nats == pytest.approx(-0.3, abs=0.01)
    assert course.trend == "falling"


def test_the_last_third_is_counted_in_steps_not_in_measurements() -> None:
    """Five measurements in the first five steps, then four far apart: the last third begins at step 51."""
    steps = [*range(1, 6), 41, 51, 61, 71]
    course = course_of(points(*({"step": step, "entropy": 1.0} for step in steps)))
    assert course.n_recent == 20


def test_a_fall_that_ended_early_in_the_last_third_goes_on_no_more() -> None:
    flat = [2.0] * 44 + [1.0] * 16
    assert course_of(entropies(*flat, error=EXACT)).trend == "fallen"
    cliff = [2.0] * 196 + [1.7, 1.4, 1.1, 0.8]
    assert course_of(entropies(*cliff, error=EXACT)).trend == "falling"


def test_entropies_of_continuous_distributions_keep_their_signs() -> None:
    """They may be negative, or become so."""
    for begins in (-1.0, 0.5):
        falling = course_of(entropies(*(begins - 0.02 * i for i in range(60)), error=0.001))
        assert falling.trend == "falling"
        for change in (falling.whole, falling.recent):
            assert change.low is not None
            assert change.high is not None
            assert change.low < change.nats < change.high < 0
    assert course_of(entropies(*(-2.0 + 0.02 * i for i in range(60)), error=0.0)).trend == "rising"
    assert course_of(entropies(*(-2.0 - 0.002 * i for i in range(60)), error=0.0)).trend == "holds"


def test_a_noisy_measurement_counts_by_its_error() -> None:
    """One of 25 ± 12 among 59 of 2.00 ± 0.02, early or late."""
    for at in (0, 2, 59):
        run = entropies(*[2.0] * 60, error=EXACT)
        run[at] = dataclasses.replace(run[at], entropy=25.0, entropy_se=12.0)
        course = course_of(run)
        assert course.trend == "holds"
        assert course.whole.nats == pytest.approx(0.0, abs=0.01)


@pytest.mark.parametrize("n", [12, 40, 200])
def test_noise_of_single_measurements_is_no_trend(n: int) -> None:
    """Each measurement is of a few prompts only: 5 % of scatter. A fall by e over the run is still one."""
    draw = random.Random(1)

    def trends(pace: float) -> Counter[str]:
        runs = ([math.exp(-pace * i / n) * draw.gauss(1.0, 0.05) for i in range(n)] for _ in range(200))
        return Counter(course_of(entropies(*run, error=0.05)).trend for run in runs)

    still, falls = trends(0.0), trends(1.0)
    assert still["holds"] + still["unknown"] >= 188, still  # 5 % of the intervals miss 0 by chance
    assert still["holds"] >= (120 if n > 40 else 80 if n == 40 else 30), still  # levels of 5, 4 and 3 measurements
    assert falls["falling"] + falls["fallen"] >= (190 if n >= 40 else 160), falls
    assert falls["holds"] == 0


def walk(draw: random.Random, n: int, *, drift: float, noise: float, error: float) -> tuple[list[float], list[float]]:
    """The true entropies of n steps, and what is measured of them."""
    level, true = 0.0, []
    for _ in range(n):
        true.append(math.exp(level))
        level += draw.gauss(drift, noise)
    return true, [value * math.exp(draw.gauss(0.0, error)) for value in true]


@pytest.mark.parametrize(("noise", "error"), [(0.05, 0.02), (0.1, 0.1), (0.01, 0.1)])
@pytest.mark.parametrize("n", [8, 40])
def test_a_pace_and_the_earliest_halving_hold_as_often_as_they_say(n: int, noise: float, error: float) -> None:
    """Of 400 falls by 3 % a step that go on. A fall that is not clear from the scatter has no pace."""
    draw, n_stated, n_held, n_early = random.Random(3), 0, 0, 0
    for _ in range(400):
        true, measured = walk(draw, n + 100, drift=-0.03, noise=noise, error=error)
        pace = course_of(entropies(*measured[:n], every=1, error=error)).pace
        if pace is not None:
            happened = linear_regression(range(pace.n_steps + 1), [math.log(t) for t in true[:n][-pace.n_steps - 1 :]])
            halved = next((k for k, value in enumerate(true[n - 1 :]) if value <= true[n - 1] / 2), 999)
            n_stated += 1
            n_held += abs(pace.log_per_step - happened.slope) <= pace.half
            n_early += halved < pace.earliest
    assert n_stated > (50 if n == 40 else 5)
    assert n_held >= 0.93 * n_stated
    assert n_early <= 0.08 * n_stated


def test_no_pace_of_what_has_no_logarithm_or_no_scatter() -> None:
    falls = [2.0 * 0.8**i for i in range(8)]
    assert course_of(entropies(*falls)).pace is not None
    assert course_of(entropies(*falls[:5])).pace is None
    assert course_of(entropies(*falls[:-1], 0.0)).pace is None
    assert course_of(entropies(*reversed(falls))).pace is None
    exact = course_of(entropies(*falls, every=1, error=0.0)).pace
    assert exact is not None
    assert exact.halves_in == pytest.approx(math.log(2) / -math.log(0.8))
    assert exact.earliest == pytest.approx(exact.halves_in)
