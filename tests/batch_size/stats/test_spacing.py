"""How far back a horizon of measured windows reaches, against a walk over single windows."""

from __future__ import annotations

import math
import random

import pytest

from sonde.batch_size.stats.spacing import Spacing


def windows_back(everies: list[float], horizon: float) -> float:
    """Go back window by window, each of which counts 1/N, until `horizon` are counted."""
    counted, n = 0.0, 0.0
    for every in reversed(everies):
        if counted + 1 / every >= horizon:
            return n + (horizon - counted) * every
        counted, n = counted + 1 / every, n + 1
    return n + (horizon - counted) * everies[0]


@pytest.mark.parametrize("seed", range(20))
def test_a_horizon_reaches_back_until_it_holds_so_many_measured_windows(seed: int) -> None:
    rng = random.Random(seed)
    spacing, everies, number = Spacing(), [], 0
    for _ in range(rng.randint(1, 8)):
        every = rng.choice([1, 2, 5, 16])
        for _ in range(rng.randint(1, 30)):
            # A measured window ends each stretch here, so that the pace is known of each single window.
            number += every
            everies += [float(every)] * every
            spacing.measured(number, every)
    assert len(everies) == number
    for horizon in (1.5, 10.0, 50.0, 400.0):
        assert spacing.windows_in(horizon) == pytest.approx(windows_back(everies, horizon), rel=1e-9)
    assert spacing.per_measured(math.inf) == pytest.approx(number / sum(1 / every for every in everies), rel=1e-9)
    assert spacing.now == everies[-1]


def test_every_window_measured_leaves_a_horizon_as_it_is() -> None:
    spacing = Spacing()
    for number in (1, 2, 5, 9):  # a window that was dropped counts too
        spacing.measured(number, 1)
    assert spacing.windows_in(50.0) == 50.0
    assert spacing.per_measured(math.inf) == 1.0


def test_many_changes_of_the_pace_stay_few_numbers() -> None:
    spacing, rng, total = Spacing(), random.Random(0), 0.0
    number = 0
    for _ in range(2000):
        every = rng.randint(1, 40)
        number += every
        total += 1
        spacing.measured(number, every)
    assert len(spacing.state_dict()) < 140
    assert spacing.per_measured(math.inf) == pytest.approx(number / total, rel=1e-9)


def test_a_state_goes_on_and_a_damaged_one_is_refused() -> None:
    spacing, again = Spacing(), Spacing()
    for number in range(1, 30):
        spacing.measured(number, 1)
    for number in range(40, 200, 16):
        spacing.measured(number, 16)
    again.load_state_dict("state", spacing.state_dict())
    for one in (spacing, again):
        one.measured(300, 8)
    assert again.state_dict() == spacing.state_dict()
    for damaged in (None, [1.0], [1.0, 2.0], [5, 1, 0.5], [5, 3, 1, 2, 1], [5, 1, math.nan]):
        before = again.state_dict()
        with pytest.raises(ValueError, match="state"):
            again.load_state_dict("state", damaged)
        assert again.state_dict() == before
