"""`sonde advise RUN --try -- script`: real scripts of known times; what cannot be tried is a sentence and 2."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sonde.cli import main
from sonde.commands.run import ON_START
from sonde.commands.trial import start
from sonde.commands.trial.start import Pace, Size, sizes_of, try_sizes
from sonde.decision.facts import Facts
from sonde.decision.law import Range, exactly
from sonde.decision.time_curve import TimeCurve
from tests.commands.rare_scripts import COMPILED
from tests.decision.known import facts
from tests.runs.report.plausible_run import header_record, write_run

QUICK = Pace(rounds=1, seconds=4.0, fewest_steps=5, enough_steps=5, least_seconds=0.2, patience=120.0)

SCRIPT = """
import argparse, pathlib, signal, sys, time, torch, sonde
from torch import nn

now, wait = 0.0, time.sleep


def sleep(seconds):
    global now
    now += seconds


time.sleep, time.perf_counter = sleep, lambda: now  # times are exact, and pass at once

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int)
parser.add_argument("--micro-batch", type=int)
parser.add_argument("--accumulation", type=int, default=1)
parser.add_argument("--mode", default="")
parser.add_argument("--log")
parser.add_argument("--out")
options = parser.parse_args()
mode, rows, steps = options.mode, options.micro_batch or options.batch, 100_000
if mode == "fails":
    sys.exit("no data at data/train.bin")
if mode.startswith("ends"):
    steps = int(mode.removeprefix("ends "))
if mode == "ignores":
    rows = 16
if mode.startswith("small data"):
    rows = min(rows, 50)
if mode == "cut":
    options.accumulation, rows = rows // 16, 16
if mode == "memory" and rows > 32:
    raise torch.OutOfMemoryError("Tried to allocate 64 GiB. CUDA out of memory.")
if mode == "killed" and rows > 32:
    signal.raise_signal(signal.SIGKILL)


marker = pathlib.Path(__file__).with_name("busy")
is_busy = mode == "busy" and not marker.exists()
marker.touch()


class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(4, 1)

    def forward(self, data):
        x = data["x"]
        falling = 0.05 - 0.0005 * len(x) if mode == "falls" else 0.05 / options.accumulation**2
        time.sleep(falling if mode in ("falls", "cut") else 0.005 + 0.0005 * len(x) + 0.3 * is_busy)
        return self.line(x)


torch.set_num_threads(1)
model = Slow()
optimizers = [torch.optim.SGD([model.line.weight], lr=0.1), torch.optim.AdamW([model.line.bias])]
for optimizer in optimizers:
    optimizer.register_step_post_hook(lambda *_: time.sleep(0.001))
if options.log:
    probe = sonde.attach(model, optimizers, unit="rows", log=options.log)
while mode == "waits":
    wait(0.1)
while mode == "closure":
    optimizers[0].step(lambda: model({"x": torch.randn(rows, 4)}).mean().backward())
for k in range(steps):
    for _ in range(options.accumulation):
        if options.log and k and probe.measures_now:  # the first steps are not timed
            sys.exit("this step is measured")
        x = torch.randn(rows // 3 if mode == "epochs" and k % 2 else rows, 4)
        mask = torch.ones(512, 512) if mode == "mask" else torch.ones(len(x), 1 + 7 * k % 30)
        data = {"x": x, "mask": mask} if mode in ("mask", "small data, padded") else {"x": x}
        out = model(data) if mode != "functions" else x @ model.line.weight.T
        out.mean().backward(retain_graph=mode == "two losses")
        if mode == "two losses":
            out.square().mean().backward()
    for optimizer in optimizers[: 1 if mode == "critic" and k % 5 else 2]:
        optimizer.step()
        optimizer.zero_grad()
"""

ON_RANKS = """
import sys, time, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    rows = int(sys.argv[1]) // dist.get_world_size()
    time.sleep(0.01 + 0.001 * rows)
    model(torch.randn(rows, 4)).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("scripts") / "train.py"
    path.write_text(SCRIPT)
    return str(path)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "PACE", QUICK)


def log(folder: Path, *, ranks: int = 1, pieces: int = 4, n_readings: int = 60) -> Path:
    """Of 600 steps of 64 rows, with B_crit near 42."""
    header = header_record(setup=header_record()["setup"] | {"ranks": ranks}, unit="rows")
    return write_run(folder, n_readings, header=header, pieces={"per_window": pieces})


def tried(
    script: str, mode: str, sizes: Sequence[int] = (16, 64), *, said: list[str] | None = None, pace: Pace = QUICK
) -> TimeCurve:
    command = [sys.executable, script, "--batch", "{batch}", "--mode", mode, "--out", "{out}"]
    say = [].append if said is None else said.append
    return try_sizes(command, [Size(n, n, 1) for n in sizes], unit="rows", ranks=1, say=say, pace=pace)


def test_a_script_whose_times_are_known(
    tmp_path: Path, script: str, quick: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """5 ms and 0.5 ms a row for each micro-batch, 1 ms for each optimizer. sonde in it measures no timed step."""
    run, own_log = log(tmp_path / "run"), tmp_path / "own"
    words = ["--micro-batch", "{micro_batch}", "--accumulation", "{accumulation}", "--log", str(own_log)]
    status = main(["advise", str(run), "--json", "--try", "--", sys.executable, script, *words])
    out, err = capsys.readouterr()
    assert status == 0, err
    found = json.loads(out)
    timings = {(t["micro_batch"], t["accumulation"]): t for t in found["facts"]["curve"]["timings"]}
    assert timings.keys() == {(16, 4), (16, 1), (64, 1), (256, 1)}
    for (micro, accumulation), timing in timings.items():
        assert timing["seconds"] == pytest.approx(accumulation * (0.005 + 0.0005 * micro) + 0.002)
        assert timing["beside"] == pytest.approx(0.002)  # two optimizers
        assert timing["ranks"] == 1
        assert timing["memory"] > 2**20
    assert err.startswith("The script may overwrite its own checkpoints: to keep them, have it save to {out}, ")
    assert err.count(" a step, ") == 4
    assert not own_log.exists()
    assert sorted(each.name for each in run.iterdir()) == ["records.jsonl", "trial.json"]
    assert found["kind"] != "time"
    lead = found["advice"]["for a run like this one"]
    basis = {(p["accumulation"], p["micro_batch"]): p["basis"] for p in lead["plans"]}
    assert basis[4, 16] == "measured"
    assert all(plan["micro_batch"] <= 256 for plan in lead["plans"])
    # What was tried is kept with the log.
    assert main(["advise", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == found


def test_of_several_logs_the_trial_is_kept_beside_the_one_that_is_gone_on_from(
    tmp_path: Path, script: str, quick: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """The shorter run came down as far in less time."""
    runs = [log(tmp_path / str(n), pieces=1, n_readings=n) for n in (60, 40)]
    command = [sys.executable, script, "--batch", "{batch}", "--out", "{out}"]
    assert main(["advise", *map(str, runs), "--json", "--try", "--", *command]) == 0
    assert [(run / "trial.json").exists() for run in runs] == [False, True]


def test_a_time_that_falls_is_tried_once_more_and_the_faster_try_counts(script: str) -> None:
    """A machine is busy for a while, or is not: that only adds to a time."""
    Path(script).with_name("busy").unlink(missing_ok=True)
    said: list[str] = []
    curve = tried(script, "busy", said=said)
    assert [timing.seconds for timing in curve.timings] == pytest.approx([0.015, 0.039])
    times = ["16 rows: 315 ms", "64 rows: 39 ms", "16 rows: 15 ms", "64 rows: 39 ms"]
    assert [words.split(" a step")[0] for words in said] == times


@pytest.mark.parametrize("mode", ["epochs", "ends 9", "two losses", "mask"])
def test_steps_that_are_timed_as_all_others(script: str, mode: str) -> None:
    """Half of them have a third of the data; there are as many as are needed; each has two backwards."""
    curve = tried(script, mode, pace=dataclasses.replace(QUICK, least_seconds=1.0))
    assert [timing.seconds for timing in curve.timings] == pytest.approx([0.015, 0.039])
    assert [(timing.micro_batch, timing.accumulation) for timing in curve.timings] == [(16, 1), (64, 1)]


def test_a_closures_backward_is_no_part_of_the_update(script: str) -> None:
    [timing] = tried(script, "closure", (16,)).timings
    assert (timing.beside, timing.accumulation) == (None, 1)


def test_an_end_of_memory_is_the_end_of_the_curve(script: str) -> None:
    said: list[str] = []
    curve = tried(script, "memory", (16, 64, 256), said=said)
    assert [t.micro_batch for t in curve.timings] == [16]
    assert (curve.too_large, curve.largest) == (64, 16)
    assert said[1:] == ["64 rows: out of memory, so nothing larger is tried"]


def test_an_end_of_the_data_is_the_end_of_the_curve(script: str) -> None:
    """With 50 rows of data, no step is of 256."""
    said: list[str] = []
    curve = tried(script, "small data", (12, 48, 256), said=said)
    assert [t.micro_batch for t in curve.timings] == [12, 48]
    assert (curve.too_large, curve.largest) == (256, 48)
    assert said[2] == "256 rows: a step takes in less data than that, so nothing larger is tried"


def test_a_size_that_never_fits_is_refused(script: str) -> None:
    with pytest.raises(ValueError, match="64 rows do not fit into memory: try a smaller batch, or free memory"):
        tried(script, "killed", (64,))


@pytest.mark.parametrize(
    ("mode", "sizes", "said"),
    [
        ("fails", (16,), "the script, at a batch of 16, ended with status 1: no data at data/train.bin"),
        ("ends 8", (16,), "the script, at a batch of 16, ended by itself after 8 optimizer steps of 9: have it train"),
        ("ignores", (16, 64), "a step at a batch of 64 takes in 1 times the data of one at 16, where 4 times"),
        ("small data", (16, 64), "a step at a batch of 64 takes in 3.1. times the data of one at 16, where 4 times"),
        ("small data, padded", (16, 64), "a step at a batch of 64 takes in 3.1. times the data of one at 16, where 4"),
        ("cut", (16, 64), "a step of 64 took 1.* ms, and one of 16 took .*: the machine is busy, or"),
        ("falls", (16, 64), "a step of 64 took .*, and one of 16 took .*: the machine is busy, or"),
        ("critic", (16,), "the script's optimizers do not step equally often, so which of them ends a step"),
        ("functions", (16,), "the script calls no torch module with data, so whether it uses its batch cannot be told"),
    ],
)
def test_what_cannot_be_tried_is_refused(script: str, mode: str, sizes: tuple[int, ...], said: str) -> None:
    words: list[str] = []
    with pytest.raises(ValueError, match=said):
        tried(script, mode, sizes, said=words)
    assert len(words) == (
        4 if mode in ("falls", "cut") else 1 if "data of" in said else 0
    )  # one more round, and no other


def test_micro_batches_that_are_not_taken_are_refused(script: str) -> None:
    """The script is told of micro-batches, and not how many make a step."""
    command = [sys.executable, script, "--micro-batch", "{micro_batch}"]
    with pytest.raises(ValueError, match="a step took 1 backward for 4 micro-batches: put "):
        try_sizes(command, [Size(64, 16, 4)], unit="rows", ranks=1, say=[].append, pace=QUICK)


def test_a_trial_compiles_what_is_compiled_without_it(tmp_path: Path) -> None:
    """Code that is compiled again and again ends up not compiled, and is timed as such."""
    (tmp_path / "train.py").write_text(COMPILED)
    of_trial = {
        "SONDE_TRIAL": str(tmp_path / "steps"),
        "PYTHONPATH": f"{ON_START}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    said = [
        subprocess.run([sys.executable, "train.py"], cwd=tmp_path, env=env, check=True, stdout=subprocess.PIPE).stdout
        for env in (dict(os.environ), dict(os.environ) | of_trial)
    ]
    [without, late, from_the_start] = b"".join(said).splitlines()
    assert late == without
    assert from_the_start == without
    assert len((tmp_path / "steps.0").read_text().splitlines()) == 2


def test_a_script_that_never_steps_is_ended(script: str) -> None:
    with pytest.raises(ValueError, match=r"at a batch of 16, took 0 optimizer steps in \d+ s: without a word"):
        tried(script, "waits", pace=dataclasses.replace(QUICK, patience=4.0))


def test_slow_steps_are_timed_all_the_same(script: str) -> None:
    """Steps of 0.2 s: fewer than enough in the seconds that there are, but three that count."""
    pace = dataclasses.replace(QUICK, seconds=0.3, fewest_steps=100)
    [timing] = tried(script, "", (400,), pace=pace).timings
    assert timing.seconds == pytest.approx(0.207)


def test_a_refused_trial_writes_nothing_over(
    tmp_path: Path, script: str, quick: None, capsys: pytest.CaptureFixture[str]
) -> None:
    run = log(tmp_path / "run", ranks=2, pieces=2)
    before = (run / "records.jsonl").read_bytes()
    command = [sys.executable, script, "--batch", "{batch}"]
    for argv, said in (
        (["--try"], "--try goes with a script after two dashes: sonde advise RUN --try -- python train.py"),
        (["--", *command], "--try goes with a script after two dashes: sonde advise RUN --try -- python train.py"),
        (["--try", "--", sys.executable, script, "--batch", "16"], "a trial needs {batch} in the script's arguments"),
        (["--try", "--", *command, "{lr}"], "the placeholder {lr}, which is none of {batch}, "),
        (["--try", "--", str(tmp_path / "none.py"), "{batch}"], "no script at "),
        (["--try", "--", *command], "the trial ran on 1 rank, and the log is of 2: start the script as for the log"),
    ):
        assert main(["advise", str(run), *argv]) == 2
        out, err = capsys.readouterr()
        assert (out, said in err) == ("", True), err
    early = write_run(tmp_path / "early", 3)
    assert main(["advise", str(early), "--try", "--", *command]) == 2
    assert "there is nothing to try yet: " in capsys.readouterr().err
    assert [each.name for each in run.iterdir()] == ["records.jsonl"]
    assert (run / "records.jsonl").read_bytes() == before


def test_a_script_on_ranks_is_timed_on_as_many(tmp_path: Path) -> None:
    """10 ms and 1 ms a row on each of 2 gloo ranks of torchrun."""
    script = tmp_path / "ddp.py"
    script.write_text(ON_RANKS)
    command = ["torchrun", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2", str(script), "{batch}"]
    curve = try_sizes(command, [Size(128, 64, 1)], unit="rows", ranks=2, say=[].append, pace=QUICK)
    [timing] = curve.timings
    assert (timing.micro_batch, timing.accumulation, timing.ranks) == (64, 1, 2)
    assert timing.seconds > 0.074  # sleeps end late, never early


@pytest.mark.parametrize(
    ("known", "critical", "command", "sizes"),
    [
        # Up to 4 times B_crit, and one smaller size where B_crit may be smaller.
        (facts(16, 40.0), Range(60.0, 33.0, 112.0), "{batch}", [(16, 16, 1), (64, 64, 1)]),
        (facts(64, 40.0), Range(60.0, 33.0, 112.0), "{batch}", [(16, 16, 1), (64, 64, 1), (256, 256, 1)]),
        (facts(64, 40.0, pieces=4.0), exactly(1e6), "{batch}", [(64 * 4**k, 16 * 4**k, 4) for k in range(5)]),
        # Micro-batches by themselves: as it is, then each batch in one.
        (
            facts(64, 40.0, pieces=4.0),
            exactly(60.0),
            "{micro_batch} {accumulation}",
            [(64, 16, 4), (16, 16, 1), (64, 64, 1), (256, 256, 1)],
        ),
        # A script that is told of micro-batches alone accumulates as it did.
        (facts(64, 40.0, pieces=4.0), exactly(60.0), "{micro_batch}", [(64, 16, 4), (16, 4, 4), (256, 64, 4)]),
        # No part of a unit is tried.
        (facts(8, 1.0, pieces=8.0), Range(4.0, 2.0, 8.0), "{batch}", [(8, 1, 8), (32, 4, 8)]),
    ],
)
def test_which_sizes_are_tried(known: Facts, critical: Range, command: str, sizes: list[Any]) -> None:
    found = sizes_of(known, critical, command.split())
    assert sorted((s.batch, s.micro_batch, s.accumulation) for s in found) == sorted(sizes)
    assert len(found) == len(set(found))
