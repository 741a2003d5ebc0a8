"""The page of several runs: what they show together, their curves, and how they differ. It needs Bokeh."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

from sonde.evidence.answer import Row as TableRow
from sonde.evidence.answer import capital
from sonde.runs.compare.beside import Value, nearest, quantities
from sonde.runs.compare.side_by_side import By, Comparison
from sonde.runs.compare.words import beside_rows, run_rows, sentences, setting_rows, summary
from sonde.runs.report.curves import Curve, add_band, add_curve, units_label
from sonde.runs.report.figures import (
    CURVE_STYLES,
    LegendEntry,
    Plot,
    Scale,
    Section,
    Table,
    add_hover,
    new_figure,
    reachable,
    scale_for,
)
from sonde.runs.report.how_measured import MAX_TEXT, Row
from sonde.runs.report.page import check_target, whole_page, write_in_one_step
from sonde.stats.columns import GREY
from sonde.wording import number, plural

_MOST_BANDS = 6
"""With more runs, intervals would cover each other, and are not drawn."""
_MOST_SENTENCES = 6
"""The table has all."""
_N_TEXTS = 120
"""Places of a figure that have a hover text."""
_TIMES = ((3600.0, "Hours"), (60.0, "Minutes"), (1.0, "Seconds"))


def write_comparison(found: Comparison, out: Path) -> Path:
    """Write the page of several runs: one HTML file that opens in any browser.

    Args:
        found: as `read_runs` returns it.
        out: the file. An older report is replaced in one step. Any other file is left alone.

    Returns:
        The file that was written.

    Raises:
        ValueError: when `out` exists and is not a report.
    """
    check_target(out)
    write_in_one_step(out, comparison_page(found))
    return out


def comparison_page(found: Comparison) -> str:
    """The whole page."""
    metrics = {run.metric for run in found.runs if run.run.readings}  # noise scales of two have no common axis
    ends = map(_end_of_noise, ("ratio", "low", "high"))
    noise = _curves(found, f"Noise scale ({found.unit})", *ends) if len(metrics) == 1 else None
    said = " ".join(sentences(found)[:_MOST_SENTENCES])
    sections = [
        Section("The runs", said, (_table("Each run by itself, at its last reading", run_rows(found)),)),
        *([Section("Noise scale", _GAPS, (noise,))] if noise else []),
        *(
            Section(each.name if each.name in found.values else capital(each.name), "", (plot,))
            for each in quantities(found)
            if (plot := _curves(found, each.name, each.of)) is not None
        ),
        Section(f"Beside {found.runs[0].name}", _BESIDE, (_table("With 95 % intervals", beside_rows(found)),)),
        Section("Settings that differ", "", (_table("From the headers of the logs", setting_rows(found, MAX_TEXT)),)),
    ]
    logs = tuple(f"{run.name}: {run.run.path}" for run in found.runs)
    return whole_page(
        sections,
        name=f"{len(found.runs)} runs side by side",
        subject="comparison of runs",
        facts=[run.name for run in found.runs],
        alerts_title="Noticed in these runs",
        alerts=[{"message": f"{notice}."} for notice in found.notices],
        more_alerts=plural(max(len(found.notices) - 5, 0), "more notice"),
        panels=[summary(found)],
        rows=[
            Row("Ratios and differences", (_METHOD,)),
            Row("Logs", logs),
            Row("Noticed", found.notices or ("Nothing.",)),
        ],
        source="the logs of these runs",
    )


def _table(caption: str, rows: Iterable[TableRow]) -> Table | str:
    head, *rest = rows
    return Table(caption, tuple(map(capital, head)), tuple(rest), n_texts=2) if rest else "Nothing."


def _end_of_noise(end: str) -> Value:
    """One number of a noise scale; NaN, where curves break, if its estimate is not known."""
    return lambda run, r: (getattr(of, end) if of.ratio else math.nan) if (of := run.noise(r)) is not None else None


def _axis(found: Comparison, by: By) -> tuple[float, str, Scale]:
    """What one unit of the horizontal axis stands for, its label, and its range: of all readings of all runs."""
    runs = [of for run in found.runs if (of := run.series(lambda *_: True, by))]
    first, end = min(of[0][0] for of in runs), max(of[-1][0] for of in runs)
    per_unit, label = units_label(end, found.unit) if by == "units" else (1.0, "Optimizer steps")
    if by == "time":
        per_unit, label = next((f, label) for f, label in _TIMES if end >= 3 * f or f == 1)
    return per_unit, label, scale_for([first / per_unit, end / per_unit], "linear")


def _curves(found: Comparison, label: str, value: Value, *ends: Value) -> Plot | None:
    """A value of each run; None where no run knows it. What is not known on the chosen axis is drawn over steps.

    Args:
        found: the runs.
        label: of the vertical axis.
        value: of a reading.
        *ends: of its interval, known where the value is.
    """
    by = found.by if any(run.series(value, found.by) for run in found.runs) else "steps"
    all_of = {run: run.series(value, by) for run in found.runs}
    drawn = {run: of for run, of in all_of.items() if not all(math.isnan(each) for _, each in of)}
    if not drawn:
        return None
    per_unit, x_label, x_scale = _axis(found, by)
    bands = {run: [[each for _, each in run.series(end, by)] for end in ends] for run in drawn if ends}
    bands = bands if len(drawn) <= _MOST_BANDS else {}
    shown = [each for of in drawn.values() for _, each in of]
    reached = reachable([each for band in bands.values() for of in band for each in of], shown)
    y = scale_for([*shown, *reached], "log" if ends else "any")
    fig = new_figure(x_scale, y, x_label=x_label, y_label=label, height=340)
    legend, words = [], []
    for run, (color, mark) in zip(found.runs, CURVE_STYLES, strict=False):
        if run in drawn:
            x, values = [at / per_unit for at, _ in drawn[run]], [each for _, each in drawn[run]]
            if run in bands:
                low, high = bands[run]
                add_band(fig, x, low, high, y, Curve("band", color, "", ""))
            add_curve(fig, x, values, color, "solid" if mark == "line" else mark)
            legend.append(LegendEntry(mark, color, run.name))
            words.append(f"{run.letter}: {number(values[0])} at first, {number(values[-1])} at last")
    if bands:
        legend.append(LegendEntry("band", GREY, "confidence interval"))
    places = [x_scale.at(k / _N_TEXTS) for k in range(_N_TEXTS + 1)]
    texts = {run.letter: (lambda k, of=of: number(nearest(of, places[k] * per_unit))) for run, of in drawn.items()}
    add_hover(fig, places, [math.nan] * len(places), texts)
    return Plot((fig,), tuple(legend), f"{label} over {x_label.lower()}. {'; '.join(words)}.")


_GAPS = "Where a curve is missing, only a bound of the noise scale is known, or nothing."
_BESIDE = "× is a factor, other numbers are differences. – says that the runs have too little in common there."
_METHOD = (
    "docs/compare.md says how ratios, differences and their intervals are made. Readings of a run depend on each "
    "other: many of them narrow nothing."
)
