"""Do the pieces hold different data? The noise within ranks, compared with the noise between them."""

from __future__ import annotations

import math

from sonde.stats.intervals import RatioInterval

_AFTER = 5
"""Windows before the first judgement."""
_FACTOR = 3.0
"""A consistency beyond this factor from 1, over its whole interval, is not explained by chance."""


def same_data(windows: int, *, pieces_differ: bool, consistency: float | None, interval: RatioInterval) -> str | None:
    """Whether pieces hold the same data, judged from averages over windows.

    The same data on all ranks give an infinite consistency. The same data in all micro-batches of a rank give 0.

    Args:
        windows: windows averaged.
        pieces_differ: whether the pieces of a window differ by more than rounding.
        consistency: tr Σ within ranks over tr Σ between ranks; None where it cannot be measured.
        interval: of the consistency, from the scatter of the windows: one window with a loss spike may dominate it.

    Returns:
        The likely cause and what to check; None when nothing looks wrong.
    """
    if windows < _AFTER:
        return None
    if not pieces_differ:
        return (
            "all pieces have the same gradient: do all ranks and all micro-batches get the same data? "
            "Check the sampler's rank, its seed and set_epoch"
        )
    if consistency is None:
        return None
    if math.isinf(consistency) or (interval.low is not None and interval.low > _FACTOR):
        how = f"{consistency:.3g}× less between ranks than within ranks"
        if math.isinf(consistency):
            how = "within ranks, and not at all between them"
        return f"gradients differ {how}: do all ranks get the same data? Check that the sampler knows the rank"
    if interval.high is not None and interval.high < 1 / _FACTOR:
        return (
            f"gradients differ {1 / max(consistency, 1e-12):.3g}× more between ranks than within ranks: do several "
            "micro-batches of a rank get the same data, or do ranks see different kinds of data?"
        )
    return None
