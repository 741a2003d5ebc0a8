"""A column of a run's records: one row says where a number comes from, what it is, and how the report draws it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from sonde.wording import number

BLUE, ORANGE, GREEN, GREY, INK = "#1f5fa8", "#b34d0a", "#1b7f5c", "#7d8793", "#26303a"
"""Colour-blind readers can distinguish these. In a grey print, dashes and marks show the difference. In a dark scheme,
page.css turns the lightness of figures around: nothing here is drawn on a background of its own."""

Mark = Literal[
    "line", "dashed", "dotted", "dotdash", "band", "bar", "dot", "whisker", "up", "down", "left", "right", "cross",
    "interval", "filled", "none",
]  # fmt: skip
Value = str | Callable[[Any], float | None]
"""A column's name, or a function of a reading."""


@dataclass(frozen=True)
class Curve:
    """One thing that is drawn over a run, and its line in the legend.

    Attributes:
        mark: "line", "dashed" or "dotted" for a line that breaks where its value is not known; "band" for the area
            between `value` and `top`; "up" or "down" for triangles; "interval" for an estimate with its ends, and
            triangles where only a bound is known; "filled" for a line and the area below it; "none" for a hover text.
        color: of the mark.
        text: what the mark means. For a column's curve, the column's own meaning.
        value: a number of each reading, None where it is not known. For a column's curve, the column itself.
        top: upper end of a band.
        alpha: how strongly a band is filled.
        stretches: whether the axis has to show it.
        outside: what triangles mean that stand for values beyond the axis; without it, values are drawn at its edge.
    """

    mark: Mark
    color: str = INK
    text: str = ""
    value: Value = ""
    top: Value = ""
    alpha: float = 0.16
    stretches: bool = True
    outside: str = ""


@dataclass(frozen=True)
class Panel:
    """One figure over a run.

    Attributes:
        label: of the vertical axis, with the unit. `{unit}` stands for the name of the probe's unit.
        section: title of the report's section that has the figure.
        kind: of the vertical axis; "any" is logarithmic if values are positive and span more than a factor of 20.
        shows: values that the axis shows in any case.
        ends: the axis, where it does not depend on the values.
        limits: heights of straight lines, and what they mean.
        height: in pixels.
        curves: what is drawn, in the order of the legend.
        hover: for each line of the hover text its label, and what makes it of a reading.
    """

    label: str
    section: str = ""
    kind: Literal["linear", "log", "any"] = "any"
    shows: Sequence[float] = ()
    ends: tuple[float, float] | None = None
    limits: Mapping[float, str] = field(default_factory=dict)
    height: int = 260
    curves: Sequence[Curve] = ()
    hover: Mapping[str, Callable[[Any], str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Description:
    """What a log says of a metric.

    Attributes:
        unit: of the metric.
        meaning: in plain text, for axes and legends.
    """

    unit: str
    meaning: str


@dataclass(frozen=True)
class Metric(Description):
    """A number of a record. Everything that is said of it stands here; its name is the key of the table that has it.

    Attributes:
        unit: `{unit}` stands for the name of the probe's unit.
        meaning: in plain text, for axes and legends. Words before a colon are its short name.
        of: where the number is in what was measured: the path of an attribute such as "average.low", or a function.
            Empty for the attribute that the column's name ends in.
        panel: the figure of the report that draws it; None for none.
        curve: how it is drawn there.
        as_text: what writes the number.
        term: its row in the report's table "How this was measured"; empty for none.
        is_listed: whether the report's table "What each forecast is made of" lists it.
    """

    of: str | Callable[[Any], float | None] = ""
    panel: Panel | None = None
    curve: Curve = Curve("line")
    as_text: Callable[[float], str] = number
    term: str = ""
    is_listed: bool = False

    @property
    def short(self) -> str:
        """The name in few words."""
        return self.meaning.partition(":")[0]

    def text(self, value: float | None) -> str:
        """The number for people."""
        return number(None) if value is None else self.as_text(value)


Columns = Mapping[str, Metric]
"""Metrics by name."""


def taken(columns: Columns, measured: Any) -> dict[str, float | None]:
    """The numbers of what was measured, by name; None where one is not known, or unbounded: JSON has no infinity."""
    return {name: _taken(column.of or name.rpartition("/")[2], measured) for name, column in columns.items()}


def _taken(of: str | Callable[[Any], float | None], measured: Any) -> float | None:
    found = of(measured) if callable(of) else measured
    for name in () if callable(of) else of.split("."):
        if found is not None:
            found = found.get(name) if isinstance(found, Mapping) else getattr(found, name)
    return float(found) if found is not None and math.isfinite(found) else None


def interval(name: str, unit: str, meaning: str, *, of: str = "", value: str = "b_simple", **drawn: Any) -> Columns:
    """The three columns of an interval. `sonde.stats.intervals.logged_interval` reads them back.

    Args:
        name: of the estimate. The ends are `name` with "_low" and "_high".
        unit: as of `Metric`, likewise `meaning`.
        meaning: of the estimate.
        of: the path of the interval; empty for what was measured itself.
        value: the attribute with the estimate. The ends are `low` and `high`.
        **drawn: `panel`, `curve` and `as_text` of the estimate.
    """
    estimate, low, high = (f"{of}.{end}".removeprefix(".") for end in (value, "low", "high"))
    return {
        name: Metric(unit, meaning, estimate, **drawn),
        f"{name}_low": Metric(unit, "lower end of its 95 % interval; 0 or null without one", low),
        f"{name}_high": Metric(unit, "upper end of its 95 % interval; null without one", high),
    }
