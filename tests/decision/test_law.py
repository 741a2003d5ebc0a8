"""The law of batch sizes, and numbers that are known as a range."""

from __future__ import annotations

import math
import random

import pytest

from sonde.decision.law import Range, as_weighed, relative_steps, steps_and_examples


@pytest.mark.parametrize("batch", [1, 32, 500, 10_000])
def test_trade_off_equation(batch: float) -> None:
    cost = steps_and_examples(batch, 500)
    assert (cost.steps - 1) * (cost.examples - 1) == pytest.approx(1)
    assert steps_and_examples(500, 500).steps == steps_and_examples(500, 500).examples == 2


@pytest.mark.parametrize(("batch", "critical"), [(0, 1), (-1, 1), (1, 0), (math.inf, 1), (1, math.nan)])
def test_trade_off_refuses(batch: float, critical: float) -> None:
    with pytest.raises(ValueError, match="positive and finite"):
        steps_and_examples(batch, critical)


@pytest.mark.parametrize("critical", [1e-3, 1.0, 90.0, 1e12])
def test_relative_steps_are_those_of_the_law(critical: float) -> None:
    parts = [steps_and_examples(batch, critical).steps for batch in (256, 64)]
    assert relative_steps(256, 64, critical) == pytest.approx(parts[0] / parts[1])
    assert relative_steps(256, 64, math.inf) == 0.25  # far below B_crit, steps fall as the batch grows
    assert relative_steps(256, 64, 0.0) == 1.0  # far above it, they stay


def test_ends_of_a_cost_are_those_of_the_range_whichever_way_it_goes() -> None:
    rng = random.Random(0)
    for _ in range(200):
        low, middle, high = sorted(math.exp(rng.uniform(-3, 9)) for _ in range(3))
        batch = math.exp(rng.uniform(-1, 8))
        cost = Range(middle, low, high).of(lambda c, b=batch: relative_steps(b, 64, c))  # type: ignore[misc]
        ends = [relative_steps(batch, 64, low + (high - low) * part) for part in (0, 0.01, 0.3, 1)]
        assert cost.low <= min(ends) * (1 + 1e-12)
        assert cost.high >= max(ends) * (1 - 1e-12)
        assert {cost.low, cost.high} == {ends[0], ends[-1]}
        assert cost.middle == relative_steps(batch, 64, middle)


def test_what_is_likely_without_a_middle() -> None:
    assert Range(None, 40.0, math.inf).likely == 40.0  # the end that is known
    assert Range(None, 0.5, 0.9).likely == 0.9  # the worse end of a cost


def test_a_batch_counts_as_its_effective_units_where_these_are_fewer() -> None:
    assert as_weighed(16, 8.0, "rows") == (8.0, "effective rows")
    assert as_weighed(16, 15.9, "rows") == as_weighed(16, None, "rows") == (16, "rows")
