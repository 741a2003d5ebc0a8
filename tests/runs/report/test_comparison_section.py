"""Comparisons of losses: what a log writes of them, what is read back, and what the report shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sonde.log.sinks import JsonlSink
from sonde.policy.log import PolicyLog
from sonde.policy.stats.entropy_comparison import EntropyComparison, EntropyDifference
from sonde.policy.stats.entropy_forecast import EntropyForecast
from sonde.records import RunLog
from sonde.runs.reader import read_run
from sonde.runs.report.comparison_section import comparison_sections
from sonde.runs.report.write import write_report
from tests.runs.report.visible_text import visible_text


def forecast(delta: float) -> EntropyForecast:
    known: dict[str, Any] = {"delta": delta, "se": 1e-3, "low": delta - 2e-3, "high": delta + 2e-3}
    return EntropyForecast(reason="", objective="per_token", update="step", **known)


NAN = "the step is not finite"
COMPARISON = EntropyComparison(
    "clip 0.2",
    {
        "clip 0.2": forecast(-5e-3),
        "<b>bonus</b>": forecast(-4e-3),
        "clip-higher 0.28": forecast(-4.99e-3),
        "broken": EntropyForecast(reason=NAN, objective="per_token", update="step"),
    },
    {
        "<b>bonus</b>": EntropyDifference(1e-3, 1e-4, 8e-4, 1.2e-3, ""),
        "clip-higher 0.28": EntropyDifference(1e-5, 1e-5, -1e-5, 3e-5, ""),
        "broken": EntropyDifference(None, None, None, None, NAN),
    },
)


def logged(folder: Path) -> Path:
    log = PolicyLog(RunLog(JsonlSink(folder), run="options"))
    log.compared(3, COMPARISON)
    log.compared(7, COMPARISON)
    log.end("done")
    log.compared(8, COMPARISON)  # says nothing more
    return folder


def test_a_comparison_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    run = read_run(logged(tmp_path))
    assert [c.window for c in run.comparisons] == [3, 7]
    assert not run.is_empty
    last = run.comparisons[-1]
    assert (last.baseline, last.per) == ("clip 0.2", "token")
    base, bonus, _, broken = last.options
    assert (base.name, base.change, base.change_se, base.difference, base.words) == (
        "clip 0.2",
        -5e-3,
        1e-3,
        None,
        "the baseline",
    )
    assert (bonus.difference, bonus.low, bonus.high) == (1e-3, 8e-4, 1.2e-3)
    assert (broken.change, broken.is_valid, broken.words) == (None, False, NAN)
    log = PolicyLog(tmp_path / "other")
    with pytest.raises(ValueError, match="step must be the number of an optimizer step, got -1"):
        log.compared(-1, COMPARISON)
    log.end("done")


def test_the_report_shows_the_last_comparison(tmp_path: Path) -> None:
    text = visible_text(write_report(logged(tmp_path)))
    for fact in (
        "What would other losses do?",
        "At step 7, beside clip 0.2, more entropy: <b>bonus</b>; cannot be distinguished: clip-higher 0.28; "
        "the step is not finite: broken. Each loss",
        "This is the last of 2 comparisons.",
        "clip 0.2 the baseline −0.00500 ± 0.0010 –",
        "<b>bonus</b> more entropy −0.00400 ± 0.0010 0.00100 (8.00 × 10⁻⁴ to 0.00120)",
        "broken the step is not finite not known not known",
    ):
        assert fact in text, fact


def test_a_point_with_its_interval_for_each_loss(tmp_path: Path) -> None:
    [section] = comparison_sections(read_run(logged(tmp_path)))
    plot, _ = section.content
    (fig,) = plot.figures  # type: ignore[union-attr]
    (bars,) = [data for r in fig.renderers if "x0" in (data := r.data_source.data)]  # type: ignore[attr-defined]
    places = {label.text: y for y, label in fig.yaxis[0].major_label_overrides.items()}
    assert list(bars["y0"]) == sorted([places["<b>bonus</b>"], places["clip-higher 0.28"]])
    assert dict(zip(bars["y0"], bars["x0"], strict=True))[places["<b>bonus</b>"]] == 8e-4
    assert dict(zip(bars["y0"], bars["x1"], strict=True))[places["<b>bonus</b>"]] == 1.2e-3
    assert "<b>bonus</b>: 0.00100 (8.00 × 10⁻⁴ to 0.00120), more entropy" in plot.in_words
