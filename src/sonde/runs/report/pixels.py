"""Curves of more values than pixels: they show the lowest and the highest value of each pixel, and their ends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

PIXELS = 800
"""The plotting area of the report is at most this wide."""

_MAX_BREAKS = 100
"""So many breaks are drawn even where they are narrow."""


def rows_shown(x: Sequence[float], y: Sequence[float]) -> list[int]:
    """The rows by which a curve is drawn, in order; all rows of a short curve.

    Args:
        x: horizontal positions; NaN where the curve breaks.
        y: values, NaN for an unknown value.
    """
    if not is_thinned(x):
        return list(range(len(x)))
    seen = _rows_seen(np.asarray(x, dtype=np.float64))
    values = np.asarray(y, dtype=np.float64)[seen]
    starts = _starts(np.asarray(x, dtype=np.float64)[seen])
    kept = extremes(values, starts)
    known = np.flatnonzero(~np.isnan(values))
    if len(known):
        kept[known[[0, -1]]] = True
    any_known = np.logical_or.reduceat(~np.isnan(values), starts)
    kept[starts[~any_known]] = True  # a pixel without a known value is a gap
    return [int(row) for row in seen[kept]]


def envelope(
    x: Sequence[float], low: Sequence[float], high: Sequence[float], *, by_majority: bool = False
) -> tuple[Sequence[float], Sequence[float], Sequence[float]]:
    """A band with one row for each pixel, from its lowest to its highest value there; a short band as it is.

    Args:
        x: horizontal positions; NaN where the band breaks.
        low: lower end, NaN where it is not known.
        high: upper end, NaN where it is not known; may be infinite.
        by_majority: leave out a pixel unless most of its rows know the band.
    """
    if not is_thinned(x):
        return x, low, high
    seen = _rows_seen(np.asarray(x, dtype=np.float64))
    places = np.asarray(x, dtype=np.float64)[seen]
    starts = _starts(places)
    lowest = np.fmin.reduceat(np.asarray(low, dtype=np.float64)[seen], starts)
    highest = np.fmax.reduceat(np.asarray(high, dtype=np.float64)[seen], starts)
    if by_majority:
        known = ~np.isnan(np.asarray(low, dtype=np.float64) + np.asarray(high, dtype=np.float64))[seen]
        sizes = np.diff(np.append(starts, len(places)))
        lowest[np.add.reduceat(known.astype(np.int64), starts) <= sizes / 2] = np.nan
    middle = places[starts]
    ends = np.append(starts[1:], len(places)) - 1
    last = ~np.isnan(middle) & np.append(np.isnan(middle[1:]), True)  # of each unbroken stretch: up to its end
    middle[last] = places[ends[last]]
    return middle.tolist(), lowest.tolist(), highest.tolist()


def extremes(values: NDArray[np.float64], starts: NDArray[Any]) -> NDArray[np.bool_]:
    """Marks the first of the lowest and the first of the highest values of each pixel. A NaN is neither.

    Args:
        values: [rows].
        starts: the first row of each pixel; [pixels].
    """
    sizes = np.diff(np.append(starts, len(values)))
    marked = np.zeros(len(values), dtype=bool)
    for series in (values, -values):
        lowest = np.repeat(np.fmin.reduceat(series, starts), sizes)
        rows = np.flatnonzero(series == lowest)
        pixels = np.searchsorted(starts, rows, side="right")
        marked[rows[np.flatnonzero(np.diff(pixels, prepend=-1))]] = True
    return marked


def is_thinned(x: Sequence[float]) -> bool:
    """Whether a curve of so many values is drawn by less than all of them."""
    return len(x) > 2 * PIXELS


def _rows_seen(x: NDArray[np.float64]) -> NDArray[np.intp]:
    """All rows; of very many breaks, such as of a thousand restarts, those alone that are wider than a pixel."""
    if np.isnan(x).sum() <= _MAX_BREAKS:
        return np.arange(len(x))
    pixel = _pixels(x)
    width = np.abs(np.append(pixel[1:], np.nan) - np.insert(pixel[:-1], 0, np.nan))
    return np.flatnonzero(~(np.isnan(x) & (width <= 1)))


def _starts(x: NDArray[np.float64]) -> NDArray[Any]:
    """The first row of each pixel; a row without a position is a pixel of its own."""
    return np.flatnonzero(~(np.diff(_pixels(x), prepend=np.nan) == 0))


def _pixels(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """The pixel of each position; NaN without a position."""
    known = x[~np.isnan(x)]
    left, width = (float(known.min()), float(np.ptp(known))) if len(known) else (0.0, 0.0)
    scale = PIXELS / width if width > 0 and math.isfinite(PIXELS / width) else 0.0
    pixels: NDArray[np.float64] = np.floor((x - left) * scale)
    return pixels
