"""How many units one batch size needs for the progress that another one makes, from two curves of the loss."""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

_SINCE = 0.5
"""Curves are compared by their mean loss since this part of the units, up to all of them."""
_REACH = 32.0
"""A loss that the faster curve has after less than one in so many of the units is as good as its first."""
_LEAST_REACH = 2.0
"""Ratio that the first losses must let a comparison find: a larger one may be beyond them."""
_DENSE = 5
"""Points in that half that make a mean. Straight lines between fewer ones lie above a falling curve."""
FEWEST = 3
"""Points of a curve that can be compared."""
_RISE = 4.0
"""Scatters by which a loss that has not diverged may rise: 2.8 standard deviations of a difference."""
_GRID = 64
"""Places at which the faster curve's mean loss is computed, evenly in the log of their units."""


@dataclass(frozen=True)
class Curve:
    """The loss on fixed held-out data of one training.

    Attributes:
        units: consumed since the checkpoint, rising; the first may be 0.
        losses: at these.
    """

    units: tuple[float, ...]
    losses: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.units) != len(self.losses):
            raise ValueError(
                f"a curve has a loss for each point, got {len(self.units)} points, {len(self.losses)} losses"
            )
        if any(b <= a for a, b in zip(self.units, self.units[1:], strict=False)):
            raise ValueError("the units of a curve must rise from point to point")

    def until(self, units: float) -> Curve:
        """The part of the curve up to so many units."""
        n = bisect.bisect_right(self.units, units)
        return Curve(self.units[:n], self.losses[:n])

    @property
    def has_diverged(self) -> bool:
        """Whether a loss is not finite, or the last one is above the first by more than the losses scatter."""
        if not all(map(math.isfinite, self.losses)):
            return True
        return bool(self.losses) and self.losses[-1] - self.losses[0] > _RISE * (self.scatter or 0.0)

    @property
    def is_flat(self) -> bool:
        """Whether the losses are finite and fall by no more than they scatter; False for fewer than 3."""
        return self.scatter is not None and falling(self).progress <= self.scatter

    @property
    def progress(self) -> float:
        """By how much the last loss is below the first."""
        return self.losses[0] - self.losses[-1]

    @property
    def scatter(self) -> float | None:
        """Standard deviation of a loss about its neighbours' line; None for fewer than 3 finite losses.

        Second differences of independent errors have 6 times their variance.
        """
        if len(self.losses) < 3 or not all(map(math.isfinite, self.losses)):
            return None
        windows = zip(self.losses, self.losses[1:], self.losses[2:], strict=False)
        return math.sqrt(statistics.fmean((a - 2 * b + c) ** 2 for a, b, c in windows) / 6)


def falling(curve: Curve) -> Curve:
    """The falling curve that is nearest to a curve, by least squares; points that rise are joined to one.

    Reference:
        Pool adjacent violators: Ayer et al., "An empirical distribution function for sampling with incomplete
        information", Ann. Math. Statist. 26 (1955) 641–647.

    Example:
        >>> falling(Curve((0, 1, 2, 3), (4.0, 2.0, 3.0, 1.0)))
        Curve(units=(0.0, 1.5, 3.0), losses=(4.0, 2.5, 1.0))
    """
    blocks: list[tuple[float, float, int]] = []  # sums of units and losses, and how many points
    for units, loss in zip(curve.units, curve.losses, strict=True):
        block = (float(units), float(loss), 1)
        while blocks and block[1] / block[2] >= blocks[-1][1] / blocks[-1][2]:
            before = blocks.pop()
            block = (before[0] + block[0], before[1] + block[1], before[2] + block[2])
        blocks.append(block)
    return Curve(tuple(units / n for units, _, n in blocks), tuple(loss / n for _, loss, n in blocks))


def units_at(curve: Curve, loss: float) -> float | None:
    """Units at which a falling curve reaches a loss, by straight lines between its points; None outside it."""
    losses = curve.losses
    if not losses or not losses[-1] <= loss <= losses[0]:
        return None
    after = next(k for k, value in enumerate(losses) if value <= loss)
    if after == 0 or losses[after] == loss:
        return curve.units[after]
    part = (losses[after - 1] - loss) / (losses[after - 1] - losses[after])
    return curve.units[after - 1] + part * (curve.units[after] - curve.units[after - 1])


def log_units_ratio(branch: Curve, reference: Curve) -> float | None:
    """Log of the units that a branch needs for a loss, over those that the reference needs.

    The slower curve has some mean loss over the last half of its units, u/2 to u. The faster one has the same mean over
    v/2 to v, for some v < u: the ratio is u/v. Means of the same kind are compared, so errors of single losses do not
    bias it: with an error of 8 % of the whole progress, the ratio of two curves was right within 1 %. An end of a
    falling fit (`falling`) compared with the middle of another one was 7 % too low.

    Where a curve has fewer than 5 points in that half, the slower one's last loss stands for the mean. So it is with
    the last losses of trainings of several lengths, each with a rate that falls to 0.

    Args:
        branch: of another batch size.
        reference: of the batch size that it is compared with, from the same checkpoint, on the same held-out data.

    Returns:
        The log; `math.inf` where the branch has diverged, or does not even come down to the reference's first losses;
        None where the reference does so or falls by no more than it scatters, a curve has fewer than 3 points, or its
        first one too late: then nothing can be compared.

    Example:
        >>> slow, fast = (Curve(tuple(range(9)), tuple(2 ** (-u / t) for u in range(9))) for t in (4, 2))
        >>> round(math.exp(log_units_ratio(slow, fast)), 1)
        2.0
    """
    if len(reference.units) < FEWEST or reference.has_diverged or reference.is_flat:
        return None
    if branch.has_diverged:
        return math.inf
    end = min(branch.units[-1:] + reference.units[-1:])
    if len(branch.units) < FEWEST:
        return None
    n_late = min(sum(_SINCE * end <= units <= end for units in curve.units) for curve in (branch, reference))
    since = _SINCE if n_late >= _DENSE else 1.0
    if max(branch.units[0], reference.units[0]) >= since * end / _LEAST_REACH:
        return None
    own, others = _mean_loss(branch, since)(end), _mean_loss(reference, since)(end)
    slower, faster = (own, reference) if own >= others else (others, branch)
    units = _units_of_mean(faster, slower, end, since)
    if units == 0:
        return math.inf if own >= others else None
    return math.log(end / units) if own >= others else math.log(units / end)


def _units_of_mean(curve: Curve, loss: float, end: float, since: float) -> float:
    """Units at which the mean loss of a curve has come down to a loss; 0 if it begins below."""
    first = max(end / _REACH, curve.units[0] / since)
    units = [end * (first / end) ** (1 - k / _GRID) for k in range(_GRID + 1)]
    means = falling(Curve(tuple(units), tuple(map(_mean_loss(curve, since), units))))
    if loss > means.losses[0]:
        return 0.0
    return units_at(means, loss) or end


def _mean_loss(curve: Curve, since: float) -> Callable[[float], float]:
    """The mean loss since a part of so many units, by straight lines between the points; at 1, the loss there."""
    below = [0.0]
    for k in range(1, len(curve.units)):
        area = (curve.units[k] - curve.units[k - 1]) * (curve.losses[k] + curve.losses[k - 1]) / 2
        below.append(below[-1] + area)

    def at(units: float) -> tuple[float, float]:
        """The loss there, and the area below the curve until there."""
        k = min(max(bisect.bisect_left(curve.units, units), 1), len(curve.units) - 1)
        (a, b), (loss, after) = curve.units[k - 1 : k + 1], curve.losses[k - 1 : k + 1]
        here = loss + (after - loss) * (units - a) / (b - a)
        return here, below[k - 1] + (units - a) * (loss + here) / 2

    if since == 1:
        return lambda units: at(units)[0]
    return lambda units: (at(units)[1] - at(since * units)[1]) / ((1 - since) * units)
