"""The figures of a long run are thinned, and still show every peak."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

from bokeh.models.glyphs import VSpan
from bokeh.plotting import figure

from sonde.runs.reader import read_run
from sonde.runs.report.curves import PIXELS, OverRun, TimeAxis, add_curve, per_pixel
from sonde.runs.report.figures import Scale
from tests.runs.report.plausible_run import write_run


def test_a_curve_of_many_values_shows_the_extremes_of_every_pixel() -> None:
    rng = random.Random(0)
    n = 30_000
    x = [i + 0.5 * rng.random() for i in range(n)]
    y = [math.sin(i / 3000) + rng.gauss(0, 0.1) for i in range(n)]
    fig = figure()
    add_curve(fig, x, y, "blue")
    drawn = fig.renderers[0].data_source.data  # type: ignore[attr-defined]
    xs, ys = list(drawn["x"]), list(drawn["y"])
    assert len(xs) <= 2 * PIXELS + 4
    assert (xs[0], xs[-1]) == (x[0], x[-1])
    pixel = lambda position: min(int((position - x[0]) / (x[-1] - x[0]) * PIXELS), PIXELS)  # noqa: E731
    by_pixel: dict[int, list[float]] = {}
    for position, value in zip(x, y, strict=True):
        by_pixel.setdefault(pixel(position), []).append(value)
    shown: dict[int, list[float]] = {}
    for position, value in zip(xs, ys, strict=True):
        shown.setdefault(pixel(position), []).append(value)
    assert {p: (min(of), max(of)) for p, of in shown.items()} == {p: (min(of), max(of)) for p, of in by_pixel.items()}


def test_gaps_of_a_pixel_and_restarts_break_a_thinned_curve() -> None:
    x = [float(i) for i in range(10_000)]
    y = [1.0] * 10_000
    y[4_000:4_100] = [math.nan] * 100
    x[7_000] = y[7_000] = math.nan
    places, low, _ = per_pixel(x, y, y)
    assert any(4_000 <= at < 4_100 for at, value in zip(places, low, strict=True) if math.isnan(value))
    assert sum(map(math.isnan, places)) == 1


def test_lines_at_very_many_restarts_are_thinned_out_and_the_legend_says_so(tmp_path: Path) -> None:
    [known, _] = read_run(write_run(tmp_path, 2)).readings
    for n_restarts, said, n_lines in ((2, "", 2), (250, "; one of 3 restarts is shown", 84)):
        readings = [replace(known, segment=i, window=i + 1) for i in range(n_restarts + 1)]
        line = OverRun.of(readings, TimeAxis.of(readings, "rows"))
        assert [entry.text for entry in line.legend] == [f"the run was restarted here{said}"]
        fig = line.new_figure(Scale("linear", 0, 1), "y", 100)
        [lines] = [r for r in fig.renderers if isinstance(r.glyph, VSpan)]
        assert len(lines.data_source.data["x"]) == n_lines
