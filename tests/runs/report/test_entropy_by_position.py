"""Entropies by position in the response, from the log to the figure."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from bokeh.models import Quad

from sonde.log.sinks import JsonlSink
from sonde.policy.log import PolicyLog
from sonde.policy.policy_entropy import PolicyEntropyProbe
from sonde.policy.stats.token_positions import AtPositions
from sonde.records import RunLog
from sonde.runs.reader import read_run
from sonde.runs.report.figures import Plot
from sonde.runs.report.policy_curves import entropy_by_position
from sonde.runs.report.write import write_report
from tests.policy.entropy_scene import Scene
from tests.runs.report.visible_text import visible_text
from tests.small_policy import STATISTICS

TITLE = "Entropy by position in the response"


def test_a_step_with_a_forecast_logs_its_evaluation_responses_and_one_without_those_it_learns_from(
    tmp_path: Path,
) -> None:
    scene = Scene()
    log = PolicyLog(RunLog(JsonlSink(tmp_path)))
    forecast = scene.probe().forecast(scene.E)
    learned = PolicyEntropyProbe(scene.model, token_statistics=STATISTICS).measure(scene.U)
    log.measured(1, forecast.metrics(), forecast, entropy=learned)
    log.measured(2, {"reward": 1.0}, entropy=learned)
    log.measured(3, {"reward": 1.0})
    log.end("training ended")
    of_e, of_u, none = (reading.positions for reading in read_run(tmp_path).policy)
    assert of_e == forecast.by_position
    assert of_u == learned.by_position
    assert none == ()
    assert of_e[0] != of_u[0]
    with torch.no_grad():
        _, h = STATISTICS(scene.model, scene.E)
    assert of_e[0].q50 == pytest.approx(float(h[:, 0].quantile(0.5)), rel=1e-5)  # scored in fp32
    [record] = [
        r for r in map(json.loads, (tmp_path / "records.jsonl").read_text().splitlines()) if r.get("window") == 1
    ]
    assert len(json.dumps(record["positions"])) < 100 * (1 + len(of_e))  # it grows with the logarithm of the length


def test_the_figure_has_the_first_and_the_last_measured_step(tmp_path: Path) -> None:
    scene = Scene()
    forecast = scene.probe().forecast(scene.E)
    log = PolicyLog(RunLog(JsonlSink(tmp_path)))
    for step, level in ((1, 2.0), (2, 1.0), (3, 0.5)):
        rows = (AtPositions(1, 1, 9, 0.1 * level, 0.5 * level, level), AtPositions(2, 3, 7, 0.0, 0.25 * level, level))
        log.measured(step, forecast.metrics(), dataclasses.replace(forecast, by_position=rows[: 1 + (step > 1)]))
    log.end("training ended")
    policy = read_run(tmp_path).policy
    plot = entropy_by_position(policy)
    assert isinstance(plot, Plot)
    bands = [r.data_source.data for r in plot.figures[0].renderers if isinstance(r.glyph, Quad)]
    assert [(list(b["left"]), list(b["right"]), list(b["top"])) for b in bands] == [
        ([1], [2], [2.0]),
        ([1, 2], [2, 4], [0.5, 0.5]),
    ]
    assert [entry.text for entry in plot.legend] == [
        "median, step 1",
        "80 % of the tokens, step 1",
        "median, step 3",
        "80 % of the tokens, step 3",
    ]
    said = "Tokens 1: 0.250, 80 % of 9 from 0.0500 to 0.500; tokens 2 to 3: 0.125, 80 % of 7 from 0 to 0.500."
    assert said in plot.in_words, plot.in_words
    assert TITLE in visible_text(write_report(tmp_path))
