"""The figures over the course of a run: noise scale, its two parts, gradient norm with clipping, logged values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from bokeh.models import NumeralTickFormatter
from bokeh.plotting import figure

from sonde.runs.reader import Reading
from sonde.runs.report.curve_style import (
    WINDOW,
    TimeAxis,
    add_bands,
    add_curve,
    add_triangles,
    new_curve,
    restart_legend,
)
from sonde.runs.report.figures import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    LegendEntry,
    Plot,
    Scale,
    add_hover,
    add_line_at,
    noise_scale_axis,
    scale_for,
)
from sonde.runs.report.logged_interval import logged_batch
from sonde.runs.report.pixels import is_thinned
from sonde.runs.report.timeline import R, Timeline
from sonde.wording import estimate, number, shorten


def noise_scale_curve(line: Timeline[Reading], axis: TimeAxis) -> Plot | str:
    """B_simple with its interval on a log axis, and the batch size across it.

    If only a bound is known, the band is hatched and open to the top or to the bottom. If nothing is known, there is a
    gap. A dotted curve shows the average over the run.
    """
    low = line.metric("gns/b_simple_low")
    batch = line.column(lambda r: logged_batch(r.metrics, line.unit)[0])
    if all(map(math.isnan, low)):
        return "No reading has an estimate or a lower bound of the noise scale yet: measure more windows."
    resolved = line.column(lambda r: r.metrics.get("gns/b_simple") if r.status == "resolved" else None)
    bound = line.column(lambda r: r.metrics.get("gns/b_simple_low") if r.status == "lower_bound" else None)
    upper = line.column(lambda r: r.high if r.status == "upper_bound" else None)
    drawn = [next((v for v in row if not math.isnan(v)), math.nan) for row in zip(resolved, bound, upper, strict=True)]
    average = line.metric("gns/b_simple_average")

    high = line.column(lambda r: r.high)
    shown = [v for v in [*drawn, *batch, *average] if v > 0]
    y = noise_scale_axis([*shown, *(v for v in low if v > 0), 2 * max(shown, default=1.0)], high)
    fig = new_curve(line, axis, y, y_label=f"Noise scale ({line.unit})", height=380)
    add_bands(fig, line.x, [v if r >= 0 else math.nan for v, r in zip(low, resolved, strict=True)], high, y,
               fill_color=BLUE, fill_alpha=0.16)  # fmt: skip
    for bottom, top in ((bound, high), ([math.nan if math.isnan(v) else y.start for v in upper], upper)):
        add_bands(fig, line.x, bottom, top, y, by_majority=True, fill_color=GREY, fill_alpha=0.10,
                   hatch_pattern="/", hatch_color=GREY, hatch_alpha=0.2, hatch_scale=10)  # fmt: skip
    _add_batch_size(fig, line, [y.clamp(b) for b in batch])
    add_curve(fig, line.x, [y.clamp(v) for v in average], INK, dash="dotted")
    add_curve(fig, line.x, [y.clamp(v) for v in resolved], BLUE)
    add_triangles(fig, line.x, [y.clamp(v) for v in bound], "triangle", GREY)
    add_triangles(fig, line.x, [y.clamp(v) for v in upper], "inverted_triangle", GREY)
    columns = {
        "x": line.x,
        "y": [y.clamp(v) for v in drawn],
        "window": line.windows,
        "seen": line.metric("run/units_seen"),
        "batch": batch,
        "known": line.texts(_known),
        "average": line.texts(lambda r: number(r.metrics.get("gns/b_simple_average"))),
    }
    rows = [("noise scale now", "@known"), ("average over the run", "@average")]
    rows += [("batch size", "@batch{0,0.[0]}"), WINDOW, ("units seen", "@seen{0,0}")]
    add_hover(fig, columns, rows)
    return Plot((fig,), (*_noise_scale_legend(line), *restart_legend(line)))


def moments_curve(line: Timeline[Reading], axis: TimeAxis) -> Plot | str:
    """tr Σ and |G|² on one log axis: their distance is the noise scale. Marks show estimates at or below 0."""
    trace, signal = line.metric("gns/trace_cov"), line.metric("gns/grad_sq")
    if all(map(math.isnan, [*trace, *signal])):
        return "No reading holds noise or signal, the two parts of the noise scale."
    y = scale_for([*trace, *signal], "log")
    fig = new_curve(line, axis, y, y_label="Squared gradient norm", height=340)
    add_curve(fig, line.x, [v if v > 0 else math.nan for v in trace], ORANGE)
    add_curve(fig, line.x, [v if v > 0 else math.nan for v in signal], GREEN)
    below = [y.at(0.025) if v <= 0 else math.nan for v in signal]
    add_triangles(fig, line.x, below, "inverted_triangle", GREEN, limit=len(below))
    add_hover(
        fig,
        {
            "x": line.x,
            "y": [y.clamp(v) for v in signal],
            "window": line.windows,
            "trace": line.texts(lambda r: number(r.metrics.get("gns/trace_cov"))),
            "signal": line.texts(lambda r: number(r.metrics.get("gns/grad_sq"))),
        },
        [("noise tr Σ", "@trace"), ("signal |G|²", "@signal"), WINDOW],
    )
    legend = [
        LegendEntry("line", ORANGE, "noise tr Σ: variance of the gradient of one unit"),
        LegendEntry("line", GREEN, "signal |G|²: squared norm of the true gradient"),
    ]
    if any(v <= 0 for v in signal):
        legend.append(LegendEntry("down", GREEN, "|G|² estimated at or below 0: not yet distinguishable from 0"))
    return Plot((fig,), (*legend, *restart_legend(line)))


def norm_curve(line: Timeline[Reading], axis: TimeAxis) -> Plot | str:
    """Gradient norm before clipping, and below it the share of windows that were clipped."""
    norm, clipped = line.metric("grad/norm"), line.metric("grad/clip_fraction")
    if all(map(math.isnan, norm)):
        return "The gradient norm was not measured in this run."
    fig = new_curve(line, axis, scale_for(norm), y_label="Gradient norm", height=260)
    add_curve(fig, line.x, norm, BLUE)
    add_hover(
        fig,
        {
            "x": line.x,
            "y": norm,
            "window": line.windows,
            "norm": line.texts(lambda r: number(r.metrics.get("grad/norm"))),
        },
        [("gradient norm", "@norm"), WINDOW],
    )
    legend = (LegendEntry("line", BLUE, "gradient norm before clipping"), *restart_legend(line))
    if all(map(math.isnan, clipped)):
        return Plot((fig,), legend)
    share = new_curve(line, axis, Scale("linear", -0.04, 1.04), y_label="Clipped windows", height=170)
    share.yaxis[0].formatter = NumeralTickFormatter(format="0 %")
    share.yaxis[0].ticker = [0, 0.5, 1]
    add_bands(share, line.x, [0.0] * len(clipped), clipped, Scale("linear", 0, 1), fill_color=ORANGE, fill_alpha=0.2)
    add_curve(share, line.x, clipped, ORANGE)
    add_hover(share, {"x": line.x, "y": clipped, "window": line.windows}, [("clipped", "@y{0.[0] %}"), WINDOW])
    fig.xaxis.visible = False  # the figure below shows the shared axis
    return Plot((fig, share), (*legend, LegendEntry("line", ORANGE, "share of windows that were clipped")))


def value_curve(line: Timeline[R], axis: TimeAxis, name: str, metric: Mapping[str, str] | None = None) -> Plot:
    """One value over the run, under its own name.

    Args:
        line: readings.
        axis: the horizontal axis.
        name: of the value.
        metric: its unit and meaning, for a metric that is declared.
    """
    values = line.metric(name)
    unit = f" ({metric['unit']})" if metric else ""
    fig = new_curve(line, axis, scale_for(values), y_label=shorten(name) + unit, height=260)
    add_curve(fig, line.x, values, INK)
    texts = line.texts(lambda r: number(r.metrics.get(name), 4))
    add_hover(fig, {"x": line.x, "y": values, "window": line.windows, "value": texts}, [("value", "@value"), WINDOW])
    legend = (LegendEntry("line", INK, metric["meaning"]),) if metric else ()
    return Plot((fig,), (*legend, *restart_legend(line)))


def _known(reading: Reading) -> str:
    metrics = reading.metrics
    return estimate(reading.status, metrics.get("gns/b_simple"), metrics.get("gns/b_simple_low"), reading.high)


def _noise_scale_legend(line: Timeline[Reading]) -> Iterator[LegendEntry]:
    statuses = {row.status for row in line.rows if row is not None}
    if "resolved" in statuses:
        yield LegendEntry("line", BLUE, "noise scale now")
        yield LegendEntry("band", BLUE, "confidence interval of the noise scale")
    if any(row is not None and row.metrics.get("gns/b_simple_average") is not None for row in line.rows):
        yield LegendEntry("dotted", INK, "noise scale, average over the run so far")
    yield LegendEntry("dashed", ORANGE, f"batch size ({line.unit} per step)")
    if "lower_bound" in statuses:
        yield LegendEntry("up", GREY, "lower bound: the noise scale lies above this")
        of_most = ", of most readings at that place" if is_thinned(line.x) else ""
        yield LegendEntry("hatched", GREY, f"no upper limit is known{of_most}")
    if "upper_bound" in statuses:
        yield LegendEntry("down", GREY, "upper bound: the noise scale lies below this")


def _add_batch_size(fig: figure, line: Timeline[Reading], batch: Sequence[float]) -> None:
    sizes = {size for size in batch if not math.isnan(size)}
    if len(sizes) == 1:
        add_line_at(fig, sizes.pop(), "width", ORANGE, "dashed")
    else:
        add_curve(fig, line.x, batch, ORANGE, dash="dashed")
