"""The verdict on a run's entropy, in one sentence with what it rests on."""

from __future__ import annotations

import math
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
