"""The verdict on the entropy of a run: one sentence, and the measurements behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sonde.policy.stats.coverage import coverage
from sonde.policy.stats.forecast_point import Point
from sonde.policy.stats.policy_alerts import find_policy_alerts
from sonde.wording import number, plural


@dataclass(frozen=True)
class EntropyVerdict:
    """A judgement of a run's entropy.

    Attributes:
        kind: "holds", "collapses", "not_linear", or "unknown" if too little was measured.
        headline: one sentence.
        detail: the measurements behind the headline.
    """

    kind: Literal["holds", "collapses", "not_linear", "unknown"]
    headline: str
    detail: str


def judge_entropy(points: Sequence[Point]) -> EntropyVerdict:
    """Judge a run by all its measurements so far.

    Args:
        points: in the order of steps.
    """
    points = [p for p in points if p.entropy is not None]
    if not points:
        return EntropyVerdict("unknown", "No verdict yet: no entropy was measured.", "The run had no forecast.")
    first, now = points[0], points[-1]
    course = (
        f"The policy's entropy is {number(now.entropy)} nats a token at step {now.step}"
        + (f", and was {number(first.entropy)} at step {first.step}" if now is not first else "")
        + "."
    )
    detail = " ".join(filter(None, (_last_step(now), _record(points))))
    alerts = find_policy_alerts(points)
    if "entropy_collapse" in alerts:
        message, _, remedy = alerts["entropy_collapse"].rpartition(": ")
        headline = f"{message[:1].upper()}{message[1:]}."
        return EntropyVerdict("collapses", headline, f"{remedy[:1].upper()}{remedy[1:]}. {course} {detail}")
    if "steps_too_large" in alerts:
        return EntropyVerdict("not_linear", f"{course} Steps are too large to forecast.", detail)
    if len(points) < 2:
        return EntropyVerdict("unknown", f"{course} One measurement shows no trend.", detail)
    return EntropyVerdict("holds", course, detail)


def _last_step(now: Point) -> str:
    if now.delta is None:
        return ""
    subject = "it" if now.per == "token" else "a response's entropy"
    change = f"{number(now.delta)} [{number(now.low)} to {number(now.high)}]"
    forecast = f"Step {now.step} was forecast to change {subject} by {change}"
    if not now.is_valid:
        return f"{forecast}: {now.reason or 'not to be trusted'}."
    if not now.has_truth:
        return f"{forecast}."
    how = "fresh rollouts" if now.is_independent else "importance sampling"
    return f"{forecast}; {how} measured {number(now.truth)}."


def _record(points: Sequence[Point]) -> str:
    so_far = coverage(points)
    n_doubtful = sum(p.delta is not None and not p.is_valid for p in points)
    sentences = []
    if so_far.n:
        judged = f"{so_far.n_held} of {plural(so_far.n, 'interval')}"
        sentences.append(f"{judged} held the change that fresh rollouts measured.")
    if n_doubtful:
        sentences.append(f"Of {len(points)} forecasts, {n_doubtful} reported that they were not to be trusted.")
    return " ".join(sentences)
