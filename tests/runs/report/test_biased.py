"""A run whose noise scale was read from consecutive steps, all the way to its report and its replayed readings."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import sonde
from sonde.runs.report.write import write_report
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
    assert f"This noise scale is {shown}." in text  # beside what the batch costs
    assert "biased fallback: consecutive steps are compared, exactly" in text  # the set-up


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
