"""What the forecasts of a run are made of, what they cost, and how entropy is spread over responses."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

from sonde.runs.policy_reading import PolicyReading
from sonde.runs.report.curve_style import STEP, TimeAxis, add_bands, add_curve, new_curve, restart_legend
from sonde.runs.report.figures import BLUE, LegendEntry, Plot, Table, add_hover, scale_for
from sonde.runs.report.policy_curves import timeline_with
from sonde.wording import duration, number, percent

_MILLION = 1e6

_PARTS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("Evaluation prompts, B_E", "entropy/n_evaluation_prompts", number),
    ("Update prompts, B_U", "entropy/n_update_prompts", number),
    ("Change of entropy (nats)", "entropy/delta_forecast", number),
    ("Its standard error (nats)", "entropy/delta_se", number),
    ("– its variance from the evaluation prompts, V_X (nats²)", "entropy/v_x", number),
    ("– its variance from the update prompts, V_Y (nats²)", "entropy/v_y", number),
    ("Variance of the change over its square", "entropy/frac_var", percent),
    ("Change to first order, or X̄·Ȳ (nats)", "entropy/bars_dot", number),
    ("KL of sampler and policy (nats a token)", "entropy/sampler_kl", number),
    ("– test of log_prob=, E[π/q] = 1 (standard errors)", "entropy/sampler_z", number),
    ("Time", "cost/entropy_seconds", duration),
    ("– drawing evaluation responses", "cost/entropy_seconds_sampling", duration),
    ("– scoring them before the step", "cost/entropy_seconds_scores", duration),
    ("– scoring them after the step", "cost/entropy_seconds_scores_after", duration),
    ("– derivatives", "cost/entropy_seconds_derivatives", duration),
    ("– gradients of the prompts", "cost/entropy_seconds_gradients", duration),
    ("– causes", "cost/entropy_seconds_causes", duration),
    ("– the coefficient that would hold the entropy", "cost/entropy_seconds_coefficient", duration),
    ("– fresh rollouts", "cost/entropy_seconds_rollouts", duration),
    ("Growth of the peak memory (MB)", "cost/entropy_peak_bytes", lambda n: number(n / _MILLION)),
)
"""Name, metric, and how its value is written."""

_Q05, _Q25, _Q50, _Q75, _Q95 = (f"entropy/update_response_q{q:02}" for q in (5, 25, 50, 75, 95))


def forecast_parts(readings: Sequence[PolicyReading]) -> Table | str:
    """The numbers behind the last forecast, and their medians over the run."""
    forecasts = [r for r in readings if r.metrics.get("entropy/delta_forecast") is not None]
    if not forecasts:
        return "No change of entropy was forecast in this run."
    rows = []
    for name, metric, text in _PARTS:
        values = [v for r in forecasts if (v := r.metrics.get(metric)) is not None]
        if not values or (metric == "entropy/v_y" and not any(values)):
            continue
        last = forecasts[-1].metrics.get(metric)
        rows.append((name, number(None) if last is None else text(last), text(statistics.median(values))))
    caption = "The numbers behind the forecast of the last measured step, and their medians over all measured steps"
    return Table(caption, ("", f"Step {forecasts[-1].window:,}", "Median"), tuple(rows))


def response_curve(readings: Sequence[PolicyReading], axis: TimeAxis) -> Plot | None:
    """The mean entropy of single responses over the run: median and quantiles; None if not measured."""
    line = timeline_with(readings, _Q50)
    if line is None:
        return None
    q05, q25, q50, q75, q95 = (line.metric(name) for name in (_Q05, _Q25, _Q50, _Q75, _Q95))
    y = scale_for([0.0, *(v for v in [*q05, *q95] if math.isfinite(v))], "linear")
    fig = new_curve(line, axis, y, y_label="Entropy (nats a token)", height=260)
    add_bands(fig, line.x, q05, q95, y, fill_color=BLUE, fill_alpha=0.12)
    add_bands(fig, line.x, q25, q75, y, fill_color=BLUE, fill_alpha=0.2)
    add_curve(fig, line.x, q50, BLUE)
    columns = {
        "x": line.x,
        "y": q50,
        "window": line.windows,
        "middle": line.texts(lambda r: _range(r, _Q25, _Q75)),
        "most": line.texts(lambda r: _range(r, _Q05, _Q95)),
        "sd": line.texts(lambda r: number(r.metrics.get("entropy/update_response_sd"))),
    }
    rows = [("median", "@y{0.000}"), ("half", "@middle"), ("90 %", "@most"), ("standard deviation", "@sd"), STEP]
    add_hover(fig, columns, rows)
    legend = (
        LegendEntry("line", BLUE, "median over the responses that the step learns from"),
        LegendEntry("band", BLUE, "half of the responses (darker), and 90 % of them"),
    )
    return Plot((fig,), (*legend, *restart_legend(line)))


def _range(reading: PolicyReading, low: str, high: str) -> str:
    return f"{number(reading.metrics.get(low))} to {number(reading.metrics.get(high))}"
