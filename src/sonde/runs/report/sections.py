"""The sections of a run with a noise scale, in order: each figure with the text that a newcomer needs to read it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from bokeh.models.annotations import BoxAnnotation
from bokeh.models.glyphs import Scatter

from sonde.batch_size.stats.columns import BATCH, METRICS, MOMENTS, NORMS, OVER_RUN
from sonde.decision.facts import Facts
from sonde.decision.law import steps_and_examples
from sonde.decision.proxy import law_in_words
from sonde.runs.facts import facts_of_run
from sonde.runs.report.curves import PIXELS, Curve, Panel, TimeAxis, add_curve, draw_panels, interval_curves, panels_of
from sonde.runs.report.figures import (
    LegendEntry,
    Plot,
    Scale,
    Section,
    add_hover,
    add_label,
    add_line_at,
    draw,
    log_ticks,
    new_figure,
    reachable,
    scale_for,
)
from sonde.runs.report.intervals import TALL, rows_figure
from sonde.runs.report.verdicts import position_text
from sonde.runs.run import AnyReading, Reading, Run, logged_batch, own_value_names
from sonde.stats.columns import BLUE, GREEN, INK, ORANGE, Columns, Description, Mark
from sonde.stats.intervals import RatioInterval
from sonde.wording import count, number, percent, plural, shorten

MAX_VALUES = 4
"""Largest number of logged values that are drawn. It keeps the page small and readable, whatever a run logs."""
MAX_GROUPS = 400
"""Largest number of groups that are drawn. A longer figure would be unreadable and large."""


def noise_scale_sections(run: Run) -> list[Section]:
    """All sections of a run with a reading of its noise scale; first what the batch size costs, and the loss."""
    probe, readings = run.probe("reading"), run.readings
    unit, last = probe.unit, readings[-1]
    axis = TimeAxis.of(readings, unit)

    over_run = partial(section_over_run, METRICS, readings, axis, unit)
    scale = Section(OVER_RUN, _noise_scale_text(run), (_noise_scale_plot(run, axis, unit),))
    sections = [
        Section(
            "What the batch size costs",
            f"Training with batch size B takes S/S_min = 1 + B_crit/B times the fewest possible steps, and uses "
            f"E/E_min = 1 + B/B_crit times the fewest possible {unit} (McCandlish et al. 2018, arXiv:1812.06162). "
            "The curves cross at B = B_crit, where both costs are 2×. B_crit is that of a whole run like this one, or "
            f"from here on where the run has no average. {law_in_words()}",
            (tradeoff_plot(facts_of_run(run)),),
        ),
        values_section(run, readings, axis, "Loss", "This run logged no loss and no other values."),
        scale,
        over_run(MOMENTS, _MOMENTS_TEXT, "No reading holds noise or signal."),
        Section("Noise scale by part of the model", _groups_text(run, unit), (groups_plot(last, unit),)),
        over_run(NORMS, _NORM_TEXT, "The gradient norm was not measured in this run."),
    ]
    return [*sections, *other_sections(METRICS, sections, over_run)]


def section_over_run(
    columns: Columns,
    readings: Sequence[AnyReading],
    axis: TimeAxis,
    unit: str,
    title: str,
    text: str = "",
    absent: str = "",
) -> Section:
    """A section with the panels of the columns that name it.

    Args:
        columns: of the readings.
        readings: in the order in which they were written.
        axis: the horizontal axis.
        unit: of the probe.
        title: of the section.
        text: how to read it.
        absent: the sentence in place of all figures.
    """
    return Section(title, text, (draw_panels(panels_of(columns, title, unit), readings, axis, absent),))


def other_sections(columns: Columns, shown: Sequence[Section], over_run: Callable[[str], Section]) -> list[Section]:
    """The sections that columns name and that have no place of their own on the page."""
    titles = dict.fromkeys(column.panel.section for column in columns.values() if column.panel is not None)
    return [over_run(title) for title in titles if title not in [section.title for section in shown]]


def _noise_scale_plot(run: Run, axis: TimeAxis, unit: str) -> Plot | str:
    """B_simple with the batch size across it, or a sentence if it is not known yet."""
    if all(reading.status == "unresolved" for reading in run.readings):
        return "No reading has an estimate or a lower bound of the noise scale yet: measure more windows."

    def batch(reading: Reading) -> float | None:  # counted as the noise scale counts it
        return logged_batch(reading.metrics, unit)[0]

    [panel] = panels_of(METRICS, OVER_RUN, unit)
    curves = [replace(curve, value=batch) if curve.value == BATCH else curve for curve in panel.curves]
    hover = {**panel.hover, METRICS[BATCH].short: lambda reading: number(batch(reading))}
    return draw_panels([replace(panel, curves=curves, hover=hover)], run.readings, axis, "")


def _noise_scale_text(run: Run) -> str:
    probe = run.probe("reading")
    text = (
        "The noise scale is the batch size at which the gradient of a batch contains as much noise as signal. "
        "A batch far below the noise scale needs many more steps. A batch far above it uses many more "
        f"{probe.unit} and saves few steps. The noise scale usually grows during training."
    )
    level = probe.setup.get("level")
    if level and probe.setup.get("fixed_weights"):
        text += (
            " The model did not train while it was measured. The curve is the average of all windows so far, and the "
            f"band its {percent(float(level))} confidence interval, which narrows as units are measured."
        )
    elif level:
        text += (
            " The solid curve is the noise scale now, filtered from all windows (optimizer steps) so far. The band "
            f"is its {percent(float(level))} confidence interval. The dotted curve is the average over the run so far, "
            "which a comparison of whole runs at several batch sizes would show."
        )
    if any(reading.status == "unresolved" for reading in run.readings):
        text += " A gap means that the noise scale was not known yet."
    if len(run.readings) > PIXELS:
        text += f" Of {count(len(run.readings))} readings, each pixel shows the lowest and the highest."
    return text


_MOMENTS_TEXT = (
    "B_simple = tr Σ / |G|²: the noise scale is the noise divided by the signal. On this logarithmic axis, the "
    "vertical distance between the two curves shows it. Both curves are running averages, so their ratio lags "
    "behind the noise scale now while training moves."
)
_NORM_TEXT = (
    "The norm of the whole gradient of each optimizer step, over all ranks, before clipping. Each point is the mean "
    "since the previous reading. A clip scales a gradient down to its threshold."
)


def value_panel(name: str, metrics: Mapping[str, Description]) -> Panel:
    """One value over the run under its own name, with its interval if it has one.

    Args:
        name: of the value.
        metrics: unit and meaning of those that are declared.
    """
    label, metric = shorten(name), metrics.get(name)
    curve = Curve("line", INK, metric.meaning if metric else "", name)
    return Panel(
        f"{label} ({metric.unit})" if metric else label,
        curves=interval_curves(name, curve) if f"{name}_low" in metrics else (curve,),
        hover={"value": lambda reading: number(reading.metrics.get(name), 4)},
    )


def values_section(run: Run, readings: Sequence[AnyReading], axis: TimeAxis, what: str, absent: str = "") -> Section:
    """The section of the user's own values.

    Args:
        run: with the values.
        readings: that may hold them.
        axis: the horizontal axis.
        what: the value that runs log most, "Loss".
        absent: the sentence in place of values.
    """
    names = own_value_names(run, readings)
    if not names:
        return Section(what, "", (absent,))
    text = "Values as the run logged them. Each point is the mean since the previous reading."
    if hidden := [shorten(name) for name in names[MAX_VALUES:]]:
        text += f" {plural(len(hidden), 'more value')} in the log: {', '.join(hidden[:10])}"
        text += ", …" if len(hidden) > 10 else "."
    plots = [draw_panels([value_panel(name, {})], readings, axis, "") for name in names[:MAX_VALUES]]
    is_alone = [name.lower() for name in names] == [what.lower()]
    return Section(what if is_alone else f"{what} and other logged values", text, tuple(plots))


def declared_sections(run: Run) -> list[Section]:
    """The sections that probes declare, each with a curve for every metric that at least one reading knows."""
    sections = []
    for declared in run.sections:
        readings = [r for r in run.measured if not r.metrics.keys().isdisjoint(declared.metrics)]
        plots: list[Plot | str] = []
        if readings:
            axis = TimeAxis.of(readings, run.probe("reading").unit)
            plots = [draw_panels([value_panel(name, run.metrics)], readings, axis, "") for name in declared.metrics]
        content = tuple(plot for plot in plots if plot) or ("None of these metrics was known in this run.",)
        sections.append(Section(declared.title, declared.text, content))
    return sections


def tradeoff_plot(run: Facts) -> Plot | str:
    """Steps and units relative to the least possible, over the batch size, with a mark at the run's own.

    Args:
        run: what the log says.

    Returns:
        The figure, or a sentence that says why there is none. Curves are dashed if only a range or a bound of B_crit is
        known.
    """
    batch, unit = run.batch or 1.0, run.unit
    known = next((scope.critical for scope in run.scopes.values() if scope.critical.high), None)
    if known is None:
        return "The trade-off needs a noise scale or a bound of the noise scale. The last reading has neither."
    low, high, where = known.low, known.high, ""
    if (critical := known.middle) is None:
        where = "upper bound" if low == 0 else "lower bound" if math.isinf(high) else "middle of the range"
        critical = high if low == 0 else low if math.isinf(high) else math.sqrt(low * high)

    extremes = (batch, critical, max(low, critical / 10), min(high, 10 * critical))
    x = Scale("log", min(extremes) / 8, max(extremes) * 8)
    here = steps_and_examples(batch, critical)
    y = Scale("log", 0.92, max(30.0, 2 * max(here.steps, here.examples)))
    fig = new_figure(
        x, y, x_label=f"Batch size ({unit} per step)", y_label="Cost (times the least possible)", height=360
    )
    fig.yaxis[0].major_label_overrides = {tick: f"{number(tick)}×" for tick in log_ticks(y)}
    left, right = max(low, x.start), min(high, x.end)
    fig.add_layout(BoxAnnotation(left=left, right=right, fill_color=BLUE, fill_alpha=0.10, line_color=None))
    line: Mark = "dashed" if where else "line"
    add_line_at(fig, critical, "height", BLUE, line)
    sizes = [x.at(i / 200) for i in range(201)]
    costs = [steps_and_examples(size, critical) for size in sizes]
    for curve, color in (([c.steps for c in costs], GREEN), ([c.examples for c in costs], ORANGE)):
        add_curve(fig, sizes, curve, color, line)
    texts: dict[str, Callable[[int], str]] = {
        "batch size": lambda i: number(sizes[i]),
        "steps": lambda i: f"{number(costs[i].steps)}×",
        "units used": lambda i: f"{number(costs[i].examples)}×",
    }
    add_hover(fig, sizes, [y.clamp(max(cost.steps, cost.examples)) for cost in costs], texts)
    add_line_at(fig, batch, "height", INK, "dotted")
    marks = Scatter(size=11, fill_color="white", line_color=INK, line_width=2.5)
    draw(fig, marks, x=[batch] * 2, y=[here.steps, here.examples])
    # Put the label on the side away from the line of B_crit.
    add_label(fig, batch, y.at(0.92), "you are here", align="right" if batch < critical else "left")
    if_there = f", if B_crit is at the {where}" if where else ""
    legend = (
        LegendEntry(line, GREEN, f"optimizer steps, S/S_min{if_there}"),
        LegendEntry(line, ORANGE, f"{unit} used, E/E_min{if_there}"),
        LegendEntry("bar", BLUE, f"{where + ' of ' if where else ''}B_crit, {number(critical)} {unit}"),
        LegendEntry("band", BLUE, "range of B_crit"),
        LegendEntry("dot", INK, f"this run, {number(batch)} {unit} per step"),
    )
    words = (
        f"Costs over the batch size. {'; '.join(entry.text for entry in legend)}. At this run's batch, steps are "
        f"{number(here.steps, 2)}× and {unit} {number(here.examples, 2)}× the least possible."
    )
    return Plot((fig,), legend, words)


def _groups_text(run: Run, unit: str) -> str:
    last, written = run.readings[-1], run.readings[-1].groups_window
    place = f"the last reading ({position_text(last, unit)})" if written == last.window else f"window {count(written)}"
    text = (
        f"Values of {place}, in the order of the model. A part far to the right "
        "has a noisier gradient than the rest of the model. A part far to the left has a clearer gradient."
    )
    hidden = len(last.groups) - MAX_GROUPS
    return (
        text if hidden <= 0 else f"{text} The first {MAX_GROUPS} are drawn; the log has {plural(hidden, 'more group')}."
    )


def groups_plot(reading: Reading, unit: str) -> Plot | str:
    """B_simple of each group in one reading, as a dot with its interval.

    Args:
        reading: the last one. Its groups are in the model's order.
        unit: plural name of the unit.

    Returns:
        The figure with the first group on top, or a sentence that says why there is none.
    """
    names = [*reading.groups][:MAX_GROUPS]
    groups = [reading.groups[name] for name in names]
    if not groups:
        return "The log holds no values of groups of parameters: sonde.attach(log_groups=True) writes them."
    if all(group.status == "unresolved" for group in groups):
        return "No group of parameters has a known noise scale yet: measure more windows."
    batch, _ = logged_batch(reading.metrics, unit)
    overall = reading.now.ratio
    shown = [v for v in (batch, overall, *(v for g in groups for v in (g.b_simple, g.low))) if v]
    x = scale_for([*shown, *reachable([g.high for g in groups if g.high is not None], shown)], "log")
    rows = [RatioInterval(group.status, group.low, group.high, ratio=group.b_simple) for group in groups]
    texts: dict[str, Callable[[int], str]] = {
        "group": lambda i: names[i],
        "noise scale": lambda i: rows[i].in_words,
        "noise tr Σ": lambda i: number(groups[i].trace_cov),
        "signal |G|²": lambda i: number(groups[i].grad_sq),
    }
    fig, legend = rows_figure(names, rows, x, f"Noise scale ({unit})", texts)
    if batch:
        legend.append(LegendEntry("dashed", ORANGE, f"batch size, {number(batch)} {unit}"))
        add_line_at(fig, batch, "height", ORANGE, "dashed")
    if overall:
        legend.append(LegendEntry("dotted", BLUE, f"whole model, {number(overall)} {unit}"))
        add_line_at(fig, overall, "height", BLUE, "dotted")
    words = "; ".join(f"{name}: {of.in_words}" for name, of in zip(names[:TALL], rows, strict=False))
    return Plot((fig,), tuple(legend), f"Noise scale ({unit}) of each part. {words}.")
