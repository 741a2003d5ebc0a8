"""The figures of a policy: entropy, forecasts beside the truth, noise scale in prompts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence, Set
from itertools import accumulate

from bokeh.models import BasicTicker, NumeralTickFormatter
from bokeh.models.glyphs import Line, Scatter, Segment

from sonde.policy.stats.forecast_point import Coverage, Point, Z, steps_kept
from sonde.runs.policy_reading import PolicyReading
from sonde.runs.report.curve_style import (
    STEP,
    TimeAxis,
    add_bands,
    add_curve,
    add_triangles,
    new_curve,
    restart_legend,
)
from sonde.runs.report.figures import (
    BLUE,
    GREY,
    LIGHT_GREY,
    ORANGE,
    LegendEntry,
    Plot,
    Scale,
    add_hover,
    add_line_at,
    draw,
    new_figure,
    noise_scale_axis,
    scale_for,
)
from sonde.runs.report.logged_interval import PROMPT_NOISE, logged_interval
from sonde.runs.report.timeline import MAX_POINTS, STEPS, Timeline, timeline
from sonde.stats.intervals import RatioInterval, Status
from sonde.wording import estimate, number

PolicyTimeline = Timeline[PolicyReading]


def entropy_curve(readings: Sequence[PolicyReading], axis: TimeAxis) -> Plot | str:
    """The policy's entropy over the run, on evaluation responses and on the responses that the policy learned from."""
    line = timeline_with(readings, "entropy/evaluation_per_token", "entropy/update_token_weighted")
    if line is None:
        return "No entropy was measured in this run."
    fresh, learned = line.metric("entropy/evaluation_per_token"), line.metric("entropy/update_token_weighted")
    errors, again = line.metric("entropy/evaluation_per_token_se"), _undone(line)
    kept = [math.nan if is_again else 1.0 for is_again in again]
    low, high = ([k * (h + s * Z * e) for k, h, e in zip(kept, fresh, errors, strict=True)] for s in (-1, 1))
    is_negative = any(v < 0 for v in [*fresh, *learned])  # as that of a continuous distribution may be
    room = scale_for([0.0, *fresh, *learned, *high, *(low if is_negative else ())], "linear")
    y = room if is_negative else Scale("linear", 0.0, room.end)
    fig = new_curve(line, axis, y, y_label="Entropy (nats a token)", height=320)
    add_bands(fig, line.x, low, high, y, fill_color=BLUE, fill_alpha=0.14)
    add_curve(fig, line.x, [k * v for k, v in zip(kept, learned, strict=True)], GREY, dash="dashed")
    add_curve(fig, line.x, [k * v for k, v in zip(kept, fresh, strict=True)], BLUE)
    either = [a if math.isfinite(a) else b for a, b in zip(fresh, learned, strict=True)]
    add_curve(fig, line.x, [v if is_again else math.nan for v, is_again in zip(either, again, strict=True)], LIGHT_GREY)
    columns = {
        "x": line.x,
        "y": either,
        "window": line.windows,
        "fresh": line.texts(lambda r: number(r.metrics.get("entropy/evaluation_per_token"))),
        "learned": line.texts(lambda r: number(r.metrics.get("entropy/update_token_weighted"))),
    }
    rows = [("on evaluation responses", "@fresh"), ("on the step's own responses", "@learned"), STEP]
    add_hover(fig, columns, rows)
    legend = [LegendEntry("line", BLUE, "entropy on evaluation responses")] if any(map(math.isfinite, fresh)) else []
    if any(map(math.isfinite, learned)):
        legend.append(LegendEntry("dashed", GREY, "entropy on the responses that the step learns from"))
    if any(map(math.isfinite, low)):
        legend.append(LegendEntry("band", BLUE, "95 % interval of the entropy, over prompts"))
    if any(again):
        legend.append(LegendEntry("line", LIGHT_GREY, "before a restart that took these steps again"))
    return Plot((fig,), (*legend, *restart_legend(line)))


def forecast_curve(readings: Sequence[PolicyReading], axis: TimeAxis) -> Plot | str:
    """Each step's forecast with its interval, and the change that was measured."""
    line = timeline_with(readings, "entropy/delta_forecast", at_most=MAX_POINTS)
    if line is None:
        return "No change of entropy was forecast in this run."
    points = [None if row is None else row.point for row in line.rows]
    y = scale_for([0.0, *(v for p in points if p for v in map(_drawn, (p.delta, p.low, p.high, p.truth)))], "linear")
    fig = new_curve(line, axis, y, y_label=f"Change of entropy ({_forecast_unit(readings)})", height=320)
    add_line_at(fig, 0.0, "width", GREY, "dotted")
    placed = [(x, p) for x, p in zip(line.x, points, strict=True) if p is not None]
    for trusted, color in ((False, GREY), (True, BLUE)):
        some = [(x, p) for x, p in placed if p.is_valid is trusted]
        xs = [x for x, _ in some]
        low, high = [_drawn(p.low) for _, p in some], [_drawn(p.high) for _, p in some]
        draw(fig, Segment(line_color=color, line_width=5, line_alpha=0.3), x0=xs, y0=low, x1=xs, y1=high)
        draw(fig, _forecast_mark(color, is_trusted=trusted), x=xs, y=[_drawn(p.delta) for _, p in some])
    true = [(x, p.truth) for x, p in placed if p.truth is not None]
    crosses = Scatter(marker="x", size=9, line_color=ORANGE, line_width=2)
    draw(fig, crosses, x=[x for x, _ in true], y=[t for _, t in true])
    columns = {
        "x": line.x,
        "y": line.metric("entropy/delta_forecast"),
        "window": line.windows,
        "forecast": line.texts(lambda r: _forecast_text(r.point)),
        "truth": line.texts(lambda r: _truth_text(r.point)),
    }
    add_hover(fig, columns, [("forecast", "@forecast"), ("truth", "@truth"), STEP])
    return Plot((fig,), (*_forecast_legend([p for _, p in placed]), *restart_legend(line)))


def _forecast_mark(color: str, *, is_trusted: bool) -> Scatter:
    return Scatter(size=8, fill_color=color if is_trusted else "white", line_color=color, line_width=1.5)


def forecast_against_truth(readings: Sequence[PolicyReading]) -> Plot | str:
    """A point for each step: on the diagonal, forecast and truth are equal."""
    points = [p for p in (r.point for r in readings) if p.has_truth]
    points = points[::-1][:: math.ceil(len(points) / MAX_POINTS) or 1][::-1]
    if not points:
        return (
            "No forecast can be compared with fresh responses: give the probe a sampler, or pass rollouts=True with "
            "TRL."
        )
    ends = [_drawn(v) for p in points for v in (p.delta, p.truth, *((p.low, p.high) if p.is_valid else ()))]
    both = scale_for([0.0, *ends], "linear")
    unit = _forecast_unit(readings)
    fig = new_figure(both, both, x_label=f"Forecast ({unit})", y_label=f"Truth ({unit})", height=420)
    fig.xaxis[0].ticker = BasicTicker(desired_num_ticks=4)  # small numbers are long: few fit on a narrow screen
    diagonal = [both.start, both.end]
    draw(fig, Line(line_color=GREY, line_dash="dashed", line_width=1.5), x=diagonal, y=diagonal)
    for trusted, color in ((False, GREY), (True, BLUE)):
        some = [p for p in points if p.is_valid is trusted]
        truth = [_drawn(p.truth) for p in some]
        if trusted:
            low, high = [_drawn(p.low) for p in some], [_drawn(p.high) for p in some]
            draw(fig, Segment(line_color=color, line_width=4, line_alpha=0.3), x0=low, y0=truth, x1=high, y1=truth)
            spread = [Z * (p.truth_se or 0.0) for p in some]
            forecasts = [_drawn(p.delta) for p in some]
            below, above = ([t + sign * s for t, s in zip(truth, spread, strict=True)] for sign in (-1, 1))
            bars = Segment(line_color=ORANGE, line_width=2, line_alpha=0.6)
            draw(fig, bars, x0=forecasts, y0=below, x1=forecasts, y1=above)
        draw(fig, _forecast_mark(color, is_trusted=trusted), x=[_drawn(p.delta) for p in some], y=truth)
    columns: dict[str, Sequence[float | str]] = {
        "x": [_drawn(p.delta) for p in points],
        "y": [_drawn(p.truth) for p in points],
        "window": [p.step for p in points],
        "forecast": [_forecast_text(p) for p in points],
        "truth": [_truth_text(p) for p in points],
    }
    add_hover(fig, columns, [("forecast", "@forecast"), ("truth", "@truth"), STEP])
    legend = [LegendEntry("dashed", GREY, "forecast and truth are equal"), *_forecast_legend(points, marks_truth=False)]
    if any(p.is_valid and (p.truth_se or 0.0) > 0 for p in points):
        legend.append(LegendEntry("bar", ORANGE, "95 % interval of the truth, by fresh rollouts"))
    return Plot((fig,), tuple(legend))


def coverage_curve(readings: Sequence[PolicyReading], axis: TimeAxis) -> Plot | str:
    """The share of intervals so far that contain the truth."""
    judged = [r for r in readings if r.point.is_valid and r.point.is_independent and r.point.has_truth]
    if not judged:
        return (
            "Coverage is not known, because no forecast that can be trusted was checked with fresh rollouts. "
            "Responses of the forecast itself cannot check its interval."
        )
    line = timeline(judged, "prompts", windows=STEPS)
    held = accumulate(int(r.point.held) for r in judged)
    so_far = {id(r): Coverage.of(n, n_held) for n, (r, n_held) in enumerate(zip(judged, held, strict=True), start=1)}
    fraction = line.column(lambda r: so_far[id(r)].fraction)
    low, high = line.column(lambda r: so_far[id(r)].low), line.column(lambda r: so_far[id(r)].high)
    fig = new_curve(line, axis, Scale("linear", -0.04, 1.04), y_label="Coverage so far", height=220)
    fig.yaxis[0].formatter = NumeralTickFormatter(format="0 %")
    add_line_at(fig, 0.95, "width", ORANGE, "dashed")
    add_bands(fig, line.x, low, high, Scale("linear", 0.0, 1.0), fill_color=BLUE, fill_alpha=0.14)
    add_curve(fig, line.x, fraction, BLUE)
    counts = line.texts(lambda r: f"{so_far[id(r)].n_held:,} of {so_far[id(r)].n:,} intervals")
    columns = {"x": line.x, "y": fraction, "window": line.windows, "counts": counts}
    add_hover(fig, columns, [("contain the truth", "@counts"), STEP])
    legend = (
        LegendEntry("line", BLUE, "share of intervals so far that contain the truth"),
        LegendEntry("band", BLUE, "95 % interval of this share"),
        LegendEntry("dashed", ORANGE, "95 %, the promised share"),
    )
    return Plot((fig,), (*legend, *restart_legend(line)))


def prompt_noise_curve(readings: Sequence[PolicyReading], axis: TimeAxis) -> Plot | str:
    """The noise scale in prompts, with its interval, and how many prompts a step learns from."""
    line = timeline_with(readings, "gns_prompts/prompts_per_window")
    if line is None:
        return "The noise scale in prompts was not measured in this run: turn gns_probe on."
    known = [None if row is None else _prompt_noise(row) for row in line.rows]
    statuses = {interval.status for interval in known if interval is not None}
    if statuses <= {"unresolved"}:
        return "No measurement has an estimate or a bound of the noise scale in prompts yet: measure more windows."
    batch = line.metric("gns_prompts/prompts_per_window")
    resolved = line.column(lambda r: r.metrics.get(PROMPT_NOISE) if _prompt_noise(r).status == "resolved" else None)
    bound = line.column(lambda r: _prompt_noise(r).low if _prompt_noise(r).status == "lower_bound" else None)
    upper = line.column(lambda r: _prompt_noise(r).high if _prompt_noise(r).status == "upper_bound" else None)
    low = line.column(lambda r: _prompt_noise(r).low if _prompt_noise(r).status == "resolved" else None)
    high = line.column(lambda r: _prompt_noise(r).high)
    drawn = [next((v for v in row if not math.isnan(v)), math.nan) for row in zip(resolved, bound, upper, strict=True)]
    y = noise_scale_axis([v for v in [*drawn, *low, *batch] if v > 0], high)
    fig = new_curve(line, axis, y, y_label="Noise scale (prompts)", height=320)
    add_bands(fig, line.x, low, high, y, fill_color=BLUE, fill_alpha=0.16)
    add_curve(fig, line.x, batch, ORANGE, dash="dashed")
    add_curve(fig, line.x, [y.clamp(v) for v in resolved], BLUE)
    add_triangles(fig, line.x, [y.clamp(v) for v in bound], "triangle", GREY)
    add_triangles(fig, line.x, [y.clamp(v) for v in upper], "inverted_triangle", GREY)
    columns = {
        "x": line.x,
        "y": [y.clamp(v) for v in drawn],
        "window": line.windows,
        "known": line.texts(_prompt_noise_text),
        "share": line.texts(lambda r: _percent(r.metrics.get("gns_prompts/completions_share"))),
    }
    rows = [("noise scale, running average", "@known"), ("part from completions", "@share"), STEP]
    add_hover(fig, columns, rows)
    return Plot((fig,), (*_prompt_noise_legend(statuses), *restart_legend(line)))


def _prompt_noise_legend(statuses: Set[Status]) -> Iterator[LegendEntry]:
    yield LegendEntry("dashed", ORANGE, "prompts that a step learns from (batch size)")
    if "resolved" in statuses:
        yield LegendEntry("line", BLUE, "noise scale, running average")
        yield LegendEntry("band", BLUE, "confidence interval of the noise scale")
    if "lower_bound" in statuses:
        yield LegendEntry("up", GREY, "lower bound: the noise scale lies above this")
    if "upper_bound" in statuses:
        yield LegendEntry("down", GREY, "upper bound: the noise scale lies below this")


def _undone(line: PolicyTimeline) -> list[bool]:
    """Whether a restart undid the measurement of each row, so that the verdict leaves it out."""
    points = [None if row is None else row.point for row in line.rows]
    kept = {id(point) for point in steps_kept([p for p in points if p is not None and p.entropy is not None]).points}
    return [p is not None and p.entropy is not None and id(p) not in kept for p in points]


def timeline_with(readings: Sequence[PolicyReading], *names: str, at_most: int | None = None) -> PolicyTimeline | None:
    """A timeline of the readings that know at least one of these metrics. Other readings would break the curves."""
    some = [r for r in readings if any(r.metrics.get(name) is not None for name in names)]
    return timeline(some, "prompts", windows=STEPS, at_most=at_most) if some else None


def _drawn(value: float | None) -> float:
    """A number as figures take it: NaN leaves a gap."""
    return math.nan if value is None else value


def _forecast_unit(readings: Sequence[PolicyReading]) -> str:
    return f"nats a {next(r.per for r in reversed(readings) if r.metrics.get('entropy/delta_forecast') is not None)}"


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


def _prompt_noise(reading: PolicyReading) -> RatioInterval:
    return logged_interval(reading.metrics, PROMPT_NOISE)


def _prompt_noise_text(reading: PolicyReading) -> str:
    known = _prompt_noise(reading)
    return estimate(known.status, reading.metrics.get(PROMPT_NOISE), known.low, known.high)


def _percent(value: float | None) -> str:
    return "not known" if value is None else f"{value:.0%}"
