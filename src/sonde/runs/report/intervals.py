"""Intervals one below the other: a dot with a bar for each estimate, a triangle where only a bound is known."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bokeh.models import FixedTicker, PlainText
from bokeh.models.glyphs import Scatter, Segment
from bokeh.plotting import figure

from sonde.runs.report.figures import LegendEntry, Scale, add_hover, add_log_axis_above, draw, new_figure
from sonde.stats.columns import BLUE, GREY, Mark
from sonde.stats.intervals import RatioInterval
from sonde.wording import shorten

TALL = 30
"""With more rows, these are closer and the axis is repeated above."""
_OF_STATUS: dict[str, tuple[Mark, str, str, dict[str, Any]]] = {
    "resolved": ("whisker", BLUE, "{what}, with its 95 % interval", {"marker": "circle"}),
    "lower_bound": ("right", GREY, "lower bound: the {what} lies above", {"marker": "triangle", "angle": -math.pi / 2}),
    "upper_bound": ("left", GREY, "upper bound: the {what} lies below", {"marker": "triangle", "angle": math.pi / 2}),
    "unresolved": ("cross", GREY, "not known, or not to be trusted", {"marker": "x"}),
}


def rows_figure(
    names: Sequence[str],
    intervals: Sequence[RatioInterval],
    x: Scale,
    label: str,
    texts: Mapping[str, Callable[[int], str]],
    *,
    what: str = "noise scale",
) -> tuple[figure, list[LegendEntry]]:
    """A figure with a row for each interval, the first one on top.

    Args:
        names: of the rows, beside the vertical axis.
        intervals: likewise.
        x: the horizontal axis.
        label: of it, with the unit.
        texts: for each line of the hover text its label, and what makes it of a row's number.
        what: the intervals are of.
    """
    n, is_tall = len(names), len(names) > TALL
    y = Scale("linear", n - 0.3, -0.7)  # downwards
    fig = new_figure(x, y, x_label=label, y_label="", height=(18 if is_tall else 28) * n + 90)
    fig.yaxis[0].ticker = FixedTicker(ticks=list(range(n)))
    fig.yaxis[0].major_label_overrides = {i: PlainText(text=shorten(name, 25)) for i, name in enumerate(names)}
    fig.yaxis.axis_label = None
    if is_tall:
        add_log_axis_above(fig, x)
    anchors, legend = draw_intervals(fig, x, intervals, what=what)
    add_hover(fig, anchors, [float(i) for i in range(n)], texts, mode="hline")
    return fig, legend


def draw_intervals(
    fig: figure, x: Scale, intervals: Sequence[RatioInterval], *, what: str = "noise scale"
) -> tuple[list[float], list[LegendEntry]]:
    """Draw a row for each interval, at the heights 0, 1, 2, …

    Args:
        fig: the figure.
        x: its horizontal axis. Ends beyond it are drawn at its edge.
        intervals: from the first row on.
        what: they are of.

    Returns:
        Where each mark stands, and the legend.
    """
    ends = {"lower_bound": "low", "upper_bound": "high"}
    known = [getattr(each, ends.get(each.status, "ratio")) for each in intervals]
    anchors = [x.at(0.015) if value is None else x.clamp(value) for value in known]
    legend = []
    for status, (mark, color, meaning, style) in _OF_STATUS.items():
        rows = [i for i, each in enumerate(intervals) if each.status == status]
        if not rows:
            continue
        legend.append(LegendEntry(mark, color, meaning.format(what=what)))
        if status != "unresolved":
            is_known = status == "resolved"
            bar: dict[str, Any] = {"line_alpha": 0.3, "line_width": 4} if is_known else {"line_dash": "dotted"}
            low, high = ([x.clamp(getattr(intervals[i], end) or 0.0) for i in rows] for end in ("low", "high"))
            draw(fig, Segment(line_color=color, **bar), x0=low, y0=rows, x1=high, y1=rows)
        marks = Scatter(size=9, fill_color=color, line_color=color, **style)
        draw(fig, marks, x=[anchors[i] for i in rows], y=rows)
    return anchors, legend
