"""What would make the noise scale known better: measuring more windows, more training, or more units."""

from __future__ import annotations

import math

from sonde.decision.law import FEWEST_STEPS

WELL_KNOWN = 0.2 / 1.96
"""Standard error of log B_simple at ± 20 %."""
BARELY_KNOWN = 0.45
"""Standard error of log B_simple at which |G|² or tr Σ can just be distinguished from 0: about 1 over Student's t."""
_WIDE = 0.25
"""Standard error of log B_simple at about ± 50 %: a two-sided interval that is wider deserves advice."""
GUESSED = 1.5
"""Standard error of log B_simple beyond which first order says nothing, and a remedy ten times too large or too small
would be computed."""
_MOST_LONGER = 4.0
"""More training than so many times the present is no advice."""


def windows_needed(log_error: float | None, n_windows: int, *, power: int = 2) -> int | None:
    """How many more windows until the standard error of log B_simple is that of ± 20 %.

    Args:
        log_error: the standard error now; None where it is not known.
        n_windows: windows that it rests on.
        power: of the error's ratio by which the number of windows grows.

    Returns:
        The number, 0 when it is reached; None when it is not known.
    """
    if log_error is None or log_error > GUESSED or not n_windows:
        return None
    return max(math.ceil(n_windows * ((log_error / WELL_KNOWN) ** power - 1) - 1e-9), 0)


def what_helps(status: str, log_error: float | None, *, n_steps: int, every: float) -> str:
    """What to do about a noise scale of which only a bound, or a wide interval, is known.

    Args:
        status: of the reading.
        log_error: standard error of log B_simple to first order; None where |G|² or tr Σ is not positive so far.
        n_steps: steps of training so far.
        every: one window in so many was measured of late.

    Returns:
        One sentence without its full stop; empty where nothing is needed.
    """
    if not n_steps or (status == "resolved" and (log_error is None or log_error <= _WIDE)):
        return ""
    target = _WIDE if status == "resolved" else BARELY_KNOWN
    factor = None  # of windows
    if log_error is not None and log_error <= GUESSED and n_steps >= FEWEST_STEPS:
        factor = max((log_error / target) ** 2, 1.5)  # below 1.5, a remedy would change little
    if every > 1.5:
        denser = 1 if factor is None else int(every / factor)
        if denser <= 1:
            return "measure every window (every=1)"
        return f"measure one window in {denser} (every={denser}, or a larger budget=)"
    if factor is None:
        what = "tr Σ" if status == "upper_bound" else "|G|²"
        more = "split each batch into more pieces" if status == "upper_bound" else "use more units in each window"
        return f"train on, or {more}; how much cannot be computed before {what} is known better"
    if factor <= _MOST_LONGER:
        return f"train about {_rounded(n_steps * (factor - 1))} more steps"
    # The variance of |G|² falls with the square of the units, where noise is large; that of tr Σ with the pieces.
    if status == "upper_bound":
        return f"split each batch into {factor:.1f} times as many pieces, or use as many times the units in such pieces"
    return f"use about {math.sqrt(factor):.1f} times as many units in each window"


def _rounded(count: float) -> int:
    """Two digits, upwards: the count is no better known, and a log repeats it less often."""
    step = int(10 ** max(math.floor(math.log10(count)) - 1, 0))
    return math.ceil(count / step - 1e-9) * step
