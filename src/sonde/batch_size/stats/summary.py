"""A reading made of the windows of a run: estimate, interval, and the reason where a number is not known."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from sonde.batch_size.stats.advice import advise, windows_needed
from sonde.batch_size.stats.averages import NoiseScaleAverages
from sonde.batch_size.stats.consistency import same_data
from sonde.batch_size.stats.critical_batch import Estimate
from sonde.batch_size.stats.filter import Level
from sonde.batch_size.stats.reading import GroupReading, NoiseScaleReading
from sonde.stats.intervals import RatioInterval, unresolved
from sonde.wording import plural

_MOST_MISSING = 5
"""Windows in a row that may be dropped before nothing is known about now; or a tenth of those used, if that is more."""
_CERTAINTY = 0.99
"""Confidence level of the check that pieces hold different data."""

Series = tuple[Level, float | None, float | None]
"""The noise scale of the whole model or of a group, its |G|² and its tr Σ."""


def summarise(averages: NoiseScaleAverages, *, unit: str, with_groups: bool = True) -> NoiseScaleReading:
    """The reading of a model that trains.

    Args:
        averages: of all windows so far.
        unit: plural name of the unit.
        with_groups: also read each group of parameters.
    """
    run, doubts = averages.run, doubts_of(averages)
    why = next(iter(doubts.values()), "") or _stale(averages)
    levels = run.levels(with_groups=with_groups)
    if why:
        levels = [Level(unresolved(why))] * len(levels)
    recent = None if why else run.recent()
    series: Sequence[Series] = [(level, None, None) for level in levels]
    if recent:
        series = list(zip(levels, recent.grad_sq, recent.trace_cov, strict=False))  # all groups, or none, are read
    status, log_error = levels[0].interval.status, levels[0].log_error
    if recent and not log_error and recent.scatter is not None:
        log_error = recent.scatter / math.sqrt(recent.n_windows)
    # A window that was dropped was measured.
    used = averages.windows / max(averages.windows + sum(averages.dropped.values()), 1)
    every = max(recent.steps_per_window * used, 1.0) if recent else 1.0
    n_units = averages.effective(averages.units_per_window)
    advice = advise(
        status,
        log_error,
        n_steps=run.n_steps,
        every=every,
        n_pieces=averages.u * n_units if averages.u and n_units else None,
        n_units=n_units,
    )
    return make_reading(
        averages,
        series,
        unit=unit,
        doubts=doubts,
        why=why,
        advice=advice if recent else "",
        scatter=recent.scatter if recent and status == "resolved" else None,
        average=estimate_of(run.average()) if recent else None,
        batch=averages.units_per_window,
        windows_needed=windows_needed(log_error, recent.n_windows) if recent else None,
        n_steps=run.n_steps,
        first_step=run.first_step,
        warms_up=run.warms_up,
        every=every,
        further_units=averages.further_per_unit,
    )


def make_reading(
    averages: NoiseScaleAverages,
    series: Sequence[Series],
    *,
    unit: str,
    doubts: Mapping[str, str],
    why: str,
    batch: float | None,
    **facts: Any,
) -> NoiseScaleReading:
    """A reading of the whole model and of its groups.

    Args:
        averages: of all windows so far.
        series: of the whole model and, after it, of each group that is read.
        unit: plural name of the unit.
        doubts: reasons not to trust the numbers, by name.
        why: why there is no number, whatever the windows say; empty where there may be one.
        batch: the batch size to judge, in units.
        facts: the other fields of the reading, by name.
    """
    own, *groups = [group_reading(*each) for each in series]
    run = averages.run
    return NoiseScaleReading(
        **vars(own),
        reason=why or _reason(averages, series[0][0].interval),
        units_per_window=batch,
        effective_units=averages.effective(batch),
        u=averages.u,
        windows=averages.windows,
        dropped=dict(averages.dropped),
        consistency=averages.consistency,
        doubts=doubts,
        scale=averages.scale,
        scale_residual=averages.scale_residual,
        unit=unit,
        groups={name: group for name, group in zip(run.groups, groups, strict=False) if name not in run.gone},
        **facts,
    )


def group_reading(level: Level, grad_sq: float | None, trace_cov: float | None) -> GroupReading:
    """The reading of one series."""
    known = level.interval
    return GroupReading(known.status, level.b_simple, known.low, known.high, grad_sq, trace_cov)


def estimate_of(level: Level) -> Estimate:
    """A noise scale as a verdict takes it."""
    return Estimate(level.b_simple, level.interval.low, level.interval.high)


def _stale(averages: NoiseScaleAverages) -> str:
    """Why the last windows say nothing about now; empty where they do."""
    missing = averages.n_missing
    if not averages.windows or missing <= max(averages.windows // 10, _MOST_MISSING):
        return ""
    last = f": {averages.last_drop}" if averages.last_drop else ""
    return f"the last {plural(missing, 'window')} could not be used{last}"


def doubts_of(averages: NoiseScaleAverages) -> dict[str, str]:
    """Reasons not to trust the averages, however narrow their interval: messages by name."""
    doubts = {}
    if (changed := averages.changed.doubt()) is not None:
        doubts["changed"] = changed
    same = same_data(
        averages.windows,
        pieces_differ=averages.pieces_differ,
        consistency=averages.consistency,
        interval=averages.within_between.interval(_CERTAINTY),
    )
    # If all data are the same, pieces repeat too.
    repeated = None if same else averages.repeats.pieces_doubt()
    if (dependent := repeated or averages.order.doubt() or averages.neighbours.doubt()) is not None:
        doubts["dependent_pieces"] = dependent
    if (shared := averages.examples.doubt()) is not None:
        doubts["dependent_examples"] = shared
    if (same := same or averages.repeats.ranks_doubt()) is not None:
        doubts["same_data"] = same
    return doubts


def _reason(averages: NoiseScaleAverages, interval: RatioInterval) -> str:
    """Why B_simple is not resolved; empty when it is resolved."""
    dropped = averages.dropped
    if interval.status != "unresolved" or averages.windows > sum(dropped.values()):
        return interval.reason
    if dropped:
        return max(dropped, key=dropped.__getitem__)
    return interval.reason if averages.windows else "no window has ended yet"
