from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sonde.evidence.stats.loss_curves import Curve, falling, log_units_ratio, units_at


def curve(loss: Callable[[float], float], units: float = 100.0, n: int = 50) -> Curve:
    places = tuple(units * k / n for k in range(n + 1))
    return Curve(places, tuple(map(loss, places)))


@pytest.mark.parametrize("times", [0.25, 0.8, 1.0, 1.3, 3.0, 8.0])
def test_a_curve_that_needs_k_times_the_units(times: float) -> None:
    """L(u/k) beside L(u), for a power law and an exponential: the ratio is k, but for the lines between 50 points."""
    for law in (lambda u: (u + 30) ** -0.5, lambda u: math.exp(-u / 60)):
        found = log_units_ratio(curve(lambda u, law=law: law(u / times)), curve(law))
        assert found is not None
        assert math.exp(found) == pytest.approx(times, rel=0.02)


def test_swapped_curves_give_the_inverse() -> None:
    draw = random.Random(0)
    a, b = (curve(lambda u, k=k: (u / k + 30) ** -0.5 + draw.gauss(0, 1e-3)) for k in (1, 2))
    there, back = log_units_ratio(b, a), log_units_ratio(a, b)
    assert there is not None
    assert back == pytest.approx(-there, abs=1e-12)


def test_evaluations_at_other_places() -> None:
    """A large batch cannot be evaluated where a small one is."""
    found = log_units_ratio(curve(lambda u: (u / 2 + 30) ** -0.5, n=9), curve(lambda u: (u + 30) ** -0.5, n=70))
    assert found is not None
    assert math.exp(found) == pytest.approx(2, rel=0.02)


def test_ends_of_trainings_of_several_lengths() -> None:
    """Four points of a curve: its last losses are compared, not means over lines that lie far above it."""
    lengths = (0.0, 50.0, 70.0, 100.0)
    fast, slow = (Curve(lengths, tuple((u / k + 30) ** -0.5 for u in lengths)) for k in (1, 1.6))
    found = log_units_ratio(slow, fast)
    assert found is not None
    assert math.exp(found) == pytest.approx(1.6, rel=0.02)  # the line from 50 to 70 lies above the curve
    back = log_units_ratio(fast, slow)
    assert back == pytest.approx(-found)
    # Half of them is 2 points, and no curve.
    assert log_units_ratio(slow.until(50), fast.until(50)) is None


def test_noise_of_losses_does_not_bias_the_ratio() -> None:
    """Losses that scatter by 8 % of the whole progress, those of the slower curve by half as much.

    The mean of 200 logs has a standard error of 0.006; an end of a falling fit would be 0.07 too low.
    """
    draw = random.Random(1)
    progress = 30**-0.5 - 130**-0.5
    logs = []
    for _ in range(200):
        fast = curve(lambda u: (u + 30) ** -0.5 + 0.08 * progress * draw.gauss(0, 1), n=40)
        slow = curve(lambda u: (u / 1.5 + 30) ** -0.5 + 0.04 * progress * draw.gauss(0, 1), n=40)
        logs.append(log_units_ratio(slow, fast))
    known = [log for log in logs if log is not None]
    assert len(known) == 200
    assert sum(known) / 200 == pytest.approx(math.log(1.5), abs=0.02)


@settings(deadline=None, max_examples=25)
@given(st.floats(0.01, 1e6), st.floats(-50, 50), st.floats(0.01, 100))
def test_other_units_of_measure(units: float, shift: float, scale: float) -> None:
    """Tokens in place of sequences, bits in place of nats, and a constant added to all losses change no ratio."""
    slow, fast = curve(lambda u: (u / 1.7 + 30) ** -0.5), curve(lambda u: (u + 30) ** -0.5)

    def changed(one: Curve) -> Curve:
        return Curve(tuple(u * units for u in one.units), tuple(shift + scale * loss for loss in one.losses))

    assert log_units_ratio(changed(slow), changed(fast)) == pytest.approx(log_units_ratio(slow, fast), abs=1e-6)


def test_what_cannot_be_compared() -> None:
    good = curve(lambda u: (u + 30) ** -0.5)
    nan = Curve((0, 1, 2), (1.0, math.nan, 0.5))
    rises = curve(lambda u: 1 + u)
    empty, late = Curve((), ()), Curve((60, 80, 100), (0.1, 0.09, 0.08))
    assert log_units_ratio(nan, good) == log_units_ratio(rises, good) == math.inf
    assert log_units_ratio(curve(lambda u: 1 + 1 / (1 + u)), good) == math.inf  # never as low as the reference's first
    constant, hardly = curve(lambda u: 2.0), curve(lambda u: (u % 4 < 1) - u / 1000)  # scatters by 0.8
    assert {log_units_ratio(good, constant), log_units_ratio(constant, constant), log_units_ratio(good, hardly)} == {
        None
    }
    assert log_units_ratio(constant, good) == math.inf
    assert log_units_ratio(good, nan) is log_units_ratio(good, rises) is None
    assert log_units_ratio(empty, good) is log_units_ratio(good, empty) is log_units_ratio(late, good) is None
    assert not empty.has_diverged
    assert nan.has_diverged


def test_a_falling_fit_is_that_of_least_squares() -> None:
    """Against its definition by means of all stretches: max over their beginnings of min over their ends."""
    draw = random.Random(2)
    losses = [3 - 0.1 * k + draw.gauss(0, 1) for k in range(20)]
    fit = falling(Curve(tuple(range(20)), tuple(losses)))
    risen = [-loss for loss in losses]
    expected = [
        -max(min(sum(risen[i : j + 1]) / (j + 1 - i) for j in range(k, 20)) for i in range(k + 1)) for k in range(20)
    ]
    assert sorted(set(fit.losses)) == pytest.approx(sorted({round(value, 9) for value in expected}), abs=1e-8)
    assert list(fit.losses) == sorted(fit.losses, reverse=True)


def test_units_at_a_loss() -> None:
    line = Curve((0, 10, 20), (3.0, 2.0, 0.0))
    assert [units_at(line, loss) for loss in (3.0, 2.5, 1.0, 0.0)] == [0, 5, 15, 20]
    assert units_at(line, 3.1) is units_at(line, -0.1) is None


def test_scatter_is_that_of_independent_errors() -> None:
    draw = random.Random(3)
    noisy = curve(lambda u: (u + 30) ** -0.5 + 0.01 * draw.gauss(0, 1), n=2000)
    assert noisy.scatter == pytest.approx(0.01, rel=0.1)  # 2,000 errors: ± 2 %, twice that for second differences
    assert Curve((0, 1), (1.0, 2.0)).scatter is None


def test_curves_that_are_none() -> None:
    with pytest.raises(ValueError, match="a loss for each point, got 1 points, 2 losses"):
        Curve((0,), (1.0, 2.0))
    with pytest.raises(ValueError, match="must rise"):
        Curve((0, 0), (1.0, 2.0))
    assert Curve((0, 1, 2), (3.0, 2.0, 1.0)).until(1.5) == Curve((0, 1), (3.0, 2.0))
