"""The figures of a policy over a run: a table of panels, and the forecasts beside the truth."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from bokeh.models import BasicTicker
from bokeh.models.glyphs import Line, Quad, Scatter, Segment

from sonde.policy.stats.columns import DELTA, FRESH, IN_PROMPTS, LEARNED, METRICS, PROMPT_NOISE, PROMPTS
from sonde.policy.stats.forecast_point import Point, Z
from sonde.policy.stats.token_positions import AtPositions
from sonde.runs.report.curves import Curve, OverRun, Panel, TimeAxis, draw_panels, panels_of
from sonde.runs.report.figures import (
    LegendEntry,
    Plot,
    Scale,
    add_hover,
    add_line_at,
    draw,
    evenly,
    new_figure,
    scale_for,
)
from sonde.runs.run import PolicyReading
from sonde.stats.columns import BLUE, GREY, ORANGE
from sonde.stats.intervals import logged_interval
from sonde.wording import count, number

MAX_POINTS = 600
"""Largest number of forecasts that are marked. (A curve thins itself out: see `per_pixel`.)"""


def entropy_panel() -> Panel:
    """The entropy on evaluation responses and on those that the policy learned from."""

    def end(sign: float) -> Callable[[Any], float | None]:
        def value(r: PolicyReading) -> float | None:
            entropy, error = r.metrics.get(FRESH), r.metrics.get(f"{FRESH}_se")
            return None if entropy is None or error is None else entropy + sign * Z * error

        return value

    curves = (
        Curve("line", BLUE, "entropy on evaluation responses", FRESH),
        Curve("dashed", GREY, "entropy on the responses that the step learns from", LEARNED),
        Curve("band", BLUE, "95 % interval of the entropy, over prompts", end(-1), end(1), alpha=0.14),
    )
    names = {"on evaluation responses": FRESH, "on the step's own responses": LEARNED}
    hover = {label: lambda r, name=name: number(r.metrics.get(name)) for label, name in names.items()}
    return Panel("Entropy (nats a token)", kind="linear", shows=(0.0,), height=320, curves=curves, hover=hover)


def prompt_noise_plot(readings: Sequence[PolicyReading], axis: TimeAxis) -> Plot | str:
    """The noise scale in prompts beside the prompts of a step, or a sentence if it is not known."""
    measured = [r for r in readings if r.metrics.get(PROMPTS) is not None]
    if not measured:
        return "The noise scale in prompts was not measured in this run: sonde.PromptNoiseProbe does."
    if all(logged_interval(r.metrics, PROMPT_NOISE).status == "unresolved" for r in measured):
        return "No measurement has an estimate or a bound of the noise scale in prompts yet: measure more windows."
    return draw_panels(panels_of(METRICS, IN_PROMPTS), readings, axis, "")


def forecast_curve(readings: Sequence[PolicyReading], axis: TimeAxis) -> Plot | str:
    """Each step's forecast with its interval, and the change that was measured."""
    some = evenly([r for r in readings if r.metrics.get(DELTA) is not None], MAX_POINTS)
    if not some:
        return "No change of entropy was forecast in this run."
    line = OverRun.of(some, axis)
    placed = [(x, r.point) for x, r in zip(line.x, line.rows, strict=True) if r is not None]
    points = [p for _, p in placed]
    y = scale_for([0.0, *(v for p in points for v in (p.delta, p.low, p.high, p.truth))], "linear")
    fig = line.new_figure(y, f"Change of entropy ({_unit(some)})", 320)
    add_line_at(fig, 0.0, "width", GREY, "dotted")
    for trusted, color in ((False, GREY), (True, BLUE)):
        xs = [x for x, p in placed if p.is_valid is trusted]
        of = [p for p in points if p.is_valid is trusted]
        low, high = [p.low for p in of], [p.high for p in of]
        draw(fig, Segment(line_color=color, line_width=5, line_alpha=0.3), x0=xs, y0=low, x1=xs, y1=high)
        draw(fig, _mark(color, is_trusted=trusted), x=xs, y=[p.delta for p in of])
    crosses = Scatter(marker="x", size=9, line_color=ORANGE, line_width=2)
    draw(fig, crosses, x=[x for x, _ in placed], y=[p.truth for p in points])
    hover = {"forecast": lambda r: _forecast_text(r.point), "truth": lambda r: _truth_text(r.point)}
    line.add_hover(fig, line.column(DELTA), hover)
    return Plot((fig,), (*_forecast_legend(points), *line.legend), _forecasts_in_words(points))


def forecast_against_truth(readings: Sequence[PolicyReading]) -> Plot | str:
    """A point for each step: on the diagonal, forecast and truth are equal."""
    points = evenly([p for p in (r.point for r in readings) if p.has_truth], MAX_POINTS)
    if not points:
        return (
            "No forecast can be compared with fresh responses: give the probe a sampler, or pass rollouts=True with "
            "TRL."
        )
    ends = [v for p in points for v in (p.delta, p.truth, *((p.low, p.high) if p.is_valid else ()))]
    both, unit = scale_for([0.0, *ends], "linear"), _unit(readings)
    fig = new_figure(both, both, x_label=f"Forecast ({unit})", y_label=f"Truth ({unit})", height=420)
    fig.xaxis[0].ticker = BasicTicker(desired_num_ticks=4)  # small numbers are long: few fit on a narrow screen
    diagonal = [both.start, both.end]
    draw(fig, Line(line_color=GREY, line_dash="dashed", line_width=1.5), x=diagonal, y=diagonal)
    valid = [p for p in points if p.is_valid]
    truth, forecast = [p.truth for p in valid], [p.delta for p in valid]
    bars = Segment(line_color=BLUE, line_width=4, line_alpha=0.3)
    draw(fig, bars, x0=[p.low for p in valid], y0=truth, x1=[p.high for p in valid], y1=truth)
    below, above = ([(p.truth or 0.0) + sign * Z * (p.truth_se or 0.0) for p in valid] for sign in (-1, 1))
    bars = Segment(line_color=ORANGE, line_width=2, line_alpha=0.6)
    draw(fig, bars, x0=forecast, y0=below, x1=forecast, y1=above)
    for trusted, color in ((False, GREY), (True, BLUE)):
        some = [p for p in points if p.is_valid is trusted]
        mark = _mark(color, is_trusted=trusted)
        draw(fig, mark, x=[p.delta for p in some], y=[p.truth for p in some])
    texts: dict[str, Callable[[int], str]] = {
        "forecast": lambda i: _forecast_text(points[i]),
        "truth": lambda i: _truth_text(points[i]),
        "step": lambda i: count(points[i].step),
    }
    add_hover(fig, [p.delta for p in points], [p.truth for p in points], texts)
    legend = [LegendEntry("dashed", GREY, "forecast and truth are equal"), *_forecast_legend(points, marks_truth=False)]
    if any((p.truth_se or 0.0) > 0 for p in valid):
        legend.append(LegendEntry("bar", ORANGE, "95 % interval of the truth, by fresh rollouts"))
    return Plot((fig,), tuple(legend), _forecasts_in_words(points))


def entropy_by_position(readings: Sequence[PolicyReading]) -> Plot | str:
    """Quantiles of the tokens' entropies along the response, at the first and at the last measured step."""
    some = [r for r in readings if r.positions]
    if not some:
        return ""
    shown = [(BLUE, some[-1])] if len(some) == 1 else [(GREY, some[0]), (BLUE, some[-1])]
    ends = [value for _, r in shown for at in r.positions for value in (at.q10, at.q90)]
    places = Scale("log", 1.0, max(at.last + 1.0 for _, r in shown for at in r.positions))
    label, y = "Position of the token in the response", scale_for([0.0, *ends], "linear")
    fig = new_figure(places, y, x_label=label, y_label="Entropy (nats)", height=320)
    legend: list[LegendEntry] = []
    for color, reading in shown:
        left, right = [at.first for at in reading.positions], [at.last + 1 for at in reading.positions]
        low, middle, high = ([getattr(at, q) for at in reading.positions] for q in ("q10", "q50", "q90"))
        band = Quad(fill_color=color, fill_alpha=0.2, line_color=None)
        draw(fig, band, left=left, right=right, bottom=low, top=high)
        draw(fig, Segment(line_color=color, line_width=2), x0=left, y0=middle, x1=right, y1=middle)
        legend.append(LegendEntry("line", color, f"median, step {reading.window:,}"))
        legend.append(LegendEntry("band", color, f"80 % of the tokens, step {reading.window:,}"))
    last = some[-1].positions
    texts: dict[str, Callable[[int], str]] = {"tokens": lambda i: _range_text(last[i])}
    texts |= {f"step {r.window:,}": partial(_quantiles_at, r) for _, r in shown}
    add_hover(fig, [math.sqrt(at.first * (at.last + 1)) for at in last], [at.q50 for at in last], texts)
    return Plot((fig,), tuple(legend), " ".join(_positions_in_words(r) for _, r in reversed(shown)))


def _range_text(at: AtPositions) -> str:
    return str(at.first) if at.first == at.last else f"{at.first:,} to {at.last:,}"


def _quantiles_at(reading: PolicyReading, index: int) -> str:
    return _quantiles_text(reading.positions[index]) if index < len(reading.positions) else "no token"


def _quantiles_text(at: AtPositions) -> str:
    return f"{number(at.q50)}, 80 % of {at.n_tokens:,} from {number(at.q10)} to {number(at.q90)}"


def _positions_in_words(reading: PolicyReading) -> str:
    rows = "; ".join(f"tokens {_range_text(at)}: {_quantiles_text(at)}" for at in reading.positions)
    return f"Median entropies by position at step {reading.window:,}, in nats. {rows.capitalize()}."


def _mark(color: str, *, is_trusted: bool) -> Scatter:
    return Scatter(size=8, fill_color=color if is_trusted else None, line_color=color, line_width=1.5)


def _unit(readings: Sequence[PolicyReading]) -> str:
    return f"nats a {next(r.per for r in reversed(readings) if r.metrics.get(DELTA) is not None)}"


def _forecast_text(point: Point) -> str:
    text = f"{number(point.delta)} [{number(point.low)} to {number(point.high)}]"
    return text if point.is_valid else f"{text}, not to be trusted"


def _truth_text(point: Point) -> str:
    if point.truth is None and point.ess_fraction is not None:
        return f"not known (effective sample size {point.ess_fraction:.2g} of the responses)"
    return number(point.truth)


def _forecast_legend(points: Sequence[Point], *, marks_truth: bool = True) -> list[LegendEntry]:
    legend = []
    if any(p.is_valid for p in points):
        legend.append(LegendEntry("whisker", BLUE, "forecast with its 95 % interval"))
    if not all(p.is_valid for p in points):
        legend.append(LegendEntry("dot", GREY, "forecast that is not to be trusted"))
    if marks_truth and any(p.truth is not None for p in points):
        method = "fresh rollouts" if any(p.is_independent for p in points) else "the forecast's own responses"
        legend.append(LegendEntry("cross", ORANGE, f"truth: the change measured by {method}"))
    return legend


def _forecasts_in_words(points: Sequence[Point]) -> str:
    last = points[-1]
    return (
        f"{len(points):,} forecasts. {sum(p.held for p in points):,} of their intervals held the truth. The last, of "
        f"step {last.step:,}: {_forecast_text(last)}; truth {_truth_text(last)}."
    )
