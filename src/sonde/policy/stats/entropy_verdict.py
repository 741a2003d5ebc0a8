"""The verdict on the entropy of a run: one sentence, and the measurements behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sonde.policy.stats.coverage import coverage
from sonde.policy.stats.entropy_course import HOLDS_WITHIN, SCATTER_FROM, Change, Course, Trend, entropy_course
from sonde.policy.stats.forecast_point import Point
from sonde.policy.stats.policy_alerts import find_policy_alerts
from sonde.policy.stats.steps_kept import StepsKept, steps_kept
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
        detail: the change, what to do, and the last forecast.
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
    points = [p for p in points if p.entropy is not None]
    if not points:
        return EntropyVerdict("unknown", "No verdict yet: no entropy was measured.", "The run had no forecast.")
    kept = steps_kept(points)
    first, now = kept.points[0], kept.points[-1]
    course = entropy_course(points) if len(kept.points) > 1 else None
    alerts = find_policy_alerts(kept.points)
    too_large = "Steps are too large to forecast." if "steps_too_large" in alerts else ""
    record = _joined(_last_step(now), _record(points))
    basis = _joined("" if course is None else _lines(course), _restarts(kept))
    if "entropy_collapse" in alerts:
        message, _, remedy = alerts["entropy_collapse"].rpartition(": ")
        change = _change(course) if course is not None else ""
        return EntropyVerdict(
            "collapses", _sentence(message), _joined(_sentence(remedy), change, too_large, record), basis
        )
    if course is None:
        state = f"The policy's entropy is {_nats(now.entropy, now.entropy_se)} nats a token at step {now.step}."
        return EntropyVerdict("unknown", f"{state} One measurement shows no trend.", _joined(too_large, record), basis)
    kind: Kind = course.trend
    if too_large and kind in ("holds", "unknown"):
        kind = "not_linear"
    detail = _joined(_change(course), _next(course), _advice(course.trend, first, course), too_large, record)
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
    levels = f"{_nats(now.nats, now.se)} nats a token at {now.label}, {_nats(start.nats, start.se)} at {start.label}"
    return f"{_HEADLINES[kind]}: {levels}."


def _change(course: Course) -> str:
    """How far the entropy has changed."""
    return f"It changed by {_amount(course.whole, 'of its first value')}."


def _lines(course: Course) -> str:
    """How many measurements stand behind the levels."""
    lines = [
        f"The level at the {end} lies on the line through the {place} {level.n} measurements."
        for end, place, level in (("start", "first", course.start), ("end", "last", course.now))
        if level.n > 1
    ]
    return _joined(*lines)


def _next(course: Course) -> str:
    """What the last third of the run says of the next steps."""
    ahead, steps = course.ahead, plural(course.n_ahead, "step")
    if ahead.half is None:
        return ""
    text = f"At the pace of the last {steps}, the next {steps} change it by {_amount(ahead, 'of its present value')}"
    return f"{text}." if ahead.sign or ahead.is_small else f"{text}, so its direction is not known yet."


def _amount(change: Change, of: str) -> str:
    """A change in nats and per cent, with its 95 % interval."""
    low, high = change.low, change.high
    nats = f"{_signed(change.nats)} nats a token"
    if change.of <= 0:
        return nats if low is None or high is None else f"{nats} (95 % interval: {_signed(low)} to {_signed(high)})"
    amount = f"{nats}, {_signed_percent(change.nats / change.of)} {of}"
    if low is None or high is None:
        return amount
    # An entropy cannot fall below 0.
    low_percent, high_percent = _signed_percent(max(low / change.of, -1.0)), _signed_percent(high / change.of)
    return f"{amount} (95 % interval: {low_percent} to {high_percent})"


def _advice(trend: Trend, first: Point, course: Course) -> str:
    match trend:
        case "holds":
            return ""
        case "unknown" if course.whole.half is None:
            n = len(course.kept.points)
            return (
                "Not all standard errors of these entropies were logged, so it is not known whether this is more than "
                f"noise. {SCATTER_FROM} measurements show their scatter; this run has {n}."
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


def _restarts(kept: StepsKept) -> str:
    undone = plural(kept.n_undone, "measurement")
    left_out = f"A restart took steps again: {undone} of these steps before the restart are left out."
    again = "A restart counted steps from the beginning again: the measurements before it are taken to come first."
    return _joined(left_out if kept.n_undone else "", again if kept.starts[-1] else "")


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
    judged = f"{so_far.n_held} of {plural(so_far.n, 'interval')} held the change that fresh rollouts measured."
    doubtful = f"Of {plural(n_forecasts, 'forecast')}, {n_doubtful} reported that they were not to be trusted."
    return _joined(judged if so_far.n else "", doubtful if n_doubtful else "")


def _nats(value: float | None, se: float | None) -> str:
    """An entropy with its standard error, to the same decimals."""
    text = number(value)
    if se is None or value is None:
        return text
    _, _, decimals = text.partition(".")
    error = f"{se:.{max(len(decimals), 2)}f}" if decimals.isdigit() or text.isdigit() else number(se, 1)
    return f"{text}\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}{error if error.strip('0.') else number(se, 1)}"


def _signed(value: float) -> str:
    return f"+{number(value)}" if value > 0 else number(value)


def _signed_percent(fraction: float) -> str:
    return f"+{percent(fraction)}" if fraction > 0 else percent(fraction)


def _joined(*sentences: str) -> str:
    return " ".join(filter(None, sentences))


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."
