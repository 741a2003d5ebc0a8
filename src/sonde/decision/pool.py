"""Several runs of one model as one: their noise scales, their times, and how fast each came down to a loss."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from sonde.decision.facts import FROM_HERE_ON, RUN_LIKE_THIS, Facts
from sonde.decision.time_curve import TimeCurve, nearly_whole
from sonde.stats.intervals import RatioInterval, unresolved
from sonde.wording import count, duration, interval, number, units

_OF_95 = 2 * 1.96
"""Length of a 95 % interval in standard errors."""


def pool(runs: Sequence[Facts]) -> Facts:
    """The facts of the run to go on from, with what all runs together show.

    The run to go on from is the one that came down to a common loss in the least time; without losses, the last one.
    Those of which nothing can be decided yet are passed over.
    Its average noise scale is replaced by that of all runs, and its time curve by the steps of all.

    Args:
        runs: at least one.

    Raises:
        ValueError: for no run, and for runs of different models, units, optimizers or metrics.
    """
    if not runs:
        raise ValueError("one decision needs one run or more, got none")
    if len(runs) == 1:
        return runs[0]
    for name, what in (("unit", "units"), ("model", "models"), ("metric", "metrics"), ("optimizer", "optimizers")):
        found = [*dict.fromkeys(getattr(each, name) for each in runs)]
        if len(found) > 1:
            raise ValueError(
                f"one decision needs runs of one model, got different {what}: {found[0] or 'none'} and "
                f"{found[1] or 'none'}: give the logs that belong together. `sonde compare --any-model` shows "
                "different models beside each other"
            )
    able = [each for each in runs if not each.why_none] or runs
    base = able[-1]
    if all(each.reached is not None for each in runs):
        base = min(able, key=lambda each: each.reached.cost if each.reached else math.inf)
    known = [scopes[RUN_LIKE_THIS].known for each in runs if RUN_LIKE_THIS in (scopes := each.scopes)]
    curves = [each.curve for each in runs if each.curve is not None]
    curves = [curve for curve in curves if curve.is_of_trial] or curves  # logs hold pauses too
    timings = tuple(timing for curve in curves for timing in curve.timings)
    too_large = min((curve.too_large for curve in curves), default=math.inf)
    now = base.scopes[FROM_HERE_ON].known if FROM_HERE_ON in base.scopes else base.now
    return dataclasses.replace(
        base,
        now=now,  # both are counted in units as the batch is
        average=average_of(known),
        effective=None,
        curve=TimeCurve(timings, too_large) if timings else None,
        is_of_several=True,
        notes=(*(note for each in runs for note in each.notes), *_notes(runs, base, known)),
    )


def average_of(known: Sequence[RatioInterval]) -> RatioInterval:
    """The average of the runs' noise scales, in logarithms, each weighed by its error and by how much the runs differ.

    Where no run has both ends, the bounds of all hold together.

    Args:
        known: of each run.

    Reference:
        DerSimonian and Laird, "Meta-analysis in clinical trials", Controlled Clinical Trials 7 (1986) 177-188.
    """
    resolved = [(math.log(each.ratio), _log_error(each)) for each in known if each.ratio and each.low and each.high]
    if not resolved:
        low, high = max(map(_low, known), default=0.0), min(map(_high, known), default=math.inf)
        if low == 0 and math.isinf(high):
            return unresolved("no run's noise scale is known")
        if low > high:
            return unresolved("the runs contradict each other")
        return RatioInterval("lower_bound" if math.isinf(high) else "upper_bound", low, high)
    weights = [1 / error**2 for _, error in resolved]
    between = _variance_between(resolved, weights)
    weights = [1 / (error**2 + between) for _, error in resolved]
    mean = sum(w * value for w, (value, _) in zip(weights, resolved, strict=True)) / sum(weights)
    half = _OF_95 / 2 / math.sqrt(sum(weights))
    return RatioInterval("resolved", math.exp(mean - half), math.exp(mean + half), ratio=math.exp(mean))


def _log_error(known: RatioInterval) -> float:
    assert known.low is not None
    assert known.high is not None
    return max(math.log(known.high / known.low) / _OF_95, 1e-6)


def _variance_between(resolved: Sequence[tuple[float, float]], weights: Sequence[float]) -> float:
    """How much the runs' logarithms differ beyond their errors."""
    total = sum(weights)
    mean = sum(w * value for w, (value, _) in zip(weights, resolved, strict=True)) / total
    excess = sum(w * (value - mean) ** 2 for w, (value, _) in zip(weights, resolved, strict=True)) - len(resolved) + 1
    scale = total - sum(w * w for w in weights) / total
    return max(excess / scale, 0.0) if scale > 0 else 0.0


def _notes(runs: Sequence[Facts], base: Facts, known: Sequence[RatioInterval]) -> Iterator[str]:
    """What the runs show beside each other, and where they contradict each other."""
    reached = [(each, each.reached) for each in runs if each.reached is not None]
    if len(reached) == len(runs):
        loss = number(reached[0][1].loss, 4) if reached[0][1] else ""
        parts = (
            f"{each.name} at {units(nearly_whole(each.batch or 1.0), each.unit)}: {count(found.steps)} steps"
            + ("" if found.seconds is None else f", {duration(found.seconds)}")
            for each, found in reached
        )
        yield f"To the loss {loss}, which all runs reached: {'; '.join(parts)}. The next run goes on from {base.name}."
    else:
        yield f"The runs have no loss in common, so the next run goes on from the last one, {base.name}."
    least, most = min(known, key=_high, default=None), max(known, key=_low, default=None)
    if least is not None and most is not None and _high(least) < _low(most):
        a, b = (interval(each.low, each.high) for each in (least, most))
        yield (
            f"The runs contradict each other: one says a noise scale of {a} {base.unit}, another {b}. A range that "
            "all runs give covers how much they differ. Rates that suit one batch and not another do this."
        )


def _low(known: RatioInterval) -> float:
    return known.low or 0.0


def _high(known: RatioInterval) -> float:
    return math.inf if known.high is None else known.high
