"""Curves over a run. A `Panel` is one row of a table: it says what one figure shows, and `draw_panels` draws it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from statistics import median
from typing import Any

import numpy as np
from bokeh.models import ColumnDataSource, NumeralTickFormatter, Range1d
from bokeh.models.glyphs import Line, Patches, Scatter, VSpan
from bokeh.plotting import figure
from numpy.typing import ArrayLike, NDArray

from sonde.runs.report.figures import (
    LegendEntry,
    Plot,
    Scale,
    add_hover,
    add_line_at,
    dash_of,
    draw,
    evenly,
    new_figure,
    reachable,
    scale_for,
)
from sonde.runs.run import AnyReading
from sonde.stats.columns import GREY, ORANGE, Columns, Mark, Metric, Value
from sonde.stats.columns import Curve as Curve
from sonde.stats.columns import Panel as Panel
from sonde.stats.intervals import logged_interval
from sonde.wording import capital, count, number

PIXELS = 800
"""The plotting area of the report is at most this wide. A curve of more values shows the lowest and the highest of each
pixel, so that no peak is lost."""
_MAX_TRIANGLES = 40

Floats = NDArray[np.float64]
Drawn = Sequence[tuple[Curve, Floats, Floats | None]]
"""Curves, each with its values, and with the upper ends of a band."""


@dataclass(frozen=True)
class TimeAxis:
    """The horizontal axis that all curves of a run share, so that they zoom together.

    Attributes:
        label: with the unit.
        noun: "window" or "step", for hover texts.
        per_unit: units seen that one unit of the axis stands for; None for an axis of optimizer steps.
        scale: the range at first.
        shared: Bokeh's range object, the same for all curves.
    """

    label: str
    noun: str
    per_unit: float | None
    scale: Scale
    shared: Range1d

    @classmethod
    def of(cls, readings: Sequence[AnyReading], unit: str, *, noun: str = "window") -> TimeAxis:
        """An axis of the units seen, or of windows if a reading does not know the units seen.

        Args:
            readings: at least one.
            unit: plural name of the unit.
            noun: what a window is called: in a policy's figures, a step.
        """
        seen = [reading.metrics.get("run/units_seen") for reading in readings]
        known = [value for value in seen if value is not None]
        per_unit = None
        label = "Optimizer steps" if noun == "step" else "Windows (optimizer steps)"
        if len(known) == len(seen):
            per_unit, label = units_label(max(known), unit)
        places = [reading.window for reading in readings] if per_unit is None else [at / per_unit for at in known]
        room = scale_for(places, "linear")
        scale = replace(room, start=max(room.start, 0.0))
        return cls(label, noun, per_unit, scale, Range1d(start=scale.start, end=scale.end))

    def position(self, reading: AnyReading) -> float:
        """Where a reading lies."""
        if self.per_unit is None:
            return float(reading.window)
        return (reading.metrics.get("run/units_seen") or 0.0) / self.per_unit


def units_label(most: float, unit: str) -> tuple[float, str]:
    """What one unit of an axis of units seen stands for, and the axis' label.

    Args:
        most: units seen at its end. From ten million on, it shows millions.
        unit: plural name of the unit.
    """
    per_unit, word = next(
        (f, w) for f, w in ((1e9, "billion "), (1e6, "million "), (1.0, "")) if most >= 10 * f or f == 1
    )
    return per_unit, capital(f"{word}{unit} seen")


@dataclass(frozen=True)
class OverRun:
    """Readings in rows, one after another.

    Attributes:
        rows: the readings; None where curves break: between two starts of the run, or where it takes steps again.
        x: position of each row on the horizontal axis; NaN where the row is None.
        axis: the horizontal axis.
    """

    rows: tuple[Any, ...]
    x: Floats
    axis: TimeAxis

    @classmethod
    def of(cls, readings: Sequence[AnyReading], axis: TimeAxis) -> OverRun:
        """Lay out readings."""
        rows: list[AnyReading | None] = []
        for reading in readings:
            before = rows[-1] if rows else None
            if before is not None and (before.segment != reading.segment or reading.window < before.window):
                rows.append(None)
            rows.append(reading)
        x = np.array([math.nan if row is None else axis.position(row) for row in rows])
        return cls(tuple(rows), x, axis)

    @property
    def restarts(self) -> list[float]:
        """Positions where the run goes on after a break."""
        return [self.x[i + 1] for i, row in enumerate(self.rows) if row is None]

    def column(self, column: Value) -> Floats:
        """A number of each row, NaN where it is not known."""
        value = (lambda row: row.metrics.get(column)) if isinstance(column, str) else column
        return np.array([None if row is None else value(row) for row in self.rows], dtype=float)

    def columns(self, panel: Panel) -> Drawn:
        """Those of each curve."""
        return [(c, self.column(c.value), self.column(c.top) if c.top else None) for c in panel.curves]

    def new_figure(self, y: Scale, label: str, height: int) -> figure:
        """An empty figure, with a dotted line at each restart."""
        axis = self.axis
        fig = new_figure(axis.scale, y, x_label=axis.label, y_label=label, height=height, shared=axis.shared)
        draw(fig, VSpan(line_color=GREY, line_dash="dotted", line_width=1.5), x=self.restarts)
        return fig

    def add_hover(self, fig: figure, y: Floats, texts: Mapping[str, Callable[[Any], str]]) -> None:
        """A text for each reading, with its window."""
        rows = self.rows
        with_window = {**texts, self.axis.noun: lambda reading: count(reading.window)}
        of_row = {label: (lambda i, text=text: text(rows[i])) for label, text in with_window.items()}
        add_hover(fig, self.x, y, of_row)

    @property
    def legend(self) -> list[LegendEntry]:
        """What the dotted lines mean; empty if the run was never restarted."""
        return [LegendEntry("dotted", GREY, "the run was restarted here")] if self.restarts else []


def panels_of(columns: Columns, section: str, unit: str = "") -> list[Panel]:
    """The panels of a section with the curves and the hover texts of the columns that they draw.

    Args:
        columns: by name.
        section: its title.
        unit: of the probe.
    """
    found: dict[str, Panel] = {}
    for name, column in columns.items():
        if column.panel is not None and column.panel.section == section:
            label = column.panel.label.replace("{unit}", unit)
            panel = found.get(label, replace(column.panel, label=label))
            curves, hover = (*panel.curves, *_curves(name, column)), {**panel.hover, column.short: _hover(name, column)}
            found[label] = replace(panel, curves=curves, hover=hover)
    return list(found.values())


def _curves(name: str, column: Metric) -> tuple[Curve, ...]:
    curve = replace(column.curve, text=column.curve.text or column.meaning, value=name)
    match curve.mark:
        case "none":
            return ()
        case "filled":
            below = replace(curve, mark="band", text="", value=lambda reading: 0.0, top=name)
            return replace(curve, mark="line"), below
        case "interval":
            return interval_curves(name, curve)
    return (curve,)


ABOVE, BELOW = "lower bound: the value lies above this", "upper bound: the value lies below this"


def interval_curves(name: str, curve: Curve) -> tuple[Curve, ...]:
    """An estimate with its interval; where only a bound is known, a triangle.

    Args:
        name: of the estimate.
        curve: how it is drawn, with its meaning.
    """

    def end(of: str, status: str) -> Callable[[Any], float | None]:
        def value(reading: Any) -> float | None:
            known = logged_interval(reading.metrics, name)
            return getattr(known, of) if known.status == status else None

        return value

    return (
        replace(curve, mark="line", stretches=True),
        replace(
            curve,
            mark="band",
            text="its confidence interval",
            value=end("low", "resolved"),
            top=end("high", "resolved"),
        ),
        replace(curve, mark="up", color=GREY, text=ABOVE, value=end("low", "lower_bound")),
        replace(curve, mark="down", color=GREY, text=BELOW, value=end("high", "upper_bound")),
    )


def _hover(name: str, column: Metric) -> Callable[[Any], str]:
    """What writes a column of a reading into a hover text."""
    if column.curve.mark == "interval":
        return lambda reading: logged_interval(reading.metrics, name).in_words
    if column.curve.mark == "band":
        return lambda reading: " to ".join(column.text(reading.metrics.get(end)) for end in (name, column.curve.top))
    return lambda reading: column.text(reading.metrics.get(name))


def draw_panels(panels: Sequence[Panel], readings: Sequence[AnyReading], axis: TimeAxis, absent: str) -> Plot | str:
    """Figures one above another, with one legend.

    Args:
        panels: what is drawn. A panel of which no reading knows a number is left out.
        readings: in the order in which they were written. Those that know nothing of a panel would break its curves.
        axis: the horizontal axis.
        absent: the sentence in place of all figures.
    """
    figures: list[figure] = []
    legend: list[LegendEntry] = []
    words: list[str] = []
    line = whole = OverRun.of(readings, axis)
    for panel in panels:
        columns = whole.columns(panel)
        is_known = ~np.all([np.isnan(values) for _, values, tops in columns if tops is None], axis=0)
        if not is_known.any():
            continue
        line = whole
        if is_known.sum() < len(readings):
            line = OverRun.of([row for row, known in zip(whole.rows, is_known, strict=True) if known], axis)
            columns = line.columns(panel)
        fig, entries = _draw_panel(panel, line, columns)
        figures, legend = [*figures, fig], [*legend, *entries]
        words += _in_words(panel.label, columns)
    if not figures:
        return absent
    for fig in figures[:-1]:
        fig.xaxis.visible = False  # the last figure shows the shared axis
    unique = dict.fromkeys([*legend, *line.legend])
    return Plot(tuple(figures), tuple(unique), " ".join(words))


def _draw_panel(panel: Panel, line: OverRun, columns: Drawn) -> tuple[figure, list[LegendEntry]]:
    y = _scale(panel, columns)
    fig = line.new_figure(y, panel.label, panel.height)
    if panel.ends == (0.0, 1.0):
        fig.yaxis[0].formatter = NumeralTickFormatter(format="0 %")
        fig.yaxis[0].ticker = [0, 0.25, 0.5, 0.75, 1]
    for height in panel.limits:
        add_line_at(fig, height, "width", ORANGE, "dashed")
    shown: list[LegendEntry] = []
    beyond: list[LegendEntry] = []
    heights = np.full(len(line.x), np.nan)  # of the first curve that is known there
    for curve, values, tops in columns:
        if curve.text and not np.isnan(values + (0.0 if tops is None else tops)).all():
            shown.append(LegendEntry(curve.mark, curve.color, curve.text))
        if tops is None:
            heights = np.where(np.isnan(heights), np.clip(values, y.start, y.end), heights)
    for curve, values, tops in sorted(columns, key=lambda each: each[2] is None):  # bands lie below
        if tops is None:
            beyond += _add_values(fig, line, y, curve, values)
        else:
            add_band(fig, line.x, values, tops, y, curve)
    line.add_hover(fig, heights, panel.hover)
    return fig, [*shown, *(LegendEntry("dashed", ORANGE, text) for text in panel.limits.values() if text), *beyond]


def _scale(panel: Panel, columns: Drawn) -> Scale:
    if panel.ends:
        low, high = panel.ends
        return Scale("linear", low - 0.04 * (high - low), high + 0.04 * (high - low))
    shown = [each for each in columns if each[0].stretches]
    values = [*panel.shows, *panel.limits, *(v for _, low, _ in shown for v in low[~np.isnan(low)].tolist())]
    tops = [v for *_, high in shown if high is not None for v in high[np.isfinite(high)].tolist()]
    if panel.kind == "log":
        return scale_for([*values, *reachable(tops, values)], "log")
    scale = scale_for([*values, *tops], panel.kind)
    # An axis that shows 0 begins there, if nothing is negative.
    return replace(scale, start=0.0) if 0.0 in panel.shows and min(values) >= 0 else scale


def _add_values(fig: figure, line: OverRun, y: Scale, curve: Curve, values: Floats) -> Iterator[LegendEntry]:
    """A line or triangles. Yields the legend of values that the axis cannot show."""
    shown = np.clip(values, y.start, y.end)
    if curve.mark in ("up", "down"):
        _add_triangles(fig, line.x, shown, curve.mark, curve.color)
        return
    inside = np.where(values == shown, values, np.nan) if curve.outside else shown
    add_curve(fig, line.x, inside, curve.color, curve.mark)
    ends: tuple[tuple[Mark, Any, float], ...] = ("up", values > y.end, 0.975), ("down", values < y.start, 0.025)
    for mark, is_beyond, height in ends:
        if curve.outside and is_beyond.any():
            _add_triangles(fig, line.x, np.where(is_beyond, y.at(height), np.nan), mark, curve.color)
            yield LegendEntry(mark, curve.color, curve.outside)


def add_curve(fig: figure, x: ArrayLike, y: ArrayLike, color: str, mark: Mark = "line") -> None:
    """A line that breaks where y is NaN. A value without a neighbour is drawn as a dot."""
    places, values = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    if len(places) > 2 * PIXELS:
        places, low, high = per_pixel(places, values, values)
        places, values = np.repeat(places, 2), np.column_stack((low, high)).ravel()
    draw(fig, Line(line_color=color, line_width=2, line_dash=dash_of(mark)), x=places, y=values)
    unknown = np.isnan([np.nan, *values, np.nan])
    alone = unknown[:-2] & ~unknown[1:-1] & unknown[2:]
    draw(fig, Scatter(line_color=color, fill_color=color, size=5), x=places[alone], y=values[alone])


def add_band(fig: figure, x: ArrayLike, low: ArrayLike, high: ArrayLike, axis: Scale, curve: Curve) -> None:
    """Fill between two curves with one polygon per unbroken stretch: one area glyph would bridge the gaps."""
    places, bottom, top = (np.asarray(each, dtype=float) for each in (x, low, high))
    if len(places) > 2 * PIXELS:
        places, bottom, top = per_pixel(places, bottom, top)
    steps = [b - a for a, b in pairwise(places) if b > a]
    half = median(steps) / 2 if steps else 0.02 * max(abs(places[0]), 1.0)  # it gives a stretch of one reading a width
    xs, ys = [], []
    for known, stretch in groupby(range(len(places)), lambda i: not math.isnan(bottom[i] + top[i])):
        if known:
            rows = list(stretch)
            at = [places[rows[0]] - half, *places[rows], places[rows[-1]] + half]
            rows = [rows[0], *rows, rows[-1]]
            xs.append(np.array([*at, *reversed(at)]))
            ys.append(np.clip([*bottom[rows], *reversed(top[rows])], axis.start, axis.end))
    if xs:
        filled = Patches(fill_color=curve.color, fill_alpha=curve.alpha, line_color=None)
        fig.add_glyph(ColumnDataSource({"xs": xs, "ys": ys}), filled)


def _add_triangles(fig: figure, x: Floats, y: Floats, mark: Mark, color: str) -> None:
    """Marks where y is known, thinned out so that they do not touch."""
    points = evenly([(a, b) for a, b in zip(x, y, strict=True) if not math.isnan(b)], _MAX_TRIANGLES)
    marks = Scatter(
        marker="triangle" if mark == "up" else "inverted_triangle", line_color=color, fill_color=color, size=8
    )
    draw(fig, marks, x=[a for a, _ in points], y=[b for _, b in points])


def per_pixel(x: ArrayLike, low: ArrayLike, high: ArrayLike) -> tuple[Floats, Floats, Floats]:
    """One row for each pixel: its position, the lowest value there, and the highest.

    Args:
        x: horizontal positions; NaN where curves break.
        low: lower values, NaN where not known.
        high: upper values, the same as the lower ones for a curve; may be infinite.
    """
    places, bottom, top = (np.asarray(each, dtype=np.float64) for each in (x, low, high))
    known = places[~np.isnan(places)]
    width = float(np.ptp(known)) if len(known) else 0.0
    scale = PIXELS / width if width > 0 and math.isfinite(PIXELS / width) else 0.0
    pixel = np.floor((places - (known.min() if len(known) else 0.0)) * scale)
    starts = np.flatnonzero(~(np.diff(pixel, prepend=np.nan) == 0))  # a row without a position is a pixel of its own
    ends = np.append(starts[1:], len(places)) - 1
    lowest, highest = np.fmin.reduceat(bottom, starts), np.fmax.reduceat(top, starts)
    shown = places[starts]
    is_last = ~np.isnan(shown) & np.append(np.isnan(shown[1:]), True)  # of each unbroken stretch: up to its end
    shown[is_last] = places[ends[is_last]]
    return shown, lowest, highest


def _in_words(label: str, columns: Drawn) -> Iterator[str]:
    """What a panel shows, for who cannot see it."""
    for curve, values, tops in columns:
        known = values[np.isfinite(values)].tolist()
        if known and tops is None:
            first, last, low, high = map(number, (known[0], known[-1], min(known), max(known)))
            what = f"{label}, {curve.text}" if curve.text else label
            yield f"{what}: {first} at first, {last} at last, between {low} and {high}."
