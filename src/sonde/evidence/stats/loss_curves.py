"""How many units one batch size needs for the progress that another one makes, from two curves of the loss."""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_LAST_PART = 0.75
"""Ratios are read where the reference has used this part of its units, and more."""
_TARGETS = 9
"""Losses at which two curves are compared; their mean is steadier than the end of a curve alone."""


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
        """Whether a loss is not finite, or the last one is above the first."""
        return not all(map(math.isfinite, self.losses)) or self.losses[-1:] > self.losses[:1]

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

    Both curves are made to fall (`falling`). They are compared at losses that both reach, over the last quarter of the
    reference's units up to the lowest such loss. The mean of the logs is returned.

    Args:
        branch: of another batch size.
        reference: of the batch size that it is compared with, from the same checkpoint, on the same held-out data.

    Returns:
        The log; `math.inf` where the branch has diverged or comes to no loss below the checkpoint's; None where the
        reference does so, or a curve has fewer than 2 points: then nothing can be compared.

    Example:
        >>> slow, fast = (Curve(tuple(range(9)), tuple(2 ** (-u / t) for u in range(9))) for t in (4, 2))
        >>> round(math.exp(log_units_ratio(slow, fast)), 1)
        2.0
    """
    if min(len(branch.units), len(reference.units)) < 2 or reference.has_diverged or len(falling(reference).units) < 2:
        return None
    if branch.has_diverged:
        return math.inf
    slow, fast = falling(branch), falling(reference)
    lowest = max(slow.losses[-1], fast.losses[-1])
    end = units_at(fast, lowest)
    if end is None or end <= 0:
        return math.inf
    targets = [_loss_at(fast, end * (_LAST_PART + (1 - _LAST_PART) * k / (_TARGETS - 1))) for k in range(_TARGETS)]
    logs = []
    for loss in targets:
        theirs, own = units_at(fast, loss), units_at(slow, loss)
        if theirs and own:
            logs.append(math.log(own / theirs))
    return statistics.fmean(logs) if logs else math.inf


def _loss_at(curve: Curve, units: float) -> float:
    """The loss of a falling curve at so many units, by straight lines between its points."""
    k = min(max(bisect.bisect_left(curve.units, units), 1), len(curve.units) - 1)
    (a, b), (high, low) = curve.units[k - 1 : k + 1], curve.losses[k - 1 : k + 1]
    return high + (low - high) * (units - a) / (b - a)


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """The mean of curves with the same units: of the seeds of one batch size."""
    units = curves[0].units
    if any(curve.units != units for curve in curves):
        raise ValueError("curves are averaged at the same units: evaluate all seeds at the same steps")
    return Curve(units, tuple(map(statistics.fmean, zip(*(curve.losses for curve in curves), strict=True))))
