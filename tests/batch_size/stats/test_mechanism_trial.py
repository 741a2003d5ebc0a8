"""Pieces or single examples: the smaller variance for the same time wins."""

from __future__ import annotations

import math
import random

import pytest

from sonde.batch_size.stats.mechanism_trial import FEWEST_PAIRS, MechanismTrial
from sonde.batch_size.stats.noise_scale import WindowEstimate


def trial(budget: float | None, *, sd: float, dear: float = 0.0, every: int = 1, n: int = 400) -> MechanismTrial:
    """Windows of 1 s, in which pieces cost 0.01 s and scatter by `sd` times as much as examples."""
    rng, found = random.Random(0), MechanismTrial(budget, every)
    for _ in range(n):
        noise, signal = rng.gauss(0, 1), rng.gauss(0, 0.1)
        found.of_examples.append(WindowEstimate(10 + noise, 1 + signal))
        found.of_pieces.append(WindowEstimate(10 + sd * noise, 1 + sd * signal))
        found.seconds.append(0.01)
        found.example_seconds.append(dear)
        found.durations.append(1.01)
    return found


def test_at_the_same_cost_the_standard_deviations_decide() -> None:
    assert trial(0.01, sd=2.0).narrower_by() == pytest.approx(2.0)
    assert trial(None, sd=0.5).narrower_by() == pytest.approx(0.5)


@pytest.mark.parametrize("dear", [0.1, 1.0])
def test_at_a_budget_a_dear_mechanism_is_used_in_fewer_windows(dear: float) -> None:
    """Both spend 1 % of the time, so windows for each measured one are in proportion to the cost."""
    times = [max(cost / (1.0 * 0.001 / 0.999), 1.0) + cost for cost in (0.01, 0.01 + dear)]
    assert trial(0.001, sd=3.0, dear=dear).narrower_by() == pytest.approx(3.0 * math.sqrt(times[0] / times[1]))


@pytest.mark.parametrize("every", [1, 5])
def test_without_a_budget_the_cost_makes_windows_longer(every: int) -> None:
    expected = 2.0 * math.sqrt((every + 0.01) / (every + 0.51))
    assert trial(None, sd=2.0, dear=0.5, every=every).narrower_by() == pytest.approx(expected)


def test_where_the_signal_is_not_seen_its_own_scatter_decides() -> None:
    found = trial(None, sd=1.0, n=60)
    found.of_pieces = [WindowEstimate(1000 * e.trace_cov, (e.grad_sq - 1) * 3) for e in found.of_pieces]
    found.of_examples = [WindowEstimate(e.trace_cov, e.grad_sq - 1) for e in found.of_examples]
    assert found.narrower_by() == pytest.approx(3.0)


def test_a_few_windows_are_no_choice() -> None:
    assert not trial(None, sd=1.0, n=FEWEST_PAIRS - 1).is_complete
    assert trial(None, sd=1.0, n=FEWEST_PAIRS).is_complete


def test_windows_without_any_scatter_are_equal() -> None:
    found = MechanismTrial(None)
    found.of_pieces = found.of_examples = [WindowEstimate(1.0, 1.0)] * 8
    assert found.narrower_by() == 1.0
