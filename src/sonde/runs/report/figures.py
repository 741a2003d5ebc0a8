"""Figures and tables of the report, all in one style: colours, axes that fit the numbers, hover texts, legends."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
from bokeh.models import (
    ColumnDataSource,
    FixedTicker,
    HoverTool,
    LogAxis,
    NoOverlap,
    NumeralTickFormatter,
    PlainText,
    Range1d,
)
from bokeh.models.annotations import Label, Span
from bokeh.models.glyph import Glyph
from bokeh.models.glyphs import Line, Scatter
from bokeh.plotting import figure
from numpy.typing import NDArray

from sonde.stats.columns import BLUE, GREEN, GREY, INK, ORANGE, Mark
from sonde.wording import number

FONT = "system-ui, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, 'Liberation Sans', sans-serif"

_MAX_TEXTS = 400
"""Largest number of readings for which a figure has a hover text."""

_TOOLTIP = (
    '<div style="font: 13px/1.5 system-ui, sans-serif"><span style="color: #5b6671">{label}:</span> @text{k}</div>'
)
"""A line of a hover text. Bokeh's own labels are light blue, with a contrast of 2.6."""

CURVE_STYLES: tuple[tuple[str, Mark], ...] = tuple(
    (color, mark) for mark in ("line", "dashed", "dotted", "dotdash") for color in (INK, BLUE, ORANGE, GREEN, GREY)
)
"""Of several curves in one figure, in order."""


@dataclass(frozen=True)
class LegendEntry:
    """One entry of a legend. Legends are part of the page, where they wrap; inside a canvas they would not.

    Attributes:
        mark: how the entry is drawn in the figure.
        color: CSS colour.
        text: what the mark means.
    """

    mark: Mark
    color: str
    text: str


@dataclass(frozen=True)
class Table:
    """Rows of plain text, in which the user's words are not escaped yet.

    Attributes:
        caption: what is listed.
        columns: heads of the columns.
        rows: one text per column.
        n_texts: columns of words, which come first. The others are numbers.
        is_code: whether the first column is shown as it is, in a fixed-width font.
    """

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    n_texts: int = 1
    is_code: bool = False


@dataclass(frozen=True)
class Plot:
    """Figures that belong together, one above the other.

    Attributes:
        figures: at least one.
        legend: its entries; may be empty.
        in_words: what the figures show, for who cannot see them.
    """

    figures: tuple[figure, ...]
    legend: tuple[LegendEntry, ...]
    in_words: str

    @property
    def is_tall(self) -> bool:
        """Whether it is higher than a screen."""
        return sum(f.height or 0 for f in self.figures) > 1000


@dataclass(frozen=True)
class Section:
    """One section of the report.

    Attributes:
        title: what is shown.
        text: how to read it, plain text.
        content: figures and tables. Where one is missing, a sentence says why.
    """

    title: str
    text: str
    content: tuple[Plot | Table | str, ...]


@dataclass(frozen=True)
class Scale:
    """An axis: its kind and the range it shows.

    Attributes:
        kind: "log" only if everything drawn is positive.
        start: lower end.
        end: upper end.
    """

    kind: Literal["linear", "log"]
    start: float
    end: float

    def clamp(self, value: float) -> float:
        """The value, or the nearer end of the axis if the value lies outside. NaN stays NaN."""
        return value if math.isnan(value) else min(max(value, self.start), self.end)

    def at(self, fraction: float) -> float:
        """The value at a fraction of the way from the start of the axis to its end."""
        if self.kind == "log":
            return float(self.start * (self.end / self.start) ** fraction)
        return self.start + fraction * (self.end - self.start)


def scale_for(values: Iterable[float | None], kind: Literal["linear", "log", "any"] = "any") -> Scale:
    """An axis that shows all values with some room, and does not collapse if they are equal.

    Args:
        values: the values to draw. None and NaN are left out. A log axis also leaves out zeros and negative values.
        kind: "any" is logarithmic if all values are positive and span more than a factor of 20.

    Example:
        >>> scale_for([1.0, 100.0]).kind, scale_for([0.0, 100.0]).kind
        ('log', 'linear')
        >>> scale_for([5.0, 5.0], "linear")
        Scale(kind='linear', start=4.5, end=5.5)
    """
    # Larger or smaller values would make a range that floats cannot hold.
    numbers = [v for v in values if v is not None and abs(v) < 1e150 and (v == 0 or abs(v) > 1e-150)]
    known = [v for v in numbers if kind != "log" or v > 0]
    low, high = (min(known), max(known)) if known else (1.0, 1.0)
    if kind == "any":
        kind = "log" if low > 0 and high > 20 * low else "linear"
    if kind == "log":
        room = max((high / low) ** 0.08, 1.25)
        return Scale("log", low / room, high * room)
    room = 0.07 * (high - low) or 0.1 * abs(high) or 1.0
    return Scale("linear", low - room, high + room)


def reachable(ends: Sequence[float], values: Sequence[float]) -> list[float]:
    """Ends of intervals, as far as a log axis should show them: the first interval of a run may span decades."""
    most = 8 * max((v for v in values if v > 0), default=1.0)
    return [min(end, most) for end in ends if math.isfinite(end)]


def new_figure(x: Scale, y: Scale, *, x_label: str, y_label: str, height: int, shared: Range1d | None = None) -> figure:
    """An empty figure as wide as the page.

    Args:
        x: the horizontal axis.
        y: the vertical axis.
        x_label: with the unit.
        y_label: with the unit.
        height: in pixels.
        shared: the range of `x`, for figures that zoom together. Another figure zooms by the keyboard alone.
    """
    fig = figure(
        x_axis_type=x.kind,
        y_axis_type=y.kind,
        x_range=shared or Range1d(start=x.start, end=x.end),
        y_range=Range1d(start=y.start, end=y.end),
        height=height,
        min_width=240,
        sizing_mode="stretch_width",
        tools="xbox_zoom,xpan,reset" if shared else "",
        active_drag=None,  # dragging a finger over a figure scrolls the page
        toolbar_location="below" if shared else None,
        background_fill_color=None,
        border_fill_color=None,
    )
    fig.toolbar.logo = None
    fig.toolbar.autohide = True
    fig.outline_line_color = None
    fig.min_border_left, fig.min_border_right = 76, 14  # so that figures one above the other line up
    for axis, scale, label in ((fig.xaxis[0], x, x_label), (fig.yaxis[0], y, y_label)):
        axis.axis_label = PlainText(text=label)  # otherwise "$$" in a unit's name would load MathJax from the network
        _style_axis(axis, scale)
    fig.xaxis[0].major_label_policy = NoOverlap(min_distance=4)  # on narrow screens, fewer labels
    fig.grid.grid_line_color = "#e9edf0"
    return fig


def add_log_axis_above(fig: figure, scale: Scale) -> None:
    """Repeat the horizontal axis at the top of a figure that is too tall to be seen at once."""
    axis = LogAxis()
    _style_axis(axis, scale)
    fig.add_layout(axis, "above")


def _style_axis(axis: Any, scale: Scale) -> None:
    axis.axis_label_text_font = axis.major_label_text_font = FONT
    axis.axis_label_text_font_style = "normal"
    axis.axis_label_text_font_size = axis.major_label_text_font_size = "12px"
    axis.axis_label_text_color = axis.major_label_text_color = INK
    axis.axis_line_color = axis.major_tick_line_color = "#b8c0c8"
    axis.minor_tick_line_color = None
    if scale.kind == "log":
        ticks = log_ticks(scale)
        axis.ticker = FixedTicker(ticks=ticks)
        axis.major_label_overrides = {tick: _tick_label(tick) for tick in ticks}
    elif scale.end - scale.start >= 1e-4 and max(abs(scale.start), abs(scale.end)) < 1e7:
        decimals = 3 if scale.end - scale.start >= 0.02 else 6
        axis.formatter = NumeralTickFormatter(format=f"0,0.[{'0' * decimals}]")


def log_ticks(scale: Scale, most: int = 9) -> list[float]:
    """Round numbers on a log axis. Bokeh's own ticker spaces ticks linearly below two decades.

    Args:
        scale: a log axis.
        most: the largest number of ticks.

    Example:
        >>> log_ticks(Scale("log", 3.0, 300.0))
        [5.0, 10.0, 20.0, 50.0, 100.0, 200.0]
    """
    first, last = math.floor(math.log10(scale.start)), math.floor(math.log10(scale.end))
    for mantissas in ((1, 1.5, 2, 2.5, 3, 4, 5, 6, 8), (1, 2, 3, 5, 7), (1, 2, 5), (1, 3)):
        ticks = [float(f"{m}e{decade}") for decade in range(first, last + 1) for m in mantissas]
        shown = [tick for tick in ticks if scale.start <= tick <= scale.end]
        if len(shown) <= most:
            return shown
    every = math.ceil((last - first + 1) / most)
    return [float(f"1e{decade}") for decade in range(last, first, -every)][::-1]


def _tick_label(tick: float) -> str:
    return f"{tick:,.6g}" if 1e-3 <= tick < 1e6 else number(tick, 2).removeprefix("1.0 × ")


def draw(fig: figure, glyph: Glyph, **columns: Sequence[float | None] | NDArray[np.float64]) -> None:
    """Draw lines, bars or marks; nothing, if no row is known.

    `fig.line`, `fig.scatter` and their like also make two glyphs for a selection, which no figure here has, and draw
    what is empty: a report would take half as long again.

    Args:
        fig: the figure.
        glyph: its style. Its coordinates keep their names, as "x" and "y" of a `Line`.
        **columns: those coordinates, one value for each point, bar or mark; None or NaN if it is not
            known.
    """
    arrays = {name: np.asarray(values, dtype=float) for name, values in columns.items()}
    if not np.isnan([*arrays.values()]).any(axis=0).all():
        fig.add_glyph(ColumnDataSource(arrays), glyph)


def add_hover(
    fig: figure,
    x: Sequence[float | None] | NDArray[np.float64],
    y: Sequence[float | None] | NDArray[np.float64],
    texts: Mapping[str, Callable[[int], str]],
    mode: Literal["vline", "hline"] = "vline",
) -> None:
    """Show a text for the nearest row, wherever in the figure the pointer is.

    Args:
        fig: the figure.
        x: of each row; one without it has no text.
        y: of each row. If only y is NaN, the text appears at the bottom.
        texts: for each line of the text its label, and what makes it of a row's number. A label must not hold text of
            the user. What is made of the row may: Bokeh escapes it.
        mode: "vline" takes the row nearest in x, "hline" the row nearest in y.
    """
    places, heights = (np.array(values, dtype=float) for values in (x, y))
    drawn = evenly(np.flatnonzero(~np.isnan(places)).tolist(), _MAX_TEXTS)
    data: dict[str, Any] = {f"text{k}": [text(i) for i in drawn] for k, text in enumerate(texts.values())}
    data["x"] = places[drawn]
    bottom = cast(Any, fig.y_range).start
    data["y"] = np.where(np.isnan(heights), bottom, heights)[drawn]
    # A line finds its nearest point at any distance, a marker only under the pointer.
    hidden = Line(line_alpha=0) if len(drawn) > 1 else Scatter(line_alpha=0, fill_alpha=0, size=60)
    fig.add_tools(
        HoverTool(
            renderers=[fig.add_glyph(ColumnDataSource(data), hidden)],
            tooltips="".join(_TOOLTIP.format(label=label, k=k) for k, label in enumerate(texts)),
            mode=mode,
            line_policy="nearest",
            limit=1,
            attachment="horizontal",
            visible=False,
        )
    )


def evenly(rows: list[Any], most: int) -> list[Any]:
    """At most so many rows, counted from the end backwards, so that the newest is always among them."""
    return rows[::-1][:: max(math.ceil(len(rows) / most), 1)][::-1]


def dash_of(mark: Mark) -> str:
    """What Bokeh calls the line of a mark."""
    return "solid" if mark == "line" else mark


def add_line_at(fig: figure, value: float, dimension: Literal["width", "height"], color: str, mark: Mark) -> None:
    """A straight line across the figure: at height `value` for "width", at x = `value` for "height"."""
    line = Span(location=value, dimension=dimension, line_color=color, line_dash=dash_of(mark), line_width=1.5)
    fig.add_layout(line)


def add_label(fig: figure, x: float, y: float, text: str, *, align: Literal["left", "right"] = "left") -> None:
    """A label beside a line or a point, never interpreted as TeX.

    Args:
        fig: the figure.
        x: in data coordinates.
        y: in data coordinates; the text is just above.
        text: plain text.
        align: with "left" the text starts at x, with "right" it ends at x.
    """
    fig.add_layout(
        Label(
            x=x,
            y=y,
            x_offset=6 if align == "left" else -6,
            y_offset=3,
            text=PlainText(text=text),
            text_color=INK,
            text_align=align,
            text_font=FONT,
            text_font_size="12px",
        )
    )
