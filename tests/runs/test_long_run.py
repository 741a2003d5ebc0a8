"""The report of a long run is small, and its figures still show every peak."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bokeh.models.glyphs import VSpan
from bokeh.plotting import figure

from sonde.log.sinks import JsonlSink
from sonde.runs.reader import read_run
from sonde.runs.report.curves import PIXELS, Curve, OverRun, TimeAxis, add_band, add_curve, per_pixel
from sonde.runs.report.figures import Scale
from sonde.runs.report.write import write_report
from tests.runs.report.plausible_run import end_record, header_record, reading_record, write_run
from tests.runs.report.visible_text import visible_text

N, RESTART = 11_010, 7_020


def _series(seed: int) -> list[float | None]:
    """Noise with two lonely peaks, and stretches that are not known."""
    rng = random.Random(seed)
    values: list[float | None] = [rng.gauss(100, 1) for _ in range(N)]
    values[3_456], values[6_789] = 900.0, 1.0
    values[8_000:8_500] = [None] * 500
    return values


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log of two starts with 11,010 readings, as many as one of ten million windows has."""
    folder = tmp_path_factory.mktemp("long")
    losses, noise = _series(1), _series(2)
    base: dict[str, Any] = reading_record(5, 6, status="resolved", groups=["head"])
    sink = JsonlSink(folder)
    for i, (loss, b_simple) in enumerate(zip(losses, noise, strict=True)):
        if i in (0, RESTART):
            sink.write(header_record())
        known = {"loss": loss, "gns/b_simple": b_simple, "run/units_seen": 64.0 * (i + 1), "cost/fraction": i / N}
        sink.write(base | {"window": i + 1, "time": base["time"] + i, "metrics": known})
    sink.write(end_record(N))
    sink.close()
    return folder


def test_the_report_of_a_long_run_is_small_and_shows_the_peaks(long_run: Path, tmp_path: Path) -> None:
    report = write_report(long_run, tmp_path / "report.html")
    assert report.stat().st_size < 2_000_000
    assert "11,010 readings, one every 10 windows, up to window 11,010" in visible_text(report)


def test_a_report_says_that_readings_have_become_rarer(tmp_path: Path) -> None:
    write_run(tmp_path, 3, status="resolved", log_every=10_000, header=header_record())
    assert "3 readings, one every 10 windows at first and 20 at last, up to window 30,000" in visible_text(
        write_report(tmp_path)
    )


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


def test_a_band_of_many_values_is_its_envelope() -> None:
    rng = random.Random(0)
    x = [float(i) for i in range(20_000)]
    low = [rng.random() for _ in x]
    high = [1 + rng.random() for _ in x]
    low[5_000], high[15_000] = -7.0, math.inf
    places, lowest, highest = per_pixel(x, low, high)
    assert len(places) == PIXELS + 1
    assert (places[0], places[-1]) == (x[0], x[-1])
    assert (min(lowest), max(highest)) == (-7.0, math.inf)
    fig = figure()
    add_band(fig, x, low, high, Scale("linear", 0.0, 3.0), Curve("band", "blue", "", "low", "high"))
    ys = fig.renderers[0].data_source.data["ys"]  # type: ignore[attr-defined]
    assert (len(ys), min(ys[0]), max(ys[0])) == (1, 0.0, 3.0)


def test_lines_at_very_many_restarts_are_thinned_out_and_the_legend_says_so(tmp_path: Path) -> None:
    [known, _] = read_run(write_run(tmp_path, 2)).readings
    for n_restarts, said, n_lines in ((2, "", 2), (250, "; one of 3 restarts is shown", 84)):
        readings = [replace(known, segment=i, window=i + 1) for i in range(n_restarts + 1)]
        line = OverRun.of(readings, TimeAxis.of(readings, "rows"))
        assert [entry.text for entry in line.legend] == [f"the run was restarted here{said}"]
        fig = line.new_figure(Scale("linear", 0, 1), "y", 100)
        [lines] = [r for r in fig.renderers if isinstance(r.glyph, VSpan)]
        assert len(lines.data_source.data["x"]) == n_lines
