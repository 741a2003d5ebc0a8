"""Where the noise scale is going, in numbers and in words."""

from __future__ import annotations

import math

from sonde.wording import number


def doubling_windows(drift: float | None, drift_error: float | None) -> float | None:
    """Windows in which B_simple doubles, negative where it halves; None where the drift may be 0.

    Args:
        drift: change of log(B_simple) per window.
        drift_error: its standard error.
    """
    if drift is None or drift_error is None or abs(drift) <= 2 * drift_error or drift == 0:
        return None
    return math.log(2) / drift


def drift_in_words(windows: float | None) -> str:
    """Where the noise scale is going, such as "doubles every 60 windows"; empty where that is not known.

    Args:
        windows: in which it doubles, negative where it halves.
    """
    if windows is None:
        return ""
    every = number(abs(windows), 2)
    return f"{'doubles' if windows > 0 else 'halves'} every {'window' if every == '1' else f'{every} windows'}"
