"""A reading made of the history and the averages: estimate, interval, and the reason where a number is not known."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from sonde.batch_size.stats.advice import advise, windows_needed
from sonde.batch_size.stats.averages import NoiseScaleAverages
from sonde.batch_size.stats.consistency import same_data
from sonde.batch_size.stats.noise_scale import RunningNoiseScale, WindowEstimate
from sonde.batch_size.stats.reading import GroupReading, Influence, NoiseScaleReading, RunAverage
from sonde.batch_size.stats.trend import TrendFit, fit_trends
from sonde.batch_size.stats.window_entry import Series, SetAside
from sonde.batch_size.stats.window_weights import effective_windows, most_effective_windows
from sonde.stats.intervals import RatioInterval
from sonde.wording import plural

_MOST_MISSING = 0.25
"""Share of the horizon for which the last windows may be missing before nothing is known about now."""
_LONGEST_MATTER = 100.0
"""Windows for which readings name a window that was set aside, if the horizon is longer."""
_CERTAINTY = 0.99
"""Confidence level of the check that pieces hold different data."""


_SERIES_AT_ONCE = 64
"""Groups whose trends are fitted together. All of thousands at once would take gigabytes."""


@dataclass(frozen=True)
class _Fitted:
    """A series with its fit, and its tr Σ and |G|² averaged over the horizon; None before the first window."""

    fit: TrendFit
    series: Series
    level: WindowEstimate | None


def summarise(
    averages: NoiseScaleAverages,
    *,
    unit: str,
    level: float,
    with_groups: bool = True,
    as_if_last: bool = True,
    now: int | None = None,
) -> NoiseScaleReading:
    """Make a reading.

    Args:
        averages: of all windows so far.
        unit: plural name of the unit.
        level: confidence level of the intervals.
        with_groups: also read each group of parameters.
        as_if_last: count the last windows among those set aside if they would be, should no window follow.
        now: number of the present window, measured or not; by default the last measured one.
    """
    history = averages.history
    doubts = doubts_of(averages)
    why = next(iter(doubts.values())) if doubts else _stale(averages)
    doubted = RatioInterval("unresolved", None, None, why) if why else None
    asides = history.set_asides_now() if as_if_last else history.set_asides
    total, groups = _fit(averages, level, doubted, with_groups=with_groups, now=averages.n_seen if now is None else now)
    own = _group(total, doubted)
    is_resolved = own.status == "resolved"
    advice, needed = ("", None) if doubted else _advice(averages, total)
    return NoiseScaleReading(
        b_simple=own.b_simple,
        low=own.low,
        high=own.high,
        status=own.status,
        reason=doubted.reason if doubted else _reason(averages, total.fit.interval),
        advice=advice,
        drift=total.fit.drift if is_resolved else None,
        drift_error=total.fit.drift_error if is_resolved else None,
        average=None if doubted else _run_average(history.run_average(), level),
        grad_sq=own.grad_sq,
        trace_cov=own.trace_cov,
        units_per_window=averages.units_per_window,
        effective_units=averages.effective_units,
        u=averages.u,
        windows=averages.windows,
        set_aside=asides.n,
        last_set_aside=asides.last if asides.last and _still_matters(asides.last, averages) else None,
        last_group_set_asides=tuple(each for each in asides.last_in_groups if _still_matters(each, averages)),
        influence=None if doubted else _influence(total),
        dropped=dict(averages.dropped),
        windows_needed=needed,
        consistency=averages.consistency,
        doubts=doubts,
        scale=averages.scale,
        scale_residual=averages.scale_residual,
        unit=unit,
        every=_spacing(averages),
        further_units=averages.further_per_unit,
        groups={
            name: replace(groups[name], set_aside=asides.n_in_group[name]) for name in history.groups if name in groups
        },
    )


def _still_matters(aside: SetAside, averages: NoiseScaleAverages) -> bool:
    """Whether a window that was set aside is so recent that it would still have weight."""
    n_since = (averages.n_seen - aside.window) / _spacing(averages)
    return n_since < min(averages.history.horizon, _LONGEST_MATTER)


def _spacing(averages: NoiseScaleAverages) -> float:
    """Windows of training for each measured one, over the horizon."""
    return averages.history.spacing.per_measured(averages.history.horizon)


def _stale(averages: NoiseScaleAverages) -> str:
    """Why the last windows say nothing about now; empty where they do."""
    history = averages.history
    missing = round((averages.n_seen - history.last_window) / history.spacing.now)
    if not averages.windows or missing <= max(_MOST_MISSING * min(history.horizon, averages.windows), 5):
        return ""
    last = f": {averages.last_drop}" if averages.last_drop else ""
    return f"the last {plural(missing, 'window')} could not be used{last}"


def _fit(
    averages: NoiseScaleAverages, level: float, doubted: RatioInterval | None, *, with_groups: bool, now: int
) -> tuple[_Fitted, dict[str, GroupReading]]:
    """The trend of the total, and a reading of each group. Of a doubted reading, no trend is computed."""
    total, groups, horizon = None, {}, averages.history.horizon
    for names, series in averages.history.series(now, with_groups=with_groups):
        means = zip(series.mean_trace_cov.tolist(), series.mean_grad_sq.tolist(), strict=True)
        levels = [WindowEstimate(*mean) if len(series.ages) else None for mean in means]
        for start in range(0, len(names), _SERIES_AT_ONCE):
            part = slice(start, start + _SERIES_AT_ONCE)
            if doubted:
                fits = [TrendFit(doubted)] * len(names[part])
            else:
                rows = series.trace_cov[part], series.grad_sq[part]
                fits = fit_trends(*rows, series.ages, horizon, level=level, spacing=_spacing(averages))
            for name, fit, mean in zip(names[part], fits, levels[part], strict=True):
                fitted = _Fitted(fit, series, mean)
                if name is None:
                    total = fitted
                else:
                    groups[name] = _group(fitted, doubted)
    assert total is not None
    return total, groups


def _advice(averages: NoiseScaleAverages, total: _Fitted) -> tuple[str, int | None]:
    """What would make the noise scale known better, and the windows that are still needed for ± 20 %."""
    fit, horizon, spacing = total.fit, averages.history.horizon, _spacing(averages)
    used = horizon if fit.horizon is None else fit.horizon / spacing
    effective, most_effective = _effective_windows(total.series, used, horizon, spacing)
    advice = advise(
        fit.interval.status,
        fit.log_error,
        effective=effective,
        most_effective=most_effective,
        horizon=horizon,
        drift=max(abs(fit.drift or 0.0) - (fit.drift_error or 0.0), 0.0) * spacing,
        n_pieces=averages.u * averages.effective_units if averages.u and averages.effective_units else None,
        n_units=averages.effective_units,
        misfit=fit.misfit,
        spacing=spacing,
    )
    return advice, windows_needed(fit.log_error, effective=effective, most_effective=most_effective)


def _effective_windows(series: Series, used: float, horizon: float, spacing: float) -> tuple[float, float]:
    """Effective windows of a trend with the horizon that it used, and at most with the horizon that it may use.

    Args:
        series: the windows.
        used: horizon in measured windows.
        horizon: likewise, the one that it may use.
        spacing: windows of training for each measured one.
    """
    if not len(series.ages):
        return 0.0, math.inf
    now = effective_windows(series.ages / spacing, series.counts, used)
    return now, max(now, most_effective_windows(horizon))


def _run_average(running: RunningNoiseScale, level: float) -> RunAverage | None:
    if not running.windows:
        return None
    interval = running.interval(level)
    is_resolved = interval.status == "resolved" and running.grad_sq
    ratio = (running.trace_cov or 0.0) / running.grad_sq if is_resolved and running.grad_sq else None
    return RunAverage(ratio, interval.low, interval.high, interval.status, running.windows)


def _influence(total: _Fitted) -> Influence | None:
    """The window that moves the estimate most."""
    if not total.fit.influence:
        return None
    i = max(range(len(total.fit.influence)), key=lambda j: abs(total.fit.influence[j]))
    return Influence(round(float(total.series.numbers[i])), total.fit.influence[i])


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


def _group(fitted: _Fitted, doubted: RatioInterval | None) -> GroupReading:
    interval = doubted or fitted.fit.interval
    level = None if doubted else fitted.level
    return GroupReading(
        status=interval.status,
        b_simple=fitted.fit.ratio if interval.status == "resolved" else None,
        low=interval.low,
        high=interval.high,
        grad_sq=level.grad_sq if level else None,
        trace_cov=level.trace_cov if level else None,
    )
