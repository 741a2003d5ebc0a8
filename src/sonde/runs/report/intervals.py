"""Intervals one below the other: a dot with a bar for each noise scale, a triangle where only a bound is known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from bokeh.models.glyphs import Scatter, Segment
from bokeh.plotting import figure

from sonde.runs.report.figures import LegendEntry, Scale, draw
from sonde.stats.columns import BLUE, GREY, Mark
from sonde.stats.intervals import RatioInterval

ABOVE, BELOW = "lower bound: the noise scale lies above this", "upper bound: the noise scale lies below this"
_OF_STATUS: dict[str, tuple[Mark, str, str, dict[str, Any]]] = {
    "resolved": ("whisker", BLUE, "noise scale and its confidence interval", {"marker": "circle"}),
    "lower_bound": ("right", GREY, ABOVE, {"marker": "triangle", "angle": -math.pi / 2}),
    "upper_bound": ("left", GREY, BELOW, {"marker": "triangle", "angle": math.pi / 2}),
    "unresolved": ("cross", GREY, "not known yet", {"marker": "x"}),
}


def draw_intervals(fig: figure, x: Scale, intervals: Sequence[RatioInterval]) -> tuple[list[float], list[LegendEntry]]:
    """Draw a row for each interval, at the heights 0, 1, 2, …

    Args:
        fig: the figure.
        x: its horizontal axis. Ends beyond it are drawn at its edge.
        intervals: from the first row on.

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
        legend.append(LegendEntry(mark, color, meaning))
        if status != "unresolved":
            is_known = status == "resolved"
            bar: dict[str, Any] = {"line_alpha": 0.3, "line_width": 4} if is_known else {"line_dash": "dotted"}
            low, high = ([x.clamp(getattr(intervals[i], end) or 0.0) for i in rows] for end in ("low", "high"))
            draw(fig, Segment(line_color=color, **bar), x0=low, y0=rows, x1=high, y1=rows)
        marks = Scatter(size=9, fill_color=color, line_color=color, **style)
        draw(fig, marks, x=[anchors[i] for i in rows], y=rows)
    return anchors, legend
