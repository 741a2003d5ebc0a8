"""A run whose noise scale was read from consecutive steps, all the way to its report and its replayed readings."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

import sonde
from sonde.runs.reader import Reading, read_run
from sonde.runs.report.curve_style import time_axis
from sonde.runs.report.curves import moments_curve, noise_scale_curve
from sonde.runs.report.figures import LegendEntry, Plot
from sonde.runs.report.groups_plot import groups_plot
from sonde.runs.report.timeline import timeline
from sonde.runs.report.tradeoff_plot import tradeoff_plot
from sonde.runs.report.write import write_report
from sonde.runs.sinks import JsonlSink
from tests.runs.report.plausible_run import GROUPS, Record, alert_record, header_record, reading_record
from tests.runs.report.visible_text import visible_text

WORDS = "biased: read from consecutive steps, so the true B_simple is probably smaller"


def write_biased_run(folder: Path, *, n_with_pieces: int = 0) -> sonde.NoiseScaleReading:
    """60 windows of one piece, then some with two."""
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    log = sonde.RunLog(sonde.JsonlSink(folder), log_windows=True, every=10)
    options = {"allow_biased": True, "per_example": "never", "every": 1, "horizon": 20.0}
    with sonde.attach(model, unit="rows", log=log, verbose=False, **options) as probe:  # type: ignore[arg-type]
        for window in range(60 + n_with_pieces):
            for _ in range(1 if window < 60 else 2):
                with probe.piece(units=4):
                    (model(torch.randn(4, 8)) - 3 - torch.randn(4, 1)).square().mean().backward()
            probe.step()
            model.zero_grad()
        return probe.reading()


def test_the_report_says_it_wherever_the_number_is(tmp_path: Path) -> None:
    reading = write_biased_run(tmp_path)
    assert (reading.status, reading.is_biased) == ("resolved", True)
    text = visible_text(write_report(tmp_path))
    assert "which is biased." in text  # the verdict's headline
    assert "Biased: read from consecutive steps, so the true B simple is probably smaller." in text  # and its detail
    assert f"The noise scale is {WORDS}. The verdict rests on the upper end" in text
    assert "; biased, probably smaller" in text  # the tile
    assert "All rows of a window have the same weight" in text
    assert "Steps ≤" in text
    assert "comparing the gradients of two consecutive steps" in text  # how it was measured
    shown = WORDS.replace("_", " ")  # the page sets the index low
    assert f"Values with gns/biased = 1 in the log are {shown}." in text
    assert f"This noise scale is {shown}. So the figure takes the upper end of its interval" in text  # what it costs
    assert "biased fallback: consecutive steps are compared, exactly" in text  # the set-up
    assert "falls by a factor of e in 20 pairs of windows." in text
    assert "upper bound of the noise scale" in text
    assert re.search(r"Window 1, after about \d+ rows: the noise scale is biased", text)  # the alert


def test_replayed_readings_are_those_of_the_probe(tmp_path: Path) -> None:
    reading = write_biased_run(tmp_path)
    windows = list(sonde.read_windows(tmp_path))
    assert [w.window for w in windows] == list(range(2, 61, 2))
    last = list(sonde.replay_windows(windows, horizon=20.0))[-1]
    assert last.is_biased
    assert (last.total.ratio, last.total.interval.low) == pytest.approx((reading.b_simple, reading.low), rel=1e-6)


def test_replayed_readings_begin_anew_where_the_bias_ends(tmp_path: Path) -> None:
    reading = write_biased_run(tmp_path, n_with_pieces=30)
    assert not reading.is_biased
    last = list(sonde.replay_windows(sonde.read_windows(tmp_path), horizon=20.0))[-1]
    assert not last.is_biased
    assert (last.total.ratio, last.total.interval.low) == pytest.approx((reading.b_simple, reading.low), rel=1e-6)


def write_records(folder: Path, biased: list[bool], alerts: Sequence[Record] = (), **metrics: float | None) -> Path:
    """Readings like those of a real run, biased where it is said."""
    sink = JsonlSink(folder)
    sink.write(header_record())
    for i, is_biased in enumerate(biased):
        record = reading_record(i, len(biased), status="resolved")
        record["metrics"] |= {"gns/biased": float(is_biased), **metrics}
        sink.write(record)
    for alert in alerts:
        sink.write(alert)
    sink.close()
    return folder


def readings(folder: Path, biased: list[bool]) -> list[Reading]:
    return list(read_run(write_records(folder, biased)).readings)


def drawn(plot: Plot | str) -> tuple[list[str], list[LegendEntry]]:
    """How the lines of a figure are dashed, and its legend."""
    assert isinstance(plot, Plot)
    glyphs = [glyph.glyph for glyph in plot.figures[0].renderers]
    lines = [glyph for glyph in glyphs if type(glyph).__name__ == "Line" and glyph.line_alpha == 1]
    return ["dashed" if line.line_dash else "solid" for line in lines], list(plot.legend)


def texts(legend: list[LegendEntry], mark: str) -> list[str]:
    return [entry.text for entry in legend if entry.mark == mark]


def test_what_the_batch_costs_is_drawn_for_the_upper_end(tmp_path: Path) -> None:
    [sound] = readings(tmp_path / "sound", [False])
    [biased] = readings(tmp_path / "biased", [True])
    lines, legend = drawn(tradeoff_plot(sound, "sequences"))
    assert lines == ["solid", "solid"]
    assert not any("biased" in entry.text for entry in legend)
    lines, legend = drawn(tradeoff_plot(biased, "sequences"))
    assert lines == ["dashed", "dashed"]
    assert texts(legend, "dashed")[0] == "optimizer steps, S/S_min: at most this"
    assert texts(legend, "dashed")[1] == "sequences used, E/E_min: at least this"
    high = biased.metrics["gns/b_simple_high"]
    assert texts(legend, "bar") == [f"upper bound of the noise scale, {high:.0f} sequences; biased, probably smaller"]
    assert "if the noise scale is at its upper bound" in texts(legend, "dot")[0]


def test_the_noise_scale_over_the_run_is_dashed_where_it_is_biased(tmp_path: Path) -> None:
    line = timeline(readings(tmp_path, [True] * 5 + [False] * 5), "sequences")
    plot = noise_scale_curve(line, time_axis(line))
    _, legend = drawn(plot)
    assert isinstance(plot, Plot)
    known = {}
    for glyph, data in ((each.glyph, each.data_source.data) for each in plot.figures[0].renderers):
        if type(glyph).__name__ == "Line" and glyph.line_color == "#1f5fa8":
            known["dashed" if glyph.line_dash else "solid"] = [value == value for value in data["y"]]
    assert known == {"solid": [False] * 5 + [True] * 5, "dashed": [True] * 5 + [False] * 5}
    assert "noise scale now; biased, probably smaller" in texts(legend, "dashed")
    assert texts(legend, "line") == ["noise scale now"]
    assert "confidence interval of the biased noise scale" in texts(legend, "band")
    assert texts(legend, "dotted") == ["noise scale, average over the run so far; in part biased"]
    _, legend = drawn(moments_curve(line, time_axis(line)))
    assert texts(legend, "line")[0].endswith("of one unit; in part biased, probably smaller")
    assert texts(legend, "line")[1].endswith("true gradient; in part biased, probably larger")


def test_groups_of_a_biased_noise_scale_are_hollow(tmp_path: Path) -> None:
    [biased] = readings(tmp_path, [True])
    plot = groups_plot(biased, GROUPS, "sequences")
    _, legend = drawn(plot)
    assert isinstance(plot, Plot)
    circles = [each.glyph for each in plot.figures[0].renderers if getattr(each.glyph, "marker", "") == "circle"]
    assert [circle.fill_color for circle in circles] == ["white"]
    assert texts(legend, "dot") == ["noise scale and its confidence interval; biased, probably smaller"]
    assert texts(legend, "whisker") == []
    assert texts(legend, "dotted")[0].endswith("sequences; biased, probably smaller")


@pytest.mark.parametrize(
    ("is_biased", "every", "sentence"),
    [
        (False, 1.0, "after 7 more windows."),
        (False, 12.0, "after 7 more measured windows."),
        (True, 1.0, "after 7 more pairs of windows."),
        (True, 12.0, "after 7 more measured pairs of windows."),
    ],
)
def test_windows_still_needed_are_called_what_they_are(
    tmp_path: Path, is_biased: bool, every: float, sentence: str
) -> None:
    metrics: dict[str, float | None] = {"gns/windows_needed": 7.0, "cost/every": every}
    assert f"narrows to about ± 20 % {sentence}" in visible_text(
        write_report(write_records(tmp_path, [is_biased], **metrics))
    )


def test_an_alert_at_attach_names_no_window(tmp_path: Path) -> None:
    write_records(tmp_path, [False], [alert_record("Something is odd.", window=0)])
    assert "Before the first window: Something is odd." in visible_text(write_report(tmp_path))
