"""Intervals one below the other: a dot with a bar for each estimate, a triangle where only a bound is known."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bokeh.models import FixedTicker, PlainText, Range1d
from bokeh.models.glyphs import Scatter, Segment
from bokeh.plotting import figure

from sonde.runs.report.figures import LegendEntry, Scale, add_hover, add_label, add_log_axis_above, draw, new_figure
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
    shared: Range1d | None = None,
) -> tuple[figure, list[LegendEntry]]:
    """A figure with a row for each interval, the first one on top.

    Args:
        names: of the rows.
        intervals: likewise. Ends beyond the axis are drawn at its edge.
        x: the horizontal axis.
        label: of it, with the unit.
        texts: for each line of the hover text its label, and what makes it of a row's number.
        what: the intervals are of.
        shared: the range of `x`, for a figure below another one: names stand inside, so that both are as wide.
    """
    n, is_tall = len(names), len(names) > TALL
    y = Scale("linear", n - 0.3, -0.9 if shared else -0.7)  # downwards
    height = 44 * n + 70 if shared else (18 if is_tall else 28) * n + 90
    fig = new_figure(x, y, x_label=label, y_label="", height=height, shared=shared)
    fig.yaxis[0].ticker = FixedTicker(ticks=list(range(n)))
    fig.yaxis[0].major_label_overrides = {i: PlainText(text=shorten(name, 25)) for i, name in enumerate(names)}
    fig.yaxis.axis_label = None
    if shared:
        fig.yaxis.visible = fig.ygrid.visible = False
        for i, name in enumerate(names):
            add_label(fig, x.at(0.0), i - 0.08, name)
    if is_tall:
        add_log_axis_above(fig, x)
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
    add_hover(fig, anchors, [float(i) for i in range(n)], texts, mode="hline")
    return fig, legend
