"""The log of a long run: what does not change is written once."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sonde
from sonde.runs.reader import read_run
from sonde.runs.sinks import JsonlSink
from tests.batch_size.loops import Recording
from tests.runs.report.plausible_run import GROUPS, end_record, header_record, known, reading_record, without, write_run


def _lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]


def test_names_and_texts_that_do_not_change_are_written_once(tmp_path: Path) -> None:
    write_run(tmp_path, 40, status="resolved")
    lines = _lines(tmp_path)
    readings = [line for line in lines if line["kind"] == "reading"]
    assert len([line for line in lines if line["kind"] == "columns"]) == 1
    assert readings[0].keys() >= {"status", "reason", "dropped", "alerts", "pieces", "groups"}
    assert [i for i, line in enumerate(readings, start=1) if "groups" in line] == [*range(1, 11), 20, 30, 40]
    assert all(line.keys() <= {"kind", "window", "time", "values", "groups"} for line in readings[1:])


def test_a_reading_of_twelve_groups_takes_less_than_400_bytes(tmp_path: Path) -> None:
    write_run(tmp_path, 1000, groups=[f"blocks.{i}" for i in range(12)])
    assert (tmp_path / "records.jsonl").stat().st_size < 400 * 1000


def test_everything_is_read_back_from_the_compact_form(tmp_path: Path) -> None:
    write_run(tmp_path, 60)
    for i, reading in enumerate((run := read_run(tmp_path)).readings):
        record = reading_record(i, 60)
        for name in ("window", "status", "reason", "dropped", "alerts", "pieces"):
            assert getattr(reading, name) == record[name]
        assert reading.time == pytest.approx(record["time"], abs=1e-3)
        assert known(reading.metrics) == pytest.approx(known(record["metrics"]), rel=1e-6)
        written = i if i < 10 else i - (i + 1) % 10  # the last reading whose groups were written
        groups = reading_record(written, 60)["groups"]
        assert [g.grad_sq for g in reading.groups.values()] == pytest.approx(
            [g["grad_sq"] for g in groups.values()], rel=1e-6
        )
        assert list(reading.groups) == list(GROUPS)
    assert run.totals.last_groups == run.readings[-1].window


def test_the_last_reading_has_its_groups_and_texts_though_its_turn_had_not_come(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path)
    sink.write(header_record())
    for i in range(25):
        record = reading_record(i, 25, alerts={"unresolved": f"seen at reading {i}"}, dropped={"why": i})
        sink.write(record if i < 10 or i == 19 else without(record, "groups"))
    assert read_run(tmp_path).readings[-1].alerts == {"unresolved": "seen at reading 19"}  # if it were cut off here
    sink.write({"kind": "details", "time": 0.0, "window": 250, "groups": reading_record(24, 25)["groups"]})
    sink.write(end_record(250))
    sink.close()
    for thinned in (False, True):
        run = read_run(tmp_path, thinned=thinned)
        last, record = run.readings[-1], reading_record(24, 25)
        assert (last.alerts, last.dropped) == ({"unresolved": "seen at reading 24"}, {"why": 24})
        assert last.groups["head"].trace_cov == pytest.approx(record["groups"]["head"]["trace_cov"], rel=1e-6)
        assert (run.totals.last_groups, run.totals.last_alerted) == (250, {"unresolved": 250})


def test_groups_of_a_start_outlast_a_restart_that_wrote_none(tmp_path: Path) -> None:
    write_run(tmp_path, 3)
    sink = JsonlSink(tmp_path)
    sink.write(header_record())  # and it crashed
    sink.close()
    for thinned in (False, True):
        assert list(read_run(tmp_path, thinned=thinned).readings[-1].groups) == list(GROUPS)
    write_run(tmp_path, 3, groups=[])
    for thinned in (False, True):
        assert read_run(tmp_path, thinned=thinned).readings[-1].groups == {}


def test_a_check_that_fails_or_recovers_is_written_at_once(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path)
    sink.write(header_record())
    for i in range(30):
        sink.write(reading_record(i, 30, alerts={"same_data": f"at {i}"} if 13 <= i < 16 else {}))
    sink.close()
    readings = read_run(tmp_path).readings
    assert [bool(reading.alerts) for reading in readings] == [13 <= i < 16 for i in range(30)]


def test_metrics_of_any_name_come_and_go(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path)
    sink.write(header_record())
    given = [{"a": 1.5}, {"a": 2.5, "new/metric": 3.0}, {"new/metric": None}, {"a": -0.0, "b": 1e300}]
    for i, metrics in enumerate(given):
        sink.write(reading_record(i, 4, metrics=metrics))
    sink.close()
    for thinned in (False, True):
        read = [dict(reading.metrics) for reading in read_run(tmp_path, thinned=thinned).readings]
        assert [{k: v for k, v in r.items() if v is not None} for r in read] == [
            {"a": 1.5}, {"a": 2.5, "new/metric": 3.0}, {}, {"a": 0.0, "b": 1e300},
        ]  # fmt: skip


def test_counters_stay_exact_and_floats_keep_seven_digits(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path)
    sink.write(header_record())
    sink.write(
        reading_record(0, 1, metrics={"run/units_seen": 123_456_789_012.0, "loss": math.pi, "tiny": 1.23456789e-30})
    )
    sink.close()
    assert read_run(tmp_path).readings[0].metrics == {
        "run/units_seen": 123_456_789_012.0, "loss": 3.141593, "tiny": 1.234568e-30,
    }  # fmt: skip


def test_a_record_that_is_refused_leaves_the_next_lines_whole(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path)
    sink.write(header_record())
    with pytest.raises(ValueError, match="a 'reading' record must hold JSON values only"):
        sink.write(reading_record(0, 2, metrics={"only here": math.nan}))
    sink.write(reading_record(1, 2))
    sink.close()
    [reading] = read_run(tmp_path).readings
    assert (reading.window, reading.status) == (20, "resolved")
    assert "only here" not in reading.metrics


def test_each_window_is_logged_on_request_and_can_be_computed_with_again(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, sink = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)), Recording()
    log = sonde.RunLog([sonde.JsonlSink(tmp_path), sink], every=5, log_windows=True)
    with sonde.attach(model, unit="rows", log=log, verbose=False) as probe:
        for step in range(12):
            for piece in range(2):
                with probe.piece(units=4):
                    loss = model(torch.randn(4, 3)).square().mean()
                    (loss * math.nan if (step, piece) == (7, 0) else loss).backward()
            probe.step()
            model.zero_grad()
        reading = probe.reading()
    windows = list(sonde.read_windows(tmp_path))
    assert [w.window for w in windows] == [1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12]  # window 8 was dropped
    assert len(sink.of_kind("window")) == len(windows)
    # So few windows are averaged as they are.
    for name, own in (("gns/trace_cov", reading.trace_cov), ("gns/grad_sq", reading.grad_sq)):
        values = [w.metrics[name] or 0.0 for w in windows]
        assert sum(values) / len(values) == pytest.approx(own, rel=1e-7)  # 9 digits are written
        group_values = [w.groups["1"][name.removeprefix("gns/")] or 0.0 for w in windows]
        own_group = getattr(reading.groups["1"], name.removeprefix("gns/"))
        assert sum(group_values) / len(values) == pytest.approx(own_group, rel=1e-7)
    replayed = list(sonde.replay_windows(windows))
    assert [r.window for r in replayed] == [w.window for w in windows]
    for fit, own in ((replayed[-1].total, reading), (replayed[-1].groups["1"], reading.groups["1"])):
        assert fit.interval.status == own.status
        assert (fit.interval.low, fit.interval.high) == pytest.approx((own.low, own.high), rel=1e-6)
        assert fit.b_simple == (None if own.b_simple is None else pytest.approx(own.b_simple, rel=1e-6))
    assert len(read_run(tmp_path).readings) == 3
    assert sum(line["kind"] == "columns" and line["of"] == "window" for line in _lines(tmp_path)) == 1


def test_windows_of_another_schema_are_refused(tmp_path: Path) -> None:
    write_run(tmp_path, 1, header=header_record(schema=2))
    with pytest.raises(ValueError, match="was written with record schema 2, expected 3: read it with the version"):
        list(sonde.read_windows(tmp_path))
