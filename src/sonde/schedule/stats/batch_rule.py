"""When the batch grows: a pure rule of readings.

A batch grows to the next allowed one when the lower end of the noise scale's interval says so:

    ratio · low ≥ 1.1 · next batch

A bound alone decides nothing. Where only "B_simple > 120" is known, |G|² cannot be distinguished from 0: a fault of the
loop looks the same, and growth is hard to take back. But where the noise scale is many batches, |G|² now may stay
unresolved for as long as the batch is small. So a bound counts once |G|² is resolved over the run: the average of the
run then has both ends, and the lower one of the two lower ends decides.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from sonde.wording import number

_PASSED_BY = 1.1
"""Times that the lower end must pass the next batch."""


@dataclass(frozen=True)
class BatchRule:
    """What a schedule may do. Counts are micro-batches of one window on one rank.

    Attributes:
        smallest: count of the first windows.
        largest: the count is never above it.
        ratio: batch over B_simple that is aimed at. At the critical batch size, training needs twice the fewest units:
            a half costs few of them.
        pause: measured windows after a change before the next, so that the noise scale of the new batch is heard.

    Raises:
        ValueError: for bounds that contradict each other, and numbers out of their range.
    """

    smallest: int
    largest: int
    ratio: float = 0.5
    pause: int = 8

    def __post_init__(self) -> None:
        if not 1 <= self.smallest <= self.largest:
            raise ValueError(
                f"largest must be at least the present {self.smallest} micro-batches a window, which must be 1 or "
                f"more, got {self.largest}: a schedule only grows the batch, so raise largest or start smaller"
            )
        if not (0 < self.ratio < math.inf and self.pause >= 0):
            raise ValueError(
                f"ratio must be positive and pause 0 or more, got {self.ratio} and {self.pause}: ratio 1 aims at a "
                "batch of B_simple"
            )

    @property
    def allowed(self) -> tuple[int, ...]:
        """All counts that a window may have, rising: powers of two times the smallest.

        Example:
            >>> BatchRule(smallest=3, largest=20).allowed
            (3, 6, 12)
        """
        n_doublings = (self.largest // self.smallest).bit_length()
        return tuple(self.smallest << k for k in range(n_doublings))


@dataclass(frozen=True)
class NoiseScaleNow:
    """What is known when a decision is due, as the log holds it: None where a number is not known or bounded.

    Attributes:
        b_simple: in units; None where only a bound of it is known.
        b_simple_low: lower end of its interval.
        b_simple_high: upper end.
        average_low: lower end of the run's average of B_simple; None where that lacks one of its ends.
        units_per_micro_batch: units that one micro-batch of all ranks together has.
        measured_windows: windows that were measured so far, and could be used.
    """

    b_simple: float | None
    b_simple_low: float | None
    b_simple_high: float | None
    average_low: float | None
    units_per_micro_batch: float
    measured_windows: int


def metrics_of(now: NoiseScaleNow) -> dict[str, float | None]:
    """What a decision rests on, by metric name."""
    return {f"schedule/{name}": value for name, value in asdict(now).items()}


@dataclass(frozen=True)
class BatchState:
    """Where a schedule stands.

    Attributes:
        micro_batches: of each window now.
        changed_at: `measured_windows` when this last changed.
        noise_scale: lower end of B_simple then, in units, which caps the rate of SGD; None before the first change.
    """

    micro_batches: int
    changed_at: int = 0
    noise_scale: float | None = None


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


def next_batch(rule: BatchRule, state: BatchState, now: NoiseScaleNow) -> Decision:
    """Decide on the windows from here on. The same arguments give the same decision.

    The count moves by one allowed count at a time: each is confirmed by readings that were taken with it.

    Args:
        rule: what may be done.
        state: after the decision before.
        now: what is known.

    Example:
        >>> rule, state = BatchRule(smallest=4, largest=64, ratio=1.0), BatchState(4)
        >>> now = NoiseScaleNow(45.0, 33.0, 60.0, None, 2.0, measured_windows=40)
        >>> decision = next_batch(rule, state, now)
        >>> decision.state.micro_batches, decision.reason
        (8, 'B_simple is 33 or more, and asks for a batch of 33: from 8 to 16')
    """
    here, per_micro_batch = state.micro_batches, now.units_per_micro_batch
    n_heard = now.measured_windows - state.changed_at
    low = _low(now)
    if low is None:
        if now.b_simple_low is None:
            return Decision(state, now, "B_simple is not known")
        return Decision(state, now, "only a bound of B_simple is known, now and over the run")
    if state.changed_at and n_heard < rule.pause:
        return Decision(state, now, f"{n_heard:.0f} of {rule.pause} measured windows since the last change")

    batch, asked = here * per_micro_batch, rule.ratio * low
    larger = min((n for n in rule.allowed if n > here), default=None)
    if larger is None:
        return Decision(state, now, f"the batch of {number(batch)} is the largest allowed")
    said = f"B_simple is {number(low)} or more, and asks for a batch of {number(asked)}"
    if asked < (needed := _PASSED_BY * larger * per_micro_batch):
        return Decision(state, now, f"{said}; growing takes {number(needed)}")
    reason = f"{said}: from {number(batch)} to {number(larger * per_micro_batch)}"
    return Decision(BatchState(larger, now.measured_windows, low), now, reason, changed=True)


def _low(now: NoiseScaleNow) -> float | None:
    """The lower end that decides; None where only bounds are known."""
    low = now.b_simple_low
    if now.b_simple is not None or low is None:
        return low
    return min(low, now.average_low) if now.b_simple_high is None and now.average_low is not None else None
