"""What would make the noise scale known better: more windows, a longer horizon, or more units or pieces in a window."""

from __future__ import annotations

import math

from sonde.batch_size.stats.trend import Misfit

_WELL_KNOWN = 0.2 / 1.96
"""Standard error of log B_simple at ± 20 %."""
_BARELY_KNOWN = 0.45
"""Standard error of log B_simple at which |G|² or tr Σ can just be distinguished from 0: about 1 over Student's t."""
_WIDE = 0.25
"""Standard error of log B_simple at about ± 50 %: a two-sided interval that is wider deserves advice."""
_GUESSED = 1.5
"""Standard error of log B_simple beyond which first order says nothing, and a remedy ten times too large or too small
would be computed."""
_MOST_DRIFT = 2.0
"""Largest change of log B_simple within a horizon that a trend follows well."""
_PER_WINDOW = 0.89
"""Effective windows per window until the horizon is filled: (Σω)²/Σω² of weights with a horizon of 0.8 of n windows,
over n."""


def windows_needed(
    log_error: float | None, *, effective: float, most_effective: float, target: float = _WELL_KNOWN
) -> int | None:
    """How many more windows until the standard error of log B_simple is `target`, by default ± 20 %.

    Args:
        log_error: the standard error now; None where it is not known.
        effective: effective windows of the trend now.
        most_effective: effective windows that the horizon allows at most; infinite for an infinite horizon.
        target: the standard error that is wanted.

    Returns:
        The number, 0 when it is reached; None when it is not known, or when this horizon is too short ever to reach it.
    """
    if log_error is None or log_error > _GUESSED or effective <= 0:
        return None
    total = effective * (log_error / target) ** 2
    if total <= effective:
        return 0
    if total > most_effective:
        return None
    return max(math.ceil((total - effective) / _PER_WINDOW - 1e-9), 1)


def advise(
    status: str,
    log_error: float | None,
    *,
    effective: float,
    most_effective: float,
    horizon: float,
    drift: float,
    n_pieces: float | None,
    n_units: float | None,
    misfit: Misfit = "",
    spacing: float = 1.0,
) -> str:
    """What to do about a noise scale of which only a bound, or a wide interval, is known.

    Args:
        status: of the reading.
        log_error: standard error of log B_simple to first order; None where |G|² or tr Σ is not positive so far.
        effective: effective windows of the trend now; 0 before the first.
        most_effective: effective windows that the horizon allows at most.
        horizon: of the trend, in measured windows.
        drift: change of log B_simple per measured window that there is at least, up or down: less its standard error.
        n_pieces: effective number of pieces in a window, u/v.
        n_units: effective number of units in a window, 1/v.
        misfit: of the trend.
        spacing: windows of training for each measured one.

    Returns:
        One sentence without its full stop; empty where nothing is needed.
    """
    if effective <= 0 or (status == "resolved" and (log_error is None or log_error <= _WIDE)):
        return ""
    if misfit == "drift":
        return "use a shorter horizon"
    target = _WIDE if status == "resolved" else _BARELY_KNOWN
    is_filled = effective > 0.9 * most_effective
    more = windows_needed(log_error, effective=effective, most_effective=most_effective, target=target)
    if more is not None and not is_filled:
        n_windows = _rounded(max(more, 5))
        of_training = f" (about {_rounded(n_windows * spacing)} windows of training)" if spacing > 1 else ""
        return f"measure about {n_windows} more windows{of_training}"
    if misfit == "jump":
        return "measure more windows; how many cannot be computed so soon after the noise scale has changed"
    if log_error is None or log_error > _GUESSED:
        return _without_numbers(status, is_filled=is_filled)
    # Of variance, once the horizon is filled. Below 1.5, a remedy would change little.
    factor = max(effective / most_effective * (log_error / target) ** 2, 1.5)
    longer = _longer_horizon(factor, horizon, drift)
    with_longer = "" if longer is None else f"use a horizon of about {longer} windows"
    if status == "upper_bound":
        return _for_noise(factor, with_longer, n_pieces, n_units)
    return _for_signal(factor, with_longer, n_pieces)


def _without_numbers(status: str, *, is_filled: bool) -> str:
    if status == "upper_bound":
        return (
            "split each batch into more pieces, or measure more windows; how many cannot be computed before tr Σ is "
            "known better"
        )
    if not is_filled:
        return "measure more windows; how many cannot be computed before |G|² is known better"
    return "use a longer horizon, or more units in each window; how much cannot be computed before |G|² is known better"


def _for_signal(factor: float, with_longer_horizon: str, n_pieces: float | None) -> str:
    """How the variance of |G|² becomes smaller by a factor: by a longer horizon, where that helps."""
    if with_longer_horizon:
        return with_longer_horizon
    if n_pieces is not None and n_pieces > 1 and (most := n_pieces / (n_pieces - 1)) > 1.05 * factor:
        # The variance of |G|² from m equal pieces of one batch is in proportion to m/(m − 1).
        left = most / factor
        return f"split each batch into {math.ceil(left / (left - 1) - 1e-9)} or more pieces"
    return (
        f"use about {math.sqrt(factor):.1f} times as many units in each window; the noise scale drifts too fast for a "
        "longer horizon"
    )


def _for_noise(factor: float, with_longer_horizon: str, n_pieces: float | None, n_units: float | None) -> str:
    """How the variance of tr Σ becomes smaller by a factor: by more pieces, or a longer horizon where that helps."""
    if n_pieces is not None and n_units is not None and n_pieces > 1:
        # The relative variance of tr Σ from m equal pieces is in proportion to 1/(m − 1).
        pieces = math.ceil(1 + factor * (n_pieces - 1) - 1e-9)
        if pieces <= n_units:
            return f"split each batch into {pieces} or more pieces"
    if with_longer_horizon:
        return with_longer_horizon
    return (
        f"use about {factor:.1f} times as many units in each window, in pieces as small as now; the noise scale drifts "
        "too fast for a longer horizon"
    )


def _longer_horizon(factor: float, horizon: float, drift: float) -> int | None:
    """The horizon with `factor` times the windows; None if the noise scale drifts too fast for it."""
    longer = _rounded(horizon * factor)
    return longer if drift * longer <= _MOST_DRIFT else None


def _rounded(count: float) -> int:
    """Two digits, upwards: the count is no better known, and a log repeats it less often."""
    step = int(10 ** max(math.floor(math.log10(count)) - 1, 0))
    return math.ceil(count / step - 1e-9) * step
