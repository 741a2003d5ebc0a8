"""Do the pieces hold different data? Noise seen within ranks beside noise seen between them."""

from __future__ import annotations

import math

from sonde.stats.intervals import RatioInterval

_AFTER, _FACTOR = 5, 3.0


def same_data(windows: int, *, pieces_differ: bool, consistency: float | None, interval: RatioInterval) -> str | None:
    """What is wrong with the data, from averages over windows.

    Data that are the same on all ranks give an infinite consistency, those that are in all micro-batches give 0.

    Args:
        windows: windows averaged.
        pieces_differ: whether the pieces of a window do, beyond rounding.
        consistency: tr Σ within ranks over tr Σ between ranks; None where it cannot be measured.
        interval: of that ratio, by the scatter of the windows: one window with a loss spike may be all of it.

    Returns:
        The cause and the way out; None when nothing looks wrong.
    """
    if windows < _AFTER:
        return None
    if not pieces_differ:
        return (
            "all pieces have the same gradient: the same data on all ranks and in all micro-batches? "
            "Check the sampler's rank, its seed and set_epoch"
        )
    if consistency is None:
        return None
    if math.isinf(consistency) or (interval.low is not None and interval.low > _FACTOR):
        less = "infinitely less" if math.isinf(consistency) else f"{consistency:.3g}× less"
        return (
            f"between ranks gradients differ {less} than within them: the same data on all ranks? "
            "Check that the sampler knows the rank"
        )
    if interval.high is not None and interval.high < 1 / _FACTOR:
        return (
            f"gradients differ {1 / max(consistency, 1e-12):.3g}× more between ranks than within them: the same data "
            "in several micro-batches of a rank, or ranks that see different kinds of data?"
        )
    return None
