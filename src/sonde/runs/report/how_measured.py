"""The table "How this was measured": everything that a reader needs to judge how far to trust the numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sonde.record_values import spacing
from sonde.runs.report.verdicts import failed_checks
from sonde.runs.run import PROMPT_NOISE, PolicyReading, Run, logged_interval
from sonde.wording import count, duration, moment, number, percent, plural

MAX_TEXT = 4000
"""Characters shown of any one text of the user's. It keeps the page small, whatever a run logs."""

_MAX_ITEMS = 20
_SETUP_SHOWN = (
    "wrapper", "ranks", "device", "tap", "parameters", "groups", "log_every", "level", "metric", "budget",
    "allowance", "every", "further_units",
    "evaluation", "optimizer", "batch_norms", "sync_batch_norms", "fixed_weights",
)  # fmt: skip

_PIECE = "A piece is one micro-batch on one rank."
_SEPARATED = "Noise is separated from signal by comparing the gradients of the pieces with the gradient of the window."
_BY_EXAMPLES = "Noise is separated from signal by comparing the gradients of single examples with that of the window."


@dataclass(frozen=True)
class Row:
    """One row of the table.

    Attributes:
        term: what the row is about.
        paragraphs: plain text, in which the user's words are not escaped yet.
        is_code: whether to keep line breaks and use a fixed-width font.
    """

    term: str
    paragraphs: tuple[str, ...]
    is_code: bool = False


def how_measured(run: Run) -> list[Row]:
    """All rows for a run in which something was measured."""
    rows = _setup_rows(run)
    if run.readings:
        rows += [*_window_rows(run), *_trust_rows(run)]
    if run.policy:
        rows += _policy_rows(run)
    return [*rows, Row("Alerts", _alerts(run)), *_record_rows(run)]


def _setup_rows(run: Run) -> list[Row]:
    unit, setup = run.probe("reading").unit, run.probe("reading").setup
    ranks = setup.get("ranks")
    training = [str(setup[key]) for key in ("wrapper", "device") if key in setup]
    if ranks is not None:
        training.insert(1, plural(int(ranks), "data-parallel rank"))
    if setup.get("parameters") is not None:
        training.append(plural(int(setup["parameters"]), "parameter"))
    rows = [Row("Training set-up", (", ".join(training) or "not recorded",))]
    if run.readings or any(logged_interval(r.metrics, PROMPT_NOISE).status != "unresolved" for r in run.policy):
        meaning = f"{unit}. Batch sizes and noise scales are counted in {unit}, each taken as one independent sample."
        rows.append(Row("Unit", (meaning,)))
    taps = _taps(run)
    if taps:
        rows.append(Row("Where gradients were read", (", then ".join(taps),)))
    if setup.get("metric", "euclidean") != "euclidean":
        of_first = " The noise scale and the verdict are of the first." if "," in str(setup["metric"]) else ""
        rows.append(Row("Norm", (f"{setup['metric']}, in place of the plain squared norm of gradients.{of_first}",)))
    if setup.get("optimizer") and not setup.get("fixed_weights"):
        rows.append(Row("Optimizer whose steps were watched", (f"{setup['optimizer']}.",)))
    if setup.get("batch_norms"):
        layers = plural(int(setup["batch_norms"]), "layer")
        meaning = (
            f"{layers} in train mode. The samples of a piece share its statistics and are not independent. B_simple "
            "therefore depends on the size of the pieces: compare runs at the same piece size only."
        )
        if setup.get("sync_batch_norms"):
            meaning += " Some share their statistics over ranks, which couples the pieces of all ranks too."
        rows.append(Row("Batch normalisation", (meaning,)))
    rest = {key: value for key, value in setup.items() if key not in _SETUP_SHOWN and value not in (None, False)}
    if rest:
        lines = [f"{key.replace('_', ' ')}: {_value(value)}" for key, value in rest.items()]
        rows.append(Row("More of the set-up", tuple(lines[:_MAX_ITEMS])))
    return rows


def _taps(run: Run) -> list[str]:
    """Where gradients were read, in the order in which these places first occur."""
    of_setup = run.probe("reading").setup.get("tap")
    if not run.readings or of_setup is None:
        return []
    of_readings = (reading.pieces.get("tap") for reading in run.readings)
    return list(dict.fromkeys(str(tap) for tap in of_readings if tap is not None)) or [str(of_setup)]


def _window_rows(run: Run) -> list[Row]:
    unit, setup, last = run.probe("reading").unit, run.probe("reading").setup, run.readings[-1]
    per_window, units = last.pieces.get("per_window"), last.metrics.get("gns/units_per_window")
    n_pieces = "not recorded" if per_window is None else plural(int(per_window), "piece")
    every = _spacing_text(int(setup["log_every"]), last.window) if setup.get("log_every") else ""
    readings = f"{plural(len(run.readings), 'reading')}{every}, up to window {count(last.window)}."
    level = setup.get("level")
    intervals = (
        f" Intervals are at {percent(float(level))} confidence, and open where noise or signal is not known."
        if level
        else ""
    )
    if setup.get("fixed_weights"):
        return [*_fixed_weights_rows(n_pieces, units, unit, intervals), Row("Readings", (readings,))]
    separated = _BY_EXAMPLES if per_window == 1 else _SEPARATED
    window = f"{_PIECE} A window is all pieces of one optimizer step. {separated}"
    rows = [
        Row("Pieces", (n_pieces if per_window is None else f"{n_pieces} per window.", window)),
        Row("Batch size", (f"{number(units, 4)} {unit} per window.",)),
        Row("Weights", (_weights(units, last.metrics.get("gns/effective_units"), unit),)),
    ]
    averaging = (
        "The noise scale now is filtered from noise and signal of all windows, in log time: what is remembered grows "
        "with the run. Nothing is clamped and no ratio is averaged."
    )
    return [*rows, Row("Now", (averaging + intervals,)), Row("Readings", (readings,))]


def _spacing_text(every: int, last_window: int) -> str:
    text, at_last = f", one every {plural(every, 'window')}", spacing(every, last_window)
    return text if at_last == every else f"{text} at first and {count(at_last)} at last"


def _fixed_weights_rows(n_pieces: str, batch: float | None, unit: str, intervals: str) -> list[Row]:
    """The windows of a model that does not train."""
    judged = "none was given." if batch is None else f"{number(batch, 4)} {unit} were given to judge."
    window = f"{n_pieces} in the last window. {_PIECE} No step is taken, and windows grow. {_SEPARATED}"
    averaging = (
        "The model does not train. Noise and signal of all windows are averaged, each window in proportion to its "
        "units, and their ratio is taken last."
    )
    return [Row("Pieces", (window,)), Row("Batch size", (judged,)), Row("Average", (averaging + intervals,))]


def _trust_rows(run: Run) -> list[Row]:
    last = run.readings[-1]
    dropped = tuple(f"{plural(n, 'window')}: {reason}" for reason, n in last.dropped.items())
    rows = [Row("Windows left out", dropped[:_MAX_ITEMS] or (f"None up to window {count(last.window)}.",))]
    consistency = last.metrics.get("gns/consistency")
    if consistency is not None:
        meaning = "noise measured within ranks divided by noise measured between ranks. It should be about 1"
        rows.append(Row("Consistency", (f"{number(consistency)}: {meaning}.",)))
    scale, residual = last.metrics.get("gns/scale"), last.metrics.get("gns/scale_residual")
    if scale is not None:
        factor = f"The optimizer's gradient was {number(scale)} times the sum of the pieces' gradients."
        rest = ""
        if residual is not None:
            rest = f" The part that this factor does not explain is {percent(residual)} of the gradient's norm."
        rows.append(Row("Scale", (factor + rest,)))
    if last.metrics.get("cost/every") is not None:
        rows.append(Row("Measured windows", (_pace(run.probe("reading").setup, last.metrics),)))
    rows.append(Row("Overhead", (_overhead(run),)))
    return rows


def _policy_rows(run: Run) -> list[Row]:
    """How the entropy and its changes were measured."""
    policy, setup = run.policy, run.probe("policy").setup
    forecasts = [r for r in policy if r.metrics.get("entropy/is_valid") is not None]
    rows = [
        Row(
            "Entropy",
            (
                "Computed exactly at each token, from all logits, at the temperature at which responses are sampled. "
                "In nats a token: the mean entropy of a whole response, divided by the mean length of a response.",
            ),
        ),
        Row(
            "Forecast",
            (
                _forecast_method(forecasts),
                f"{sum(r.point.is_valid for r in forecasts)} of {plural(len(forecasts), 'forecast')} can be trusted.",
            ),
        ),
    ]
    if setup.get("evaluation"):
        rows.append(Row("Evaluated on", (f"{setup['evaluation']}.",)))
    reasons = dict.fromkeys(f"Step {r.window:,}: {r.reason}" for r in policy if r.reason)
    doubts = tuple(cut(reason, 300) for reason in list(reasons)[:_MAX_ITEMS])
    rows.append(Row("Not to be trusted", doubts or ("None.",)))
    seconds = [value for r in policy if (value := r.metrics.get("cost/entropy_seconds")) is not None]
    if seconds:
        mean_time = duration(sum(seconds) / len(seconds))
        rows.append(
            Row(
                "Time",
                (f"{mean_time} per forecast, with the measured changes, on average.",),
            )
        )
    return rows


def _forecast_method(forecasts: Sequence[PolicyReading]) -> str:
    method = (
        "Responses to evaluation prompts are scored before and after the step. After it, each position counts as "
        "often as the response up to there has become more likely."
    )
    if any(r.metrics.get("entropy/delta_finite_step") is not None for r in forecasts):
        method = (
            "The first derivative of the entropy along the mean gradient of the update prompts, times the learning "
            f"rate. For the step itself: {method[0].lower()}{method[1:]}"
        )
    return f"{method} The standard error comes from the scatter over these prompts."


def _record_rows(run: Run) -> list[Row]:
    header = run.header
    starts = [f"Started {moment(header.time)}." for header in run.headers[:_MAX_ITEMS]]
    if run.torn:
        starts.append(f"A crash damaged the log: {run.torn}.")
    versions = ", ".join(f"{name} {version}" for name, version in header.versions.items())
    rows = [Row("Log", (*starts, _end(run))), Row("Versions", (versions or "not recorded",))]
    if header.metadata:
        rows.append(Row("Metadata", (cut(json.dumps(header.metadata, indent=2, ensure_ascii=False)),), is_code=True))
    return rows


def cut(text: str, longest: int = MAX_TEXT) -> str:
    """The text. If it is too long to show, it is cut and a note says by how much."""
    if (n_left := len(text) - longest) <= 0:
        return text
    return f"{text[:longest]}… ({plural(n_left, 'more character')} in the log)"


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return cut(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), 300)


def _weights(units: float | None, effective: float | None, unit: str) -> str:
    if units is None or effective is None:
        return "not known"
    if abs(effective - units) <= 1e-6 * units:
        return f"All {unit} of a window have the same weight."
    return (
        f"The {unit} of a window have different weights: {number(units, 4)} of them count as much as "
        f"{number(effective, 4)} of equal weight."
    )


def _alerts(run: Run) -> tuple[str, ...]:
    failed = failed_checks(run)
    lines = [
        f"{cut(each.message, 500)} ({each.when}{'; it has passed since' if each.is_over else ''})"
        for each in failed[:_MAX_ITEMS]
    ]
    if len(failed) > _MAX_ITEMS:
        lines.append(f"The log has {plural(len(failed) - _MAX_ITEMS, 'more alert')}.")
    return tuple(lines) or ("None.",)


def _overhead(run: Run) -> str:
    fraction, seconds = run.mean("cost/fraction"), run.mean("cost/seconds_per_window")
    if fraction is None and seconds is None:
        return "not measured"
    per_window = "" if seconds is None else f", {duration(seconds)} per window"
    share = "" if fraction is None else f"{percent(fraction)} of the training time{per_window}"
    return f"{share or per_window.removeprefix(', ')}. This is host time that the probe cost, averaged over the run."


def _pace(setup: Mapping[str, Any], metrics: Mapping[str, float | None]) -> str:
    """Which windows were measured, and the part of the run's time that it took at the end."""
    every, share, error = (metrics.get(f"cost/{name}") for name in ("every", "share", "share_error"))
    budget, allowance = setup.get("budget"), setup.get("allowance")
    seconds = f", or {duration(allowance)} if that is more" if isinstance(allowance, int | float) else ""
    allowed = f" {percent(budget)} of the time was allowed{seconds}." if isinstance(budget, float) else ""
    which = "All" if every is None or every <= 1 else f"One in {number(every)}"
    cost = (
        "" if share is None or error is None else f", which takes {percent(share)} ± {percent(2 * error)} of the time"
    )
    return f"{which} at the end{cost}.{allowed}"


def _end(run: Run) -> str:
    last = run.header.time if run.is_empty else max(run.header.time, run.last.time)
    if run.ended is None:
        return f"No end was recorded: the run is still going on, or it was cut off after {moment(last)}."
    return f"Ended: {run.ended}. Last reading: {moment(last)}."
