"""The critical batch size from branches: the largest batch that needs hardly more units than the reference."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from sonde.stats.intervals import RatioInterval, student_t_quantile, unresolved


@dataclass(frozen=True)
class UnitsRatio:
    """Units that a batch size needs for the reference's loss, over those that the reference needs.

    Attributes:
        batch: units of one optimizer step.
        logs: log of the ratio of each seed that could be compared; `math.inf` where the branch diverged or is slower
            than can be compared.
        ratio: the mean over seeds, of the logs; infinite if one is, None without any.
        low: lower end of its 95 % interval; None where it is not known.
        high: upper end.
        n_diverged: seeds whose branch diverged.
    """

    batch: float
    logs: tuple[float, ...]
    ratio: float | None
    low: float | None
    high: float | None
    n_diverged: int = 0

    @property
    def n_slow(self) -> int:
        """Seeds whose branch did not diverge, but never came down to the reference's first losses."""
        return sum(map(math.isinf, self.logs)) - self.n_diverged


def units_ratios(logs: Sequence[tuple[float, Sequence[float]]]) -> list[UnitsRatio]:
    """The ratio of each batch with its interval.

    The variance over seeds is the mean of the batch's own and that of all batches together. Its own alone would make
    intervals of 3 seeds 1.6 times as wide. That of all alone would cover 89 % instead of 95 % where seeds of one batch
    scatter twice as much as those of another.

    Args:
        logs: each batch with the log of its ratio for each seed, paired by data with the reference.

    Returns:
        In the order of the batches.

    Example:
        >>> [r.ratio for r in units_ratios([(64, [0.0, 0.0])])]
        [1.0]
    """
    ordered = sorted((batch, tuple(values)) for batch, values in logs)
    steady = [values for _, values in ordered if len(values) > 1 and not any(map(math.isinf, values))]
    return [_ratio_of(batch, values, steady) for batch, values in ordered]


def _ratio_of(batch: float, logs: tuple[float, ...], steady: Sequence[tuple[float, ...]]) -> UnitsRatio:
    """One batch's ratio; `steady` are the logs of all batches that have not diverged, with 2 seeds or more."""
    if not logs:
        return UnitsRatio(batch, logs, None, None, None)
    if any(map(math.isinf, logs)):
        finite = [math.exp(value) for value in logs if math.isfinite(value)]
        return UnitsRatio(batch, logs, math.inf, min(finite, default=math.inf), math.inf)
    mean = statistics.fmean(logs)
    own = len(logs) - 1
    n_all = sum(len(values) - 1 for values in steady)
    if not n_all:
        return UnitsRatio(batch, logs, math.exp(mean), None, None)
    pooled = sum((len(values) - 1) * statistics.variance(values) for values in steady) / n_all
    n_pooled = min(own, n_all - own) if own else n_all  # degrees of freedom that the other batches lend
    squares = (own * statistics.variance(logs) if own else 0.0) + n_pooled * pooled
    reach = student_t_quantile(0.975, own + n_pooled) * math.sqrt(squares / (own + n_pooled) / len(logs))
    return UnitsRatio(batch, logs, math.exp(mean), math.exp(mean - reach), math.exp(mean + reach))


def critical_batch(ratios: Sequence[UnitsRatio], reference: float, tolerance: float) -> RatioInterval:
    """The batch size at which the ratio of units passes 1 + tolerance, between the batches by straight lines.

    The law 1 + B/B_crit is such a line. Lines in logs would be wrong by 13 % between batches of 16 and 64 at B_crit 50.

    Its interval reaches from the first batch at which the upper end of the ratio passes 1 + tolerance, to the last one
    at which the lower end does.

    Args:
        ratios: of batches above the reference.
        reference: its batch, whose ratio is 1.
        tolerance: part of the units that a batch may need more: 0.2 for a fifth.

    Returns:
        In units; a lower bound if no batch needs so many, and unresolved, with a reason, without intervals.

    Raises:
        ValueError: unless the tolerance is positive.
    """
    if not tolerance > 0:
        raise ValueError(f"tolerance must be positive, got {tolerance}: 0.2 allows a fifth more units")
    known = [r for r in ratios if r.batch > reference and r.ratio is not None]
    if not known:
        return unresolved("no batch above the reference could be compared")
    if any(r.low is None for r in known):
        return unresolved("too few seeds can be compared: use 3 seeds or more, or train longer")
    batches = [reference, *(r.batch for r in known)]
    level = 1 + tolerance
    middle = _passes(batches, [1.0, *(r.ratio or 0.0 for r in known)], level)
    first = _passes(batches, [1.0, *(r.high or 0.0 for r in known)], level)
    last = _passes(batches, [1.0, *(r.low or 0.0 for r in known)], level)
    if not first:
        missing = ", ".join(f"{r.batch:g}" for r in ratios if r.batch > batches[-1])
        reason = "no batch needs so many units: try larger ones"
        if missing:
            reason = f"no batch that was compared needs so many units, and batch {missing} could not be compared"
        return RatioInterval("lower_bound", batches[-1], math.inf, reason)
    if not middle or (known[-1].low or 0.0) < level:
        reason = "the largest batch may need as few units: use larger batches or more seeds"
        return RatioInterval("lower_bound", first[0][0], math.inf, reason)
    return RatioInterval("resolved", first[0][0], last[-1][1], ratio=math.sqrt(math.prod(middle[0])))


def _passes(batches: Sequence[float], ratios: Sequence[float], level: float) -> list[tuple[float, float]]:
    """Where the ratio rises through a level, from below: between which two batch sizes, equal where that is known.

    Between a batch and a larger one that diverged, all that is known is that the level is passed there.
    """
    found = []
    for k in range(1, len(batches)):
        below, above = ratios[k - 1], ratios[k]
        if not below < level <= above:
            continue
        if math.isinf(above):
            found.append((float(batches[k - 1]), float(batches[k])))
            continue
        at = batches[k - 1] + (level - below) / (above - below) * (batches[k] - batches[k - 1])
        found.append((at, at))
    return found


def from_base(critical: float, reference: float, tolerance: float) -> float:
    """B_crit of the law 1 + B/B_crit, whose ratio of units passes 1 + w at a batch b, from a reference of B₀.

    (1 + b/B_crit)/(1 + B₀/B_crit) = 1 + w gives B_crit = (b − (1 + w) B₀)/w.

    Returns:
        In units; 0 or less where the ratio rises faster than the law allows.
    """
    return (critical - (1 + tolerance) * reference) / tolerance
