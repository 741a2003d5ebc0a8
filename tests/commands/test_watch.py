"""`sonde watch`: what it refuses, and how it begins and ends, where torch is not installed."""

from __future__ import annotations

import functools
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sonde.cli import main
from tests.new_process import WITHOUT_TORCH
from tests.runs.report.plausible_run import alert_record, write_run


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "expected at least one run to watch, got none"),
        (["nowhere"], "no run at nowhere: give the folder a run was logged to"),
        (["."], "no records.jsonl in the folder ., which holds 1 run: give the folder of one, such as run"),
        (["run", "loss.csv"], "expected a run's folder or its records.jsonl, got the file loss.csv"),
        (["run", "--port", "8000"], "--port 8000 is the port of the page: give --serve too"),
        (["run", "--serve", "--port", "99999"], "--port 99999 cannot be used"),
    ],
)
def test_what_cannot_be_watched_is_refused_in_a_sentence(
    options: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run", 3)
    (tmp_path / "loss.csv").touch()
    assert main(["watch", *options]) == 2
    assert capsys.readouterr().err.startswith(f"sonde: error: {said}")


def _lines_until(watch: subprocess.Popen[str], said: str) -> None:
    assert watch.stdout is not None
    for line in watch.stdout:
        if said in line:
            return
    raise AssertionError("it has ended")


@pytest.mark.timeout(60)
def test_it_goes_on_without_the_folder_until_ctrl_c(tmp_path: Path) -> None:
    """Its address and what goes wrong are printed at once, also into a file. The last readings come at the end."""
    folder = write_run(tmp_path / "run", 12, end=False)
    command = [sys.executable, "-W", "error", "-c", WITHOUT_TORCH, f"watch {folder} --serve"]
    # Tests that run in the background ignore Ctrl-C, and so would what they start.
    as_in_a_terminal = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "bufsize": 1}
    with subprocess.Popen(command, **pipes, preexec_fn=as_in_a_terminal) as watch:
        try:
            _lines_until(watch, "?token=")
            folder.rename(tmp_path / "elsewhere")
            _lines_until(watch, "holds no log any more")
            write_run(tmp_path / "elsewhere", 0, end=False, alerts=[alert_record("Look here.", window=121)])
            (tmp_path / "elsewhere").rename(folder)
            _lines_until(watch, f"{folder} is read again\n")
            watch.send_signal(signal.SIGINT)
            out, err = watch.communicate(timeout=20)
        finally:
            watch.kill()
    assert (watch.returncode, err) == (0, "")
    assert "small language model · window 120, after 7,680 sequences · last record" in out
    assert "! Look here." in out
