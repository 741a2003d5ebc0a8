"""The verdict on the entropy of a run: one sentence, and the measurements behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sonde.policy.stats.coverage import coverage
from sonde.policy.stats.entropy_course import Course, Trend, entropy_course
from sonde.policy.stats.forecast_point import Point
from sonde.policy.stats.policy_alerts import find_policy_alerts
from sonde.wording import number, plural

Kind = Trend | Literal["collapses", "not_linear", "unknown"]


@dataclass(frozen=True)
class EntropyVerdict:
    """A judgement of a run's entropy.

    Attributes:
        kind: "collapses"; "falling" or "rising" in the last third of the run; "fallen" or "risen" before it; "holds";
            "not_linear" if steps are too large to forecast; or "unknown" if too little was measured.
        headline: one sentence.
        detail: what to do, and the measurements behind the headline.
    """

    kind: Kind
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
    state = (
        f"The policy's entropy is {number(now.entropy)} nats a token at step {now.step}"
        + (f", and was {number(first.entropy)} at step {first.step}" if now is not first else "")
        + "."
    )
    detail = " ".join(filter(None, (_last_step(now), _record(points))))
    alerts = find_policy_alerts(points)
    if "entropy_collapse" in alerts:
        message, _, remedy = alerts["entropy_collapse"].rpartition(": ")
        headline = f"{message[:1].upper()}{message[1:]}."
        return EntropyVerdict("collapses", headline, f"{remedy[:1].upper()}{remedy[1:]}. {state} {detail}")
    course = entropy_course(points) if len(points) > 1 else None
    too_large = "Steps are too large to forecast." if "steps_too_large" in alerts else ""
    if course is not None and course.trend != "holds":
        advice = " ".join(filter(None, (_advice(course.trend, first), too_large, detail)))
        return EntropyVerdict(course.trend, _headline(course, first, now), advice)
    if too_large:
        return EntropyVerdict("not_linear", f"{state} {too_large}", detail)
    if course is None:
        return EntropyVerdict("unknown", f"{state} One measurement shows no trend.", detail)
    return EntropyVerdict("holds", state, detail)


def _headline(course: Course, first: Point, now: Point) -> str:
    """Where the entropy goes, with the numbers of the whole run and of its last third."""
    moves = {
        "falling": "is falling",
        "fallen": "has fallen, and holds now",
        "rising": "is rising",
        "risen": "has risen, and holds now",
        "holds": "holds",
    }[course.trend]
    known = [p for p in (now, course.since, first) if p is not first] + [first]
    numbers = ", ".join(f"{number(p.entropy)} at step {p.step}" for p in known)
    return f"The policy's entropy {moves}: {numbers} (nats a token)."


def _advice(trend: Trend, first: Point) -> str:
    if trend in ("rising", "risen"):
        return "The policy becomes more random. Check the reward, and the entropy bonus if there is one."
    if first.is_near_uniform:
        return (
            "The policy was almost uniform at first, so its entropy had to fall for it to learn. If the reward no "
            "longer rises, add an entropy bonus, or stop here."
        )
    return "If the reward no longer rises, add an entropy bonus, lower the learning rate, or stop here."


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
    n_forecasts = sum(p.delta is not None for p in points)
    n_doubtful = sum(p.delta is not None and not p.is_valid for p in points)
    sentences = []
    if so_far.n:
        judged = f"{so_far.n_held} of {plural(so_far.n, 'interval')}"
        sentences.append(f"{judged} held the change that fresh rollouts measured.")
    if n_doubtful:
        sentences.append(
            f"Of {plural(n_forecasts, 'forecast')}, {n_doubtful} reported that they were not to be trusted."
        )
    return " ".join(sentences)
