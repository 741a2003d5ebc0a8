"""What looks wrong in a reading, in plain words."""

from __future__ import annotations

from sonde.stats.tracker import NoiseScaleReading

_CERTAIN_AFTER, _CERTAIN_FACTOR = 5, 50.0
_LIKELY_AFTER, _LIKELY_FACTOR = 30, 3.0
_UNRESOLVED_AFTER = 50


def find_alerts(reading: NoiseScaleReading) -> dict[str, str]:
    """Judge a reading.

    The consistency of sound data scatters by some 10 % after 30 windows of 2 ranks; data that are the same on all ranks
    give infinity, data that are the same in all micro-batches give 0.

    Args:
        reading: any reading.

    Returns:
        Messages by name: "same_data", "unresolved"; empty when nothing looks wrong.
    """
    alerts = {}
    if (message := _same_data(reading)) is not None:
        alerts["same_data"] = message
    if reading.status != "resolved" and reading.windows >= _UNRESOLVED_AFTER:
        needed = reading.windows_needed
        alerts["unresolved"] = (
            f"|G|² is not told from 0 after {reading.windows} windows, so the noise scale has no upper end: "
            + (f"about {needed} more windows" if needed else "a longer horizon")
            + " or more pieces in a window would resolve it"
        )
    return alerts


def _same_data(reading: NoiseScaleReading) -> str | None:
    if reading.windows < _CERTAIN_AFTER or reading.trace_cov is None or reading.grad_sq is None:
        return None
    if reading.trace_cov <= 1e-6 * abs(reading.grad_sq):
        return (
            "all pieces have the same gradient: the same data on all ranks and in all micro-batches? "
            "Check the sampler's rank, its seed and set_epoch"
        )
    ratio = reading.consistency
    if ratio is None:
        return None
    factor = _LIKELY_FACTOR if reading.windows >= _LIKELY_AFTER else _CERTAIN_FACTOR
    if ratio > factor:
        return (
            f"gradients differ {ratio:.3g}× less between ranks than within them: the same data on all ranks? "
            "Check that the sampler knows the rank"
        )
    if ratio < 1 / factor:
        return (
            f"gradients differ {1 / max(ratio, 1e-12):.3g}× more between ranks than within them: the same data in "
            "several micro-batches of a rank, or ranks that see different kinds of data?"
        )
    return None
