"""Alerts of a policy's run: the entropy collapses, steps are too large, or intervals miss the truth."""

from __future__ import annotations

from collections.abc import Sequence

from sonde.policy.stats.coverage import LEVEL, coverage
from sonde.policy.stats.forecast_point import Point
from sonde.wording import number, percent, plural

COLLAPSED_BELOW = 0.1
"""Fraction of the run's largest entropy below which a policy hardly explores."""
_RUNS_OUT_WITHIN = 20
"""Optimizer steps. An entropy that reaches 0 within them, at the pace of the last forecast, raises an alert."""
_LEARNS_ABOVE = 0.5
"""Fraction of the entropy of an almost uniform start above which a fall is how the policy learns, and no alert."""
_TOO_LARGE_IN_A_ROW = 3
"""Forecasts in a row that are not to be trusted before an alert."""
_JUDGED_FROM = 10
"""Smallest number of checked intervals from which their coverage is judged."""
_MISSES_BELOW = 0.7
"""Coverage below which intervals count as missing the truth."""


def find_policy_alerts(points: Sequence[Point]) -> dict[str, str]:
    """The alerts at the last point, in plain words.

    Args:
        points: all points so far, in the order of steps.

    Returns:
        Messages by name: "entropy_collapse", "steps_too_large", "intervals_miss". Empty if nothing looks wrong.
    """
    alerts = {}
    if collapse := _collapse(points):
        alerts["entropy_collapse"] = collapse
    last = [p for p in points if p.delta is not None][-_TOO_LARGE_IN_A_ROW:]
    if len(last) == _TOO_LARGE_IN_A_ROW and all(p.is_too_large for p in last):
        alerts["steps_too_large"] = (
            f"the last {len(last)} forecasts of the entropy's change are not to be trusted: the steps are too large to "
            "be linear. A smaller learning rate makes their effect predictable"
        )
    so_far = coverage(points)
    fraction = so_far.fraction
    if fraction is not None and so_far.n >= _JUDGED_FROM and so_far.high < LEVEL and fraction < _MISSES_BELOW:
        alerts["intervals_miss"] = (
            f"{so_far.n_held} of {so_far.n} intervals held the entropy's change, where 95 % should: check that "
            "evaluation responses are sampled untruncated, at the policy's own temperature, and independently"
        )
    return alerts


def remedy_for(first: Point) -> str:
    """The advice on an entropy that falls too far.

    Args:
        first: the run's first measurement. A policy that begins almost uniform must lose most of its entropy to learn
            anything, at any learning rate: so how far it fell says nothing of the learning rate.
    """
    if first.is_near_uniform:
        return "if the reward no longer rises, add an entropy bonus, or stop here"
    return "lower the learning rate, add an entropy bonus, or stop here"


def _collapse(points: Sequence[Point]) -> str:
    known = [(p.entropy, p) for p in points if p.entropy is not None]
    if len(known) < 2:
        return ""
    (entropy, now), (largest, at_largest) = known[-1], max(known, key=lambda pair: pair[0])
    if largest <= 0:  # of a continuous distribution, whose entropy has no 0 to collapse to
        return ""
    first_entropy, first = known[0]
    remedy = remedy_for(first)
    if entropy < COLLAPSED_BELOW * largest:
        return (
            f"the policy's entropy has collapsed to {number(entropy)} nats a token, {percent(entropy / largest)} of "
            f"its value at step {at_largest.step}, and the policy hardly explores any more: {remedy}"
        )
    if first.is_near_uniform and entropy > _LEARNS_ABOVE * first_entropy:
        return ""
    if now.delta is not None and now.high is not None and now.high < 0 and now.is_valid and now.per == "token":
        steps_left = entropy / -now.delta
        if steps_left < _RUNS_OUT_WITHIN:
            return (
                f"the policy's entropy is collapsing: at {number(now.delta)} nats a token and step, the remaining "
                f"{number(entropy)} nats last {plural(max(round(steps_left), 1), 'step')} more: {remedy}"
            )
    return ""
