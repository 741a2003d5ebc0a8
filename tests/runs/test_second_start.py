"""A folder that is given again: a start that loads a saved state goes on with its run, and any other is a new run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sonde
from sonde.cli import main
from tests.runs.report.visible_text import visible_text


def start(folder: Path, batch: int, windows: int, state: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Train for some windows of two micro-batches, and log to the folder. Returns the state at the end."""
    model = nn.Linear(4, 1)
    generator = torch.Generator().manual_seed(batch)
    log = sonde.RunLog(sonde.JsonlSink(folder), every=5, log_windows=True)
    with sonde.attach(model, unit="rows", log=log, verbose=False) as probe:
        if state is not None:
            probe.load_state_dict(state)
        for _ in range(windows):
            for _ in range(2):
                with probe.piece(units=batch // 2):
                    model(torch.randn(batch // 2, 4, generator=generator)).square().mean().backward()
            probe.step()
            model.zero_grad()
        return probe.state_dict()


@pytest.mark.parametrize("first", [3, 20])
def test_a_second_start_without_a_state_is_a_new_run(first: int, tmp_path: Path) -> None:
    """Also where the first run was shorter than the interval between readings."""
    start(tmp_path, batch=64, windows=first)
    start(tmp_path, batch=16, windows=12)
    run = sonde.read_run(tmp_path)
    assert [reading.window for reading in run.readings] == [5, 10, 12]
    assert {reading.metrics["gns/units_per_window"] for reading in run.readings} == {16}
    assert (len(run.headers), run.earlier_runs, run.ended) == (1, 1, "closed")
    assert run.readings[-1].metrics["run/units_seen"] == 16 * 12
    assert main(["report", str(tmp_path)]) == 0
    text = visible_text(tmp_path / "report.html")
    assert "1 earlier run in the same folder left out" in text
    assert "restarted" not in text
    assert "batch of 16 rows" in text
    assert "64 rows" not in text.split("How this was measured")[0]


def test_the_last_run_alone_is_read_with_its_own_restarts(tmp_path: Path) -> None:
    for batch in (64, 32):
        start(tmp_path, batch=batch, windows=10)
    start(tmp_path, batch=16, windows=10, state=start(tmp_path, batch=16, windows=5))
    run = sonde.read_run(tmp_path)
    assert [(reading.segment, reading.window) for reading in run.readings] == [(0, 5), (1, 10), (1, 15)]
    assert (len(run.headers), run.earlier_runs) == (2, 2)
    start(tmp_path, batch=8, windows=0)  # a new run without a reading hides nothing
    assert sonde.read_run(tmp_path).readings == run.readings


def test_damage_is_told_by_its_line_in_the_file(tmp_path: Path) -> None:
    start(tmp_path, batch=64, windows=10)
    n_before = len((tmp_path / "records.jsonl").read_bytes().splitlines())
    start(tmp_path, batch=16, windows=10)
    lines = (tmp_path / "records.jsonl").read_bytes().splitlines()
    lines.insert(n_before + 3, b"Traceback (most recent call last):")
    (tmp_path / "records.jsonl").write_bytes(b"\n".join(lines))
    with pytest.raises(ValueError, match=f"is damaged: line {n_before + 4} is not a JSON object"):
        sonde.read_run(tmp_path)
