"""The rule of a batch schedule, on readings made by hand."""

from __future__ import annotations

import json
import math
import random
import re
from dataclasses import replace
from typing import Any

import pytest

from sonde.schedule.stats.batch_rule import (
    BatchRule,
    BatchState,
    NoiseScaleNow,
    metrics_of,
    next_batch,
)
from tests.schedule.replays import now_from, replayed

RULE = BatchRule(smallest=4, largest=32, ratio=1.5)
NOW = NoiseScaleNow(None, None, None, None, units_per_micro_batch=2.0, measured_windows=40)


def _between(low: float, high: float) -> NoiseScaleNow:
    return replace(NOW, b_simple=math.sqrt(low * high), b_simple_low=low, b_simple_high=high)


def _counts(rule: BatchRule, *known: NoiseScaleNow, every: int = 10) -> list[int]:
    readings = [replace(each, measured_windows=every * n) for n, each in enumerate(known, start=1)]
    return [decision.state.micro_batches for decision in replayed(rule, readings)]


def test_the_lower_end_decides() -> None:
    """From 8 units to 16: 1.5 · low must be 1.1 · 16 = 17.6."""
    just_below, just_above = _between(11.73, 1000.0), _between(11.74, 20.0)
    assert _counts(RULE, just_below, just_above) == [4, 8]


@pytest.mark.parametrize(
    ("now", "words"),
    [
        (replace(NOW, b_simple_low=1e6), "only a bound of B_simple is known"),
        (replace(NOW, b_simple_low=0.0, b_simple_high=1e-6), "only a bound of B_simple is known"),
        (NOW, "B_simple is not known"),
    ],
)
def test_a_bound_alone_decides_nothing(now: NoiseScaleNow, words: str) -> None:
    decision = next_batch(RULE, BatchState(8), now)
    assert decision.state == BatchState(8)
    assert words in decision.reason


def test_a_bound_counts_once_the_run_s_average_has_both_ends() -> None:
    """The lower one of the two lower ends decides: 1.5 · low against 1.1 · 16 = 17.6."""
    bound = replace(NOW, b_simple_low=50.0)

    def count(now: NoiseScaleNow, average_low: float | None) -> int:
        return next_batch(RULE, BatchState(4), replace(now, average_low=average_low)).state.micro_batches

    assert [count(bound, low) for low in (None, 11.7, 11.8, 1e3)] == [4, 4, 8, 8]
    assert [count(replace(bound, b_simple_low=low), 1e3) for low in (11.7, 11.8)] == [4, 8]
    assert count(_between(11.7, 20.0), 1e3) == 4


def test_a_log_gives_back_what_decides() -> None:
    for now in (_between(9.1, 12.3), replace(NOW, b_simple_low=50.0, average_low=math.pi), NOW):
        assert now_from(json.loads(json.dumps(metrics_of(now)))) == now


def test_it_grows_by_one_count_at_a_time_and_waits_for_measured_windows() -> None:
    rule, high = replace(RULE, pause=8), _between(1e4, 1e5)
    assert _counts(rule, *[high] * 5) == [8, 16, 32, 32, 32]
    assert _counts(rule, *[high] * 6, every=4) == [8, 8, 16, 16, 32, 32]


def test_a_schedule_never_shrinks() -> None:
    low = _between(0.1, 0.2)
    assert _counts(RULE, _between(100.0, 200.0), low, low) == [8, 8, 8]


def test_only_allowed_counts() -> None:
    high = _between(1e4, 1e5)
    assert _counts(BatchRule(3, 25), *[high] * 5) == [6, 12, 24, 24, 24]
    assert _counts(BatchRule(4, 4), high) == [4]


def test_the_same_readings_give_the_same_decisions() -> None:
    draw = random.Random(1)
    rule = BatchRule(1, 2**30)
    readings = []
    for n in range(200):
        low = math.exp(draw.uniform(0, n / 10))
        readings.append(replace(_between(low, low * draw.uniform(1, 2)), measured_windows=5 * n))
    whole, state = replayed(rule, readings), BatchState(1)
    assert sum(decision.changed for decision in whole) > 10
    # Going on from a saved state is going on.
    for now, decision in zip(readings, whole, strict=True):
        again = next_batch(rule, state, now)
        assert again == decision
        state = BatchState(**vars(again.state))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"smallest": 8, "largest": 4}, "largest must be at least the present 8 micro-batches"),
        ({"smallest": 0}, "1 or more"),
        ({"ratio": 0.0}, "ratio must be positive"),
        ({"ratio": math.inf}, "ratio must be positive"),
        ({"pause": -1}, "pause 0 or more"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        replace(RULE, **options)
