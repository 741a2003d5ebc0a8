"""The figures of a policy that say how far to trust its forecasts."""

from __future__ import annotations

import math
from collections.abc import Sequence

from bokeh.models import NumeralTickFormatter
from bokeh.plotting import figure

from sonde.policy.stats.entropy_forecast import LINEAR_BETWEEN
from sonde.policy.stats.prefix_weights import LEAST_SUPPORT, MOST_UNSUPPORTED
from sonde.runs.policy_reading import PolicyReading
from sonde.runs.report.curve_style import STEP, TimeAxis, add_curve, add_triangles, new_curve, restart_legend
from sonde.runs.report.figures import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    LegendEntry,
    Plot,
    Scale,
    add_hover,
    add_line_at,
    scale_for,
)
from sonde.runs.report.policy_curves import PolicyTimeline, timeline_with
from sonde.wording import number, percent

_SUPPORT, _UNSUPPORTED, _RATIO = (f"entropy/{name}" for name in ("support", "unsupported", "linear_over_true"))
_OWN = "entropy/evaluation_own_policy_z"


def trust_curves(readings: Sequence[PolicyReading], axis: TimeAxis) -> Plot | str:
    """How well responses represent the policy after each step, and first order over truth where it was taken."""
    line = timeline_with(readings, _SUPPORT)
    if line is None:
        return "No true change was measured on the evaluation responses."
    figures, legend = _sample_size(line, axis)
    if any(map(math.isfinite, line.metric(_RATIO))):
        figures[-1].xaxis.visible = False
        ratio, more = _linear_over_true(line, axis)
        figures.append(ratio)
        legend += more
    return Plot(tuple(figures), (*legend, *restart_legend(line)))


def _sample_size(line: PolicyTimeline, axis: TimeAxis) -> tuple[list[figure], list[LegendEntry]]:
    fig = new_curve(line, axis, Scale("linear", -0.04, 1.04), y_label="Share of the whole", height=220)
    fig.yaxis[0].formatter = NumeralTickFormatter(format="0 %")
    support, lacks = line.metric(_SUPPORT), line.metric(_UNSUPPORTED)
    add_line_at(fig, MOST_UNSUPPORTED, "width", ORANGE, "dashed")
    add_curve(fig, line.x, support, GREEN)
    add_curve(fig, line.x, lacks, GREY)
    columns = {
        "x": line.x,
        "y": support,
        "window": line.windows,
        "lacks": line.texts(lambda r: percent(r.metrics.get(_UNSUPPORTED))),
    }
    add_hover(fig, columns, [("support", "@y{0.[0] %}"), ("entropy without support", "@lacks"), STEP])
    return [fig], [
        LegendEntry(
            "line", GREEN, "support: effective sample size of the responses after the step, a mean over positions"
        ),
        LegendEntry("line", GREY, f"part of the entropy at positions with a support below {LEAST_SUPPORT:.0%}"),
        LegendEntry("dashed", ORANGE, f"limit of this part: {MOST_UNSUPPORTED:.0%}"),
    ]


def _linear_over_true(line: PolicyTimeline, axis: TimeAxis) -> tuple[figure, list[LegendEntry]]:
    ratio, y = line.metric(_RATIO), Scale("linear", 0.0, 2.0)
    fig = new_curve(line, axis, y, y_label="Linear / true", height=220)
    low, high = LINEAR_BETWEEN
    for bound in LINEAR_BETWEEN:
        add_line_at(fig, bound, "width", ORANGE, "dashed")
    add_curve(fig, line.x, [v if y.start <= v <= y.end else math.nan for v in ratio], BLUE)
    outside = [y.clamp(v) if math.isfinite(v) and not y.start <= v <= y.end else math.nan for v in ratio]
    add_triangles(fig, line.x, outside, "triangle", GREY)
    texts = line.texts(lambda r: number(r.metrics.get(_RATIO)))
    columns = {"x": line.x, "y": [y.clamp(v) for v in ratio], "window": line.windows, "ratio": texts}
    add_hover(fig, columns, [("linear / true", "@ratio"), STEP])
    legend = [
        LegendEntry("line", BLUE, "change to first order divided by the true change, on the same prefixes"),
        LegendEntry("dashed", ORANGE, f"the step is small enough to be linear from {low:g} to {high:g}"),
    ]
    if any(map(math.isfinite, outside)):
        legend.append(LegendEntry("up", GREY, "ratio outside this axis"))
    return fig, legend


def own_policy_curve(readings: Sequence[PolicyReading], axis: TimeAxis) -> Plot | str:
    """Whether the evaluation responses are the policy's own, forecast by forecast."""
    line = timeline_with(readings, _OWN)
    if line is None:
        return (
            "This was not tested: no evaluation responses were sampled by the policy itself. Those that came with "
            "their sampler's log-probabilities have their own test, among the numbers of each forecast below."
        )
    z = line.metric(_OWN)
    fig = new_curve(line, axis, scale_for([-3.0, 3.0, *z], "linear"), y_label="Standard errors", height=220)
    for bound in (-2.0, 2.0):
        add_line_at(fig, bound, "width", ORANGE, "dashed")
    add_curve(fig, line.x, z, BLUE)
    texts = line.texts(lambda r: percent(r.metrics.get("entropy/evaluation_own_policy_departure")))
    columns = {"x": line.x, "y": z, "window": line.windows, "departure": texts}
    add_hover(fig, columns, [("standard errors", "@y{0.0}"), ("of the entropy", "@departure"), STEP])
    legend = (
        LegendEntry("line", BLUE, "mean of −log π above the entropy, in standard errors"),
        LegendEntry("dashed", ORANGE, "19 of 20 values lie between the lines if the responses are the policy's own"),
    )
    return Plot((fig,), (*legend, *restart_legend(line)))
