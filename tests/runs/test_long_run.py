"""The figures of a long run are thinned, and still show every peak."""

from __future__ import annotations

import math
import random

from bokeh.plotting import figure

from sonde.runs.report.curves import PIXELS, add_curve, per_pixel


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
