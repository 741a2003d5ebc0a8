"""What a policy's log writes, and what it says when something looks wrong."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sonde.log.sinks import JsonlSink
from sonde.policy.log import PolicyLog
from sonde.policy.stats.attribution import Cause, Causes, Share
from sonde.policy.stats.entropy_forecast import EntropyForecast
from sonde.records import RunLog
from sonde.runs.reader import read_run

FORECAST = EntropyForecast(
    reason="",
    objective="per_token",
    update="step",
    delta=-0.02,
    se=0.001,
    low=-0.022,
    high=-0.018,
    entropy=2.0,
    shares=(Share(1, -0.015, -0.01, -0.005), Share(2, -0.005, -0.004, None)),
    causes=Causes(-0.01, -0.01, 0.0, (Cause(7, -0.01, -0.02, 0.01),), 0.98),
)


def test_the_table_of_a_forecast_has_both_ends_and_names() -> None:
    lines = FORECAST.table({1: "1+1=", 7: "a prompt\nof many words " * 9}).splitlines()
    assert lines[0] == "-1.00e-02 from this batch, -1.00e-02 from earlier ones"
    assert lines[2].split() == ["learning", "from", "change", "rewarded", "penalised"]
    assert lines[3].startswith("a prompt of many words a prompt of many…")
    assert lines[3].split()[-3:] == ["-1.00e-02", "-2.00e-02", "+1.00e-02"]
    assert lines[6].split() == ["1+1=", "-1.50e-02", "-1.00e-02", "-5.00e-03"]
    assert lines[7].split() == ["prompt", "2", "-5.00e-03", "-4.00e-03", "–"]
    assert len({len(line) for line in lines if line and "batch" not in line}) == 1
    many = changed(shares=tuple(Share(n, 1.0, 1.0, 0.0) for n in range(30)), causes=None)
    assert [line.split()[1] for line in many.table(n=2).splitlines()[1:]] == ["0", "1", "28", "29"]


def changed(**changes: Any) -> EntropyForecast:
    return dataclasses.replace(FORECAST, **changes)


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]


def test_what_was_measured_is_what_is_read(tmp_path: Path) -> None:
    log = PolicyLog(RunLog(JsonlSink(tmp_path), run="r", metadata={"note": 1}), setup={"loss": "dr_grpo"})
    log.measured(6, FORECAST.metrics() | {"reward": 0.5}, FORECAST, {1: "1+1=", 7: "7+7="})
    log.measured(11, {"gns_prompts/b_simple": 3.0, "reward": math.inf})
    log.end("training ended")
    log.end("closed")  # says nothing more
    run = read_run(tmp_path)
    assert (run.name, run.header.unit, run.ended) == ("r", "prompts", "training ended")
    first, second = run.policy
    assert (first.window, first.metrics["reward"], first.point.delta) == (6, 0.5, -0.02)
    assert [(s.prompt, s.drift) for s in first.shares] == [("1+1=", -0.005), ("prompt 2", None)]
    assert first.causes is not None
    assert [(c.prompt, c.change) for c in first.causes.prompts] == [("7+7=", -0.01)]
    assert second.metrics == {"gns_prompts/b_simple": 3.0, "reward": None}
    assert (second.shares, second.causes) == ((), None)
    assert [r["kind"] for r in records(tmp_path)] == ["header", "policy", "policy", "end"]


def test_numbers_of_numpy_and_torch_are_numbers(tmp_path: Path) -> None:
    log = PolicyLog(RunLog(JsonlSink(tmp_path)))
    entropy: Any = torch.tensor(2.0)
    steps: list[Any] = [np.int64(3), torch.tensor(4)]
    log.measured(
        steps[0], {"reward": np.float32(0.5), "entropy/evaluation_per_token": entropy, "n": np.int64(3), "x": np.nan}
    )
    log.measured(steps[1], {"reward": entropy.reshape(1, 1)})
    log.end("done")
    first, second = read_run(tmp_path).policy
    assert (first.window, first.metrics) == (
        3,
        {"reward": 0.5, "entropy/evaluation_per_token": 2.0, "n": 3.0, "x": None},
    )
    assert (second.window, second.metrics) == (4, {"reward": 2.0})


@pytest.mark.parametrize(
    ("step", "metrics", "message"),
    [
        (1, {"reward": "much"}, "the metric 'reward' must be a number or None, got 'much': pass a number, or leave"),
        (1, {"reward": np.zeros(2)}, "the metric 'reward' must be a number or None, got array"),
        (1.5, {}, "step must be the number of an optimizer step, got 1.5: pass a whole number from 0 up"),
        (-1, {}, "step must be the number of an optimizer step, got -1"),
    ],
)
def test_what_no_record_can_hold_is_refused_at_the_door(
    tmp_path: Path, step: Any, metrics: dict[str, Any], message: str
) -> None:
    log = PolicyLog(RunLog(JsonlSink(tmp_path)))
    with pytest.raises(ValueError, match=message):
        log.measured(step, metrics)
    log.measured(7, {"reward": 1.0})
    log.end("done")
    assert [reading.window for reading in read_run(tmp_path).policy] == [7]


def test_only_the_largest_of_many_prompts_are_kept(tmp_path: Path) -> None:
    shares = tuple(Share(n, (-1) ** n * n * 1e-3, 0.0, 0.0) for n in range(200))
    log = PolicyLog(RunLog(JsonlSink(tmp_path)))
    log.measured(1, {}, changed(shares=shares))
    log.end("done")
    found = [share["change"] for share in records(tmp_path)[1]["shares"]]
    assert len(found) == 64
    assert found == sorted(found)
    assert min(map(abs, found)) == pytest.approx(0.136)


def test_a_collapse_is_told_once_and_stays_in_the_records(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = PolicyLog(RunLog(JsonlSink(tmp_path)))
    with caplog.at_level(logging.WARNING, "sonde"):
        for step, entropy in enumerate([2.0, 1.0, 0.15, 0.1], start=1):
            forecast = changed(entropy=entropy)
            log.measured(step, forecast.metrics(), forecast)
    assert sum("collapse" in message for message in caplog.messages) == 1
    log.end("done")
    written = records(tmp_path)
    assert [r["kind"] for r in written] == ["header", "policy", "policy", "alert", "policy", "policy", "end"]
    assert [bool(r["alerts"]) for r in written if r["kind"] == "policy"] == [False, False, True, True]
    assert list(log.alerts) == ["entropy_collapse"]


def test_an_alert_stays_while_only_the_noise_is_measured(tmp_path: Path) -> None:
    log = PolicyLog(RunLog(JsonlSink(tmp_path)))
    for step, entropy in enumerate([2.0, 0.1], start=1):
        forecast = changed(entropy=entropy, objective="sequence")
        log.measured(step, forecast.metrics(), forecast, {1: "x" * 1000})
    log.measured(3, {"gns_prompts/b_simple": 3.0})
    log.end("done")
    last = read_run(tmp_path).policy[-1]
    assert list(last.alerts) == ["entropy_collapse"]
    assert last.per == "response"
    assert max(len(share["prompt"]) for share in records(tmp_path)[1]["shares"]) == 201


class FullDisk:
    """Fails after the header."""

    def write(self, record: Mapping[str, object]) -> None:
        if record["kind"] != "header":
            raise OSError("no space left")

    def close(self) -> None:
        """Nothing is held."""


def test_a_sink_that_fails_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = PolicyLog(RunLog([FullDisk(), JsonlSink(tmp_path)]))
    log.measured(1, {}, FORECAST)
    log.measured(2, {}, FORECAST)
    log.end("done")
    assert caplog.text.count("FullDisk writes no more: no space left") == 1
    assert len(records(tmp_path)) == 4


def test_a_folder_is_a_log_of_its_own(tmp_path: Path) -> None:
    PolicyLog(tmp_path).end("training ended")
    assert read_run(tmp_path).header.unit == "prompts"
