"""The verdict on the entropy of a run: one sentence, and the measurements behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sonde.policy.stats.entropy_course import HOLDS_WITHIN, NO_CHANGE, Change, Course, Trend, entropy_course
from sonde.policy.stats.forecast_point import Point, steps_kept
from sonde.policy.stats.policy_alerts import find_policy_alerts, pace_text
from sonde.wording import number, percent, plural

Kind = Trend | Literal["collapses", "not_linear"]


@dataclass(frozen=True)
class EntropyVerdict:
    """A judgement of a run's entropy.

    Attributes:
        kind: "collapses"; "falling" or "rising" if the entropy goes on changing; "fallen" or "risen" if it has changed;
            "holds" if a larger change is excluded; "not_linear" if steps are too large to forecast; "unknown" if the
            measurements are too few or too noisy.
        headline: one sentence.
        detail: the change, what to do, and why the last forecast is not to be trusted.
        basis: how the levels were made of the measurements, and what a restart did to these.
    """

    kind: Kind
    headline: str
    detail: str
    basis: str = ""


def judge_entropy(points: Sequence[Point]) -> EntropyVerdict:
    """Judge a run by all its measurements so far.

    Args:
        points: in the order in which they were measured. After a restart, step numbers may go back.
    """
    has_forecast = any(p.delta is not None for p in points)
    points = [p for p in points if p.entropy is not None]
    if not points:
        why = "Forecasts were logged without the policy's entropy." if has_forecast else "The run had no forecast."
        return EntropyVerdict("unknown", "No verdict yet: no entropy was measured.", why)
    kept = steps_kept(points)
    first, now = kept.points[0], kept.points[-1]
    course = entropy_course(kept.points) if len(kept.points) > 1 else None
    alerts = find_policy_alerts(kept.points)
    too_large = "Steps are too large to forecast." if "steps_too_large" in alerts else ""
    doubt = _doubt(now)
    basis = _joined("" if course is None else _levels(course), _restarts(kept.n_undone))
    if "entropy_collapse" in alerts:
        message, _, remedy = alerts["entropy_collapse"].rpartition(": ")
        change = _change(course) if course is not None else ""
        return EntropyVerdict(
            "collapses", _sentence(message), _joined(_sentence(remedy), change, too_large, doubt), basis
        )
    if course is None:
        state = f"The policy's entropy is {_nats(now.entropy, now.entropy_se)} nats a token at step {now.step:,}."
        return EntropyVerdict("unknown", f"{state} One measurement shows no trend.", _joined(too_large, doubt), basis)
    kind: Kind = course.trend
    if too_large and kind in ("holds", "unknown"):
        kind = "not_linear"
    detail = _joined(_change(course), _recent(course), _advice(course.trend, first, course), too_large, doubt)
    return EntropyVerdict(kind, _headline(course, kind), detail, basis)


_HEADLINES = {
    "holds": "The policy's entropy holds",
    "falling": "The policy's entropy is falling",
    "fallen": "The policy's entropy has fallen",
    "rising": "The policy's entropy is rising",
    "risen": "The policy's entropy has risen",
    "unknown": "It is not known yet whether the policy's entropy holds",
    "not_linear": "The policy's steps are too large to forecast. Its entropy",
}


def _headline(course: Course, kind: Kind) -> str:
    """Where the entropy goes, with its levels at both ends of the run."""
    start, now = course.start, course.now
    levels = f"{_nats(now.nats, now.se)} nats a token {now.label}, {_nats(start.nats, start.se)} {start.label}"
    return f"{_HEADLINES[kind]}: {levels}."


def _change(course: Course) -> str:
    """How far the entropy has changed."""
    return f"It changed by {_amount(course.whole, 'of its level at the start')}."


def _levels(course: Course) -> str:
    """How many measurements stand behind the levels."""
    if course.now.n == 1:
        return ""
    return (
        f"The level at each end of the run is the mean of {course.now.n} measurements. Measurements with smaller "
        "standard errors count more."
    )


def _recent(course: Course) -> str:
    """What the last third of the run did, if it is not the whole run."""
    recent = course.recent
    if recent.half is None or course.n_recent >= course.n_steps:
        return ""
    text = f"Over the last {plural(course.n_recent, 'step')}, it changed by {_amount(recent, 'of its level before')}"
    if not (recent.sign or recent.is_small):
        return f"{text}, so its present direction is not known yet."
    pace = course.pace if course.trend == "falling" else None
    return _joined(f"{text}.", "" if pace is None else _sentence(pace_text(pace)))


def _amount(change: Change, of: str) -> str:
    """A change in nats and per cent, with its 95 % interval."""
    low, high = change.low, change.high
    # Per cent say nothing of almost no entropy, nor of a continuous distribution's.
    if change.of < NO_CHANGE or change.nats < -change.of:
        amount, ends = f"{_nats(change.nats)} nats a token", [_nats(low), _nats(high)]
    else:
        # An entropy of tokens cannot fall below 0.
        parts = [None if nats is None else max(nats / change.of, -1.0) for nats in (change.nats, low, high)]
        part, *ends = (percent(None if of is None else round(of, 3)) for of in parts)
        amount = f"{_nats(change.nats)} nats a token, {part} {of}"
    return amount if change.half is None else f"{amount} (95 % interval: {ends[0]} to {ends[1]})"


def _advice(trend: Trend, first: Point, course: Course) -> str:
    match trend:
        case "holds":
            return ""
        case "unknown" if course.whole.half is None:
            return (
                "No standard errors of these entropies were logged, so it is not known whether this is more than "
                "noise. Log them too: they need at least 2 prompts a measurement."
            )
        case "unknown":
            return (
                f"The measurements are too noisy to say whether it changed by more than {percent(HOLDS_WITHIN)}: "
                "measure more steps, or more prompts each time."
            )
        case "rising" | "risen":
            return "The policy becomes more random. Check the reward, and the entropy bonus if there is one."
    if first.is_near_uniform:
        return (
            "The policy was almost uniform at first, so its entropy had to fall for it to learn. If the reward no "
            "longer rises, add an entropy bonus, or stop here."
        )
    return "If the reward no longer rises, add an entropy bonus, lower the learning rate, or stop here."


def _restarts(n_undone: int) -> str:
    if not n_undone:
        return ""
    undone, are = plural(n_undone, "measurement"), "is" if n_undone == 1 else "are"
    return f"A restart took steps again: {undone} of these steps before the restart {are} left out."


def _doubt(now: Point) -> str:
    """Why the last forecast is not to be trusted."""
    if now.delta is None or now.is_valid:
        return ""
    return f"The forecast of step {now.step:,}: {now.reason or 'not to be trusted'}."


def _nats(value: float | None, se: float | None = None) -> str:
    """Nats a token to a thousandth, perhaps with their standard error: what is below is noise."""
    if value is None:
        return number(None)
    nats = f"{round(value, 3) + 0.0:.3f}".replace("-", "\N{MINUS SIGN}")  # + 0.0: no negative zero
    return nats if se is None else f"{nats}\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}{se:.3f}"


def _joined(*sentences: str) -> str:
    return " ".join(filter(None, sentences))


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."
