"""A log holds each record as it was given, one a line; the longer the run, the rarer its readings."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import sonde
from sonde import record_values
from sonde.log.sinks import JsonlSink
from sonde.record_values import spacing
from sonde.runs.reader import read_run
from tests.batch_size.loops import Recording, windows_of_rows
from tests.ranks import Ranks
from tests.runs.logged_windows import logged_windows
from tests.runs.report.plausible_run import (
    GROUPS,
    alert_record,
    end_record,
    header_record,
    reading_record,
    write_run,
)


def _lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "records.jsonl").read_bytes().splitlines()]


def test_each_record_is_one_line_that_json_reads_back(tmp_path: Path) -> None:
    header = header_record(metadata={"note": "tr Σ\nnext line \u2028 \0 \U0001f680 \udc80 </script>"})
    records = [header, *(reading_record(i, 3) for i in range(3)), alert_record(), end_record(30)]
    sink = JsonlSink(tmp_path)
    for record in records:
        sink.write(record)
        assert _lines(tmp_path)[-1] == record  # on disk at once, and exactly as it was given
    sink.close()
    assert _lines(tmp_path) == records
    assert read_run(tmp_path).header.metadata == header["metadata"]


def test_everything_is_read_back(tmp_path: Path) -> None:
    """Readings between two with groups have those before. The last one has its own: they are written at the end."""
    n = 65
    write_run(tmp_path, n)
    for i, reading in enumerate(read_run(tmp_path).readings):
        record = reading_record(i, n)
        for name in ("window", "time", "status", "reason", "advice", "metrics", "dropped", "alerts", "pieces"):
            assert getattr(reading, name) == record[name]
        written = i if i < 10 or i == n - 1 else i - (i + 1) % 10  # the last reading whose groups were written
        groups = reading_record(written, n)["groups"]
        assert reading.groups_window == 10 * (written + 1)
        assert [g.grad_sq for g in reading.groups.values()] == [g["grad_sq"] for g in groups.values()]
        assert list(reading.groups) == list(GROUPS)


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
    windows = logged_windows(tmp_path)
    assert [w["window"] for w in windows] == [1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12]  # window 8 was dropped
    assert len(sink.of_kind("window")) == len(windows)
    # So few windows are averaged as they are.
    for name, own in (("gns/trace_cov", reading.trace_cov), ("gns/grad_sq", reading.grad_sq)):
        values = [w["metrics"][name] for w in windows]
        assert sum(values) / len(values) == pytest.approx(own, rel=1e-12)
        group_values = [w["groups"]["1"][name.removeprefix("gns/")] for w in windows]
        own_group = getattr(reading.groups["1"], name.removeprefix("gns/"))
        assert sum(group_values) / len(values) == pytest.approx(own_group, rel=1e-12)
    assert len(read_run(tmp_path).readings) == 3


@pytest.mark.parametrize(("every", "n", "is_at_most"), [(10, 10_000_000, 11_000), (1, 10_000_000, 14_300)])
def test_the_log_of_ten_million_windows_has_about_eleven_thousand_readings(every: int, n: int, is_at_most: int) -> None:
    ends = [2000 * every * 2**k for k in range(20)]
    assert [spacing(every, end) for end in ends] == [every * 2**k for k in range(20)]
    assert [spacing(every, end + 1) for end in ends] == [every * 2 ** (k + 1) for k in range(20)]
    stretches = zip([0, *ends], [min(end, n) for end in ends], strict=False)
    n_readings = sum(max(end - start, 0) // spacing(every, end) for start, end in stretches)
    assert 2000 < n_readings <= is_at_most


def _readings_of_starts(every: int, ends: Sequence[int]) -> list[list[int]]:
    """The windows of the readings of each start; each goes on from the state of the one before."""
    found, state = list[list[int]](), None
    for begin, end in itertools.pairwise([0, *ends]):
        model, sink = nn.Linear(3, 1), Recording()
        log = sonde.RunLog(sink, every=every)
        group = dist.group.WORLD if dist.is_initialized() else None
        with sonde.attach(model, unit="rows", every=1, log=log, process_group=group, verbose=False) as probe:
            if state is not None:
                probe.load_state_dict(state)
            windows_of_rows(probe, model, end - begin)
            state = probe.state_dict()
        found.append([record["window"] for record in sink.of_kind("reading")])
    return found


def test_readings_become_rarer_and_a_restart_goes_on_as_a_run_that_was_not_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(record_values, "MOST_READINGS", 4)
    assert _readings_of_starts(2, [33]) == [[2, 4, 6, 8, 12, 16, 24, 32, 33]]
    assert _readings_of_starts(2, [10, 33]) == [[2, 4, 6, 8, 10], [12, 16, 24, 32, 33]]


def _on_ranks() -> list[list[int]]:
    record_values.MOST_READINGS = 4
    try:
        return _readings_of_starts(2, [20])
    finally:
        record_values.MOST_READINGS = 2000


def test_ranks_agree_beyond_the_doubling(ranks2: Ranks) -> None:
    assert ranks2(_on_ranks) == [[[2, 4, 6, 8, 12, 16, 20]], [[]]]
