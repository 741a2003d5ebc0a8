"""How a policy's entropy has changed: over the whole run, and lately."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sonde.policy.stats.forecast_point import Point

Trend = Literal["holds", "falling", "fallen", "rising", "risen"]

_LATELY = 0.15
"""Relative change over the last third of the run above which the entropy falls or rises."""
_AT_THIS_PACE = 0.2
"""Relative change over the whole run above which the entropy falls or rises, if it goes on at half the run's pace."""
_IN_ALL = 0.5
"""Entropy over its first value below which it has fallen; above the inverse, it has risen."""
_NO_CHANGE = 0.01
"""Nats a token. Smaller changes count as none, whatever the entropy is."""
_SMOOTHED = 3
"""Measurements averaged at most: each is of a few prompts only."""


@dataclass(frozen=True)
class Course:
    """The entropy at three times, in nats a token. Each is a mean over a few measurements, where there are many.

    Attributes:
        first: at the beginning of the run.
        earlier: at the beginning of its last third.
        now: at its end.
        since: the measurement with which the last third begins.
        lately: the last third's part of the run's steps; more than a third if measurements are few.
    """

    first: float
    earlier: float
    now: float
    since: Point
    lately: float

    @property
    def trend(self) -> Trend:
        """Where the entropy goes, or where it has gone: the last third decides, then the whole run."""
        recent, whole = self.now - self.earlier, self.now - self.first
        if abs(recent) > max(_LATELY * self.earlier, _NO_CHANGE) or self._goes_on(recent, whole):
            return "falling" if recent < 0.0 else "rising"
        if abs(whole) > _NO_CHANGE:
            if self.now < _IN_ALL * self.first:
                return "fallen"
            if self.first < _IN_ALL * self.now:
                return "risen"
        return "holds"

    def _goes_on(self, recent: float, whole: float) -> bool:
        has_changed = abs(whole) > max(_AT_THIS_PACE * self.first, _NO_CHANGE)
        return has_changed and recent * whole > 0.0 and abs(recent) >= 0.5 * self.lately * abs(whole)


def entropy_course(points: Sequence[Point]) -> Course:
    """The course of the entropy.

    Args:
        points: at least two, in the order of steps, all with an entropy.

    Example:
        >>> def point(step: int, entropy: float) -> Point:
        ...     return Point(step, entropy, None, None, None, False, None, None, False)
        >>> entropy_course([point(1, 2.7), point(28, 1.2), point(56, 0.4)]).trend
        'falling'
    """
    n = len(points)
    width = min(max(n // 6, 1), _SMOOTHED)
    n_steps = max(points[-1].step - points[0].step, 1)  # a restart may count steps from 1 again
    last_third = points[-1].step - n_steps / 3
    # At least one measurement lies before the last.
    begins = min(next((i for i, p in enumerate(points) if p.step >= last_third), n), n - 2)

    def level(i: int) -> float:
        known = [p.entropy or 0.0 for p in points[i : i + width]]
        return sum(known) / len(known)

    lately = max(points[-1].step - points[begins].step, 1) / n_steps
    return Course(level(0), level(begins), level(n - width), points[begins], lately)
