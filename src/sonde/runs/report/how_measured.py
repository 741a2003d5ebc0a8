"""The table "How this was measured": everything that a reader needs to judge how far to trust the numbers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from sonde.batch_size.stats.columns import BATCH, METRICS
from sonde.runs.report.verdicts import failed_checks
from sonde.runs.run import Run
from sonde.wording import count, duration, number, percent, plural

MAX_TEXT = 4000
"""Characters shown of any one text of the user's. It keeps the page small, whatever a run logs."""

_MAX_ITEMS = 20
_NOT_SHOWN = ("groups", "optimizer_settings")
"""Long lists in a set-up."""
_COUPLED = (
    "layers in train mode couple the samples of a piece, so B_simple depends on the pieces' size: compare runs at "
    "the same piece size only."
)
_PIECE = "A piece is one micro-batch on one rank."
_SEPARATED = "Noise is separated from signal by comparing the gradients of the pieces with the gradient of the window."
_BY_EXAMPLES = "Noise is separated from signal by comparing the gradients of single examples with that of the window."
_AVERAGED = (
    "The model does not train, no step is taken, and windows grow. Noise and signal of all windows are averaged, each "
    "window in proportion to its units, and their ratio is taken last."
)
_FILTERED = (
    "A window is all pieces of one optimizer step. The noise scale now is filtered from noise and signal of all "
    "windows, in log time: what is remembered grows with the run. Nothing is clamped and no ratio is averaged."
)
_ENTROPY = (
    "Computed exactly at each token, from all logits, at the temperature at which responses are sampled. In nats a "
    "token: the mean entropy of a whole response, divided by the mean length of a response."
)
_FORECAST = (
    "Responses to evaluation prompts are scored before and after the step. After it, each position counts as often as "
    "the response up to there has become more likely. The standard error comes from the scatter over these prompts."
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
        rows += _noise_scale_rows(run)
    if run.policy:
        rows += _policy_rows(run)
    rows += _record_rows(run)
    return [row for row in rows if any(row.paragraphs)]


def _setup_rows(run: Run) -> Iterator[Row]:
    setup = {**run.probe("policy").setup, **run.probe("reading").setup}
    empty: tuple[object, ...] = (None, False, "", [], {})
    shown = {key: value for key, value in setup.items() if key not in _NOT_SHOWN and value not in empty}
    lines = [f"{key.replace('_', ' ')}: {cut(setting_text(value), 300)}" for key, value in shown.items()]
    yield Row("Set-up", tuple(lines[: 2 * _MAX_ITEMS]))
    if setup.get("batch_norms"):
        over_ranks = " Some couple those of all ranks." if setup.get("sync_batch_norms") else ""
        yield Row("Batch normalisation", (f"{setup['batch_norms']} {_COUPLED}{over_ranks}",))


def _noise_scale_rows(run: Run) -> Iterator[Row]:
    unit, setup, last = run.probe("reading").unit, run.probe("reading").setup, run.readings[-1]
    per_window, read_by = last.pieces.get("per_window"), last.pieces.get("tap")
    if per_window is not None:
        by = f", read by {read_by}" if read_by else ""
        yield Row("Pieces", (f"{plural(int(per_window), 'piece')} in the last window{by}. {_PIECE}",))
    separated = _BY_EXAMPLES if per_window == 1 and not setup.get("fixed_weights") else _SEPARATED
    level = setup.get("level")
    open_ends = f"Intervals are at {percent(level)} confidence, and open where noise or signal is not known."
    method = _AVERAGED if setup.get("fixed_weights") else _FILTERED
    yield Row("Noise scale", (separated, method, *[open_ends] * bool(level)))
    units, effective = last.metrics.get(BATCH), last.metrics.get("gns/effective_units")
    if units and effective and abs(effective - units) > 1e-6 * units:
        meaning = f"{number(units, 4)} {unit} of a window count as much as {number(effective, 4)} of equal weight."
        yield Row("Weights", (meaning,))
    yield Row("Readings", (f"{plural(len(run.readings), 'reading')}, up to window {count(last.window)}.",))
    dropped = tuple(f"{plural(n, 'window')}: {reason}" for reason, n in last.dropped.items())
    yield Row("Windows left out", dropped[:_MAX_ITEMS] or (f"None up to window {count(last.window)}.",))
    for name, column in METRICS.items():
        if column.term and (value := last.metrics.get(name)) is not None:
            yield Row(column.term, (f"{column.text(value)}: {column.meaning}.",))


def _policy_rows(run: Run) -> Iterator[Row]:
    """How the entropy and its changes were measured."""
    policy = run.policy
    forecasts = [r for r in policy if r.metrics.get("entropy/is_valid") is not None]
    yield Row("Entropy", (_ENTROPY,))
    method = _FORECAST
    if any(r.metrics.get("entropy/delta_finite_step") is not None for r in forecasts):
        method = f"{_BY_GRADIENTS}{method[0].lower()}{method[1:]}"
    trusted = f"{sum(r.point.is_valid for r in forecasts)} of {plural(len(forecasts), 'forecast')} can be trusted."
    yield Row("Forecast", (method, trusted))
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
    yield Row("Versions", (", ".join(f"{name} {version}" for name, version in run.header.versions.items()),))
    if run.header.metadata:
        metadata = json.dumps(run.header.metadata, indent=2, ensure_ascii=False)
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
    if isinstance(value, int):
        return f"{value:,}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
