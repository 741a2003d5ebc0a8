"""A reading made of the windows of a run: estimate, interval, and the reason where a number is not known."""

from __future__ import annotations

from sonde.batch_size.stats.advice import advise, windows_needed
from sonde.batch_size.stats.averages import NoiseScaleAverages
from sonde.batch_size.stats.consistency import same_data
from sonde.batch_size.stats.filter import Level
from sonde.batch_size.stats.level import Recent
from sonde.batch_size.stats.reading import GroupReading, NoiseScaleReading, RunAverage
from sonde.stats.intervals import RatioInterval
from sonde.wording import plural

_MOST_MISSING = 5
"""Windows in a row that may be dropped before nothing is known about now; or a tenth of those used, if that is more."""
_CERTAINTY = 0.99
"""Confidence level of the check that pieces hold different data."""


def summarise(averages: NoiseScaleAverages, *, unit: str, with_groups: bool = True) -> NoiseScaleReading:
    """Make a reading.

    Args:
        averages: of all windows so far.
        unit: plural name of the unit.
        with_groups: also read each group of parameters.
    """
    run = averages.run
    doubts = doubts_of(averages)
    why = next(iter(doubts.values())) if doubts else _stale(averages)
    doubted = Level(RatioInterval("unresolved", None, None, why))
    recent = None if why else run.recent()
    total, *of_groups = [doubted] * (1 + len(run.groups)) if why else run.levels(with_groups=with_groups)
    own = _group(total, recent, 0)
    log_error = total.log_error or (recent.log_error if recent else None)
    n_pieces = averages.u * averages.effective_units if averages.u and averages.effective_units else None
    advice = advise(
        own.status,
        log_error,
        n_steps=run.n_steps,
        every=recent.every if recent else 1.0,
        n_pieces=n_pieces,
        n_units=averages.effective_units,
    )
    return NoiseScaleReading(
        b_simple=own.b_simple,
        low=own.low,
        high=own.high,
        status=own.status,
        reason=why or _reason(averages, total.interval),
        advice="" if recent is None else advice,
        scatter=recent.scatter if recent and own.status == "resolved" else None,
        average=_run_average(averages) if recent else None,
        grad_sq=own.grad_sq,
        trace_cov=own.trace_cov,
        units_per_window=averages.units_per_window,
        effective_units=averages.effective_units,
        u=averages.u,
        windows=averages.windows,
        dropped=dict(averages.dropped),
        windows_needed=windows_needed(log_error, recent.n_windows) if recent else None,
        consistency=averages.consistency,
        doubts=doubts,
        scale=averages.scale,
        scale_residual=averages.scale_residual,
        unit=unit,
        n_steps=run.n_steps,
        warms_up=run.warms_up,
        every=recent.every if recent else 1.0,
        further_units=averages.further_per_unit,
        groups={
            name: _group(level, recent, i)
            for i, (name, level) in enumerate(zip(run.groups, of_groups, strict=False), 1)
            if name not in run.gone and with_groups
        },
    )


def _stale(averages: NoiseScaleAverages) -> str:
    """Why the last windows say nothing about now; empty where they do."""
    missing = averages.n_missing
    if not averages.windows or missing <= max(averages.windows // 10, _MOST_MISSING):
        return ""
    last = f": {averages.last_drop}" if averages.last_drop else ""
    return f"the last {plural(missing, 'window')} could not be used{last}"


def _run_average(averages: NoiseScaleAverages) -> RunAverage:
    b_simple, interval = averages.run.average()
    return RunAverage(b_simple, interval.low, interval.high, interval.status, averages.run.n_windows)


def _group(level: Level, recent: Recent | None, series: int) -> GroupReading:
    return GroupReading(
        status=level.interval.status,
        b_simple=level.b_simple,
        low=level.interval.low,
        high=level.interval.high,
        grad_sq=recent.grad_sq[series] if recent else None,
        trace_cov=recent.trace_cov[series] if recent else None,
    )


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
    if (dependent := repeated or averages.neighbours.doubt()) is not None:
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
