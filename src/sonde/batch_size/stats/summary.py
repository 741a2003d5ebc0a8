"""A reading made of the windows of a run: estimate, interval, and the reason where a number is not known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from sonde.batch_size.stats.advice import advise, windows_needed
from sonde.batch_size.stats.averages import NoiseScaleAverages
from sonde.batch_size.stats.critical_batch import Estimate
from sonde.batch_size.stats.reading import GroupReading, NoiseScaleReading
from sonde.batch_size.stats.windows_of_run import Recent
from sonde.stats.intervals import RatioInterval, unresolved
from sonde.wording import plural

_MOST_MISSING = 5
"""Windows in a row that may be dropped before nothing is known about now; or a tenth of those used, if that is more."""
_NOTHING: dict[str, Any] = {"advice": "", "scatter": None, "average": None, "windows_needed": None, "every": 1.0}
"""What a reading says of windows before there are any, or where they cannot be trusted."""

Series = tuple[RatioInterval, float | None, float | None]
"""The noise scale of the whole model or of a group, its |G|² and its tr Σ."""


def summarise(averages: NoiseScaleAverages, *, unit: str, with_groups: bool = True) -> NoiseScaleReading:
    """The reading of a model that trains.

    Args:
        averages: of all windows so far.
        unit: plural name of the unit.
        with_groups: also read each group of parameters.
    """
    run = averages.run
    levels, recent = run.levels(with_groups=with_groups), run.recent()
    series: Sequence[Series] = [(level, None, None) for level in levels]
    facts: dict[str, Any] = {}
    if recent is not None:
        # All groups, or none, are read.
        series = list(zip(levels, recent.grad_sq, recent.trace_cov, strict=False))
        facts = _known_of(averages, levels[0], recent)
    return make_reading(
        averages,
        series,
        unit=unit,
        batch=averages.units_per_window,
        stale=_stale(averages),
        n_steps=run.blocks.n_steps,
        first_step=run.first_step,
        warms_up=run.warms_up,
        further_units=averages.further_per_unit,
        **facts,
    )


def _known_of(averages: NoiseScaleAverages, level: RatioInterval, recent: Recent) -> dict[str, Any]:
    """How well the noise scale of a run is known, what would make it known better, and its average."""
    log_error = level.log_error
    if not log_error and recent.scatter is not None:
        log_error = recent.scatter / math.sqrt(recent.n_windows)
    # A window that was dropped was measured.
    used = averages.windows / max(averages.windows + sum(averages.dropped.values()), 1)
    every = max(recent.n_steps / recent.n_windows * used, 1.0)
    n_units = averages.effective(averages.units_per_window)
    n_pieces = averages.u * n_units if averages.u and n_units else None
    n_steps = averages.run.blocks.n_steps
    return {
        "advice": advise(level.status, log_error, n_steps=n_steps, every=every, n_pieces=n_pieces, n_units=n_units),
        "scatter": recent.scatter if level.status == "resolved" else None,
        "average": estimate_of(averages.run.average()),
        "windows_needed": windows_needed(log_error, recent.n_windows),
        "every": every,
    }


def make_reading(
    averages: NoiseScaleAverages,
    series: Sequence[Series],
    *,
    unit: str,
    batch: float | None,
    stale: str = "",
    **facts: Any,
) -> NoiseScaleReading:
    """A reading of the whole model and of its groups; without numbers if there is a doubt.

    Args:
        averages: of all windows so far.
        series: of the whole model and, after it, of each group that is read.
        unit: plural name of the unit.
        batch: the batch size to judge, in units.
        stale: why there is no number, whatever the windows say; empty where there may be one.
        facts: the other fields of the reading, by name.
    """
    doubts = averages.doubts()
    if why := next(iter(doubts.values()), stale):
        series, facts = [(unresolved(why), None, None)] * len(series), facts | _NOTHING
    own, *groups = [group_reading(*each) for each in series]
    run = averages.run
    return NoiseScaleReading(
        **vars(own),
        **(_NOTHING | facts),
        reason=why or _reason(averages, series[0][0]),
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
        # A group without any gradient is frozen, or not covered.
        groups={n: g for n, g in zip(run.groups, groups, strict=False) if (g.trace_cov, g.grad_sq) != (0.0, 0.0)},
    )


def group_reading(known: RatioInterval, grad_sq: float | None, trace_cov: float | None) -> GroupReading:
    """The reading of one series."""
    return GroupReading(known.status, known.ratio, known.low, known.high, grad_sq, trace_cov)


def estimate_of(known: RatioInterval) -> Estimate:
    """A noise scale as a verdict takes it."""
    return Estimate(known.ratio, known.low, known.high)


def _stale(averages: NoiseScaleAverages) -> str:
    """Why the last windows say nothing about now; empty where they do."""
    missing = averages.n_missing
    if not averages.windows or missing <= max(averages.windows // 10, _MOST_MISSING):
        return ""
    last = f": {averages.last_drop}" if averages.last_drop else ""
    return f"the last {plural(missing, 'window')} could not be used{last}"


def _reason(averages: NoiseScaleAverages, interval: RatioInterval) -> str:
    """Why B_simple is not resolved; empty when it is resolved."""
    dropped = averages.dropped
    if interval.status != "unresolved" or averages.windows > sum(dropped.values()):
        return interval.reason
    if dropped:
        return max(dropped, key=dropped.__getitem__)
    return interval.reason if averages.windows else "no window has ended yet"
