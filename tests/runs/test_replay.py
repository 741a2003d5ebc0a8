"""Windows of one start are replayed; windows of several starts are refused, since their numbers and ages go back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sonde


def write_start(folder: Path, n: int, state: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """Log n windows, going on from a saved state if there is one. Returns the state after the first of them."""
    torch.manual_seed(0)
    model, log = nn.Linear(4, 1), sonde.RunLog(sonde.JsonlSink(folder), log_windows=True)
    saved: dict[str, Any] = {}
    options = {"every": 1, "per_example": "never"} | options  # else the clock chooses windows and how they are read
    with sonde.attach(model, unit="rows", log=log, verbose=False, **options) as probe:
        if state is not None:
            probe.load_state_dict(state)
        for i in range(n):
            for _ in range(3):
                with probe.piece(units=8):
                    (model(torch.randn(8, 4)) - 1 - torch.randn(8, 1)).square().mean().backward()
            probe.step()
            model.zero_grad()
            saved = probe.state_dict() if i == 0 else saved
    return saved


def test_readings_made_again_know_the_learning_rate(tmp_path: Path) -> None:
    """A rate that falls widens the interval."""
    torch.manual_seed(0)
    model, log = nn.Linear(4, 1), sonde.RunLog(sonde.JsonlSink(tmp_path), log_windows=True)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with sonde.attach(model, optimizer, unit="rows", log=log, every=1, per_example="never", verbose=False) as probe:
        for step in range(60):
            optimizer.param_groups[0]["lr"] = 1e-3 if step < 45 else 1e-5
            for _ in range(3):
                with probe.piece(units=8):
                    (model(torch.randn(8, 4)) - 1 - torch.randn(8, 1)).square().mean().backward()
            probe.step()
            optimizer.step()
            model.zero_grad()
        found = [probe.reading().low, probe.reading().high]
    windows = list(sonde.read_windows(tmp_path))
    last = list(sonde.replay_windows(windows))[-1].total.interval
    assert [last.low, last.high] == pytest.approx(found, rel=1e-6)
    still = [replace(w, metrics={**w.metrics, "gns/learning_rate": 1e-3}) for w in windows]
    other = list(sonde.replay_windows(still))[-1].total.interval
    assert (other.high or 0) / (other.low or 1) < 0.9 * (last.high or 0) / (last.low or 1)


def test_windows_of_two_starts_are_refused_with_the_way_out(tmp_path: Path) -> None:
    write_start(tmp_path, 12, write_start(tmp_path, 20))
    windows = list(sonde.read_windows(tmp_path))
    assert [w.segment for w in windows] == [0] * 20 + [1] * 12
    with pytest.raises(ValueError, match=r"got window 2 of start 1 after window 20 of start 0.*w.segment == 1"):
        list(sonde.replay_windows(windows))
    for segment, last in ((0, 20), (1, 13)):
        replayed = list(sonde.replay_windows((w for w in windows if w.segment == segment), every=5))
        assert [r.window for r in replayed] == list(range(5, last + 1, 5))


def test_windows_that_were_measured_again_are_refused(tmp_path: Path) -> None:
    write_start(tmp_path, 8)
    windows = list(sonde.read_windows(tmp_path))
    with pytest.raises(ValueError, match="got window 5 of start 0 after window 8 of start 0"):
        list(sonde.replay_windows([*windows, *windows[4:]]))


def test_windows_that_were_logged_without_groups_are_the_whole_model(tmp_path: Path) -> None:
    write_start(tmp_path / "with", 20)
    write_start(tmp_path / "without", 20, log_groups=False)
    last = [list(sonde.replay_windows(sonde.read_windows(tmp_path / name)))[-1] for name in ("with", "without")]
    # The total of 20 windows is the sum of their groups, but for the rounding of what the log holds.
    assert last[1].total.b_simple == pytest.approx(last[0].total.b_simple, rel=1e-6)
    assert last[1].total.interval.high == pytest.approx(last[0].total.interval.high, rel=1e-6)
    assert last[1].groups == {}


@pytest.mark.parametrize("every", [0, -3, 2.5])
def test_every_must_be_a_number_of_windows(every: Any) -> None:
    with pytest.raises(ValueError, match="every must be a whole number of windows from 1 up"):
        sonde.replay_windows([], every=every)
