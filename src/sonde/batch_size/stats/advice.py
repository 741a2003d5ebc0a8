"""What would make the noise scale known better: more windows, a longer horizon, or more units or pieces in a window."""

from __future__ import annotations

import math

_WELL_KNOWN = 0.2 / 1.96
"""Standard error of log B_simple at ± 20 %."""
_BARELY_KNOWN = 0.45
"""Standard error of log B_simple at which |G|² can just be distinguished from 0: about 1 over Student's t."""
_WIDE = 0.25
"""Standard error of log B_simple at about ± 50 %: a two-sided interval that is wider deserves advice."""
_MOST_DRIFT = 2.0
"""Largest change of log B_simple within a horizon that a trend follows well."""


def windows_needed(
    log_error: float | None, *, windows: int, effective: float, most_effective: float, target: float = _WELL_KNOWN
) -> int | None:
    """How many more windows until the standard error of log B_simple is `target`, by default ± 20 %.

    Args:
        log_error: the standard error now; None where it is not known.
        windows: windows so far.
        effective: effective windows of the trend now.
        most_effective: effective windows that the horizon allows at most; infinite for an infinite horizon.
        target: the standard error that is wanted.

    Returns:
        The number, 0 when it is reached; None when it is not known, or when this horizon is too short ever to reach it.
    """
    if log_error is None or effective <= 0:
        return None
    total = effective * (log_error / target) ** 2
    if total <= effective:
        return 0
    if total > most_effective:
        return None
    # Effective windows grow in proportion to windows until the horizon is filled.
    return max(math.ceil(windows * (total / effective - 1.0)), 1)


def advise(
    status: str,
    log_error: float | None,
    *,
    windows: int,
    effective: float,
    most_effective: float,
    horizon: float,
    drift: float | None,
    n_pieces: float | None,
) -> str:
    """What to do about a noise scale of which only a bound, or a wide interval, is known.

    Args:
        status: of the reading.
        log_error: standard error of log B_simple to first order; None where |G|² is not positive so far.
        windows: windows so far.
        effective: effective windows of the trend now.
        most_effective: effective windows that the horizon allows at most.
        horizon: of the trend, in windows.
        drift: change of log B_simple per window, as far as it is known.
        n_pieces: effective number of pieces in a window.

    Returns:
        One sentence without its full stop; empty where nothing is needed.
    """
    if windows == 0 or (status == "resolved" and (log_error is None or log_error <= _WIDE)):
        return ""
    target = _WIDE if status == "resolved" else _BARELY_KNOWN
    if status == "upper_bound":
        return "split each batch into more pieces, or measure more windows, to see the noise"
    if log_error is None:
        if effective < 0.9 * most_effective:
            return "measure more windows; how many cannot be computed before |G|² is positive"
        return "use a longer horizon, or more units in each window; how much cannot be computed before |G|² is positive"
    more = None
    if effective <= 0.9 * most_effective:
        more = windows_needed(
            log_error, windows=windows, effective=effective, most_effective=most_effective, target=target
        )
    if more is not None:
        return f"measure about {_rounded(max(more, 5))} more windows"
    # Of variance, once the horizon is filled. Below 1.5, a remedy would change little.
    factor = max(effective / most_effective * (log_error / target) ** 2, 1.5)
    longer = _rounded(horizon * factor)
    if abs(drift or 0.0) * longer <= _MOST_DRIFT:
        return f"use a horizon of about {longer} windows"
    if n_pieces is not None and n_pieces > 1 and (most := n_pieces / (n_pieces - 1)) > 1.05 * factor:
        # The variance of |G|² from m equal pieces of one batch is in proportion to m/(m − 1).
        left = most / factor
        return f"split each batch into {math.ceil(left / (left - 1) - 1e-9)} or more pieces"
    return (
        f"use about {math.sqrt(factor):.1f} times as many units in each window; the noise scale drifts too fast for a "
        "longer horizon"
    )


def _rounded(count: float) -> int:
    """Two digits, upwards: the count is no better known, and a log repeats it less often."""
    step = int(10 ** max(math.floor(math.log10(count)) - 1, 0))
    return math.ceil(count / step - 1e-9) * step
