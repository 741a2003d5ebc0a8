"""Figures of branches from one checkpoint: the units that each batch size needs, and its loss over units."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

import numpy as np
from bokeh.models import FixedTicker, Range1d
from bokeh.models.annotations import BoxAnnotation
from bokeh.models.glyphs import Line, Scatter, Segment
from bokeh.plotting import figure

from sonde.evidence.answer import times
from sonde.evidence.branches import Branch, Branches
from sonde.runs.report.curves import Curve, add_band, add_curve
from sonde.runs.report.figures import (
    CURVE_STYLES,
    LegendEntry,
    Plot,
    Scale,
    add_hover,
    add_line_at,
    draw,
    log_ticks,
    new_figure,
    reachable,
    scale_for,
)
from sonde.runs.report.intervals import rows_figure
from sonde.stats.columns import BLUE, GREY, INK, ORANGE
from sonde.stats.intervals import RatioInterval
from sonde.wording import capital, count, number, percent


def ratio_plot(branches: Branches, scales: Sequence[tuple[str, RatioInterval]]) -> Plot | str:
    """The ratio of units over the batch size, and below it the noise scales on the same axis.

    Args:
        branches: with their ratios.
        scales: name and interval of each noise scale.

    Returns:
        The figures, or a sentence that says why there are none.
    """
    known = [r for r in branches.ratios if r.ratio is not None]
    if not known:
        return "No batch size could be compared with the reference."
    unit, level = branches.unit, 1 + branches.tolerance
    x, y = _batch_scale(branches, scales), _ratio_scale(branches)
    shared = Range1d(start=x.start, end=x.end)
    fig = new_figure(
        x, y, x_label=f"Batch size ({unit} per step)", y_label=f"{capital(unit)} needed", height=360, shared=shared
    )
    _mark_batches(fig, x, branches)
    ticks = _ratio_ticks(y)
    fig.yaxis[0].ticker = FixedTicker(ticks=ticks)
    fig.yaxis[0].major_label_overrides = {tick: f"{tick:g}×" for tick in ticks}
    legend = [*_draw_critical(fig, x, branches), *_draw_ratios(fig, y, branches)]
    add_line_at(fig, level, "width", ORANGE, "dashed")
    more = f"{percent(branches.tolerance)} more {unit} than the reference: the tolerance"
    texts: dict[str, Callable[[int], str]] = {
        "batch size": lambda i: number(known[i].batch),
        "times the units of the reference": lambda i: times(known[i]),
        "seeds compared": lambda i: count(len(known[i].logs)),
    }
    heights = [y.clamp(r.ratio or 1.0) for r in known]
    add_hover(fig, [r.batch for r in known], heights, texts)
    figures = [fig]
    if scales:
        names, ofs = zip(*scales, strict=True)
        of_row = {"noise scale": lambda i: names[i], "value": lambda i: ofs[i].in_words}
        rows, marks = rows_figure(names, ofs, x, f"Noise scale or batch size ({unit})", of_row, shared=shared)
        _draw_critical(rows, x, branches)
        figures, legend = [fig, rows], [*legend, *marks]
    said = [f"batch size {number(r.batch)}: {times(r)}" for r in known]
    said += [f"{name}: {of.in_words} {unit}" for name, of in scales]
    words = f"{capital(unit)} that each batch size needs, times those of the reference. {'; '.join(said)}."
    return Plot(tuple(figures), (*dict.fromkeys([LegendEntry("dashed", ORANGE, more), *legend]),), words)


def _batch_scale(branches: Branches, scales: Sequence[tuple[str, RatioInterval]]) -> Scale:
    ends = [end for _, of in scales for end in (of.low, of.ratio) if end]
    shown = [b.batch for b in branches.branches] + ends
    return scale_for([*shown, *reachable([of.high for _, of in scales if of.high], shown)], "log")


def _ratio_scale(branches: Branches) -> Scale:
    ratios = [r for r in branches.ratios if r.ratio is not None]
    shown = [1.0, 1.1 * (1 + branches.tolerance), *(r.ratio for r in ratios if r.ratio and math.isfinite(r.ratio))]
    ends = reachable([end for r in ratios for end in (r.low, r.high) if end is not None], shown)
    return scale_for([*shown, *ends], "log")


def _ratio_ticks(y: Scale) -> list[float]:
    """Round numbers; on a short axis, evenly spaced ones."""
    if y.end > 4 * y.start:
        return log_ticks(y)
    step = next(s for s in (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0) if (y.end - y.start) / s <= 9)
    return [round(k * step, 2) for k in range(math.ceil(y.start / step), math.floor(y.end / step) + 1)]


def _mark_batches(fig: figure, x: Scale, branches: Branches) -> None:
    """A tick at each batch size, and round numbers beyond them."""
    batches = sorted({b.batch for b in branches.branches})
    beyond = [tick for tick in log_ticks(x) if not batches[0] / 1.5 < tick < 1.5 * batches[-1]]
    ticks = sorted([*batches, *beyond])
    fig.xaxis[0].ticker = FixedTicker(ticks=ticks)
    fig.xaxis[0].major_label_overrides = {tick: number(tick) for tick in ticks}


def _draw_critical(fig: figure, x: Scale, branches: Branches) -> list[LegendEntry]:
    critical = branches.critical
    if critical.low is None or critical.high is None:
        return []
    left, right = x.clamp(critical.low), x.clamp(critical.high)
    fig.add_layout(BoxAnnotation(left=left, right=right, fill_color=BLUE, fill_alpha=0.10, line_color=None))
    if critical.ratio is None:
        return [LegendEntry("band", BLUE, "possible range of the critical batch size: no upper end known")]
    add_line_at(fig, critical.ratio, "height", BLUE, "line")
    return [
        LegendEntry("bar", BLUE, f"critical batch size, {number(critical.ratio)} {branches.unit}"),
        LegendEntry("band", BLUE, f"its {percent(0.95)} interval"),
    ]


def _draw_ratios(fig: figure, y: Scale, branches: Branches) -> list[LegendEntry]:
    finite = [r for r in branches.ratios if r.ratio is not None and math.isfinite(r.ratio)]
    unbounded = [r.batch for r in branches.ratios if r.ratio == math.inf]
    known = [r for r in finite if r.low is not None and r.high is not None]
    low, high = ([y.clamp(getattr(r, end)) for r in known] for end in ("low", "high"))
    at = [r.batch for r in known]
    draw(fig, Segment(line_color=INK, line_width=4, line_alpha=0.3), x0=at, y0=low, x1=at, y1=high)
    points = sorted([(branches.reference, 1.0), *((r.batch, r.ratio or 1.0) for r in finite)])
    batches, ratios = zip(*points, strict=True)
    sizes = np.unique([*np.geomspace(batches[0], batches[-1], 200), *batches])  # lines are straight without logs
    draw(fig, Line(line_color=INK, line_width=1.5), x=sizes.tolist(), y=np.interp(sizes, batches, ratios).tolist())
    draw(fig, Scatter(size=8, fill_color=INK, line_color=INK), x=batches, y=ratios)
    reference = Scatter(size=11, fill_color="white", line_color=INK, line_width=2.5)
    draw(fig, reference, x=[branches.reference], y=[1.0])
    legend = [
        LegendEntry("whisker", INK, f"{branches.unit} that a batch size needs, with the {percent(0.95)} interval"),
        LegendEntry("dot", INK, f"the reference, {number(branches.reference)} {branches.unit} per step"),
    ]
    if unbounded:
        marks = Scatter(marker="triangle", size=10, fill_color=ORANGE, line_color=ORANGE)
        draw(fig, marks, x=unbounded, y=[y.at(0.97)] * len(unbounded))
        legend.append(LegendEntry("up", ORANGE, "a seed of this batch size diverged, or is too slow to compare"))
    return legend


def loss_plot(branches: Branches) -> Plot | str:
    """The mean loss of each batch size over units, with a band from the lowest to the highest seed."""
    by_batch = {batch: of for batch in sorted({b.batch for b in branches.branches}) if (of := _drawn(branches, batch))}
    if not by_batch:
        return "No branch has a loss yet."
    steady = [b for of in by_batch.values() for b in of if not b.curve.has_diverged]
    losses = [loss for b in steady for loss in b.curve.losses] or [1.0]
    y = scale_for(losses, "any")
    x = scale_for([0.0, branches.units], "linear")
    label = f"{capital(branches.unit)} since the checkpoint"
    fig = new_figure(x, y, x_label=label, y_label="Held-out loss", height=380)
    legend: list[LegendEntry] = []
    words = []
    for (batch, of), (color, mark) in zip(by_batch.items(), CURVE_STYLES * len(by_batch), strict=False):
        for branch in (b for b in of if b.curve.has_diverged):
            add_curve(fig, branch.curve.units, [y.clamp(v) for v in branch.curve.losses], GREY, "dotted")
        curves = [b.curve for b in of if not b.curve.has_diverged]
        if not curves:
            continue
        units = sorted(set.intersection(*({*curve.units} for curve in curves)))
        columns = [[dict(zip(c.units, c.losses, strict=True))[at] for c in curves] for at in units]
        mean = [*map(statistics.fmean, columns)]
        if units:
            add_band(fig, units, [*map(min, columns)], [*map(max, columns)], y, Curve("band", color, "", ""))
        # Seeds that were evaluated at other units have no mean: each is drawn.
        for at, losses in [(units, mean)] if units else [([*c.units], [*c.losses]) for c in curves]:
            add_curve(fig, at, losses, color, mark)
        legend.append(LegendEntry(mark, color, f"batch size {number(batch)}"))
        first, last = (number(statistics.fmean(curve.losses[k] for curve in curves), 4) for k in (0, -1))
        words.append(f"batch size {number(batch)}: {first} at first, {last} at last")
    legend.append(LegendEntry("band", GREY, "from the lowest to the highest seed"))
    if len(steady) < sum(map(len, by_batch.values())):
        legend.append(LegendEntry("dotted", GREY, "a branch that diverged"))
    return Plot((fig,), tuple(legend), f"Held-out loss over {branches.unit}. {'; '.join(words)}.")


def _drawn(branches: Branches, batch: float) -> list[Branch]:
    of_batch = (b for b in branches.branches if b.batch == batch and b.state == "finished")
    return [b for b in of_batch if b.curve.units]
