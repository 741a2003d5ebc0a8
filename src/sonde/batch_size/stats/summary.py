"""A reading made of averages: estimate, interval, and the reason where a number is not known."""

from __future__ import annotations

from sonde.batch_size.stats.averages import NoiseScaleAverages
from sonde.batch_size.stats.consistency import same_data
from sonde.batch_size.stats.noise_scale import RunningNoiseScale
from sonde.batch_size.stats.reading import GroupReading, NoiseScaleReading
from sonde.stats.intervals import RatioInterval

_CERTAINTY = 0.99
"""Confidence level of the check that pieces hold different data."""


def summarise(averages: NoiseScaleAverages, *, unit: str, level: float) -> NoiseScaleReading:
    """Make a reading of the averages.

    Args:
        averages: of all windows so far.
        unit: plural name of the unit.
        level: confidence level of the intervals.
    """
    total = averages.total
    doubts = _doubts(averages)
    doubted = RatioInterval("unresolved", None, None, next(iter(doubts.values()))) if doubts else None
    interval = doubted or total.interval(level)
    return NoiseScaleReading(
        b_simple=_ratio(total, interval),
        low=interval.low,
        high=interval.high,
        status=interval.status,
        reason=doubted.reason if doubted else _reason(averages, interval),
        grad_sq=None if doubts else total.grad_sq,
        trace_cov=None if doubts else total.trace_cov,
        units_per_window=averages.units_per_window,
        effective_units=averages.effective_units,
        u=averages.u,
        windows=total.windows,
        dropped=dict(averages.dropped),
        windows_needed=None if doubts else total.windows_needed(level=level),
        consistency=averages.consistency,
        doubts=doubts,
        scale=averages.scale,
        scale_residual=averages.scale_residual,
        unit=unit,
        groups={name: _group(running, doubted, level) for name, running in averages.per_group.items()},
    )


def _doubts(averages: NoiseScaleAverages) -> dict[str, str]:
    """Reasons not to trust the averages, however narrow their interval: messages by name."""
    doubts = {}
    if (changed := averages.changed.doubt()) is not None:
        doubts["changed"] = changed
    if (dependent := averages.neighbours.doubt()) is not None:
        doubts["dependent_pieces"] = dependent
    same = same_data(
        averages.total.windows,
        pieces_differ=averages.pieces_differ,
        consistency=averages.consistency,
        interval=averages.within_between.interval(_CERTAINTY),
    )
    return doubts | ({"same_data": same} if same else {})


def _reason(averages: NoiseScaleAverages, interval: RatioInterval) -> str:
    """Why B_simple is not resolved; empty when it is resolved."""
    dropped = averages.dropped
    if interval.status == "resolved":
        return ""
    if not averages.total.windows:
        return max(dropped, key=dropped.__getitem__) if dropped else "no window has ended yet"
    if interval.status == "lower_bound":
        return "|G|² cannot yet be distinguished from 0: measure more windows"
    if averages.total.effective_windows < 2:
        return interval.reason
    return (
        "neither the noise tr Σ nor |G|² can yet be distinguished from 0: measure more windows, or more pieces in each"
    )


def _group(running: RunningNoiseScale, doubted: RatioInterval | None, level: float) -> GroupReading:
    interval = doubted or running.interval(level)
    return GroupReading(
        status=interval.status,
        b_simple=_ratio(running, interval),
        low=interval.low,
        high=interval.high,
        grad_sq=None if doubted else running.grad_sq,
        trace_cov=None if doubted else running.trace_cov,
    )


def _ratio(running: RunningNoiseScale, interval: RatioInterval) -> float | None:
    """tr Σ/|G|², only where the interval is two-sided."""
    if interval.status != "resolved" or running.trace_cov is None or not running.grad_sq:
        return None
    return running.trace_cov / running.grad_sq
