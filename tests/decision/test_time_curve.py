"""The time of a step: exact where it was measured, between sizes, and both ends of it beyond them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sonde.decision.law import exactly
from sonde.decision.time_curve import TimeCurve, Timing

seconds = st.floats(1e-4, 10.0)
few = st.integers(1, 8)


@given(c=seconds, d=seconds, o=st.floats(0, 10), accumulations=st.lists(few, min_size=4, max_size=4), of=st.data())
@settings(max_examples=100, deadline=None, derandomize=True)
def test_between_sizes_a_line_and_what_is_beside_it_come_back(
    c: float, d: float, o: float, accumulations: list[int], of: st.DataObject
) -> None:
    """A step of A micro-batches takes A (c + d m) + o, in whatever accumulation each size was tried."""
    sizes = (4, 16, 64, 256)
    timings = [Timing(m, a, 1, a * (c + d * m) + o, o) for m, a in zip(sizes, accumulations, strict=True)]
    curve = TimeCurve(tuple(timings))
    for each in timings:
        assert curve.of_step(each.micro_batch, each.accumulation, 1) == (exactly(each.seconds), "measured")
    size, accumulation = of.draw(st.integers(5, 250)), of.draw(st.integers(9, 64))
    found, basis = curve.of_step(size, accumulation, 1)
    assert found.low == pytest.approx(found.high)
    assert found.middle == pytest.approx(accumulation * (c + d * size) + o, rel=1e-9)
    assert [basis, curve.of_step(size, accumulation, 4)[1]] == ["interpolated", "modelled"]


@given(
    rises=st.lists(st.tuples(few, st.floats(1e-4, 1)), min_size=1, max_size=3),
    fullness=st.floats(0, 1),
    beside=st.floats(0, 10),
    is_beside_known=st.booleans(),
    size=st.floats(1, 5_000),
    accumulation=st.integers(1, 64),
)
@settings(max_examples=400, deadline=None, derandomize=True)
def test_bounds_hold_the_truth(
    rises: list[tuple[int, float]],
    fullness: float,
    beside: float,
    is_beside_known: bool,
    size: float,
    accumulation: int,
) -> None:
    """Whatever a step takes beside its micro-batches, and however full the device is beyond the tried sizes."""
    sizes = [16.0 * 4**k for k in range(len(rises))]
    of_micro = [rises[0][1]]
    for _, rise in rises[1:]:  # from a device that is not full to one that is
        of_micro.append(of_micro[-1] * (1 + 3 * rise))
    timings = [
        Timing(m, a, 1, a * f + beside, beside if is_beside_known else None)
        for m, f, (a, _) in zip(sizes, of_micro, rises, strict=True)
    ]

    def truth(m: float) -> float:
        for k in range(len(sizes) - 1):
            if sizes[k] <= m <= sizes[k + 1]:
                return of_micro[k] + (of_micro[k + 1] - of_micro[k]) * (m - sizes[k]) / (sizes[k + 1] - sizes[k])
        k = 0 if m < sizes[0] else -1
        return of_micro[k] * (1 - fullness + fullness * m / sizes[k])

    if any(1 < max(m, size) / min(m, size) <= 1.05 for m in sizes):  # counts as the measured size
        return
    (found, _), expected = TimeCurve(tuple(timings)).of_step(size, accumulation, 1), accumulation * truth(size) + beside
    assert found.low <= expected * (1 + 1e-9)
    assert found.high >= expected * (1 - 1e-9)
    if is_beside_known and sizes[0] <= size <= sizes[-1]:
        assert found.middle == pytest.approx(expected)


def test_without_a_trial_both_ends_are_those_of_an_empty_and_a_full_device() -> None:
    """One size was timed: 16 in 10 ms. A step of 64 takes 10 ms at least and 40 ms at most, and nothing between."""
    found, basis = TimeCurve((Timing(16, 1, 1, 0.010),)).of_step(64, 1, 1)
    assert (found.low, found.middle, found.high) == (pytest.approx(0.010), None, pytest.approx(0.040))
    assert basis == "bounds"
    # Accumulated, the parts beside the micro-batches may be all or nothing.
    found, _ = TimeCurve((Timing(16, 1, 1, 0.010),)).of_step(16, 4, 1)
    assert (found.low, found.high) == (pytest.approx(0.010), pytest.approx(0.040))


def test_two_accumulations_of_one_size_tell_what_is_beside() -> None:
    """3 ms for a micro-batch of 8 and 5 ms beside: steps of 1 and 4 take 8 and 17 ms."""
    curve = TimeCurve((Timing(8, 1, 2, 0.008), Timing(8, 4, 2, 0.017)))
    assert curve.of_step(8, 2, 2)[0].middle == pytest.approx(0.011)
    assert curve.of_step(8, 16, 2)[0].middle == pytest.approx(0.053)


def test_several_sizes_of_logs_bound_what_is_beside() -> None:
    """16 and 64 took 10 and 31 ms: on a full device, 3 of these are beside; otherwise fewer, and not all 10."""
    found, _ = TimeCurve((Timing(16, 1, 1, 0.010), Timing(64, 1, 1, 0.031))).of_step(16, 16, 1)
    assert (found.low, found.high) == (pytest.approx(0.003 + 16 * 0.007), pytest.approx(0.160))


@pytest.mark.parametrize(
    ("sizes", "too_large", "largest"),
    [
        ((16,), math.inf, math.inf),  # one size, as of a log: both ends are said beyond it
        ((16, 64), math.inf, 64),  # nothing is said beyond what was tried
        ((16,), 64, 16),
        ((16, 64), 64, 16),  # it fitted once, and then did not
        ((16,), 16, 1),
    ],
)
def test_nothing_is_planned_beyond_what_was_tried_or_did_not_fit(
    sizes: tuple[float, ...], too_large: float, largest: float
) -> None:
    assert TimeCurve(tuple(Timing(m, 1, 1, 0.01 * m) for m in sizes), too_large).largest == largest


def test_the_nearest_number_of_ranks_stands_for_another() -> None:
    curve = TimeCurve((Timing(8, 1, 1, 0.010), Timing(8, 1, 8, 0.016)))
    found = [curve.of_step(8, 1, ranks) for ranks in (1, 2, 4, 8, 64)]
    assert [step.middle for step, _ in found] == [0.010, 0.010, 0.016, 0.016, 0.016]
    assert [basis for _, basis in found] == ["measured", "modelled", "modelled", "measured", "modelled"]
