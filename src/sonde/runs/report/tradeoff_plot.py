"""The figure of what a batch size costs: optimizer steps against examples, with a mark at the run's own batch size."""

from __future__ import annotations

from typing import Any

from bokeh.models.annotations import BoxAnnotation
from bokeh.models.glyphs import Line, Scatter
from bokeh.plotting import figure

from sonde.batch_size.stats.critical_batch import steps_and_examples
from sonde.runs.reader import Reading
from sonde.runs.report.figures import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    LegendEntry,
    Plot,
    Scale,
    add_hover,
    add_label,
    add_line_at,
    draw,
    log_ticks,
    new_figure,
)
from sonde.runs.report.logged_interval import logged_batch, logged_interval
from sonde.wording import number


def tradeoff_plot(reading: Reading, unit: str) -> Plot | str:
    """Steps and units relative to the least possible, over the batch size.

    Args:
        reading: the last one.
        unit: plural name of the unit.

    Returns:
        The figure, or a sentence that says why there is none. Curves are dashed if only a bound of the noise scale is
        known.
    """
    batch, unit = logged_batch(reading.metrics, unit)
    # Whole runs are compared by their average; a checkpoint has no other noise scale than now.
    metric, known = "gns/b_simple_average", logged_interval(reading.metrics, "gns/b_simple_average")
    if known.status == "unresolved":
        metric, known = "gns/b_simple", logged_interval(reading.metrics, "gns/b_simple")
    low, high, status = known.low, known.high, known.status
    resolved = status == "resolved"
    critical = reading.metrics.get(metric) if resolved else high if status == "upper_bound" else low
    if not batch or not critical or low is None or high is None:
        return "The trade-off needs a noise scale or a bound of the noise scale. The last reading has neither."

    extremes = (batch, critical, max(low, critical / 10), min(high, 10 * critical))
    x = Scale("log", min(extremes) / 8, max(extremes) * 8)
    cost = steps_and_examples(batch, critical)
    y = Scale("log", 0.92, max(30.0, 2 * max(cost.steps, cost.examples)))
    fig = new_figure(
        x,
        y,
        x_label=f"Batch size ({unit} per step)",
        y_label="Cost (times the least possible)",
        height=360,
    )
    fig.yaxis[0].major_label_overrides = {tick: f"{number(tick)}×" for tick in log_ticks(y)}

    left, right = max(low, x.start), min(high, x.end)
    fig.add_layout(BoxAnnotation(left=left, right=right, fill_color=BLUE, fill_alpha=0.10, line_color=None))
    dash = "solid" if resolved else "dashed"
    add_line_at(fig, critical, "height", BLUE, dash)
    _add_costs(fig, x, y, critical, dash)
    add_line_at(fig, batch, "height", INK, "dotted")
    here = Scatter(size=11, fill_color="white", line_color=INK, line_width=2.5)
    draw(fig, here, x=[batch] * 2, y=[cost.steps, cost.examples])
    # Put the label on the side away from the line of the noise scale.
    add_label(fig, batch, y.at(0.92), "you are here", INK, align="right" if batch < critical else "left")
    return Plot((fig,), _legend(batch, critical, unit, status))


def _add_costs(fig: figure, x: Scale, y: Scale, critical: float, dash: str) -> None:
    sizes = [x.at(i / 200) for i in range(201)]
    costs = [steps_and_examples(size, critical) for size in sizes]
    steps, examples = [cost.steps for cost in costs], [cost.examples for cost in costs]
    for curve, color in ((steps, GREEN), (examples, ORANGE)):
        draw(fig, Line(line_color=color, line_width=2.5, line_dash=dash), x=sizes, y=curve)
    columns: dict[str, list[Any]] = {
        "x": sizes,
        "y": [y.clamp(max(cost.steps, cost.examples)) for cost in costs],
        "size": [number(size) for size in sizes],
        "steps": [f"{number(cost)}×" for cost in steps],
        "examples": [f"{number(cost)}×" for cost in examples],
    }
    add_hover(fig, columns, [("batch size", "@size"), ("steps", "@steps"), ("units used", "@examples")])


def _legend(batch: float, critical: float, unit: str, status: str) -> tuple[LegendEntry, ...]:
    if status == "resolved":
        return (
            LegendEntry("line", GREEN, "optimizer steps, S/S_min"),
            LegendEntry("line", ORANGE, f"{unit} used, E/E_min"),
            LegendEntry("bar", BLUE, f"noise scale, {number(critical)} {unit}"),
            LegendEntry("band", BLUE, "confidence interval of the noise scale"),
            LegendEntry("dot", INK, f"this run, {number(batch)} {unit} per step"),
        )
    is_lower = status == "lower_bound"
    which, other = ("lower", "upper") if is_lower else ("upper", "lower")
    return (
        LegendEntry("dashed", GREEN, f"optimizer steps, S/S_min: at {'least' if is_lower else 'most'} this"),
        LegendEntry("dashed", ORANGE, f"{unit} used, E/E_min: at {'most' if is_lower else 'least'} this"),
        LegendEntry("bar", BLUE, f"{which} bound of the noise scale, {number(critical)} {unit}"),
        LegendEntry("band", BLUE, f"possible range of the noise scale: no {other} limit known"),
        LegendEntry(
            "dot", INK, f"this run, {number(batch)} {unit} per step, if the noise scale is at its {which} bound"
        ),
    )
