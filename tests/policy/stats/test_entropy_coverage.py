"""How often the 95 % interval of a run's change of entropy holds the change of the true levels."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from statistics import fmean

import pytest

from tests.policy.stats.points import course_of, points

COURSES: dict[str, Callable[[float], float]] = {
    "constant": lambda t: 1.0,
    "exponential": lambda t: 0.4 + 2.3 * math.exp(-6 * t),
    "sine": lambda t: 1.5 + 0.5 * math.sin(2 * math.pi * t),
}
SE = 0.03
"""Standard error of each measurement, in nats a token."""
RUNS = 100
"""For each course. Of 300 runs, 95 % have a standard error of 1.3 %, and 90 % of 1.7 %."""


def errors(draw: random.Random, n: int, correlation: float) -> Iterator[float]:
    """An autoregression of first order with a standard deviation of `SE`."""
    error = draw.gauss(0.0, SE)
    for _ in range(n):
        yield error
        error = correlation * error + math.sqrt(1 - correlation**2) * draw.gauss(0.0, SE)


@pytest.mark.parametrize("n", [10, 30, 300])
@pytest.mark.parametrize("correlation", [0.0, 0.5])
def test_the_intervals_of_the_change_hold_the_truth(n: int, correlation: float) -> None:
    """The truth is the difference of the same means of the true entropies.

    Measured on 600 runs a cell: 96 to 98 % with independent errors from 100 measurements on, 90 to 94 % with
    correlated ones. Short runs have wider intervals, since bends look like scatter or correlation: 93 to 100 %.
    """
    draw = random.Random(n)
    held, widths = {}, []
    for name, course in COURSES.items():
        true = [course(i / (n - 1)) for i in range(n)]
        held[name] = 0
        for _ in range(RUNS):
            noisy = (value + error for value, error in zip(true, errors(draw, n, correlation), strict=True))
            found = course_of(points(*({"entropy": v, "entropy_se": SE} for v in noisy)))
            k = found.now.n
            assert found.whole.half is not None
            held[name] += abs(found.whole.nats - fmean(true[-k:]) + fmean(true[:k])) <= found.whole.half
            widths.append(found.whole.half)
    assert sum(held.values()) >= (0.90 - 2.5 * 0.017) * 3 * RUNS, held
    assert min(held.values()) >= (0.90 - 2.5 * 0.03) * RUNS, held
    if correlation == 0.0 and n >= 100:  # and not by being far too wide
        assert fmean(widths) < 1.6 * 1.96 * SE * math.sqrt(2 / k)
