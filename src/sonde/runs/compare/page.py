"""The page of several runs: what they show together, their curves, and how they differ. It needs Bokeh."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Iterator

from sonde.evidence.answer import Row as TableRow
from sonde.runs.compare.side_by_side import ENTROPY, By, Comparison
from sonde.runs.compare.stats.at_equal import Points
from sonde.runs.compare.words import beside_rows, reached_rows, run_rows, setting_rows, summary
from sonde.runs.report.curves import add_curve, units_label
from sonde.runs.report.figures import (
    CURVE_STYLES,
    LegendEntry,
    Plot,
    Scale,
    Section,
    Table,
    add_hover,
    new_figure,
    scale_for,
)
from sonde.runs.report.how_measured import MAX_TEXT, Row
from sonde.runs.report.page import whole_page
from sonde.wording import capital, number

_N_TEXTS = 120
"""Places of a figure that have a hover text."""
_TIMES = ((3600.0, "Hours"), (60.0, "Minutes"), (1.0, "Seconds"))


def comparison_page(found: Comparison) -> str:
    """The whole page."""
    panel = summary(found)
    best = _table("With 95 % intervals", beside_rows(found)), _table("By interpolation", reached_rows(found), n_texts=1)
    sections = [
        Section("Which did best?", f"{panel.headline} {panel.detail} {_BESIDE}", best),
        Section("The runs", "", (_table("Each run by itself, at its last reading", run_rows(found)),)),
        *(Section(title, text, (plot,)) for title, text, plot in _plots(found)),
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
        panels=[panel],
        rows=[Row("Differences", (_METHOD,)), Row("Logs", logs), Row("Noticed", found.notices or ("Nothing.",))],
        source="the logs of these runs",
    )


def _table(caption: str, rows: Iterable[TableRow], *, n_texts: int = 2) -> Table | str:
    head, *rest = rows
    return Table(caption, tuple(map(capital, head)), tuple(rest), n_texts) if rest else "Nothing."


def _plots(found: Comparison) -> Iterator[tuple[str, str, Plot]]:
    """Title, text and curves of what any run knows."""
    metrics = {str(run.run.probe("reading").setup.get("metric")) for run in found.runs if run.run.readings}
    # Noise scales of two metrics have no common axis.
    drawn = dict.fromkeys(found.values, "") | dict.fromkeys(["gns/b_simple"] * (len(metrics) == 1), _GAPS)
    for name, text in (drawn | dict.fromkeys(["grad/norm", "run/units_per_second"], "")).items():
        title = _TITLES.get(name, name).format(unit=found.unit)
        if (plot := _curves(found, name, title)) is not None:
            yield title, text, plot


def _axis(found: Comparison, by: By) -> tuple[float, str, Scale]:
    """What one unit of the horizontal axis stands for, its label, and its range: of all readings of all runs."""
    runs = [of for run in found.runs if (of := run.placed(by))]
    first, end = min(of[0][0] for of in runs), max(of[-1][0] for of in runs)
    per_unit, label = units_label(end, found.unit) if by == "units" else (1.0, "Optimizer steps")
    if by == "time":
        per_unit, label = next((f, label) for f, label in _TIMES if end >= 3 * f or f == 1)
    return per_unit, label, scale_for([first / per_unit, end / per_unit], "linear")


def _curves(found: Comparison, name: str, label: str) -> Plot | None:
    """A value of each run; None where no run knows it. What is not known on the chosen axis is drawn over steps."""
    by = found.by if any(run.curve(name, found.by) for run in found.runs) else "steps"
    drawn = {run: points for run in found.runs if (points := run.curve(name, by))}
    if not drawn:
        return None
    per_unit, x_label, x_scale = _axis(found, by)
    y = scale_for([value for points in drawn.values() for _, value in points], "any")
    fig = new_figure(x_scale, y, x_label=x_label, y_label=label, height=340)
    legend, words = [], []
    for run, (color, mark) in zip(found.runs, CURVE_STYLES, strict=False):
        if run in drawn:
            points = drawn[run]
            x, values = [at / per_unit for at, _ in points], [value for _, value in points]
            add_curve(fig, x, values, color, mark)
            legend.append(LegendEntry(mark, color, run.name))
            words.append(f"{run.letter}: {number(values[0])} at first, {number(values[-1])} at last")
    places = [x_scale.at(k / _N_TEXTS) for k in range(_N_TEXTS + 1)]
    texts = {run.letter: (lambda k, of=of: number(nearest(of, places[k] * per_unit))) for run, of in drawn.items()}
    add_hover(fig, places, [math.nan] * len(places), texts)
    return Plot((fig,), tuple(legend), f"{label} over {x_label.lower()}. {'; '.join(words)}.")


_TITLES = {
    ENTROPY: "Entropy",
    "gns/b_simple": "Noise scale ({unit})",
    "grad/norm": "Gradient norm",
    "run/units_per_second": "Speed ({unit} per second)",
}
_GAPS = "The noise scale now, where it is known: the report of each run has its interval."
_BESIDE = (
    "Each difference is at the last place that both runs have reached. Where a number is “about”, too few values lie "
    "near that place for an interval. – says that the runs have no such place in common."
)
_METHOD = (
    "Differences are of lines through the last values of each run, over the logarithm of the place: docs/compare.md. A "
    "value in a reading is the mean since the reading before, so it is taken at the middle between the two."
)


def nearest(series: Points, at: float) -> float:
    """The value that is nearest to a position."""
    after = bisect.bisect_left(series, at, key=lambda point: point[0])
    return min(series[max(after - 1, 0) : after + 1], key=lambda point: abs(point[0] - at))[1]
