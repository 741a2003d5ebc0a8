"""Differences of runs: against exact normal intervals, and over many pairs of runs whose truth is known."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Sequence

import pytest

from sonde.batch_size.stats.filter import Blocks, NoiseScaleFilter
from sonde.runs.compare.stats import differences
from sonde.runs.compare.stats.differences import PART
from sonde.stats.intervals import RatioInterval, unresolved
from tests.batch_size.stats.windows import gaussian_windows
from tests.mutants import Mutant

BATCH, STEPS, EVERY, PAIRS = 32.0, 450, 50, 100
KNOWN = RatioInterval("resolved", 40.0, 90.0, ratio=60.0)


def lognormal(middle: float, error: float) -> RatioInterval:
    """The interval of a noise scale whose log has this standard error."""
    return RatioInterval("resolved", middle * math.exp(-1.96 * error), middle * math.exp(1.96 * error), ratio=middle)


def test_the_ratio_of_lognormal_noise_scales_has_the_interval_of_a_normal_difference() -> None:
    found = differences.ratio_between(lognormal(90.0, 0.3), lognormal(60.0, 0.4))
    assert found.ratio == 1.5
    ends = [1.5 * math.exp(sign * 1.96 * 0.5) for sign in (-1, 1)]  # √(0.3² + 0.4²) = 0.5
    assert [found.low, found.high] == pytest.approx(ends)


def test_a_ratio_the_other_way_round_is_its_inverse() -> None:
    narrow = lognormal(20.0, 0.1)
    one, other = differences.ratio_between(KNOWN, narrow), differences.ratio_between(narrow, KNOWN)
    assert one.low is not None
    assert one.high is not None
    assert [other.low, other.ratio, other.high] == pytest.approx([1 / one.high, 1 / (one.ratio or 0), 1 / one.low])


def test_bounds_make_bounds() -> None:
    above, below = RatioInterval("lower_bound", 100.0, math.inf), RatioInterval("upper_bound", 0.0, 30.0)
    no_noise, nothing = RatioInterval("upper_bound", 0.0, 0.0), unresolved("too few windows")
    for ours, theirs, status, low, high in (
        (above, KNOWN, "lower_bound", 100 / 90, math.inf),
        (KNOWN, above, "upper_bound", 0.0, 0.9),
        (below, KNOWN, "upper_bound", 0.0, 30 / 40),
        (above, below, "lower_bound", 100 / 30, math.inf),
        (above, above, "unresolved", None, None),
        (KNOWN, nothing, "unresolved", None, None),
        (no_noise, KNOWN, "upper_bound", 0.0, 0.0),
    ):
        ratio = differences.ratio_between(ours, theirs)
        assert (ratio.status, ratio.low, ratio.high, ratio.ratio) == (status, low, high, None)


def test_the_last_stretch_reaches_to_the_end_on_one_side_of_1() -> None:
    above, below, both = lognormal(2.0, 0.1), lognormal(0.5, 0.1), lognormal(1.1, 0.1)
    assert [differences.side_of_1(each) for each in (above, below, both, unresolved(""))] == [1, -1, 0, 0]
    assert differences.last_stretch([]) is None
    assert differences.last_stretch([above, above, both]) is None
    assert differences.last_stretch([above, both, above, above]) == 2
    assert differences.last_stretch([below, below, above]) == 2
    assert differences.last_stretch([above, above]) == 0


# Over many pairs of runs, by the real filter.


@functools.cache
def pairs_of_runs(times: Callable[[int], float]) -> list[list[RatioInterval]]:
    """The ratio at each reading of pairs of runs: the noise scale of one grows, that of the other is a multiple."""
    grows = [20.0 * (1 + t / 50) ** 0.7 for t in range(STEPS)]
    many = [[b * times(t) for t, b in enumerate(grows)], grows]
    ours, theirs = (readings(b_simple, seed) for seed, b_simple in enumerate(many))
    rows = [list(map(differences.ratio_between, *both)) for both in zip(ours, theirs, strict=True)]
    return [list(of_pair) for of_pair in zip(*rows, strict=True)]


def readings(b_simple: Sequence[float], seed: int) -> list[list[RatioInterval]]:
    """The noise scale now of many runs at each reading."""
    taken, blocks, found = NoiseScaleFilter(PAIRS, BATCH), Blocks(), []
    for step, window in enumerate(gaussian_windows(b_simple, n_runs=PAIRS, seed=seed, batch=BATCH), start=1):
        if (block := blocks.add(step, window, 1 / BATCH)) is not None:
            taken.update(block)
        if step % EVERY == 0:
            found.append(taken.levels(blocks.unfinished))
    return found


def alike(_: int) -> float:
    return 1.0


def later(step: int) -> float:
    return 1.8 if step >= 300 else 1.0


def test_intervals_of_the_ratio_hold_at_every_reading() -> None:
    """Measured on 200 pairs: 98 to 100 %, but 79 % at the first reading after a jump, since a filter lags."""
    for times in (alike, later):
        pairs = pairs_of_runs(times)
        for k in range(len(pairs[0])):
            step = EVERY * (k + 1)
            held = sum((of[k].low or 0) <= times(step - 1) <= (of[k].high or math.inf) for of in pairs)
            if not (times is later and step == 350):
                assert held >= (0.95 - 3 * 0.022) * PAIRS  # √(0.95 · 0.05/100) = 0.022


def test_runs_that_do_not_differ_are_seldom_said_to_differ() -> None:
    assert sum(differences.last_stretch(of) is not None for of in pairs_of_runs(alike)) <= (0.05 + 3 * 0.022) * PAIRS


def test_a_difference_is_found_with_its_beginning_and_its_size() -> None:
    pairs, begins, n_held = pairs_of_runs(later), [], 0
    for of in pairs:
        if (first := differences.last_stretch(of)) is not None:
            begins.append(EVERY * (first + 1))
            n_held += (of[-1].low or 0) <= 1.8 <= (of[-1].high or math.inf)
    assert len(begins) >= 0.95 * PAIRS
    assert n_held >= 0.9 * len(begins)
    early = sum(begin < 300 for begin in begins)
    assert early <= 0.05 * PAIRS
    assert sorted(begins)[len(begins) // 2] <= 400


# Means over the last quarter.


def losses(rng: random.Random, level: float, *, n: int = 200, correlation: float = 0.5) -> list[tuple[float, float]]:
    """A falling curve whose errors are correlated from one reading to the next."""
    error, curve = 0.0, []
    for i in range(1, n + 1):
        error = correlation * error + rng.gauss(0, 0.05)
        curve.append((10.0 * i, level + 3 * i**-0.5 + error))
    return curve


@pytest.mark.parametrize(("correlation", "part"), [(0.0, 0.95), (0.5, 0.93), (0.8, 0.79)])
def test_intervals_of_a_difference_hold(correlation: float, part: float) -> None:
    """As the docstring says. Student's t of 5 blocks; √(0.93 · 0.07/500) = 0.011."""
    rng, n = random.Random(0), 500
    found = [
        differences.mean_difference(
            losses(rng, 1.2, correlation=correlation), losses(rng, 1.0, n=100, correlation=correlation)
        )
        for _ in range(n)
    ]
    held = sum(each is not None and each.low <= 0.2 <= each.high for each in found)
    assert held / n == pytest.approx(part, abs=0.03)


def test_what_both_have_in_common_cancels() -> None:
    ours = losses(random.Random(1), 1.0)
    theirs = [(at, loss - 0.3) for at, loss in ours]
    found = differences.mean_difference(ours, theirs)
    assert found is not None
    assert [found.value, found.low, found.high] == pytest.approx([0.3, 0.3, 0.3])


def test_too_few_values_have_no_difference() -> None:
    ours = losses(random.Random(1), 1.0)
    late = [(at, value) for at, value in ours if at > (1 - PART) * 2000]
    assert differences.mean_difference(ours, []) is None
    assert differences.mean_difference(ours, late[:2]) is None
    in_three_blocks, in_two_blocks = [late[0], late[len(late) // 2], late[-1]], [late[0], late[1], late[-1]]
    assert differences.mean_difference(ours, in_three_blocks) is not None
    assert differences.mean_difference(ours, in_two_blocks) is None


@pytest.mark.parametrize(
    ("function", "old", "new", "test"),
    [
        ("ratio_between", "math.log(denominator.high / denominator.ratio)", "0.0", "inverse"),
        ("ratio_between", "math.hypot(math.log(numerator.high", "max(math.log(numerator.high", "normal"),
        ("last_stretch", "!= side", "== 0", "stretch"),
        ("mean_difference", "/ math.sqrt(n)", "/ n", "hold"),
    ],
)
def test_a_mistake_is_noticed(function: str, old: str, new: str, test: str) -> None:
    tests = {
        "inverse": test_a_ratio_the_other_way_round_is_its_inverse,
        "normal": test_the_ratio_of_lognormal_noise_scales_has_the_interval_of_a_normal_difference,
        "stretch": test_the_last_stretch_reaches_to_the_end_on_one_side_of_1,
        "hold": lambda: test_intervals_of_a_difference_hold(0.0, 0.95),
    }
    mutant = Mutant(f"{old} → {new}", f"sonde.runs.compare.stats.differences:{function}", old, new)
    with mutant.applied(), pytest.raises(AssertionError):
        tests[test]()
