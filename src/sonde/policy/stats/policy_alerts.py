"""Alerts of a policy's run: its entropy collapses, steps are too large, intervals miss, responses are not its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from sonde.policy.stats.entropy_course import Course, Pace, entropy_course
from sonde.policy.stats.forecast_point import Coverage, Point, StepsKept, is_judged
from sonde.policy.stats.own_policy import OwnPolicyTest, SamplerTest, why_not_over
from sonde.stats.intervals import LEVEL
from sonde.wording import number, percent, plural

_HALVES_WITHIN = 20
"""Optimizer steps. An entropy that certainly falls, and halves within them at its pace, raises an alert."""
_LEARNS_ABOVE = 0.5
"""Fraction of the entropy of an almost uniform start above which a fall is how the policy learns, and no alert."""
_IN_A_ROW = 3
"""Forecasts in a row that are not to be trusted, or whose steps are rounded away, before an alert."""
_ROUNDED_AWAY = 0.5
"""Part of a step that parameters of 16 bits do not hold, from which most of it is lost."""
_AT_EACH_END = 150
"""Measurements at each end of a run that a collapse is judged by. Levels and errors rest on fewer of a long run."""
_JUDGED_FROM = 10
"""Smallest number of checked intervals from which their coverage is judged."""
_MISSES_BELOW = 0.7
"""Coverage below which intervals count as missing the truth."""


class PolicyAlerts:
    """Finds the alerts after each point, without another look at all points before it.

    Example:
        >>> alerts = PolicyAlerts()
        >>> for step, entropy in enumerate((2.0, 0.1), start=1):
        ...     alerts.add(Point(step, entropy, None, None, None, False, None, None, False, entropy_se=0.01))
        >>> list(alerts.messages())
        ['entropy_collapse']
    """

    def __init__(self) -> None:
        self._with_entropy = StepsKept()
        self._forecasts: deque[Point] = deque(maxlen=_IN_A_ROW)
        self._n_judged = self._n_held = 0
        self._own_policy: list[OwnPolicyTest] = []
        self._sampler: list[SamplerTest] = []

    def add(self, point: Point) -> None:
        """Add the next point, in the order in which points were measured."""
        if point.entropy is not None:
            self._with_entropy.add(point)
        if point.delta is not None:
            self._forecasts.append(point)
        self._own_policy += [point.own_policy] if point.own_policy is not None else []
        self._sampler += [point.sampler] if point.sampler is not None else []
        if is_judged(point):
            self._n_judged += 1
            self._n_held += point.held

    def messages(self) -> dict[str, str]:
        """The alerts at the last point, in plain words.

        Returns:
            Messages by name: "entropy_collapse", "steps_too_large", "steps_rounded_away", "not_own_policy",
            "not_of_sampler", "intervals_miss". Empty if nothing looks wrong.
        """
        alerts, points = {}, self._with_entropy.points
        if len(points) > 2 * _AT_EACH_END:
            points = [*points[:_AT_EACH_END], *points[-_AT_EACH_END:]]
        if len(points) > 1 and (collapse := _collapse(entropy_course(points))):
            alerts["entropy_collapse"] = collapse
        n = len(self._forecasts)
        if n == _IN_A_ROW and all(p.is_too_large for p in self._forecasts):
            alerts["steps_too_large"] = (
                f"the last {n} forecasts of the entropy's change are not to be trusted: the steps are too large. A "
                "smaller learning rate makes their effect predictable"
            )
        away = [p.rounded_away for p in self._forecasts if (p.rounded_away or 0.0) > _ROUNDED_AWAY]
        if len(away) == _IN_A_ROW:
            alerts["steps_rounded_away"] = (
                f"parameters of 16 bits round away {percent(away[-1])} of each step: keep them in 32 bits, and use "
                "autocast or mixed precision for the arithmetic"
            )
        if why := why_not_over(self._own_policy):
            alerts["not_own_policy"] = why
        if why := why_not_over(self._sampler):
            alerts["not_of_sampler"] = why
        so_far = Coverage.of(self._n_judged, self._n_held)
        fraction = so_far.fraction
        if fraction is not None and so_far.n >= _JUDGED_FROM and so_far.high < LEVEL and fraction < _MISSES_BELOW:
            alerts["intervals_miss"] = (
                f"{so_far.n_held:,} of {so_far.n:,} intervals held the entropy's change, where 95 % should: check that "
                "evaluation responses are sampled untruncated, at the policy's own temperature, and independently"
            )
        return alerts


def find_policy_alerts(points: Sequence[Point]) -> dict[str, str]:
    """The alerts at the last point, in plain words; see `PolicyAlerts.messages`.

    Args:
        points: all points so far, in the order in which they were measured.
    """
    alerts = PolicyAlerts()
    for point in points:
        alerts.add(point)
    return alerts.messages()


def _collapse(course: Course) -> str:
    first, start, level = course.first, course.start.nats, course.now.nats
    if course.is_continuous:
        return ""
    remedy = "lower the learning rate, add an entropy bonus, or stop here"
    # A policy that begins almost uniform must lose most of its entropy to learn anything, at any learning rate: so how
    # far it fell says nothing of the learning rate.
    if first.is_near_uniform:
        remedy = "if the reward no longer rises, add an entropy bonus, or stop here"
    if course.has_collapsed:
        return (
            f"the policy's entropy has collapsed to {number(level)} nats a token, {percent(level / start)} of its "
            f"level {course.start.label}, and the policy hardly explores any more: {remedy}"
        )
    if first.is_near_uniform and level > _LEARNS_ABOVE * start:
        return ""
    pace = course.pace
    if pace is None or pace.halves_in > _HALVES_WITHIN:
        return ""
    over = f"over the last {plural(pace.n_steps, 'step')}, {pace_text(pace)}"
    return f"the policy's entropy is collapsing: {over}. It is {number(level)} nats a token now: {remedy}"


def pace_text(pace: Pace) -> str:
    """How fast the entropy falls, with its scatter, and what can be said of the steps to come."""
    fall, low, high = map(percent, pace.fall_per_step)
    halves, earliest = (max(round(steps), 1) for steps in (pace.halves_in, pace.earliest))
    return (
        f"it fell by {fall} a step (95 % interval: {low} to {high}). It halves in {plural(halves, 'step')} if this "
        f"pace lasts, and in {earliest:,} at the earliest"
    )
