"""The same training at other batch sizes: how each is shared out, and what it costs in steps, units, time and money."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from sonde.decision.law import FAR, FURTHEST, Range, exactly, relative_steps
from sonde.decision.time_curve import Basis, TimeCurve

HOUR = 3600.0
_DEEPEST = 10
"""Accumulations that are considered are powers of two up to this one, beside the present one."""
_OFF = 0.1
"""A batch that ranks cannot share is replaced by one at most so far from it, where there is such a one."""


@dataclass(frozen=True)
class Present:
    """A training as it is.

    Attributes:
        batch: units of one optimizer step.
        steps: optimizer steps, for which others are sought that learn as much.
        micro_batch: units of one backward on one rank.
        accumulation: micro-batches that each rank takes in a step.
        ranks: data-parallel ranks.
        ranks_at_most: how many there may be.
        curve: the time of a step. Without a clock, one step of the present batch takes 1.
        has_clock: whether the curve is in seconds.
        cost_per_hour: of all ranks; None where it is not known.
        least_micro_batch: a smaller micro-batch would change the loss itself; 0 where none is known to do so.
        most_on_more_ranks: a larger batch than this is shared by no more ranks than there are.
        by_rank_time: whether the time of all ranks together counts, in place of the time.
    """

    batch: float
    steps: float
    micro_batch: float
    accumulation: int
    ranks: int
    ranks_at_most: int
    curve: TimeCurve
    has_clock: bool = False
    cost_per_hour: float | None = None
    least_micro_batch: float = 0.0
    most_on_more_ranks: float = math.inf
    by_rank_time: bool = False

    @property
    def whole_batch(self) -> int:
        """The batch that is set: an epoch's last windows lower the average a little."""
        return self.ranks * self.accumulation * max(round(self.micro_batch), 1)

    @property
    def step_time(self) -> Range:
        """Of one step, by the curve's clock."""
        return self.curve.of_step(self.micro_batch, self.accumulation, self.ranks)[0]


@dataclass(frozen=True)
class Plan:
    """The same training at one batch size.

    Attributes:
        batch: units of one optimizer step. Of the present one an average, as logged.
        ranks: data-parallel ranks that it uses.
        accumulation: micro-batches that each rank takes one after the other in a step.
        micro_batch: units of each.
        steps: optimizer steps.
        units: of all steps.
        time: of training, over that of the present plan.
        better: the same, at the better end of the time of a step.
        worse: the same, at its worse end. A larger micro-batch is best on a device that is not full, a smaller one on a
            full device.
        rank_time: of all ranks together, over that of the present plan; the price follows it.
        basis: how the time is known.
        seconds: of training; None where the log has no clock.
        money: None where the clock or the price is not known.
    """

    batch: float
    ranks: int
    accumulation: int
    micro_batch: int
    steps: Range
    units: Range
    time: Range
    better: Range
    worse: Range
    rank_time: Range
    basis: Basis
    seconds: Range | None
    money: Range | None

    @property
    def whole_batch(self) -> int:
        """The batch that can be set."""
        return self.accumulation * self.ranks * self.micro_batch


def plans_of(present: Present, critical: Range) -> tuple[Plan, ...]:
    """The plans of all batch sizes that are worth a look, by size. The present one is the one with `as_it_is`.

    Args:
        present: the training as it is.
        critical: the critical batch size.
    """
    sizes = {*_sizes(present, critical)}
    found = {plan.batch: plan for size in sizes if (plan := plan_of(present, size, critical)) is not None}
    found[present.batch] = as_it_is(present, critical)
    return tuple(found[size] for size in sorted(found))


def _sizes(present: Present, critical: Range) -> Iterator[float]:
    """Powers of two times the present batch near B_crit, and the batches whose time was measured.

    None is far from B_crit: a whole training is taken to obey the law, and the rule of the rate.
    """
    batch, known = present.whole_batch, [end for end in (critical.low, critical.high) if 0 < end < math.inf]
    middle = [critical.middle] if critical.middle is not None else known
    low = max(min([batch / 2, *(end / FAR for end in middle)]), batch / FURTHEST, 1)
    high = min(max([batch * 2, *(end * FAR for end in middle)]), batch * FURTHEST)
    powers = itertools.takewhile(lambda size: size <= high, (batch / FURTHEST * 2.0**k for k in itertools.count()))
    for size in (*powers, *(each.batch for each in present.curve.timings)):
        if low <= size <= high and size != batch:
            yield size


def as_it_is(present: Present, critical: Range) -> Plan:
    """The plan of the present batch, shared out as it is."""
    split = (present.ranks, present.accumulation, max(round(present.micro_batch), 1))
    return _costs(present, critical, split, present.batch, present.micro_batch)


def plan_of(present: Present, batch: float, critical: Range, *, exact: bool = False) -> Plan | None:
    """The best way to share out a batch among the ranks that there may be.

    Micro-batches may be larger than they are: that is the commonest way to be faster on one device. None is larger than
    what was tried, where several sizes were.

    Args:
        present: the training as it is.
        batch: units of one optimizer step. The plan has the nearest batch that ranks can share.
        critical: the critical batch size.
        exact: take this very batch where it can be shared at all; otherwise one that is shared better may be taken.

    Returns:
        The plan that takes the least time at its worse end, or the least time of all ranks where that counts; of those
        the one that takes less of the other, and then the one with the better other end. None where micro-batches would
        have to be larger, or smaller, than they may be.
    """
    splits = [*_splits(present, batch)]
    near = [each for each in splits if abs(math.prod(each) - batch) <= _OFF * batch]
    if exact:
        near = [each for each in near if math.prod(each) == batch] or near
    if not near and splits:
        near = [min(splits, key=lambda each: abs(math.prod(each) - batch))]
    plans = [_costs(present, critical, split, math.prod(split), split[-1]) for split in near]
    return min(plans, key=lambda plan: _order(plan, batch, present.by_rank_time), default=None)


def _order(plan: Plan, wanted: float, by_rank_time: bool) -> tuple[float, ...]:
    costs = (plan.rank_time, plan.time) if by_rank_time else (plan.time, plan.rank_time)
    off = abs(math.log(plan.batch / wanted))
    return *(cost.high for cost in costs), costs[0].low, off, plan.ranks, plan.accumulation


def _splits(present: Present, batch: float) -> Iterator[tuple[int, int, int]]:
    """Ranks, accumulation and micro-batch, all whole, whose product is a batch near to this one."""
    ranks_at_most = present.ranks_at_most
    if batch > present.most_on_more_ranks:
        ranks_at_most = min(ranks_at_most, present.ranks)
    most, largest = min(ranks_at_most, max(round(batch), 1)), present.curve.largest
    powers = itertools.takewhile(lambda n: n <= most, (2**k for k in itertools.count()))
    for ranks in {*powers, most, min(present.ranks, most)}:
        of_rank = max(round(batch / ranks), 1)
        fewest = max(math.ceil(of_rank / largest), 1)
        for accumulation in {*(2**k for k in range(_DEEPEST + 1)), present.accumulation, fewest}:
            micro = max(round(of_rank / accumulation), 1)
            if accumulation <= of_rank and present.least_micro_batch <= micro <= largest * 1.001:
                yield ranks, accumulation, micro


def _costs(present: Present, critical: Range, split: tuple[int, int, int], batch: float, micro: float) -> Plan:
    """What a training costs at another batch size, if it learns as much.

    Steps, the time of one, and that of a present one are uncertain for reasons of their own, so their ends are
    multiplied.
    """
    ranks, accumulation, whole_micro = split
    parts = critical.of(lambda c: relative_steps(batch, present.batch, c))
    (step, basis), now = present.curve.of_step(micro, accumulation, ranks), present.step_time
    is_present = (ranks, accumulation, micro) == (present.ranks, present.accumulation, present.micro_batch)
    ratio = exactly(1.0) if is_present else step.over(now)
    time = parts.by(ratio)
    rank_time, seconds, money = time.times(ranks / present.ranks), None, None
    steps = parts.times(present.steps)
    if present.has_clock:
        seconds = steps.by(step)
        if present.cost_per_hour is not None:
            money = seconds.times(ranks / present.ranks / HOUR * present.cost_per_hour)
    return Plan(
        batch=batch,
        ranks=ranks,
        accumulation=accumulation,
        micro_batch=whole_micro,
        steps=steps,
        units=steps.times(batch),
        time=time,
        better=parts.times(ratio.low),
        worse=parts.times(ratio.high),
        rank_time=rank_time,
        basis=basis,
        seconds=seconds,
        money=money,
    )
