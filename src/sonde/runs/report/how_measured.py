"""The table "How this was measured": everything that a reader needs to judge how far to trust the numbers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sonde.batch_size.stats.columns import METRICS
from sonde.record_values import SETTINGS, spacing
from sonde.runs.report.verdicts import failed_checks
from sonde.runs.run import PROMPT_NOISE, Run
from sonde.stats.intervals import logged_interval
from sonde.wording import count, duration, moment, number, percent, plural

MAX_TEXT = 4000
"""Characters shown of any one text of the user's. It keeps the page small, whatever a run logs."""

_MAX_ITEMS = 20
_PIECE = "A piece is one micro-batch on one rank."
_SEPARATED = "Noise is separated from signal by comparing the gradients of the pieces with the gradient of the window."
_BY_EXAMPLES = "Noise is separated from signal by comparing the gradients of single examples with that of the window."
_AVERAGED = (
    "The model does not train. Noise and signal of all windows are averaged, each window in proportion to its units, "
    "and their ratio is taken last."
)
_FILTERED = (
    "The noise scale now is filtered from noise and signal of all windows, in log time: what is remembered grows with "
    "the run. Nothing is clamped and no ratio is averaged."
)
_ENTROPY = (
    "Computed exactly at each token, from all logits, at the temperature at which responses are sampled. In nats a "
    "token: the mean entropy of a whole response, divided by the mean length of a response."
)
_FORECAST = (
    "Responses to evaluation prompts are scored before and after the step. After it, each position counts as often as "
    "the response up to there has become more likely."
)
_BY_GRADIENTS = (
    "The first derivative of the entropy along the mean gradient of the update prompts, times the learning rate. For "
    "the step itself: "
)


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
    """All rows for a run in which something was measured. A row without a text is left out."""
    rows = [*_setup_rows(run)]
    if run.readings:
        rows += [*_window_rows(run), *_trust_rows(run)]
    if run.policy:
        rows += _policy_rows(run)
    rows += _record_rows(run)
    return [row for row in rows if any(row.paragraphs)]


def _setup_rows(run: Run) -> Iterator[Row]:
    unit, setup = run.probe("reading").unit, run.probe("reading").setup
    ranks = "" if setup.get("ranks") is None else plural(int(setup["ranks"]), "data-parallel rank")
    parameters = "" if setup.get("parameters") is None else plural(int(setup["parameters"]), "parameter")
    training = (str(setup.get("wrapper", "")), ranks, str(setup.get("device", "")), parameters)
    yield Row("Training set-up", (", ".join(filter(None, training)) or "not recorded",))
    if run.readings or any(logged_interval(r.metrics, PROMPT_NOISE).status != "unresolved" for r in run.policy):
        meaning = f"{unit}. Batch sizes and noise scales are counted in {unit}, each taken as one independent sample."
        yield Row("Unit", (meaning,))
    if run.readings and setup.get("tap") is not None:  # in the order in which these places first occur
        of_readings = (reading.pieces.get("tap") for reading in run.readings)
        taps = list(dict.fromkeys(str(tap) for tap in of_readings if tap is not None)) or [str(setup["tap"])]
        yield Row("Where gradients were read", (", then ".join(taps),))
    if setup.get("metric", "euclidean") != "euclidean":
        of_first = " The noise scale and the verdict are of the first." if "," in str(setup["metric"]) else ""
        yield Row("Norm", (f"{setup['metric']}, in place of the plain squared norm of gradients.{of_first}",))
    if setup.get("optimizer") and not setup.get("fixed_weights"):
        yield Row("Optimizer whose steps were watched", (f"{setup['optimizer']}.",))
    if setup.get("batch_norms"):
        meaning = (
            f"{plural(int(setup['batch_norms']), 'layer')} in train mode. The samples of a piece share its statistics "
            "and are not independent. B_simple therefore depends on the size of the pieces: compare runs at the same "
            "piece size only."
        )
        if setup.get("sync_batch_norms"):
            meaning += " Some share their statistics over ranks, which couples the pieces of all ranks too."
        yield Row("Batch normalisation", (meaning,))
    rest = {key: value for key, value in setup.items() if key not in SETTINGS and value not in (None, False)}
    lines = [f"{key.replace('_', ' ')}: {cut(setting_text(value), 300)}" for key, value in rest.items()]
    yield Row("More of the set-up", tuple(lines[:_MAX_ITEMS]))


def _window_rows(run: Run) -> Iterator[Row]:
    unit, setup, last = run.probe("reading").unit, run.probe("reading").setup, run.readings[-1]
    per_window, units = last.pieces.get("per_window"), last.metrics.get("gns/units_per_window")
    n_pieces = "not recorded" if per_window is None else plural(int(per_window), "piece")
    intervals = ""
    if setup.get("level"):
        level = percent(float(setup["level"]))
        intervals = f" Intervals are at {level} confidence, and open where noise or signal is not known."
    if setup.get("fixed_weights"):
        judged = "none was given." if units is None else f"{number(units, 4)} {unit} were given to judge."
        window = f"{n_pieces} in the last window. {_PIECE} No step is taken, and windows grow. {_SEPARATED}"
        yield Row("Pieces", (window,))
        yield Row("Batch size", (judged,))
        yield Row("Average", (_AVERAGED + intervals,))
    else:
        separated = _BY_EXAMPLES if per_window == 1 else _SEPARATED
        window = f"{_PIECE} A window is all pieces of one optimizer step. {separated}"
        yield Row("Pieces", (n_pieces if per_window is None else f"{n_pieces} per window.", window))
        yield Row("Batch size", (f"{number(units, 4)} {unit} per window.",))
        yield Row("Weights", (_weights(units, last.metrics.get("gns/effective_units"), unit),))
        yield Row("Now", (_FILTERED + intervals,))
    text = plural(len(run.readings), "reading")
    if every := int(setup.get("log_every") or 0):
        at_last = spacing(every, last.window)
        text += f", one every {plural(every, 'window')}"
        text += "" if at_last == every else f" at first and {count(at_last)} at last"
    yield Row("Readings", (f"{text}, up to window {count(last.window)}.",))


def _trust_rows(run: Run) -> Iterator[Row]:
    last = run.readings[-1]
    dropped = tuple(f"{plural(n, 'window')}: {reason}" for reason, n in last.dropped.items())
    yield Row("Windows left out", dropped[:_MAX_ITEMS] or (f"None up to window {count(last.window)}.",))
    for name, column in METRICS.items():
        if column.term and (value := last.metrics.get(name)) is not None:
            yield Row(column.term, (f"{column.text(value)}: {column.meaning}.",))
    if last.metrics.get("cost/every") is not None:
        yield Row("Measured windows", (_pace(run.probe("reading").setup, last.metrics),))
    fraction, seconds = run.mean("cost/fraction"), run.mean("cost/seconds_per_window")
    share = "" if fraction is None else f"{percent(fraction)} of the training time"
    per_window = "" if seconds is None else f"{duration(seconds)} per window"
    cost = ", ".join(filter(None, (share, per_window)))
    means = ". This is host time that the probe cost, averaged over the run."
    yield Row("Overhead", (cost + means if cost else "not measured",))


def _pace(setup: Mapping[str, Any], metrics: Mapping[str, float | None]) -> str:
    """Which windows were measured, and the part of the run's time that it took at the end."""
    every, share, error = (metrics.get(f"cost/{name}") for name in ("every", "share", "share_error"))
    budget, allowance = setup.get("budget"), setup.get("allowance")
    text = "All at the end" if every is None or every <= 1 else f"One in {number(every)} at the end"
    if share is not None and error is not None:
        text += f", which takes {percent(share)} ± {percent(2 * error)} of the time"
    if isinstance(budget, float):
        seconds = f", or {duration(allowance)} if that is more" if isinstance(allowance, int | float) else ""
        text += f". {percent(budget)} of the time was allowed{seconds}"
    return f"{text}."


def _weights(units: float | None, effective: float | None, unit: str) -> str:
    if units is None or effective is None:
        return "not known"
    if abs(effective - units) <= 1e-6 * units:
        return f"All {unit} of a window have the same weight."
    return (
        f"The {unit} of a window have different weights: {number(units, 4)} of them count as much as "
        f"{number(effective, 4)} of equal weight."
    )


def _policy_rows(run: Run) -> Iterator[Row]:
    """How the entropy and its changes were measured."""
    policy, setup = run.policy, run.probe("policy").setup
    forecasts = [r for r in policy if r.metrics.get("entropy/is_valid") is not None]
    yield Row("Entropy", (_ENTROPY,))
    method = _FORECAST
    if any(r.metrics.get("entropy/delta_finite_step") is not None for r in forecasts):
        method = f"{_BY_GRADIENTS}{method[0].lower()}{method[1:]}"
    trusted = f"{sum(r.point.is_valid for r in forecasts)} of {plural(len(forecasts), 'forecast')} can be trusted."
    yield Row("Forecast", (f"{method} The standard error comes from the scatter over these prompts.", trusted))
    if setup.get("evaluation"):
        yield Row("Evaluated on", (f"{setup['evaluation']}.",))
    reasons = dict.fromkeys(f"Step {r.window:,}: {r.reason}" for r in policy if r.reason)
    yield Row("Not to be trusted", tuple(cut(reason, 300) for reason in list(reasons)[:_MAX_ITEMS]) or ("None.",))
    seconds = [value for r in policy if (value := r.metrics.get("cost/entropy_seconds")) is not None]
    if seconds:
        mean = duration(sum(seconds) / len(seconds))
        yield Row("Time", (f"{mean} per forecast, with the measured changes, on average.",))


def _record_rows(run: Run) -> Iterator[Row]:
    failed = [f"{cut(each.message, 500)} ({each.in_words})" for each in failed_checks(run)]
    if hidden := len(failed) - _MAX_ITEMS:
        failed[_MAX_ITEMS:] = [f"The log has {plural(hidden, 'more alert')}."] if hidden > 0 else []
    yield Row("Alerts", tuple(failed) or ("None.",))
    header = run.header
    log = [f"Started {moment(header.time)}." for header in run.headers[:_MAX_ITEMS]]
    last = moment(header.time if run.is_empty else max(header.time, run.last.time))
    log.append(
        f"No end was recorded: the run is still going on, or it was cut off after {last}."
        if run.ended is None
        else f"Ended: {run.ended}. Last reading: {last}."
    )
    yield Row("Log", tuple(log))
    yield Row(
        "Versions", (", ".join(f"{name} {version}" for name, version in header.versions.items()) or "not recorded",)
    )
    if header.metadata:
        metadata = json.dumps(header.metadata, indent=2, ensure_ascii=False)
        yield Row("Metadata", (cut(metadata),), is_code=True)


def cut(text: str, longest: int = MAX_TEXT) -> str:
    """The text. If it is too long to show, it is cut and a note says by how much."""
    if (n_left := len(text) - longest) <= 0:
        return text
    return f"{text[:longest]}… ({plural(n_left, 'more character')} in the log)"


def setting_text(value: object) -> str:
    """A setting in plain text."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
