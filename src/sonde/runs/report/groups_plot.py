"""The figure of the noise scale of each group of parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from bokeh.models import FixedTicker, PlainText
from bokeh.models.glyphs import Scatter, Segment
from bokeh.plotting import figure

from sonde.batch_size.stats.reading import GroupReading
from sonde.runs.reader import Reading
from sonde.runs.report.figures import (
    BLUE,
    GREY,
    ORANGE,
    LegendEntry,
    Plot,
    Scale,
    add_axis_above,
    add_hover,
    add_line_at,
    draw,
    new_figure,
    noise_scale_axis,
)
from sonde.runs.report.logged_interval import logged_batch
from sonde.wording import estimate, number, shorten

MAX_GROUPS = 400
"""Largest number of groups that are drawn. A longer figure would be unreadable and large."""

_GREY = {"fill_color": GREY, "line_color": GREY}
_MARKS: dict[str, dict[str, Any]] = {
    "resolved": {"marker": "circle", "fill_color": BLUE, "line_color": BLUE, "size": 9},
    "lower_bound": {"marker": "triangle", **_GREY, "size": 9, "angle": -math.pi / 2},  # points to the right
    "upper_bound": {"marker": "triangle", **_GREY, "size": 9, "angle": math.pi / 2},  # points to the left
    "unresolved": {"marker": "x", **_GREY, "size": 8},
}

_TALL = 30  # with more groups, rows are closer and the axis is repeated above


def groups_plot(reading: Reading, order: Sequence[str], unit: str) -> Plot | str:
    """B_simple of each group in one reading, as a dot with its interval.

    Args:
        reading: the last one.
        order: the groups in the model's order.
        unit: plural name of the unit.

    Returns:
        The figure with the first group on top, or a sentence that says why there is none.
    """
    groups = ordered_groups(reading, order)
    if not groups:
        return "The log holds no values of groups of parameters: sonde.attach(log_groups=True) writes them."
    if all(group.status == "unresolved" for group in groups.values()):
        return "No group of parameters has a known noise scale yet: measure more windows."
    batch, _ = logged_batch(reading.metrics, unit)
    overall = reading.metrics.get("gns/b_simple") if reading.status == "resolved" else None
    known = [v for g in groups.values() for v in (g.b_simple, g.low) if v]
    lines = [v for v in (batch, overall) if v is not None]
    x = noise_scale_axis([*known, *lines], [g.high for g in groups.values() if g.high is not None])
    n_groups = len(groups)
    fig = new_figure(
        x,
        Scale("linear", n_groups - 0.3, -0.7),  # downwards: the first group on top
        x_label=f"Noise scale ({unit})",
        y_label="",
        height=(18 if n_groups > _TALL else 28) * n_groups + 90,
    )
    fig.yaxis[0].ticker = FixedTicker(ticks=list(range(n_groups)))
    fig.yaxis[0].major_label_overrides = {i: PlainText(text=shorten(name, 25)) for i, name in enumerate(groups)}
    fig.yaxis.axis_label = None
    if n_groups > _TALL:
        add_axis_above(fig, x)
    for value, color, dash in ((batch, ORANGE, "dashed"), (overall, BLUE, "dotted")):
        if value:
            add_line_at(fig, value, "height", color, dash)
    _add_intervals(fig, x, list(groups.values()))
    _add_texts(fig, x, groups)
    return Plot((fig,), _legend(list(groups.values()), batch, overall, unit))


def ordered_groups(reading: Reading, order: Sequence[str]) -> dict[str, GroupReading]:
    """The reading's groups in the given order, then any others; at most `MAX_GROUPS`."""
    names = dict.fromkeys([*(name for name in order if name in reading.groups), *reading.groups])
    return {name: reading.groups[name] for name in list(names)[:MAX_GROUPS]}


def _add_intervals(fig: figure, x: Scale, groups: Sequence[GroupReading]) -> None:
    for status, mark in _MARKS.items():
        rows = [i for i, group in enumerate(groups) if group.status == status]
        ends = [(g.low, g.high) for g in (groups[i] for i in rows) if g.low is not None and g.high is not None]
        if status != "unresolved":
            style: dict[str, Any] = (
                {"line_width": 4, "line_alpha": 0.3}
                if status == "resolved"
                else {"line_dash": "dotted", "line_alpha": 0.7}
            )
            low, high = [x.clamp(low) for low, _ in ends], [x.clamp(high) for _, high in ends]
            draw(fig, Segment(line_color=mark["line_color"], **style), x0=low, y0=rows, x1=high, y1=rows)
        draw(fig, Scatter(**mark), x=[_anchor(groups[i], x) for i in rows], y=rows)


def _add_texts(fig: figure, x: Scale, groups: dict[str, GroupReading]) -> None:
    columns: dict[str, list[Any]] = {
        "x": [_anchor(group, x) for group in groups.values()],
        "y": [float(row) for row in range(len(groups))],
        "name": list(groups),
        "known": [estimate(g.status, g.b_simple, g.low, g.high) for g in groups.values()],
        "trace": [number(group.trace_cov) for group in groups.values()],
        "signal": [number(group.grad_sq) for group in groups.values()],
    }
    rows = [("group", "@name"), ("noise scale", "@known"), ("noise tr Σ", "@trace"), ("signal |G|²", "@signal")]
    add_hover(fig, columns, rows, mode="hline")


def _anchor(group: GroupReading, x: Scale) -> float:
    known = {"resolved": group.b_simple, "lower_bound": group.low, "upper_bound": group.high, "unresolved": None}
    value = known[group.status]
    return x.at(0.015) if value is None else x.clamp(value)


def _legend(
    groups: Sequence[GroupReading], batch: float | None, overall: float | None, unit: str
) -> tuple[LegendEntry, ...]:
    statuses = {group.status for group in groups}
    legend = []
    if "resolved" in statuses:
        legend.append(LegendEntry("whisker", BLUE, "noise scale and its confidence interval"))
    if "lower_bound" in statuses:
        legend.append(LegendEntry("right", GREY, "lower bound: the noise scale lies above this"))
    if "upper_bound" in statuses:
        legend.append(LegendEntry("left", GREY, "upper bound: the noise scale lies below this"))
    if "unresolved" in statuses:
        legend.append(LegendEntry("cross", GREY, "not known yet"))
    if batch:
        legend.append(LegendEntry("dashed", ORANGE, f"batch size, {number(batch)} {unit}"))
    if overall:
        legend.append(LegendEntry("dotted", BLUE, f"whole model, {number(overall)} {unit}"))
    return tuple(legend)
