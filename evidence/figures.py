"""`python -m evidence.figures`: writes from the results alone the study's tables, what sonde says of them, and figures.

Figures are drawn by bokeh, and their pictures taken in Chromium.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evidence import cost, schedule_figure
from evidence.analysis import Swept, factors, quantile, resolved, swept, tables
from evidence.laws import units_by_noise
from evidence.said import said
from evidence.tasks import OPTIMIZERS, TASKS
from evidence.work import RESULTS, Store

COLORS = dict(zip(OPTIMIZERS, ("#0072b2", "#56b4e9", "#d55e00", "#009e73"), strict=True))
MARKERS = dict(zip(("regression, exact", *TASKS), ("cross", "circle", "square", "triangle", "diamond"), strict=True))
FRAME: dict[str, Any] = {"height": 420, "toolbar_location": None}
METRICS = ("euclidean", "adam", "sign", "spectral")


def units_over_batch(cases: Sequence[Swept]) -> Any:
    """Units over the fewest, by B over B_crit, for all trainings, with the law."""
    from bokeh.plotting import figure

    axes: dict[str, Any] = {"x_axis_type": "log", "y_axis_type": "log", "x_axis_label": "batch / B_crit"}
    plot: Any = figure(title="Units that a batch needs, over the fewest", width=480, **axes, **FRAME)
    grid = [10 ** (k / 10 - 2) for k in range(41)]
    plot.line(grid, [units_by_noise(b, 1.0) for b in grid], color="black", legend_label="1 + B/B_crit")
    for case in cases:
        fit = case.fit("noise")
        # The fit's constant: the mean over batches of what the law leaves.
        rest = [
            mean - math.log(units_by_noise(b, fit.critical)) for b, mean in zip(case.batches, case.means, strict=True)
        ]
        fewest = sum(rest) / len(rest)
        at = [batch / fit.critical for batch in case.batches]
        over = [math.exp(mean - fewest) for mean in case.means]
        look = {"marker": MARKERS[case.task], "color": COLORS[case.kind], "legend_label": case.kind}
        plot.scatter(at, over, size=6, **look)
    plot.legend.location = "top_left"
    return plot


def factors_of_proxies(store: Store) -> Any:
    """The swept critical batch over each proxy: median and 90 % range over runs, by optimizer."""
    from bokeh.models import FactorRange
    from bokeh.plotting import figure

    every = factors(store)
    found = {
        (metric, kind): resolved(every.get((kind, f"B_simple, run, {metric}", "swept"), ()))
        for metric in METRICS
        for kind in OPTIMIZERS
    }
    rows = [row for row, known in found.items() if len(known) > 2]
    axes: dict[str, Any] = {
        "x_axis_type": "log",
        "x_axis_label": "B_crit of whole trainings / B_simple averaged over a run",
    }
    scale = FactorRange(factors=rows[::-1])
    plot: Any = figure(title="Median and 90 % range over runs", y_range=scale, width=620, **axes, **FRAME)
    plot.yaxis.group_label_orientation = "horizontal"
    for row in rows:
        low, middle, high = (quantile(found[row], part) for part in (0.05, 0.5, 0.95))
        plot.segment([low], [row], [high], [row], color=COLORS[row[1]], line_width=3)
        plot.scatter([middle], [row], color=COLORS[row[1]], size=9)
    plot.line([1, 1], [rows[-1], rows[0]], color="black", line_dash="dashed")
    return plot


def draw(plots: Sequence[Any], to: Path, width: int, height: int) -> None:
    """Plots beside each other, as a picture of so many pixels."""
    from bokeh.layouts import row
    from bokeh.plotting import output_file, save
    from docs.figures.__main__ import AT_REST
    from tests.chromium import chromium

    with tempfile.TemporaryDirectory() as folder, chromium(Path(folder) / "profile") as browser:
        output_file(str(Path(folder) / "page.html"), title="study", mode="inline")
        save(row(*plots))
        browser.set_window_size(width, height)
        browser.get((Path(folder) / "page.html").as_uri())
        while not browser.execute_script(AT_REST):
            pass
        browser.save_screenshot(str(to))


def main() -> None:
    """Write the tables, and the figures that there are results for."""
    parser = argparse.ArgumentParser(prog="python -m evidence.figures", description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder of tables.md and the figures")
    options = parser.parse_args()
    store = Store(options.results)
    (options.out / "tables.md").write_text(tables(store))
    if store.folder == RESULTS:
        for file, text in said(store).items():
            file.write_text(text)
    draw([units_over_batch(swept(store)), factors_of_proxies(store)], options.out / "study.png", 1130, 570)
    if store.read("cost"):
        draw([cost.plot(store)], options.out / "cost.png", 1130, 570)
    if store.read("schedules"):
        draw(schedule_figure.plots(store), options.out / "schedules.png", 1090, 1000)


if __name__ == "__main__":
    main()
