"""When the batch grows: a pure rule of readings, so that a log replays every decision.

A batch grows to the next allowed one when the lower end of the noise scale's interval says so:

    ratio · low ≥ hysteresis · next batch

A bound decides nothing. A noise scale of which only "more than 120" is known has no interval: |G|² cannot be
distinguished from 0, and what looks like noise may as well be a fault of the loop or the first steps of a run. Growth
is hard to take back, so it waits until the data could have said "too large" too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from sonde.batch_size.stats.proxy import FACTORS
from sonde.stats.intervals import RatioInterval
from sonde.wording import number

POWERS_OF_TWO: Literal["powers of two"] = "powers of two"


@dataclass(frozen=True)
class BatchRule:
    """What a schedule may do. Counts are micro-batches of one window on one rank.

    Attributes:
        smallest: count of the first windows.
        largest: the count is never above it.
        ratio: batch over B_simple that is aimed at; see `usual_ratio`.
        hysteresis: an end of the interval must pass the next batch by this factor, from 1 up.
        counts: "powers of two" for smallest · 2ᵏ, or all counts that are allowed, smallest and largest among them.
        pause: measured windows after a change before the next, so that the noise scale of the new batch is heard.
        monotone: never shrink. Otherwise the batch shrinks when the upper end of the interval says so.

    Raises:
        ValueError: for bounds that contradict each other, and numbers out of their range.
    """

    smallest: int
    largest: int
    ratio: float = 1.0
    hysteresis: float = 1.1
    counts: Literal["powers of two"] | Sequence[int] = POWERS_OF_TWO
    pause: int = 8
    monotone: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.smallest <= self.largest:
            raise ValueError(
                f"largest must be at least the present {self.smallest} micro-batches a window, which must be 1 or "
                f"more, got {self.largest}: a schedule only grows the batch, so raise largest or start smaller"
            )
        if not (0 < self.ratio < math.inf and 1 <= self.hysteresis < math.inf and self.pause >= 0):
            raise ValueError(
                "ratio must be positive, hysteresis 1 or more and pause 0 or more, got "
                f"{self.ratio}, {self.hysteresis} and {self.pause}: ratio 1 aims at a batch of B_simple"
            )
        if self.counts != POWERS_OF_TWO and not {self.smallest, self.largest} <= set(self.counts):
            raise ValueError(
                f"counts must hold smallest and largest, {self.smallest} and {self.largest}, got {self.counts!r:.100}: "
                "list every number of micro-batches that is allowed"
            )

    @property
    def allowed(self) -> tuple[int, ...]:
        """All counts that a window may have, rising.

        Example:
            >>> BatchRule(smallest=3, largest=20).allowed, BatchRule(2, 12, counts=(12, 2, 4)).allowed
            ((3, 6, 12), (2, 4, 12))
        """
        if self.counts == POWERS_OF_TWO:
            n_doublings = (self.largest // self.smallest).bit_length()
            return tuple(self.smallest << k for k in range(n_doublings))
        return tuple(sorted({int(n) for n in self.counts if self.smallest <= int(n) <= self.largest}))


@dataclass(frozen=True)
class NoiseScaleNow:
    """What is known when a decision is due.

    Attributes:
        known: B_simple with its interval, in units.
        units_per_micro_batch: units that one micro-batch of all ranks together has.
        n_measured: windows that were measured so far, and could be used.
        window: windows that have ended so far.
        units: that were trained on so far.
    """

    known: RatioInterval
    units_per_micro_batch: float
    n_measured: int
    window: int = 0
    units: float = 0.0


@dataclass(frozen=True)
class BatchState:
    """Where a schedule stands.

    Attributes:
        micro_batches: of each window now.
        changed_at: `n_measured` when this last changed.
    """

    micro_batches: int
    changed_at: int = 0


@dataclass(frozen=True)
class Decision:
    """What was decided, from what, and why.

    Attributes:
        state: from now on.
        now: what was known.
        reason: in words, without a full stop.
        changed: whether the count is another one than before.
    """

    state: BatchState
    now: NoiseScaleNow
    reason: str
    changed: bool = False


def usual_ratio(optimizer: str, metric: str) -> float:
    """Batch over B_simple that is aimed at by default: the median critical batch of sonde's study over B_simple.

    Args:
        optimizer: as `kind_of` names it.
        metric: of B_simple.

    Returns:
        1 where the study says nothing of this optimizer in this metric.

    Example:
        >>> usual_ratio("Adam or AdamW (β = 0.9)", "euclidean"), usual_ratio("Lion", "euclidean")
        (1.5, 1.0)
    """
    factor = FACTORS.get((optimizer, metric))
    return 1.0 if factor is None else factor.median


def next_batch(rule: BatchRule, state: BatchState, now: NoiseScaleNow) -> Decision:
    """Decide on the windows from here on. The same arguments give the same decision.

    The count moves by one allowed count at a time: each is confirmed by readings that were taken with it.

    Args:
        rule: what may be done.
        state: after the decision before.
        now: what is known.

    Example:
        >>> rule, state = BatchRule(smallest=4, largest=64), BatchState(4)
        >>> now = NoiseScaleNow(RatioInterval("resolved", 33.0, 60.0, ratio=45.0), 2.0, n_measured=40)
        >>> decision = next_batch(rule, state, now)
        >>> decision.state.micro_batches, decision.reason
        (8, 'B_simple is 33 or more, and asks for a batch of 33: from 8 to 16')
    """
    known, counts, here = now.known, rule.allowed, state.micro_batches
    n_heard = now.n_measured - state.changed_at
    if known.status != "resolved" or known.low is None or known.high is None:
        only_bound = f"only a bound of B_simple is known: {known.reason}"
        return Decision(state, now, only_bound if known.low is not None else f"B_simple is not known: {known.reason}")
    if state.changed_at and n_heard < rule.pause:
        return Decision(state, now, f"{n_heard} of {rule.pause} measured windows since the last change")

    batch = here * now.units_per_micro_batch
    larger = min((n for n in counts if n > here), default=None)
    smaller = max((n for n in counts if n < here), default=None)
    low, high = rule.ratio * known.low, rule.ratio * known.high
    end, asked, to = f"B_simple is {number(known.low)} or more", low, larger
    if not rule.monotone and smaller is not None and high * rule.hysteresis <= smaller * now.units_per_micro_batch:
        end, asked, to = f"B_simple is {number(known.high)} or less", high, smaller
    elif larger is None:
        return Decision(state, now, f"the batch of {number(batch)} is the largest allowed")
    elif low < rule.hysteresis * larger * now.units_per_micro_batch:
        needed = number(rule.hysteresis * larger * now.units_per_micro_batch)
        return Decision(state, now, f"{end}, and asks for a batch of {number(low)}; growing takes {needed}")
    assert to is not None
    reason = f"{end}, and asks for a batch of {number(asked)}: from {number(batch)} to "
    reason += number(to * now.units_per_micro_batch)
    changed = replace(state, micro_batches=to, changed_at=now.n_measured)
    return Decision(changed, now, reason, changed=True)


def replayed(rule: BatchRule, readings: Iterable[NoiseScaleNow]) -> list[Decision]:
    """All decisions of a run, from what was known at each."""
    decisions: list[Decision] = []
    state = BatchState(rule.smallest)
    for now in readings:
        decisions.append(next_batch(rule, state, now))
        state = decisions[-1].state
    return decisions
