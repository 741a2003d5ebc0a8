"""SIGTERM does to a process what it would do without sonde: each reading is on disk already."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from torch import nn

import sonde
from tests.new_process import Python

SCRIPT = """
import os, signal, sys
import torch
from torch import nn
import sonde

{before}
model = nn.Linear(3, 1)
probe = sonde.attach(model, unit="rows", log=sonde.RunLog(sonde.JsonlSink(sys.argv[1]), every=2), verbose=False)
for window in range(1, 8):
    for _ in range(2):
        with probe.piece(units=4):
            model(torch.randn(4, 3)).square().mean().backward()
    probe.step()
    model.zero_grad()
    if window == 5:
        os.kill(os.getpid(), signal.{signal})
"""


def run_script(folder: Path, *, signal_name: str = "SIGTERM", before: str = "") -> tuple[int, sonde.Run]:
    """The script's status, minus the signal that ended it, and its log."""
    code = SCRIPT.format(before=before, signal=signal_name)
    with Python("-c", code, str(folder / "run"), folder=folder) as python:
        status = python.wait().status
    return status, sonde.read_run(folder / "run")


def test_a_process_that_is_told_to_end_leaves_each_reading_and_no_torn_line(tmp_path: Path) -> None:
    status, run = run_script(tmp_path)
    assert (status, [reading.window for reading in run.readings]) == (-signal.SIGTERM, [2, 4])
    assert (run.ended, run.torn) == (None, None)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["records.jsonl"]


def test_a_handler_of_the_users_is_called_and_the_log_goes_on(tmp_path: Path) -> None:
    handler = "signal.signal(signal.SIGTERM, lambda *_: open(sys.argv[1] + '/called', 'w').close())"
    status, run = run_script(tmp_path, before=handler)
    assert (tmp_path / "run" / "called").exists()
    assert (status, run.ended) == (0, "the process ended without probe.close()")
    assert [reading.window for reading in run.readings] == [2, 4, 6, 7]
    lines = (tmp_path / "run" / "records.jsonl").read_text().splitlines()
    assert [json.loads(line)["kind"] for line in lines].count("end") == 1


def test_a_handler_that_exits_ends_the_log(tmp_path: Path) -> None:
    status, run = run_script(tmp_path, before="signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))")
    assert (status, run.ended) == (7, "the process ended without probe.close()")
    assert [reading.window for reading in run.readings] == [2, 4, 5]


def test_ctrl_c_ends_the_log_with_the_windows_since_the_last_reading(tmp_path: Path) -> None:
    status, run = run_script(tmp_path, signal_name="SIGINT")
    assert status != 0
    assert run.ended == "the process ended without probe.close()"
    assert [reading.window for reading in run.readings] == [2, 4, 5]


@pytest.mark.parametrize("name", [name for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name)])
def test_no_handler_is_installed(name: str, tmp_path: Path) -> None:
    number = getattr(signal, name)
    before = signal.getsignal(number)
    log = sonde.RunLog(sonde.JsonlSink(tmp_path))
    with sonde.attach(nn.Linear(3, 1), unit="rows", log=log, verbose=False):
        assert signal.getsignal(number) is before
    assert signal.getsignal(number) is before
    assert os.path.exists(tmp_path / "records.jsonl")
