"""`sonde run` as it is typed, in real processes: Python, torchrun, `accelerate launch`, and Ctrl-C."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import sonde
from tests.commands.scripts import DDP, NEVER_TRAINS, PLAIN, whole
from tests.commands.unmodified import bare, same_weights
from tests.new_process import Ended, Python

pytestmark = pytest.mark.slow

COMMANDS = {
    "--nproc": (DDP, 2, ["--nproc", "2", "--", "package/train.py"]),
    "accelerate launch": (PLAIN, 1, ["--", "accelerate", "launch", "--cpu", "package/train.py"]),
}
OPTIONS = ["--every", "1", "--no-report", "--unit", "images"]
CHAINED = """
import sys
print("chained", "torch" in sys.modules, flush=True)
"""


def launched(arguments: Sequence[str], folder: Path) -> Ended:
    environment = {
        "OMP_NUM_THREADS": "1",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": str(Path(sonde.__file__).parents[1]),
    }
    with Python("-m", "sonde", "run", *arguments, folder=folder, environment=environment) as process:
        return process.wait()


@pytest.mark.parametrize("name", COMMANDS)
def test_a_script_is_measured_as_it_is_launched(name: str, tmp_path: Path) -> None:
    script, ranks, command = COMMANDS[name]
    if name == "accelerate launch":
        pytest.importorskip("accelerate", reason="needs accelerate: pip install '.[accelerate]'")
    without = bare(script, tmp_path, ranks=ranks)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text(whole(script))
    ended = launched([*OPTIONS, *command, "w.pt", "--lr", "3"], tmp_path)
    assert (ended.status, ended.out) == (0, without.out), ended.err
    assert same_weights(torch.load(tmp_path / "w.pt"), without.weights)
    assert ended.err.count("sonde: B_simple") == 1, ended.err
    assert f"  ranks     {ranks} data-parallel rank" in ended.err
    assert "not measured" not in ended.err
    (folder,) = (tmp_path / "runs").iterdir()
    run = sonde.read_run(folder)
    assert (run.readings[-1].window, run.readings[-1].dropped, run.header.unit) == (12, {}, "images")
    assert run.header.metadata["command"] == " ".join([*command[command.index("--") + 1 :], "w.pt", "--lr", "3"])


def test_ctrl_c_in_a_real_python_ends_a_script_that_ran_as_it_was(tmp_path: Path) -> None:
    """The command becomes the script, whose own sitecustomize runs too. The signal itself ends it, a shell's 130."""
    without = bare(PLAIN, tmp_path)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(CHAINED)
    more = """
print(sys.path[0], [path for path in sys.path if 'on_start' in path], __name__, flush=True)
import os, signal, time
os.kill(os.getpid(), signal.SIGINT)
time.sleep(9)
"""
    (tmp_path / "train.py").write_text(whole(PLAIN) + more)
    paths = os.pathsep.join([str(tmp_path / "site"), str(Path(sonde.__file__).parents[1])])
    ended = subprocess.run(
        [sys.executable, "-m", "sonde", "run", "--every", "1", "--", "train.py", "b.pt", "--lr", "3"],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
        # A shell starts tests in the background with interrupts ignored, and processes hand that on.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert ended.returncode == -signal.SIGINT, ended.stderr
    # The command has a sitecustomize too, and then the script.
    assert ended.stdout.removeprefix("chained False\n") == f"chained False\n{without.out}{tmp_path} [] __main__\n"
    assert same_weights(torch.load(tmp_path / "b.pt"), without.weights)
    assert "KeyboardInterrupt" in ended.stderr
    assert re.search(r"sonde: B_simple [\d.]+ rows \[", ended.stderr)
    (folder,) = (tmp_path / "runs").iterdir()
    assert f"sonde: report  {folder}/report.html\n" in ended.stderr
    assert (folder / "report.html").read_text().startswith("<!DOCTYPE html>")


def test_a_script_without_an_optimizer_says_so(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(NEVER_TRAINS)
    ended = launched(["--", "train.py", "w.pt", "--lr", "3"], tmp_path)
    assert (ended.status, ended.out) == (0, "3 ['--lr', '3'] []\n")
    assert not (tmp_path / "runs").exists()
    assert ended.err == "sonde: not measured: the script made no torch.optim.Optimizer\n"
