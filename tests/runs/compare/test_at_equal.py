"""Two curves at an equal place: against known curves with errors, over many pairs of runs whose truth is known."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from sonde.runs.compare.stats import at_equal
from tests.mutants import Mutant

SD = 0.03
Shape = Callable[[float], float]


def power(x: float) -> float:
    return 1.5 + 4 * x**-0.3


def steep(x: float) -> float:
    return 1 + 20 * x**-0.5


def cooled(x: float) -> float:
    """The rate falls to 0 at 1000, so the loss falls fast at the end."""
    return 2.4 - 0.4 * (x / 1000) - 0.2 * math.log(x / 1000)


def later(loss: Shape) -> Shape:
    """A run that needs 1.5 times as much for each loss, and ends 0.1 higher."""
    return lambda x: loss(x / 1.5) + 0.1


def curve(
    loss: Shape, *, n: int, end: float, rng: random.Random | None = None, correlation: float = 0.0
) -> list[tuple[float, float]]:
    """Values at n places, evenly up to the end; their errors are correlated from one to the next."""
    error, found = rng.gauss(0, 1) if rng else 0.0, []
    for i in range(1, n + 1):
        if rng:
            error = correlation * error + math.sqrt(1 - correlation**2) * rng.gauss(0, 1)
        found.append((end * i / n, loss(end * i / n) + SD * error))
    return found


def held(loss: Shape, sizes: tuple[int, int, float, float], correlation: float, *, n: int = 400) -> float:
    """The part of the intervals that hold the true difference, over pairs of runs of these sizes."""
    n_ours, n_theirs, our_end, their_end = sizes
    rng, end, hits = random.Random(1), min(our_end, their_end), 0
    for _ in range(n):
        ours = curve(loss, n=n_ours, end=our_end, rng=rng, correlation=correlation)
        theirs = curve(later(loss), n=n_theirs, end=their_end, rng=rng, correlation=correlation)
        found = at_equal.difference(ours, theirs)
        assert found is not None
        assert found.low is not None
        assert found.high is not None
        hits += found.low <= loss(end) - later(loss)(end) <= found.high
    return hits / n


@pytest.mark.parametrize("loss", [power, steep, cooled])
@pytest.mark.parametrize(
    ("sizes", "correlation", "part"),
    [
        ((20, 21, 1000, 1000), 0.0, 0.97),
        ((20, 80, 1000, 2000), 0.0, 0.97),  # the places of one are all places of the other
        ((200, 100, 1000, 1000), 0.0, 0.96),
        ((1000, 200, 4000, 1000), 0.5, 0.95),
        ((200, 100, 1000, 1000), 0.5, 0.95),
        ((20, 21, 1000, 1000), 0.5, 0.91),
        ((200, 100, 1000, 1000), 0.8, 0.90),
        ((20, 21, 1000, 1000), 0.8, 0.73),
    ],
)
def test_intervals_hold(loss: Shape, sizes: tuple[int, int, float, float], correlation: float, part: float) -> None:
    """As the docstring says. √(0.95 · 0.05/400) = 0.011, √(0.75 · 0.25/400) = 0.022."""
    assert held(loss, sizes, correlation) == pytest.approx(part, abs=0.035)


@pytest.mark.parametrize(
    ("loss", "sizes", "error"),
    [
        *((loss, (20, 21, 1000, 1000), 0.005) for loss in (power, steep, cooled)),
        *((loss, (20, 20, 1000, 4000), 0.012) for loss in (power, steep, cooled)),  # neighbours at 1 and 1.25
        *((loss, (20, 20, 4000, 1000), 0.012) for loss in (power, steep)),
        *((loss, (20, 20, 1000, 16_000), 0.03) for loss in (power, steep, cooled)),  # a neighbour twice as far
        *((loss, (20, 20, 16_000, 1000), 0.03) for loss in (power, steep)),
        *((loss, (5, 5, 1000, 4000), 0.016) for loss in (power, steep, cooled)),
    ],
)
def test_any_two_runs_with_five_evaluations_have_a_number(
    loss: Shape, sizes: tuple[int, int, float, float], error: float
) -> None:
    """Without errors. Differences are 0.17, 0.24 and 0.31."""
    n_ours, n_theirs, our_end, their_end = sizes
    found = at_equal.difference(curve(loss, n=n_ours, end=our_end), curve(later(loss), n=n_theirs, end=their_end))
    assert found is not None
    assert found.value == pytest.approx(loss(1000) - later(loss)(1000), abs=error)


def test_nothing_is_extrapolated() -> None:
    ours, theirs = [(100.0, 3.0), (200.0, 2.5)], [(300.0, 2.0), (400.0, 1.9)]
    assert at_equal.difference(ours, theirs) is None
    assert at_equal.difference(theirs, ours) is None
    assert at_equal.difference(ours, []) is None
    assert at_equal.reached(ours, 3.5) is None  # it began below


def test_between_two_values_lies_the_line_over_the_logarithm() -> None:
    """200 is one third of the way from 100 to 800."""
    found = at_equal.difference([(50.0, 9.0), (200.0, 3.0)], [(100.0, 8.0), (800.0, 5.0)])
    assert found == at_equal.Difference(pytest.approx(3.0 - 7.0))
    assert str(found) == "about −4"


def test_what_both_have_in_common_cancels() -> None:
    """Two runs that see the same batches in the same order have the same errors."""
    ours = curve(power, n=20, end=1000, rng=random.Random(1))
    found = at_equal.difference(ours, [(at, loss - 0.3) for at, loss in ours])
    assert found is not None
    assert [found.value, found.low, found.high] == pytest.approx([0.3, 0.3, 0.3])
    others = curve(power, n=21, end=1000, rng=random.Random(2))
    apart = at_equal.difference(ours, [(at, loss - 0.3) for at, loss in others])
    assert apart is not None
    assert apart.low is not None
    assert apart.low < 0.29


@pytest.mark.parametrize(
    ("n", "sd", "bias", "scatter"), [(20, 0.0, 0.01, 1e-9), (20, 1.0, 0.05, 0.07), (200, 1.0, 0.02, 0.04)]
)
def test_a_loss_is_reached_where_it_is(n: int, sd: float, bias: float, scatter: float) -> None:
    """The slow run needs exactly twice as much for each loss, so the fast one reaches its last loss in the middle."""
    rng, found = random.Random(2), []
    for _ in range(100):
        slow, fast = (curve(lambda x, f=f: power(x / f), n=n, end=1000, rng=rng if sd else None) for f in (2, 1))
        loss = at_equal.level_at(slow, slow[-1][0]).value
        at = at_equal.reached(fast, loss)
        assert at is not None
        assert at_equal.reached(slow, loss) == 1000
        found.append(at / 1000)
    mean = sum(found) / len(found)
    assert mean == pytest.approx(0.5, abs=bias)
    assert math.sqrt(sum((at - mean) ** 2 for at in found) / len(found)) <= scatter


@pytest.mark.parametrize(
    ("function", "old", "new", "test"),
    [
        ("_end_of_line", "1 / len(x) + mean**2", "1 / len(x) + 0 * mean**2", "hold"),
        ("_on_a_line", "math.log(at / place)", "at / place", "number"),
        ("difference", "one.variance + other.variance", "one.variance", "hold"),
        ("_between", "math.log(place / before) / math.log(at / before)", "0.5", "between"),
        ("difference", "place < max", "place < min", "extrapolated"),
        ("reached", "math.exp(at)", "at", "reached"),
    ],
)
def test_a_mistake_is_noticed(function: str, old: str, new: str, test: str) -> None:
    tests = {
        "hold": lambda: test_intervals_hold(power, (200, 99, 1000, 1000), 0.0, 0.96),
        "number": lambda: test_any_two_runs_with_five_evaluations_have_a_number(steep, (20, 21, 1000, 1000), 0.005),
        "between": test_between_two_values_lies_the_line_over_the_logarithm,
        "extrapolated": test_nothing_is_extrapolated,
        "reached": lambda: test_a_loss_is_reached_where_it_is(20, 0.0, 0.01, 1e-9),
    }
    mutant = Mutant(f"{old} → {new}", f"sonde.runs.compare.stats.at_equal:{function}", old, new)
    with mutant.applied(), pytest.raises((AssertionError, ValueError, IndexError)):
        tests[test]()
