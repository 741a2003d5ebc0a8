"""What a batch costs, and how it is shared out: against a naive computation over all ends and all splits."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sonde.decision.law import Range
from sonde.decision.plans import Plan, Present, as_it_is, plan_of, plans_of
from sonde.decision.time_curve import TimeCurve, Timing
from tests.decision.known import curves, ends_of, every_split, powers, ranges, tried


@st.composite
def presents(draw: st.DrawFn, *, in_powers: bool = False) -> Present:
    """A training whose step was timed; all of its sizes are powers of two if that is asked for."""
    ranks, accumulation, micro = draw(powers), draw(powers), draw(powers if in_powers else st.integers(1, 64))
    at_most = draw(powers if in_powers else st.integers(1, 64) | st.integers(1, 10**12))
    batch, curve = float(micro * accumulation * ranks), draw(curves(micro, accumulation, ranks))
    rate = draw(st.none() | st.floats(0.1, 100))
    return Present(batch, 1000.0, float(micro), accumulation, ranks, at_most, curve, True, rate)


@given(presents(), ranges(), st.integers(1, 20_000) | st.integers(1, 10**12))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_costs_are_those_of_a_naive_computation(present: Present, critical: Range, batch: int) -> None:
    plan = plan_of(present, batch, critical)
    assume(plan is not None)
    assert plan is not None
    steps, times = ends_of(present, critical, (plan.ranks, plan.accumulation, plan.micro_batch), plan.batch)
    expected = {"steps": steps, "units": [n * plan.batch for n in steps], "time": times}
    expected["rank_time"] = [time * plan.ranks / present.ranks for time in times]
    step, _ = present.curve.of_step(plan.micro_batch, plan.accumulation, plan.ranks)
    expected["seconds"] = [n * end for n in steps for end in (step.low, step.high)]
    if present.cost_per_hour is not None:
        price = plan.ranks / present.ranks / 3600 * present.cost_per_hour
        expected["money"] = [price * seconds for seconds in expected["seconds"]]
    for name, ends in expected.items():
        found: Range = getattr(plan, name)
        assert (found.low, found.high) == (pytest.approx(min(ends)), pytest.approx(max(ends))), name
        assert found.middle is None or found.low * (1 - 1e-9) <= found.middle <= found.high * (1 + 1e-9), name
    assert (plan.money is None) == (present.cost_per_hour is None)
    assert (plan.better.low, plan.worse.high) == (plan.time.low, plan.time.high)


@given(presents(), ranges(), st.integers(1, 20_000) | st.integers(1, 10**12), st.sampled_from([0.0, 4.0]))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_a_batch_is_shared_out_in_whole_numbers_that_are_allowed(
    present: Present, critical: Range, batch: int, least: float
) -> None:
    present = dataclasses.replace(present, least_micro_batch=least)
    if (plan := plan_of(present, batch, critical)) is None:
        assert batch / present.ranks_at_most < 2 * least or present.curve.largest < least or batch > 1e5
        return
    assert plan.whole_batch == plan.batch == plan.ranks * plan.accumulation * plan.micro_batch
    assert plan.ranks <= present.ranks_at_most
    assert max(least, 1) <= plan.micro_batch <= present.curve.largest
    if batch <= 20_000 and present.ranks_at_most <= batch and not least:
        assert abs(plan.batch - batch) <= max(0.1 * batch, 1) or present.curve.largest < batch


@pytest.mark.parametrize("by_rank_time", [False, True])
@given(presents(in_powers=True), ranges(), st.integers(0, 10).map(lambda k: 2**k))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_no_other_split_is_better_at_its_worse_end(
    by_rank_time: bool, present: Present, critical: Range, batch: int
) -> None:
    present = dataclasses.replace(present, by_rank_time=by_rank_time)
    plan = plan_of(present, batch, critical)
    splits = every_split(present, batch, present.ranks_at_most)
    assert (plan is None) == (not splits)
    if plan is not None:
        worst = [
            max(ends_of(present, critical, s, batch)[1]) * (s[0] / present.ranks if by_rank_time else 1) for s in splits
        ]
        found = plan.rank_time if by_rank_time else plan.time
        assert found.high == pytest.approx(min(worst))


def test_beyond_a_batch_more_ranks_are_not_used() -> None:
    present = Present(16, 1000, 16, 1, 1, 64, TimeCurve((Timing(16, 1, 1, 1.0, 0.0),)), most_on_more_ranks=100)
    ranks = [plan.ranks for n in (64, 100, 128, 4096) if (plan := plan_of(present, n, Range(90, 80, 100)))]
    assert ranks[:2] != [1, 1]
    assert ranks[2:] == [1, 1]


def test_the_present_plan_is_as_it_is_and_takes_what_it_takes() -> None:
    """Its batch may be an average: an epoch's last windows are short."""
    curve = TimeCurve((Timing(7.9, 4, 2, 0.5),))
    present = Present(63.2, 1000.0, 7.9, 4, 2, 2, curve, has_clock=True, cost_per_hour=36.0)
    plan = as_it_is(present, Range(90.0, 80.0, 100.0))
    assert (plan.ranks, plan.accumulation, plan.micro_batch, plan.batch) == (2, 4, 8, 63.2)
    assert (plan.time, plan.steps, plan.rank_time) == (Range(1, 1, 1), Range(1000, 1000, 1000), Range(1, 1, 1))
    assert plan.seconds == Range(500, 500, 500)
    assert plan.money == Range(5, 5, 5)


def test_batches_that_are_looked_at_lie_about_the_critical_one() -> None:
    """Powers of two times the present one, from a quarter of B_crit to 4 times it, and those that were timed."""
    curve = tried((16, 0.01), (48, 0.02), (1000, 0.5))
    present = Present(16, 1000, 16, 1, 1, 1, curve, has_clock=True)
    plans = plans_of(present, Range(60.0, 50.0, 70.0))
    assert [plan.batch for plan in plans] == [8, 16, 32, 48, 64, 128]
    assert [plan.basis for plan in plans] == ["bounds", "measured", "interpolated", "measured", *["interpolated"] * 2]


@pytest.mark.parametrize("batch", [17.0, 1e12, 2.0**60])
def test_a_huge_number_of_ranks_does_not_hang(batch: float) -> None:
    present = Present(8, 1000, 8, 1, 1, 10**12, TimeCurve((Timing(8, 1, 1, 0.01, 0.0),), 9), has_clock=True)
    plan: Plan | None = plan_of(present, batch, Range(90, 80, 100))
    assert plan is not None
    assert plan.micro_batch <= 8
    assert plan.whole_batch == pytest.approx(batch, rel=0.1)
