"""`sonde run` as it is typed, in real processes: with torchrun, `accelerate launch`, and a module."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import sonde
from tests.commands.scripts import DDP, NEVER_TRAINS, PLAIN
from tests.commands.unmodified import bare, same_weights
from tests.new_process import Ended, Python

pytestmark = pytest.mark.slow

TORCHRUN = ["torchrun", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2"]
STARTS = [
    ["train.py"],
    ["-m", "torch.distributed.run", *TORCHRUN[1:], "-m", "train"],
]
COMMANDS = {
    "torchrun": (DDP, 2, ["--", *TORCHRUN, "package/train.py"]),
    "--nproc": (DDP, 2, ["--nproc", "2", "--", "package/train.py"]),
    "accelerate launch": (PLAIN, 1, ["--", "accelerate", "launch", "--cpu", "package/train.py"]),
    "-m": (PLAIN, 1, ["--", "-m", "package.train"]),
}


def launched(command: Sequence[str], folder: Path) -> Ended:
    environment = {
        "OMP_NUM_THREADS": "1",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": str(Path(sonde.__file__).parents[1]),
    }
    options = ["--every", "1", "--no-report", "--unit", "images"]
    arguments = ["-m", "sonde", "run", *options, *command, "w.pt", "--lr", "3"]
    with Python(*arguments, folder=folder, environment=environment) as process:
        return process.wait()


@pytest.mark.parametrize("name", COMMANDS)
def test_a_script_is_measured_as_it_is_launched(name: str, tmp_path: Path) -> None:
    script, ranks, command = COMMANDS[name]
    if name == "accelerate launch":
        pytest.importorskip("accelerate", reason="needs accelerate: pip install '.[accelerate]'")
    without = bare(script, tmp_path, ranks=ranks)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text(script)
    ended = launched(command, tmp_path)
    assert (ended.status, ended.out) == (0, without.out), ended.err
    assert same_weights(torch.load(tmp_path / "w.pt"), without.weights)
    assert ended.err.count("sonde: B_simple") == 1, ended.err
    assert f"  ranks     {ranks} data-parallel rank" in ended.err
    assert "nothing was measured" not in ended.err
    (folder,) = (tmp_path / "runs").iterdir()
    run = sonde.read_run(folder)
    assert (run.readings[-1].window, run.readings[-1].dropped, run.header.unit) == (12, {}, "images")
    assert run.header.metadata["command"] == " ".join([*command[command.index("--") + 1 :], "w.pt", "--lr", "3"])


@pytest.mark.parametrize("before", STARTS, ids=" ".join)
def test_a_script_without_an_optimizer_says_so_and_its_launcher_does_not(before: list[str], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(NEVER_TRAINS)
    ended = launched(["--", *before], tmp_path)
    assert ended.status == 0
    assert ended.err.count("sonde: nothing was measured: the script made no torch.optim.Optimizer\n") == 1
