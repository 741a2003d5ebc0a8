"""How forecasts of a policy's entropy have done so far, and whether that entropy collapses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Self

from sonde.policy.stats.entropy_forecast import TOO_LARGE
from sonde.policy.stats.importance import Per
from sonde.wording import number, percent, plural

LEVEL = 0.95
"""Of the intervals that are judged."""
COLLAPSED_BELOW = 0.1
"""Part of the largest entropy that was measured: below it, a policy hardly explores."""
_RUNS_OUT_WITHIN = 20
"""Optimizer steps: an entropy that would be gone by then, at the pace of the last forecast, is told of."""
_TOO_LARGE_IN_A_ROW = 3
_JUDGED_FROM = 10
_MISSES_BELOW = 0.7
_Z = 1.959964


@dataclass(frozen=True)
class Point:
    """What was measured around one optimizer step; NaN where something is not known.

    Attributes:
        step: its number, from 1.
        entropy: of the policy before it, in nats a token.
        delta: the forecast of what the step does to it, in nats.
        low: lower end of the forecast's 95 % interval.
        high: upper end.
        is_valid: whether the step was small enough for a first-order forecast.
        truth: what the step did, by fresh rollouts where there were any, otherwise by importance sampling.
        truth_se: its standard error.
        is_independent: whether truth is of responses of its own, rather than of those that the forecast was made on.
        per: what `delta` and `truth` are of, "token" or "response".
        reason: why the forecast is unknown or not to be trusted; empty when it is.
    """

    step: int
    entropy: float
    delta: float
    low: float
    high: float
    is_valid: bool
    truth: float
    truth_se: float
    is_independent: bool
    per: Per = "token"
    reason: str = ""

    @property
    def is_too_large(self) -> bool:
        """Whether the step is too large to be linear, rather than something else being wrong."""
        return not self.is_valid and self.reason.startswith(TOO_LARGE)

    @property
    def has_truth(self) -> bool:
        """Whether forecast and truth are both known."""
        return math.isfinite(self.delta) and math.isfinite(self.low) and math.isfinite(self.truth)

    @property
    def held(self) -> bool:
        """Whether the interval held the truth, whose own standard error widens it."""
        end = self.low if self.truth < self.delta else self.high
        doubt = _Z * (self.truth_se if math.isfinite(self.truth_se) else 0.0)
        return abs(self.truth - self.delta) <= math.hypot(end - self.delta, doubt)


def point_of(step: int, metrics: Mapping[str, float | None], per: Per = "token", reason: str = "") -> Point:
    """A point from metrics by their names; see `records.METRICS`."""

    def known(name: str) -> float:
        value = metrics.get(f"entropy/{name}")
        return math.nan if value is None else value

    is_independent = math.isfinite(known("delta_rollouts"))
    return Point(
        step=step,
        entropy=known("per_token"),
        delta=known("delta_forecast"),
        low=known("delta_low"),
        high=known("delta_high"),
        is_valid=known("is_valid") == 1.0,
        truth=known("delta_rollouts") if is_independent else known("delta_importance"),
        truth_se=known("delta_rollouts_se") if is_independent else 0.0,
        is_independent=is_independent,
        per=per,
        reason=reason,
    )


@dataclass(frozen=True)
class Coverage:
    """How many intervals held the truth.

    Attributes:
        n: forecasts that were to be trusted and whose truth was measured on other responses.
        n_held: those whose interval held it.
        low: lower end of the 95 % interval of the share that hold; 0 without forecasts.
        high: upper end; 1 without.
    """

    n: int
    n_held: int
    low: float
    high: float

    @classmethod
    def of(cls, n: int, n_held: int) -> Self:
        """With Wilson's interval (1927): the shares that n_held of n does not contradict."""
        if not n:
            return cls(0, 0, 0.0, 1.0)
        centre = (n_held + _Z**2 / 2) / (n + _Z**2)
        half = _Z / (n + _Z**2) * math.sqrt(n_held * (n - n_held) / n + _Z**2 / 4)
        return cls(n, n_held, max(centre - half, 0.0), min(centre + half, 1.0))

    @property
    def fraction(self) -> float:
        """n_held over n; NaN without forecasts."""
        return self.n_held / self.n if self.n else math.nan


def coverage(points: Sequence[Point]) -> Coverage:
    """Of the forecasts so far.

    Example:
        >>> held = Point(1, 1.0, -0.02, -0.03, -0.01, True, -0.025, 0.001, True)
        >>> coverage([held, held]).n_held
        2
    """
    judged = [p for p in points if p.is_valid and p.is_independent and p.has_truth]
    return Coverage.of(len(judged), sum(p.held for p in judged))


def find_policy_alerts(points: Sequence[Point]) -> dict[str, str]:
    """What looks wrong at the last point, in plain words.

    Args:
        points: all so far, in the order of steps.

    Returns:
        Messages by name: "entropy_collapse", "steps_too_large", "intervals_miss"; empty when nothing looks wrong.
    """
    alerts = {}
    if collapse := _collapse(points):
        alerts["entropy_collapse"] = collapse
    last = points[-_TOO_LARGE_IN_A_ROW:]
    if len(last) == _TOO_LARGE_IN_A_ROW and all(p.is_too_large for p in last):
        alerts["steps_too_large"] = (
            f"none of the last {len(last)} forecasts of the entropy's change is to be trusted: steps are too large to "
            "be linear, so a smaller learning rate would do the same more surely"
        )
    so_far = coverage(points)
    if so_far.n >= _JUDGED_FROM and so_far.high < LEVEL and so_far.fraction < _MISSES_BELOW:
        alerts["intervals_miss"] = (
            f"{so_far.n_held} of {so_far.n} intervals held the entropy's change, where 95 % should: "
            "are evaluation responses sampled untruncated, at the policy's own temperature, and independently?"
        )
    return alerts


def _collapse(points: Sequence[Point]) -> str:
    known = [p for p in points if math.isfinite(p.entropy)]
    if len(known) < 2:
        return ""
    now, most = known[-1], max(known, key=lambda p: p.entropy)
    remedy = "lower the learning rate, add an entropy bonus, or stop here"
    if now.entropy < COLLAPSED_BELOW * most.entropy:
        part = percent(now.entropy / most.entropy)
        return (
            f"the policy's entropy has collapsed to {number(now.entropy)} nats a token, {part} of what it was at step "
            f"{most.step}, and it hardly explores any more: {remedy}"
        )
    if now.high < 0 and now.is_valid and now.per == "token":
        steps_left = now.entropy / -now.delta
        if steps_left < _RUNS_OUT_WITHIN:
            return (
                f"the policy's entropy is collapsing: at {number(now.delta)} nats a token and step, the "
                f"{number(now.entropy)} that are left last {plural(max(round(steps_left), 1), 'step')} more: {remedy}"
            )
    return ""


@dataclass(frozen=True)
class EntropyVerdict:
    """A judgement of a run's entropy.

    Attributes:
        kind: "holds", "collapses", "not_linear", or "unknown" where too little was measured.
        headline: one sentence.
        detail: what it rests on.
    """

    kind: Literal["holds", "collapses", "not_linear", "unknown"]
    headline: str
    detail: str


def judge_entropy(points: Sequence[Point]) -> EntropyVerdict:
    """Judge a run by all that was measured so far.

    Args:
        points: in the order of steps.
    """
    points = known = [p for p in points if math.isfinite(p.entropy)]
    if not known:
        return EntropyVerdict("unknown", "No verdict yet: no entropy was measured.", "The run had no forecast.")
    first, now = known[0], known[-1]
    course = (
        f"The policy's entropy is {number(now.entropy)} nats a token at step {now.step}"
        + (f", and was {number(first.entropy)} at step {first.step}" if now is not first else "")
        + "."
    )
    detail = " ".join(filter(None, (_last_step(now), _record(points))))
    alerts = find_policy_alerts(points)
    if "entropy_collapse" in alerts:
        said, _, remedy = alerts["entropy_collapse"].rpartition(": ")
        headline = f"{said[:1].upper()}{said[1:]}."
        return EntropyVerdict("collapses", headline, f"{remedy[:1].upper()}{remedy[1:]}. {course} {detail}")
    if "steps_too_large" in alerts:
        return EntropyVerdict("not_linear", f"{course} Steps are too large to forecast.", detail)
    if len(known) < 2:
        return EntropyVerdict("unknown", f"{course} One measurement makes no course.", detail)
    return EntropyVerdict("holds", course, detail)


def _last_step(now: Point) -> str:
    if not math.isfinite(now.delta):
        return ""
    what = "it" if now.per == "token" else "a response's entropy"
    said = f"Step {now.step} was to change {what} by {number(now.delta)} [{number(now.low)} to {number(now.high)}]"
    if not now.is_valid:
        return f"{said}, which is {now.reason or 'not to be trusted'}."
    if not now.has_truth:
        return f"{said}."
    how = "fresh rollouts" if now.is_independent else "importance sampling"
    return f"{said}; by {how} it was {number(now.truth)}."


def _record(points: Sequence[Point]) -> str:
    so_far = coverage(points)
    n_not_linear = sum(math.isfinite(p.delta) and not p.is_valid for p in points)
    said = []
    if so_far.n:
        said.append(f"{so_far.n_held} of {plural(so_far.n, 'interval')} held what fresh rollouts measured.")
    if n_not_linear:
        said.append(f"Of {len(points)} forecasts, {n_not_linear} said that they were not to be trusted.")
    return " ".join(said)
