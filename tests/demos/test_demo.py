"""The demo as a user starts it: real processes, a real terminal, real signals."""

from __future__ import annotations

import io
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from sonde.demos.byte_lm.options import DemoOptions
from sonde.demos.byte_lm.run import end
from sonde.runs.reader import read_run
from tests.new_process import Python

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc"),
]

DEADLINE = 120.0  # seconds; a run here takes about 8 on 2 idle cores
SMALL = ["demo", "--context", "16", "--batch", "8", "--log-every", "2", "--steps", "5000"]
FORKED = """
import functools, runpy
from sonde.demos.byte_lm import run
run.start_processes = functools.partial(run.start_processes, start_method="fork")
"""
"""Ranks that need not import torch. Where it does not matter how they are started, they are forked."""
RUN = "runpy.run_module('sonde', run_name='__main__', alter_sys=True)"
CTRL_C_WHILE_RANKS_START = f"""
import os, runpy, signal
from sonde.demos.byte_lm import run
start = run.start_processes

def and_ctrl_c(*args, **options):
    ranks = start(*args, **options)
    os.killpg(0, signal.SIGINT)
    return ranks

run.start_processes = and_ctrl_c
{RUN}
"""


def _ranks_of(launcher: int) -> list[int]:
    children = map(int, Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split())
    return [child for child in children if b"resource_tracker" not in Path(f"/proc/{child}/cmdline").read_bytes()]


def _is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def _wait_for(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < give_up, "the demo did not get this far in time"
        time.sleep(0.05)


def _has_reading(folder: Path) -> bool:
    log = folder / "records.jsonl"
    return log.exists() and '{"kind":"reading"' in log.read_text()


def test_the_demo_learns_logs_and_says_what_it_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As users start it: 12 steps with short sequences."""
    folder = tmp_path / "run"
    options = ["--steps", "12", "--log-every", "4", "--context", "32", "--learning-rate", "3e-3", "--out", str(folder)]
    with Python("-m", "sonde", "demo", *options, folder=tmp_path) as demo:
        ended = demo.wait(DEADLINE)
    assert ended.status == 0, ended.err
    run = read_run(folder)
    assert (run.ended, run.torn, run.alerts, run.header.unit) == ("finished", None, (), "sequences")
    assert [reading.window for reading in run.readings] == [4, 8, 12]
    _, losses = run.series("loss")
    assert losses[2] < losses[1] < losses[0] < math.log(256) + 0.1, "it starts from a nearly uniform guess"
    assert (run.header.metadata["learning_rate"], run.header.metadata["steps"]) == (3e-3, 12)
    assert (run.header.setup["wrapper"], run.header.setup["ranks"]) == ("DistributedDataParallel", 2)
    last = run.readings[-1]
    assert (last.pieces["per_window"], last.metrics["gns/units_per_window"]) == (4, 32)
    consistency = last.metrics["gns/consistency"]
    # None if the ranks had the same data. 12 windows of a few hundred elements give the ratio to some tens of %.
    assert consistency is not None
    assert 0.3 < consistency < 3

    assert (folder / "report.html").read_text().startswith("<!DOCTYPE html>")
    assert "\x1b" not in ended.out + ended.err
    verdict = "No verdict yet on the batch of 32 sequences"
    for text in ("2 processes on the CPU", "step 12/12, loss ", "─ verdict ─", verdict):
        assert text in ended.out
    assert f"log     {folder}/records.jsonl\nreport  {folder}/report.html" in ended.out
    # Messages of torch and its launcher are hidden. The message of attaching is shown.
    lines = ended.err.splitlines()
    assert lines[0] == "sonde: noise scale attached"
    assert all(line.startswith(("sonde: ", "  ")) for line in lines), ended.err

    monkeypatch.setitem(sys.modules, "bokeh", None)  # 'import bokeh' raises ImportError
    screen = io.StringIO()
    end(DemoOptions(), folder, Console(file=screen, width=100))
    needed = "the report needs bokeh: pip install 'gradsonde[report]', then run: sonde report"
    assert f"report  {needed} {folder}" in screen.getvalue()


@pytest.mark.parametrize("has_begun", [False, True])
def test_ctrl_c_stops_all_ranks_at_the_same_step(has_begun: bool, tmp_path: Path) -> None:
    """It reaches the launcher and all ranks at once. While ranks still start, it is not lost."""
    folder = tmp_path / "run"
    code = FORKED + RUN if has_begun else CTRL_C_WHILE_RANKS_START
    with Python("-c", code, *SMALL, "--out", str(folder), folder=tmp_path) as demo:
        if has_begun:
            _wait_for(lambda: _has_reading(folder))
            os.killpg(demo.pid, signal.SIGINT)
        ended = demo.wait(DEADLINE)
    assert ended.status == 130, ended.err
    assert "Traceback" not in ended.out + ended.err
    run = read_run(folder)
    assert (run.ended, run.torn) == ("interrupted", None)
    done = f"step {run.readings[-1].window}" if has_begun else "the first step"
    assert f"Stopped at {done} of 5000." in ended.out
    assert ("Log and report are complete up to this step." in ended.out) == has_begun
    assert (folder / "report.html").exists() == has_begun


@pytest.mark.parametrize("is_killed", [False, True], ids=["second Ctrl-C", "killed"])
def test_a_launcher_that_ends_at_once_is_followed_by_its_ranks(is_killed: bool, tmp_path: Path) -> None:
    with Python("-c", FORKED + RUN, *SMALL, "--out", str(tmp_path / "run"), folder=tmp_path) as demo:
        _wait_for(lambda: len(_ranks_of(demo.pid)) == 2)
        ranks = _ranks_of(demo.pid)
        if is_killed:
            demo.kill()
        else:
            for rank in ranks:  # which would end the demo before the second one
                os.kill(rank, signal.SIGSTOP)
            os.killpg(demo.pid, signal.SIGINT)
            time.sleep(0.2)  # two signals at once are one
            os.killpg(demo.pid, signal.SIGINT)
        assert demo.wait(DEADLINE).status == (-signal.SIGKILL if is_killed else 130)
        for rank in ranks:
            os.kill(rank, signal.SIGCONT)
        _wait_for(lambda: not any(map(_is_running, ranks)))
    assert read_run(tmp_path / "run").ended == "interrupted"


def test_a_killed_rank_ends_the_demo_with_one_sentence(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with Python("-c", FORKED + RUN, *SMALL, "--out", str(folder), folder=tmp_path) as demo:
        _wait_for(lambda: _has_reading(folder))
        ranks = sorted(_ranks_of(demo.pid))  # in the order in which they were started
        os.kill(ranks[1], signal.SIGKILL)
        ended = demo.wait(DEADLINE)
    assert ended.status == 1, ended.err
    lines = ended.err.splitlines()
    assert all(line.startswith(("sonde: ", "  ")) for line in lines), ended.err
    assert [line for line in lines if "error" in line] == [
        "sonde: error: rank 1 was killed by SIGKILL; the system kills a process when memory runs out; "
        f"the log so far: {folder}/records.jsonl"
    ]
    assert not any(map(_is_running, ranks))
    run = read_run(folder)
    assert run.readings
    assert run.ended in (None, "stopped by RuntimeError")  # the launcher may end rank 0 before it misses the other


def test_the_error_of_a_rank_is_shown_in_full(tmp_path: Path) -> None:
    absent = {"GLOO_SOCKET_IFNAME": "absent"}
    code, out = FORKED + RUN, ["--out", str(tmp_path / "run")]
    with Python("-c", code, *SMALL, *out, folder=tmp_path, environment=absent) as demo:
        ended = demo.wait(DEADLINE)
    assert ended.status == 1
    assert ended.err.count("Traceback") == 1
    assert "dist.init_process_group(" in ended.err
    last = ended.err.splitlines()[-1]
    assert last.startswith("sonde: error: rank ")
    assert "failed: RuntimeError" in last
    assert "Unable to find address for: absent" in last
    assert not (tmp_path / "run" / "records.jsonl").exists()
    assert "the log so far" not in last
