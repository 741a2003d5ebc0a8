"""Readings of the noise scale, made again from the windows of a log."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from sonde.batch_size.stats.filter import Level
from sonde.batch_size.stats.noise_scale import WindowEstimate
from sonde.batch_size.stats.solved_window import SolvedWindow
from sonde.batch_size.stats.windows_of_run import WindowsOfRun
from sonde.runs.windows import WindowReading


@dataclass(frozen=True)
class ReplayedReading:
    """The noise scale after one window.

    Attributes:
        window: number of the optimizer step.
        total: of the whole model.
        groups: of each group of parameters.
    """

    window: int
    total: Level
    groups: Mapping[str, Level]


def replay_windows(windows: Iterable[WindowReading], *, every: int = 1) -> Iterator[ReplayedReading]:
    """Make the readings of a run again from its windows, as a probe would have made them.

    Some readings of the probe differ from these. A log does not say which parameters were frozen or released, nor that
    a state was loaded and windows measured again within one start. Doubts that kept the probe from giving a number,
    such as pieces with the same data, are not replayed.

    Args:
        windows: of one start of the run, in order; `sonde.read_windows` reads those of a log that was written with
            `RunLog(log_windows=True)`. If the run was restarted, choose a start by `WindowReading.segment`.
        every: windows between two readings, from 1 up.

    Yields:
        A reading at every window whose number is a multiple of `every`.

    Raises:
        ValueError: for `every` below 1, a window without tr Σ or |G|², or windows of several starts.

    Example:
        >>> from sonde import read_windows, replay_windows
        >>> first_start = (w for w in read_windows("runs/my-run") if w.segment == 0)  # doctest: +SKIP
        >>> for reading in replay_windows(first_start, every=10):  # doctest: +SKIP
        ...     print(reading.window, reading.total.b_simple, reading.total.interval)
    """
    if not isinstance(every, int) or every < 1:
        raise ValueError(f"every must be a whole number of windows from 1 up, got {every!r}: use 1 for all readings")
    return _replayed(windows, every)


def _replayed(windows: Iterable[WindowReading], every: int) -> Iterator[ReplayedReading]:
    run: WindowsOfRun | None = None
    before: WindowReading | None = None
    for window in windows:
        _check_follows(before, window)
        before = window
        run = run or WindowsOfRun(tuple(window.groups))
        run.add(_solved(window), window.window, window.metrics.get("gns/learning_rate"))
        if window.window % every == 0:
            total, *groups = run.levels()
            yield ReplayedReading(window.window, total, dict(zip(run.groups, groups, strict=True)))


def _check_follows(before: WindowReading | None, window: WindowReading) -> None:
    """Refuse windows of several starts: a restart takes windows again, so that numbers and ages would go back."""
    if before is None or (window.segment == before.segment and window.window > before.window):
        return
    raise ValueError(
        f"windows must come from one start of the run, with rising numbers, got window {window.window} of start "
        f"{window.segment} after window {before.window} of start {before.segment}: choose one, for example "
        f"[w for w in windows if w.segment == {window.segment}]; if a state was loaded within that start, also leave "
        "out the windows that were measured again"
    )


def _solved(window: WindowReading) -> SolvedWindow:
    """A window as the probe solved it, as far as its level needs it."""
    per_group = tuple(
        _estimate(window, group.get("trace_cov"), group.get("grad_sq")) for group in window.groups.values()
    )
    total = _estimate(window, window.metrics.get("gns/trace_cov"), window.metrics.get("gns/grad_sq"))
    units = window.metrics.get("gns/effective_units") or math.nan
    squared_norm = total.grad_sq + total.trace_cov / units  # |F|² = |G|² + v tr Σ, v = 1/units
    return SolvedWindow(
        total=total,
        per_group=per_group,  # a log may leave the groups out
        within_between=None,
        norm=math.sqrt(max(squared_norm, 0.0)),
        effective_units=units,
        u=math.nan,
        witness_squares=0.0,
        witness_differences=0.0,
    )


def _estimate(window: WindowReading, trace_cov: float | None, grad_sq: float | None) -> WindowEstimate:
    if trace_cov is None or grad_sq is None:
        raise ValueError(f"window {window.window} of the log lacks tr Σ or |G|²: is the log damaged?")
    return WindowEstimate(trace_cov, grad_sq)
