"""What looks wrong in a run of a policy: its entropy collapses, steps are too large, intervals miss the truth."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sonde.policy.stats.coverage import LEVEL, coverage
from sonde.policy.stats.forecast_point import Point
from sonde.wording import number, percent, plural

COLLAPSED_BELOW = 0.1
"""Part of the largest entropy that was measured: below it, a policy hardly explores."""
_RUNS_OUT_WITHIN = 20
"""Optimizer steps: an entropy that would be gone by then, at the pace of the last forecast, is told of."""
_TOO_LARGE_IN_A_ROW = 3
_JUDGED_FROM = 10
_MISSES_BELOW = 0.7


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
