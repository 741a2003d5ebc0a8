"""What looks wrong in a reading, in plain words."""

from __future__ import annotations

from sonde.stats.reading import NoiseScaleReading

_UNRESOLVED_AFTER = 50


def find_alerts(reading: NoiseScaleReading) -> dict[str, str]:
    """Judge a reading.

    Args:
        reading: any reading.

    Returns:
        Messages by name: "changed", "same_data", "unresolved"; empty when nothing looks wrong.
    """
    alerts = dict(reading.doubts)
    if not alerts and reading.status != "resolved" and reading.windows >= _UNRESOLVED_AFTER:
        needed = reading.windows_needed
        alerts["unresolved"] = (
            f"|G|² is not told from 0 after {reading.windows} windows, so the noise scale has no upper end: "
            + (f"about {needed} more windows" if needed else "a longer horizon")
            + " or more pieces in a window would resolve it"
        )
    return alerts
