"""Parts of every curve over a run: the shared horizontal axis, lines that break at gaps, bands, marks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from statistics import median
from typing import Any

import numpy as np
from bokeh.models import ColumnDataSource, Range1d
from bokeh.models.glyphs import Line, Patches, Scatter, VSpan
from bokeh.plotting import figure

from sonde.runs.report.figures import GREY, LegendEntry, Scale, draw, new_figure, scale_for
from sonde.runs.report.pixels import envelope, rows_shown
from sonde.runs.report.timeline import R, Timeline

_MAX_TRIANGLES = 40
_MAX_RESTARTS = 100
"""Lines at more restarts would hide the curves."""

WINDOW = ("window", "@window{0,0}")
"""The row of a hover text that shows the window."""
STEP = ("step", "@window{0,0}")
"""The same in the figures of a policy, where a window is called an optimizer step."""


@dataclass(frozen=True)
class TimeAxis:
    """The horizontal axis that all curves of a run share, so that they zoom together.

    Attributes:
        scale: the range at first.
        shared: Bokeh's range object, the same for all curves.
    """

    scale: Scale
    shared: Range1d


def time_axis(line: Timeline[R]) -> TimeAxis:
    """The horizontal axis for one run."""
    room = scale_for(line.x, "linear")
    scale = replace(room, start=max(room.start, 0.0))
    return TimeAxis(scale, Range1d(start=scale.start, end=scale.end))


def new_curve(line: Timeline[R], axis: TimeAxis, y: Scale, *, y_label: str, height: int) -> figure:
    """An empty figure over a run, with a dotted line at each restart; of very many restarts, at each of some."""
    fig = new_figure(axis.scale, y, x_label=line.x_label, y_label=y_label, height=height, shared=axis.shared)
    if line.restarts:
        positions = line.restarts[:: _every_restart(line)]
        draw(fig, VSpan(line_color=GREY, line_dash="dotted", line_width=1.5), x=positions)
    return fig


def add_curve(fig: figure, x: Sequence[float], y: Sequence[float], color: str, dash: str = "solid") -> None:
    """A line that breaks where y is NaN. A value without a neighbour is drawn as a dot.

    A curve of many values is drawn by the lowest and the highest of each pixel, so that no peak is lost, and its ends.
    """
    rows = rows_shown(x, y)
    x, y = [x[i] for i in rows], [y[i] for i in rows]
    draw(fig, Line(line_color=color, line_width=2, line_dash=dash), x=x, y=y)
    unknown = [True, *map(math.isnan, y), True]
    alone = [i for i in range(len(y)) if unknown[i] and not unknown[i + 1] and unknown[i + 2]]
    dots = Scatter(line_color=color, fill_color=color, size=5)
    draw(fig, dots, x=[x[i] for i in alone], y=[y[i] for i in alone])


def add_bands(
    fig: figure,
    x: Sequence[float],
    low: Sequence[float],
    high: Sequence[float],
    axis: Scale,
    *,
    by_majority: bool = False,
    **style: Any,
) -> None:
    """Fill between two curves with one polygon per unbroken stretch: one area glyph would bridge the gaps.

    A band of many values is as high in each pixel as its highest value there, and as low as its lowest. `by_majority`
    leaves out the pixels in which most values are not known.
    """
    x, low, high = envelope(x, low, high, by_majority=by_majority)
    half = _half_spacing(x)
    xs, ys = [], []
    for known, stretch in groupby(range(len(x)), lambda i: not (math.isnan(low[i]) or math.isnan(high[i]))):
        rows = list(stretch)
        if not known:
            continue
        rows = [rows[0], *rows, rows[-1]]
        positions = [x[i] for i in rows]
        positions[0], positions[-1] = positions[0] - half, positions[-1] + half
        xs.append(np.array([*positions, *reversed(positions)]))
        ys.append(np.array([*(axis.clamp(low[i]) for i in rows), *(axis.clamp(high[i]) for i in reversed(rows))]))
    if xs:
        fig.add_glyph(ColumnDataSource({"xs": xs, "ys": ys}), Patches(line_color=None, **style))


def _half_spacing(x: Sequence[float]) -> float:
    """Half the usual distance between readings. It gives a stretch of one reading a width."""
    steps = [b - a for a, b in pairwise(x) if b > a]
    return median(steps) / 2 if steps else 0.02 * max(abs(x[0]), 1.0)


def add_triangles(
    fig: figure, x: Sequence[float], y: Sequence[float], marker: str, color: str, limit: int = _MAX_TRIANGLES
) -> None:
    """Marks where y is known, thinned out so that they do not touch."""
    points = [(a, b) for a, b in zip(x, y, strict=True) if not math.isnan(b)]
    points = points[:: max(math.ceil(len(points) / limit), 1)]
    marks = Scatter(marker=marker, line_color=color, fill_color=color, size=8)
    draw(fig, marks, x=[a for a, _ in points], y=[b for _, b in points])


def restart_legend(line: Timeline[R]) -> tuple[LegendEntry, ...]:
    """The legend of the dotted lines; empty if the run was never restarted."""
    if not line.restarts:
        return ()
    text = "the run was restarted here"
    if (every := _every_restart(line)) > 1:
        text += f"; one of {every} restarts is shown"
    return (LegendEntry("dotted", GREY, text),)


def _every_restart(line: Timeline[R]) -> int:
    return math.ceil(len(line.restarts) / _MAX_RESTARTS)
