"""`sonde branch` through the real command line: what it measures, what it keeps, and what it refuses."""

from __future__ import annotations

import json
import math
import os
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import sonde
from sonde.cli import main
from sonde.evidence.answer import advice, at_half, batch_rows, headline, scale_rows
from sonde.evidence.branches import Branches, Proxy
from sonde.evidence.stats.branched_batch import from_base
from tests.commands.branch_scripts import PATTERN, PRINTS, TRAINS
from tests.new_process import Python


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prints.py").write_text(PRINTS)
    (tmp_path / "trains.py").write_text(TRAINS)
    return tmp_path


def words(batches: str = "16,32,64", *options: object, wrong: str = "", seeds: int = 2, ends: bool = True) -> list[str]:
    """A command that trains branches of the script that prints."""
    own = ["--batches", batches, "--units", "3200", "--seeds", seeds, "--jobs", 2, "--loss-regex", PATTERN, *options]
    script = ["prints.py", "--batch", "{batch}", "--seed", "{seed}", *(["--wrong", wrong] if wrong else [])]
    script += ["--steps", "{steps}"] if ends else []
    return ["branch", *map(str, own), "--", *script]


def result(folder: Path) -> Branches:
    return Branches.from_json(json.loads((folder / "branches" / "branches.json").read_text()))


def said(capsys: pytest.CaptureFixture[str], argv: Sequence[str], status: int = 0) -> tuple[str, str]:
    assert main(argv) == status
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    return out, err


def test_the_critical_batch_of_a_known_law(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = said(capsys, words("16,32,64", "--noise", "B_noise=40:30:60", seeds=3))
    found = result(folder)
    # The script's batches need 1 + B/50 times the units. Its losses scatter by 0.2 %, the ratios of 3 seeds by about
    # 0.3 %, which the conversion makes 2 % of 50. The noise is the same on every machine.
    critical = found.critical
    assert critical.ratio is not None
    assert from_base(critical.ratio, 16, 0.2) == pytest.approx(50, rel=0.08)
    assert [branch.state for branch in found.branches] == ["finished"] * 9
    assert all(branch.curve.units[-1] == 3200 for branch in found.branches)
    assert (found.noise, found.unverified) == (0.0, {})
    for sentence in (headline(found), advice(found), at_half(found)):
        assert f"{sentence}\n" in out
    shown = {" ".join(line.split()) for line in out.splitlines()}
    assert {" ".join(row).strip() for row in (*batch_rows(found), *scale_rows(found))} <= shown
    assert "bit for bit" not in out
    assert "batch 32, seed 3: finished\n" in err

    kept = {path: path.stat().st_mtime_ns for path in folder.rglob("result.json")}
    again_out, err = said(capsys, words("16,32,64", "--noise", "B_noise=40:30:60", seeds=3))
    assert (again_out, err) == (out, "16 of 16 runs are finished already.\n")
    # A larger batch is trained beside them.
    _, err = said(capsys, words("16,32,64,128", seeds=3))
    assert err.startswith("15 of 20 runs are finished already.\nbatch 128, seed ")
    assert {path: path.stat().st_mtime_ns for path in kept} == kept


def test_noise_scales_of_a_measured_checkpoint(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    data = [(x, x.sum(1, keepdim=True) + 3 * torch.randn(2, 1)) for x in torch.randn(1000, 2, 4)]
    measured = sonde.measure(
        torch.nn.Linear(4, 1),
        lambda model, batch: torch.nn.functional.mse_loss(model(batch[0]), batch[1]),
        data,
        unit="rows",
        log=sonde.RunLog(Path("measured")),
        verbose=False,
    )
    out, _ = said(capsys, words("16,32", "--noise", "measured", "--noise", "B=120:90:160", seeds=1))
    found = result(folder)
    assert found.proxies[-1] == Proxy("B", "", 90, 160, 120)
    simple = next(proxy for proxy in found.proxies if proxy.name == "B_simple, in measured")
    known = measured.reading
    assert simple.metric == "euclidean"
    assert (simple.low, simple.high, simple.value) == pytest.approx((known.low, known.high, known.b_simple))
    assert found.unit == "rows"
    assert "3,200 rows from the checkpoint" in out
    out, _ = said(capsys, words("16,32", "--unit", "images", seeds=1))
    assert "3,200 images from the checkpoint" in out

    header = Path("measured/records.jsonl").read_text().splitlines()[0].replace('"rows"', '"images"')
    logs = f"import os\nprint({header!r}, file=open(os.environ['SONDE_BRANCH'] + '/records.jsonl', 'w'))\nargs ="
    Path("prints.py").write_text(Path("prints.py").read_text().replace("args =", logs, 1))
    _, err = said(capsys, words("16,32", "--noise", "measured", "--out", "images", seeds=1), status=2)
    assert "must have the same unit, got images and rows: leave out --noise or --unit, or measure in images" in err
    kept = Branches.from_json(json.loads(Path("images/branches.json").read_text()))
    assert (kept.unit, kept.proxies) == ("images", ())
    before = [*folder.rglob("result.json")]
    _, err = said(capsys, words("16,32", "--noise", "measured", "--unit", "images", "--out", "new"), status=2)
    assert "must have the same unit, got images and rows" in err
    assert [*folder.rglob("result.json")] == before  # nothing was trained


def test_branches_that_are_finished_outlast_ctrl_c(folder: Path) -> None:
    wait = "import os\nwhile args.batch > 60 and not os.path.exists('go'):\n    time.sleep(0.01)\ndraw ="
    (folder / "prints.py").write_text((folder / "prints.py").read_text().replace("draw =", wait, 1))
    command = ["-m", "sonde", *words("16,64", seeds=1)]
    with Python(*command, folder=folder) as python:
        deadline = time.monotonic() + 120
        while len(list(folder.rglob("result.json"))) < 4 or not list(folder.rglob("batch-64-*/stdout.txt")):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(python.pid, signal.SIGINT)
        ended = python.wait()
    assert ended.status == 130, ended.err
    assert "Stopped: 5 of 9 runs are finished. The same command trains the others." in ended.err
    assert not (folder / "branches" / "branches.json").exists()

    (folder / "go").touch()
    with Python(*command, folder=folder) as python:
        ended = python.wait()
    assert ended.status == 0, ended.err
    assert ended.err.startswith("5 of 9 runs are finished already.\n")
    assert [branch.state for branch in result(folder).branches] == ["finished"] * 2
    assert "use 3 seeds or more" in ended.out


@pytest.mark.slow  # three new processes import torch
def test_torch_scripts_have_logs_of_their_own(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"weight": torch.full((1, 8), 2.0)}, "start.pt")
    options = ["--batches", "16,64", "--units", "1280", "--seeds", "1", "--jobs", "3", "--checkpoint", "start.pt"]
    script = ["trains.py", "--resume", "{checkpoint}", "--batch", "{batch}", "--lr", "{lr}", "--seed", "{seed}"]
    said(capsys, ["branch", *options, "--lr", "0.002", "--lr-rule", "linear", "--", *script])
    found = result(folder)
    assert not (folder / "runs").exists()
    assert [branch.rate for branch in found.branches] == [0.002, 0.008]
    assert found.unit == "rows"
    reference, larger = found.branches
    assert (found.noise, found.unverified) == (0.0, {})
    assert reference.curve.units == tuple(range(0, 1281, 64))
    assert larger.curve.units[-1] == 1280
    # SGD with the rate ∝ batch: far below the critical batch, both need about as many units.
    assert 0.8 < (found.ratios[0].ratio or math.inf) < 1.5
    assert {(proxy.name, proxy.metric) for proxy in found.proxies} == {
        ("B_simple, now", "euclidean"),
        ("B_simple, average", "euclidean"),
    }


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_branches_end_with_the_command(number: int, folder: Path) -> None:
    """Also when the terminal is lost, and when the command is killed and can end nothing."""
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip("started by nohup, so the command ignores the signal too")
    (folder / "waits.py").write_text("import time; open('begun', 'w').close(); time.sleep(120)")
    command = words("16,32", seeds=1, ends=False)
    command[command.index("prints.py")] = "waits.py"
    with Python("-m", "sonde", *command, folder=folder) as python:
        deadline = time.monotonic() + 120
        while not (folder / "begun").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(python.pid, number)
        ended = python.wait()
        while not list(folder.rglob("status")):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    if number != signal.SIGKILL:
        assert "Stopped: 0 of 7 runs are finished." in ended.err
    assert {path.read_text() for path in folder.rglob("status")} == {"143\n"}


def test_what_a_script_does_wrong_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = said(capsys, words("16,64", wrong="diverges"))
    assert "Batch 64 diverged with 2 of 2 seeds" in out
    assert "unbounded" in out
    critical = result(folder).critical
    assert (critical.low, critical.high) == (16, 64)
    out, _ = said(capsys, words("16,64", wrong="short"), status=2)
    assert "Batch 64, seed 1 cut off: it ended by itself after 1,024 of 3,200 units: have the script train" in out
    _, err = said(capsys, words("16,32", wrong="raises"), status=2)
    assert "failed, so the others were not trained: it ended with status 1: RuntimeError: no such data (see /" in err


def test_a_branch_that_failed_is_trained_again(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = (folder / "prints.py").read_text()
    broken = script.replace("draw =", "assert args.batch < 30, 'too little memory'\ndraw =", 1)
    (folder / "prints.py").write_text(broken)
    out, _ = said(capsys, words("16,32", seeds=1), status=2)
    assert "Batch 32, seed 1 failed: it ended with status 1: AssertionError: too little memory" in out
    assert "Whether the script uses {batch} is not known: with 32 in place of 16 the script failed: it ended" in out
    (folder / "prints.py").write_text(script)
    out, err = said(capsys, words("16,32", seeds=1))
    assert "failed" not in out
    assert err.startswith("6 of 8 runs are finished already.\n")
    assert len(list(folder.glob("branches/batch-32-*.old-1"))) == 1  # what has failed can still be looked at


def test_a_rate_that_falls_to_0(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The script's loss is a tenth higher until its rate has fallen, so that only last losses follow its law."""
    options = ["--decay", "--units", "6400", "--lr-rule", "none", "--lr", "1"]
    said(capsys, [*words("16,32,64", *options, wrong="decays"), "--lr", "{lr}"])
    found = result(folder)
    assert len(found.branches) == 6
    assert {branch.curve.units[1:] for branch in found.branches} == {(3200, 4480, 6400)}
    # 1 + B/50 units of each batch over those of 16, with lines between 3 lengths, and losses that scatter by 0.2 %.
    for ratio in found.ratios:
        assert ratio.ratio == pytest.approx((1 + ratio.batch / 50) / (1 + 16 / 50), rel=0.05)
    assert found.rule == "learning rate the same for all batches, falling to 0 in each branch"


def test_a_script_that_runs_on_is_ended(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said(capsys, words("16,32", wrong="slow", seeds=1, ends=False))
    assert [(b.state, b.curve.units[-1]) for b in result(folder).branches] == [("finished", 3200)] * 2
    assert {path.read_text() for path in folder.rglob("status")} == {"143\n"}  # by SIGTERM


def test_a_script_that_overwrites_its_checkpoint(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "start").mkdir()
    (folder / "start" / "weights").write_text("")
    prints = (folder / "prints.py").read_text()
    (folder / "prints.py").write_text(prints.replace("args = ", "open('start/weights', 'a').write('x')\nargs = ", 1))
    options = words("16,32", "--checkpoint", "start", seeds=1)
    _, err = said(capsys, [*options, "--from", "0", "--wrong", "{checkpoint}"], status=2)
    assert "the script writes to start, where other branches would begin: have it save to {out}" in err
    _, err = said(capsys, [*words("16,32", "--checkpoint", "start", "--out", "start/x")], status=2)
    assert "--out must be outside the checkpoint, got start/x" in err


def test_scripts_that_count_on_from_a_checkpoint(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for further, begin in (([], 0), (["--first-step", "1000"], 0), (["--first-step", "990"], 160)):
        command = words("16,32", *further, seeds=1, ends=False, wrong="slow")
        said(capsys, [*command, "--from", "1000"])
        assert result(folder).branches[0].curve.units[0] == begin


def test_scripts_that_count_on_but_do_not_print_the_checkpoints_loss(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = (folder / "prints.py").read_text()
    (folder / "prints.py").write_text(script.replace("    print(", "    if step: print("))
    _, err = said(capsys, [*words("16,32", seeds=1), "--from", "1000"], status=2)
    assert "cut off, so the others" in err  # by the last step's number
    assert "own, pass the checkpoint's step as --first-step" in err
    _, err = said(capsys, [*words("16,32", seeds=1, wrong="slow", ends=False), "--from", "1000"], status=2)
    assert "differ, so they are not the checkpoint's own: pass its step as --first-step" in err


def test_another_engine(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said(capsys, words("16,32", "--launcher", "env {command}", seeds=1))
    assert len(result(folder).branches) == 2


def test_a_script_without_a_log_or_with_another_metric(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "silent.py").write_text("print('nothing')")
    own = ["branch", "--batches", "16,32", "--units", "320", "--seeds", "1"]
    _, err = said(capsys, [*own, "--", "silent.py", "{batch}"], status=2)
    assert "it has no sonde log: call sonde.attach and probe.log(eval_loss=…)" in err
    _, err = said(capsys, [*own, "--loss-regex", PATTERN, "--", "silent.py", "{batch}"], status=2)
    assert "nothing that it printed matches --loss-regex" in err


REFUSED = [
    ("--batches takes 2 sizes or more", ["--batches", "16"], None),
    ("--units must be 2 steps of the largest batch, 64, or more", ["--units", "60"], None),
    ("--seeds must be at least 1, got 0", ["--seeds", "0"], None),
    ("--jobs must be at least 1, got 0", ["--jobs", "0"], None),
    ("--tolerance must be above 0, got 0", ["--tolerance", "0"], None),
    ("--reference must be one of 16,32, got 8", ["--reference", "8"], None),
    ("no checkpoint at absent.pt", ["--checkpoint", "absent.pt"], None),
    ("--checkpoint is given, but the command has no {checkpoint}", ["--checkpoint", "prints.py"], None),
    ("branches go to a folder, got the file prints.py", ["--out", "prints.py"], None),
    ("--first-step is of printed steps", ["--first-step", "3"], None),
    ("--launcher must be a command with {command}, got 'flux'", ["--launcher", "flux"], None),
    ("--launcher ray {command} cannot end a branch", ["--launcher", "ray {command}"], None),
    ("--decay needs {steps} or {units}", ["--decay"], None),
    ("--loss-regex needs the groups", ["--loss-regex", "(?P<loss>x)"], None),
    ("--loss-regex is no regular expression", ["--loss-regex", "("], None),
    ("NAME=VALUE:LOW:HIGH with LOW ≤ VALUE ≤ HIGH, got 'B=3:4:5'", ["--noise", "B=3:4:5"], None),
    ("--noise takes the folder of a log that has a noise scale", ["--noise", "absent"], None),
    ("--noise takes the folder of a log", ["--noise", "=120:90:160"], None),
    ("--unit must be a name such as sequences, got none", ["--unit", ""], None),
    ("--lr and --lr-rule need {lr}", ["--lr", "0.1"], None),
    ("the command has no {batch}", [], "prints.py --seed {seed}"),
    ("the command has no {seed}", [], "prints.py --batch {batch}"),
    ("the placeholder {speed}, which is none of", [], "prints.py {batch} {seed} {speed}"),
    (
        "the command has {checkpoint}, which has no value: pass --checkpoint",
        [],
        "prints.py {batch} {seed} {checkpoint}",
    ),
    ("{lr} needs a rate above 0, got None: pass --lr", [], "prints.py {batch} {seed} {lr}"),
    (
        "must be sqrt, linear, none, sgd=N, sign=N, or a table of rates such as 16:1e-3,32:1.4e-3, got 'cube'",
        ["--lr", "1", "--lr-rule", "cube"],
        "prints.py {batch} {seed} {lr}",
    ),
    ("has no rate for batch 32: add it", ["--lr-rule", "16:1"], "prints.py {batch} {seed} {lr}"),
    ("leave out --lr", ["--lr", "1", "--lr-rule", "16:1,32:2"], "prints.py {batch} {seed} {lr}"),
    ("are Adam's rule", ["--lr", "1", "--beta1", "0.9"], "prints.py {batch} {seed} {lr} {beta1}"),
    ("is no command that is installed", [], "no-such-program {batch} {seed}"),
    ("no -- in", [], ""),
]


@pytest.mark.parametrize(("sentence", "options", "command"), REFUSED, ids=[row[0] for row in REFUSED])
def test_errors_come_before_anything_starts(
    sentence: str, options: list[str], command: str | None, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = "prints.py --batch {batch} --seed {seed}" if command is None else command
    argv = ["branch", "--batches", "16,32", "--units", "320", *options]
    out, err = said(capsys, [*argv, *(["--", *shlex.split(script)] if script else [])], status=2)
    assert (out, err.count("\n"), err.startswith("sonde: error: ")) == ("", 1, True)
    assert sentence in err
    assert not (folder / "branches").exists()


SHOWS = """
import sys, zlib
learnt = float(sys.argv[2]) * (1 + zlib.crc32(repr(sys.argv).encode()) / 2**32)
print(f"step 0: val loss 2.0\\nstep {sys.argv[7]}: val loss {2 - learnt}", *sys.argv[1:])
"""
"""Prints what it was given, and a loss of its own for all of it, which falls by the rate."""


def test_rates_and_what_goes_with_them(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "shows.py").write_text(SHOWS)
    placeholders = [
        "{batch}",
        "{lr}",
        "{beta1}",
        "{beta2}",
        "{eps}",
        "{weight_decay}",
        "{steps}",
        "${HOME}",
        '{"a": 1}',
    ]
    adam = ["--lr", "0.01", "--beta1", "0.9", "--beta2", "0.99", "--eps", "1e-8", "--weight-decay", "0.1"]
    argv = ["branch", "--batches", "16,64", "--units", "6400", "--seeds", "1", "--loss-regex", PATTERN, *adam]
    said(capsys, [*argv, "--", sys.executable, "shows.py", *placeholders])
    shown = {}
    for path in folder.rglob("stdout.txt"):
        _, batch, _, _, *changed, _ = path.parent.name.split("-")
        if not changed:
            shown[batch] = path.read_text().split()[10:]
    assert shown == {
        "16": ["16", "0.01", "0.9", "0.99", "1e-08", "0.1", "400", "${HOME}", '{"a":', "1}"],
        "64": ["64", "0.02", "0.6", "0.96", "5e-09", "0.2", "100", "${HOME}", '{"a":', "1}"],
    }
    assert result(folder).rule == "learning rate ∝ √batch with β₁, β₂ and ε, weight decay as fast per unit"
