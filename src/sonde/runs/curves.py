"""The figures over the course of a run: noise scale, its two parts, gradient norm with clipping, logged values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from statistics import median
from typing import Any

from bokeh.models import ColumnDataSource, NumeralTickFormatter, Range1d
from bokeh.plotting import figure

from sonde.runs.figures import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    Key,
    Plot,
    Scale,
    add_hover,
    add_line_at,
    new_figure,
    noise_scale_axis,
    scale_for,
)
from sonde.runs.reader import Reading
from sonde.runs.timeline import Timeline
from sonde.wording import estimate, number, shorten

_WINDOW = ("window", "@window{0,0}")
_MAX_TRIANGLES = 40


@dataclass(frozen=True)
class TimeAxis:
    """The horizontal axis that all curves of a run share, so that they zoom together.

    Attributes:
        scale: what it shows.
        shared: the one range object.
    """

    scale: Scale
    shared: Range1d


def time_axis(line: Timeline) -> TimeAxis:
    """The axis for one run."""
    room = scale_for(line.x, "linear")
    scale = replace(room, start=max(room.start, 0.0))
    return TimeAxis(scale, Range1d(start=scale.start, end=scale.end))


def noise_scale_curve(line: Timeline, axis: TimeAxis) -> Plot | str:
    """B_simple with its interval on a log axis, and the batch size across it.

    Where only a lower bound is known, the band is hatched and open to the top. Where nothing is known there is a gap.
    """
    low, batch = line.metric("gns/b_simple_low"), line.metric("gns/units_per_window")
    if all(map(math.isnan, low)):
        return "No reading has resolved or bounded the noise scale yet: measure more windows."
    resolved = line.column(lambda r: r.metrics.get("gns/b_simple") if r.status == "resolved" else None)
    bound = line.column(lambda r: r.metrics.get("gns/b_simple_low") if r.status == "lower_bound" else None)
    drawn = [a if math.isnan(b) else b for a, b in zip(resolved, bound, strict=True)]

    high = line.column(lambda r: r.high)
    y = noise_scale_axis([*drawn, *low, *batch, 2 * max((v for v in [*drawn, *batch] if v > 0), default=1.0)], high)
    fig = _new_curve(line, axis, y, y_label=f"Noise scale ({line.unit})", height=380)
    _add_bands(fig, line.x, [v if r >= 0 else math.nan for v, r in zip(low, resolved, strict=True)], high, y,
               fill_color=BLUE, fill_alpha=0.16)  # fmt: skip
    _add_bands(fig, line.x, bound, high, y, fill_color=GREY, fill_alpha=0.10,
               hatch_pattern="/", hatch_color=GREY, hatch_alpha=0.2, hatch_scale=10)  # fmt: skip
    _add_batch_size(fig, line, [y.clamp(b) for b in batch])
    _add_curve(fig, line.x, [y.clamp(v) for v in resolved], BLUE)
    _add_triangles(fig, line.x, [y.clamp(v) for v in bound], "triangle", GREY)
    columns = {
        "x": line.x,
        "y": [y.clamp(v) for v in drawn],
        "window": line.windows,
        "seen": line.metric("run/units_seen"),
        "batch": batch,
        "known": line.texts(_known),
    }
    rows = [("noise scale", "@known"), ("batch size", "@batch{0,0.[0]}"), _WINDOW, ("units seen", "@seen{0,0}")]
    add_hover(fig, columns, rows)
    return Plot((fig,), (*_noise_scale_keys(line), *_restart_key(line)))


def moments_curve(line: Timeline, axis: TimeAxis) -> Plot | str:
    """tr Σ and |G|² on one log axis: their distance is the noise scale. Estimates at or below 0 are marked."""
    trace, signal = line.metric("gns/trace_cov"), line.metric("gns/grad_sq")
    if all(map(math.isnan, [*trace, *signal])):
        return "No reading holds the two parts of the noise scale."
    y = scale_for([*trace, *signal], "log")
    fig = _new_curve(line, axis, y, y_label="Squared gradient norm", height=340)
    _add_curve(fig, line.x, [v if v > 0 else math.nan for v in trace], ORANGE)
    _add_curve(fig, line.x, [v if v > 0 else math.nan for v in signal], GREEN)
    below = [y.at(0.025) if v <= 0 else math.nan for v in signal]
    _add_triangles(fig, line.x, below, "inverted_triangle", GREEN, limit=len(below))
    add_hover(
        fig,
        {
            "x": line.x,
            "y": [y.clamp(v) for v in signal],
            "window": line.windows,
            "trace": line.texts(lambda r: number(r.metrics.get("gns/trace_cov"))),
            "signal": line.texts(lambda r: number(r.metrics.get("gns/grad_sq"))),
        },
        [("noise tr Σ", "@trace"), ("signal |G|²", "@signal"), _WINDOW],
    )
    keys = [
        Key("line", ORANGE, "noise: variance of the gradient from one unit alone, tr Σ"),
        Key("line", GREEN, "signal: squared norm of the true gradient, |G|²"),
    ]
    if any(v <= 0 for v in signal):
        keys.append(Key("down", GREEN, "estimate of |G|² at or below 0: hidden in the noise so far"))
    return Plot((fig,), (*keys, *_restart_key(line)))


def norm_curve(line: Timeline, axis: TimeAxis) -> Plot | str:
    """Gradient norm before clipping, and below it the share of windows that were clipped."""
    norm, clipped = line.metric("grad/norm"), line.metric("grad/clip_fraction")
    if all(map(math.isnan, norm)):
        return "The gradient norm was not measured in this run."
    fig = _new_curve(line, axis, scale_for(norm), y_label="Gradient norm", height=260)
    _add_curve(fig, line.x, norm, BLUE)
    add_hover(
        fig,
        {
            "x": line.x,
            "y": norm,
            "window": line.windows,
            "norm": line.texts(lambda r: number(r.metrics.get("grad/norm"))),
        },
        [("gradient norm", "@norm"), _WINDOW],
    )
    keys = (Key("line", BLUE, "gradient norm before clipping"), *_restart_key(line))
    if all(map(math.isnan, clipped)):
        return Plot((fig,), keys)
    share = _new_curve(line, axis, Scale("linear", -0.04, 1.04), y_label="Clipped", height=170)
    share.yaxis[0].formatter = NumeralTickFormatter(format="0 %")
    share.yaxis[0].ticker = [0, 0.5, 1]
    _add_bands(share, line.x, [0.0] * len(clipped), clipped, Scale("linear", 0, 1), fill_color=ORANGE, fill_alpha=0.2)
    _add_curve(share, line.x, clipped, ORANGE)
    add_hover(share, {"x": line.x, "y": clipped, "window": line.windows}, [("clipped", "@y{0.[0] %}"), _WINDOW])
    fig.xaxis.visible = False
    return Plot((fig, share), (*keys, Key("line", ORANGE, "share of the windows that were clipped")))


def value_curve(line: Timeline, axis: TimeAxis, name: str) -> Plot:
    """One value that the user logged, under its own name."""
    values = line.metric(name)
    fig = _new_curve(line, axis, scale_for(values), y_label=shorten(name), height=260)
    _add_curve(fig, line.x, values, INK)
    texts = line.texts(lambda r: number(r.metrics.get(name), 4))
    add_hover(fig, {"x": line.x, "y": values, "window": line.windows, "value": texts}, [("value", "@value"), _WINDOW])
    return Plot((fig,), _restart_key(line))


def _new_curve(line: Timeline, axis: TimeAxis, y: Scale, *, y_label: str, height: int) -> figure:
    fig = new_figure(axis.scale, y, x_label=line.x_label, y_label=y_label, height=height, shared=axis.shared)
    for position in line.restarts:
        add_line_at(fig, position, "height", GREY, "dotted")
    return fig


def _known(reading: Reading) -> str:
    metrics = reading.metrics
    return estimate(reading.status, metrics.get("gns/b_simple"), metrics.get("gns/b_simple_low"), reading.high)


def _noise_scale_keys(line: Timeline) -> Iterator[Key]:
    statuses = {row.status for row in line.rows if row is not None}
    if "resolved" in statuses:
        yield Key("line", BLUE, "noise scale")
        yield Key("band", BLUE, "its confidence interval")
    yield Key("dashed", ORANGE, f"batch size ({line.unit} per step)")
    if "lower_bound" in statuses:
        yield Key("up", GREY, "known only to lie above this")
        yield Key("hatched", GREY, "no upper limit known")


def _add_batch_size(fig: figure, line: Timeline, batch: Sequence[float]) -> None:
    sizes = {size for size in batch if not math.isnan(size)}
    if len(sizes) == 1:
        add_line_at(fig, sizes.pop(), "width", ORANGE, "dashed")
    else:
        _add_curve(fig, line.x, batch, ORANGE, dash="dashed")


def _add_curve(fig: figure, x: Sequence[float], y: Sequence[float], color: str, dash: str = "solid") -> None:
    """A line that breaks where y is NaN, with a dot where a value has no neighbour to be joined to."""
    fig.line(x, y, color=color, line_width=2, line_dash=dash)
    unknown = [True, *map(math.isnan, y), True]
    alone = [i for i in range(len(y)) if unknown[i] and not unknown[i + 1] and unknown[i + 2]]
    fig.scatter([x[i] for i in alone], [y[i] for i in alone], color=color, size=5)


def _add_bands(
    fig: figure, x: Sequence[float], low: Sequence[float], high: Sequence[float], axis: Scale, **style: Any
) -> None:
    """Fill between two curves, one polygon per unbroken stretch: an area glyph would bridge the gaps."""
    half = _half_spacing(x)
    xs, ys = [], []
    for known, stretch in groupby(range(len(x)), lambda i: not (math.isnan(low[i]) or math.isnan(high[i]))):
        rows = list(stretch)
        if not known:
            continue
        rows = [rows[0], *rows, rows[-1]]
        at = [x[i] for i in rows]
        at[0], at[-1] = at[0] - half, at[-1] + half
        xs.append([*at, *reversed(at)])
        ys.append([*(axis.clamp(low[i]) for i in rows), *(axis.clamp(high[i]) for i in reversed(rows))])
    if xs:
        fig.patches("xs", "ys", source=ColumnDataSource({"xs": xs, "ys": ys}), line_color=None, **style)


def _half_spacing(x: Sequence[float]) -> float:
    """Half the usual distance between readings: a stretch of one reading still has a width."""
    steps = [b - a for a, b in pairwise(x) if b > a]
    return median(steps) / 2 if steps else 0.02 * max(abs(x[0]), 1.0)


def _add_triangles(
    fig: figure, x: Sequence[float], y: Sequence[float], marker: str, color: str, limit: int = _MAX_TRIANGLES
) -> None:
    points = [(a, b) for a, b in zip(x, y, strict=True) if not math.isnan(b)]
    points = points[:: max(math.ceil(len(points) / limit), 1)]
    fig.scatter([a for a, _ in points], [b for _, b in points], marker=marker, color=color, size=8)


def _restart_key(line: Timeline) -> tuple[Key, ...]:
    return (Key("dotted", GREY, "the run was restarted here"),) if line.restarts else ()
