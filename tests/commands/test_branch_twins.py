"""`sonde branch` sees whether a script uses what it is given: scripts that ignore one placeholder, and good ones."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from sonde.cli import main
from tests.commands.branch_scripts import LOGS, PATTERN, RESUMES


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a script, and a checkpoint of it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(RESUMES)
    subprocess.run([sys.executable, "train.py", "--save", "start.json"], check=True, stdout=subprocess.DEVNULL)
    return tmp_path


ADAM = "--lr {lr} --beta1 {beta1} --beta2 {beta2} --eps {eps}"
OF_ADAM = "--lr 0.02 --beta1 0.9 --beta2 0.99 --eps 1e-8"
SLOWED = (
    "with 2e-08 in place of 0.02 its loss falls nearly as far, as if another rate held, at least after the first steps"
)
DECAY, OF_DECAY = "--weight_decay {weight_decay}", "--weight-decay 0.1"


def branch(script: str, options: str = "", wrong: str = "", batches: str = "8,16", n_seeds: int = 1) -> int:
    words = f"train.py --resume {{checkpoint}} --batch {{batch}} {script}" + (f" --wrong {wrong}" if wrong else "")
    given = f"--checkpoint start.json --batches {batches} --units 320 --seeds {n_seeds} --jobs 2 {options}"
    return main(["branch", *given.split(), "--loss-regex", PATTERN, "--", *shlex.split(words)])


@pytest.mark.parametrize(
    ("ignored", "wrong", "script", "options"),
    [
        ("lr", "lr", "--lr {lr} --steps {steps}", "--lr 0.05"),
        ("lr", "schedule", "--lr {lr} --steps {steps}", "--lr 0.02"),
        ("beta1", "beta1", ADAM, OF_ADAM),
        ("beta2", "beta2", ADAM, OF_ADAM),
        ("eps", "eps", ADAM, OF_ADAM),
        ("weight_decay", "weight_decay", DECAY, OF_DECAY),
        ("batch", "batch", "--lr {lr}", "--lr 0.02"),
        ("batch", "least", "--lr {lr}", "--lr 0.02"),
        ("seed", "seed", "--seed {seed}", "--seeds 2"),
        # At the largest batch alone:
        ("lr", "limits", "--lr {lr} --steps {steps}", "--lr 0.02 --batches 8,16,32"),
        ("batch", "fits", "--lr {lr}", "--lr 0.02 --batches 8,16,32"),
        ("weight_decay", "lighter", f"--lr {{lr}} {DECAY}", f"--lr 0.02 --batches 8,16,32 {OF_DECAY}"),
        # At the smallest, or one between, alone:
        ("batch", "least", "--lr {lr}", "--lr 0.02 --batches 8,30,64"),
        ("batch", "rounds", "--lr {lr}", "--lr 0.02 --batches 8,20,32"),
        ("steps", "epochs", "--steps {steps}", ""),
        ("steps", "steps", "--steps {steps}", ""),
        ("units", "units", "--units {units}", ""),
    ],
    ids=lambda value: value if " " not in value else "",
)
def test_a_script_that_ignores_one_placeholder_is_refused(
    ignored: str, wrong: str, script: str, options: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "branches").mkdir()
    (folder / "branches" / "branches.json").write_text("an earlier result")
    assert branch(script, options, wrong) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert f"sonde: error: the script ignores {{{ignored}}}: with " in err
    assert (folder / "branches" / "branches.json").read_text() == "an earlier result"
    assert ("it seems to have a limit, or to round" in err) == ("32" in options)
    assert "batch 16, seed 1" not in err  # what shows it is trained first
    # With a script that is mended, the same command trains everything anew.
    (folder / "train.py").write_text(RESUMES.replace("args.wrong", '""'))
    assert branch(script, options, wrong) == 0
    assert "already" not in capsys.readouterr().err


@pytest.mark.parametrize("length", ["steps", "units"])
def test_a_script_that_uses_all_of_them_is_trained(
    length: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = f"{ADAM} {DECAY} --seed {{seed}} --{length} {{{length}}}"
    assert branch(script, f"{OF_ADAM} {OF_DECAY} --json", n_seeds=2) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert (found["noise"], found["unverified"]) == (0.0, {})
    names = ("batch", "lr", length, "beta1", "beta2", "eps", "weight_decay")
    assert {f"check of {{{name}}}" for name in names} <= {line.split(" by ")[0] for line in err.splitlines()}


@pytest.mark.parametrize(
    ("wrong", "name", "why"),
    [
        ("chance", "batch", "with 16 in place of 8 its losses differ as two equal runs do"),
        ("lr+noise", "lr", SLOWED),  # the losses' own scatter hides that they are the same
        ("later", "lr", SLOWED),
        ("noise", "", ""),  # far less than what the rate changes
    ],
)
def test_what_is_not_known_of_a_script_is_said_first(
    wrong: str, name: str, why: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, options, status = "--lr {lr} --steps {steps} --seed {seed}", "--lr 0.02 --seeds 3", 2 if name else 0
    assert branch(script, options, wrong) == status
    out = capsys.readouterr().out
    assert "Two runs of one branch are not the same bit for bit" in out or wrong == "later"
    assert branch(script, f"{options} --json", wrong) == status
    found = json.loads(capsys.readouterr().out)
    assert (name in found["unverified"]) == bool(name)
    assert "steps" not in found["unverified"]  # it ends there
    assert found["words"]["critical"].startswith("If the script uses {" if name else "The critical batch size is")
    assert out.strip().startswith(found["words"]["critical"])
    if name:
        assert found["unverified"][name] == why
        assert f"Whether the script uses {{{name}}} is not known: {why}." in found["notices"]
        assert found["words"]["advice"].startswith("See first whether the script uses what it is given")
        assert "decision" not in found["words"]


def logged(wrong: str, batches: str = "16,40") -> int:
    Path("logs.py").write_text(LOGS)
    script = f"logs.py --batch {{batch}} --lr {{lr}} --steps {{steps}} --wrong {wrong}"
    options = f"--batches {batches} --units 768 --seeds 1 --jobs 2 --lr 0.01 --json"
    if wrong == "limits":
        script, options = f"{script} --weight_decay {{weight_decay}}", f"{options} --weight-decay 0.1"
    return main(["branch", *options.split(), "--", *script.split()])


@pytest.mark.slow  # each run imports torch
def test_a_log_shows_what_losses_cannot(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs of one command differ, but the log of each has the batch and the rate."""
    assert logged("chance") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["noise"] != 0
    assert found["unverified"] == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ("scales", "the script changes {lr}: its log has 0.06325 where {lr} is 0.01, at batch 40"),
        ("limits", "the script changes {weight_decay}: its log has 0.12 where {weight_decay} is 10.1, at batch 16"),
        ("late", "the script ignores {lr}: with 1e-08 in place of 0.01 its losses are the same, bit for bit"),
        ("rounds", "the script changes {batch}: its steps have 32 units where {batch} is 40"),
    ],
)
def test_values_that_the_script_changes_are_refused(
    wrong: str, sentence: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are used, so losses differ; but they are not those of the table."""
    assert logged(wrong) == 2
    assert sentence in capsys.readouterr().err
    assert not (folder / "branches" / "branches.json").exists()


def test_a_script_that_shows_no_loss_is_ended(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "train.py").write_text("import time\nprint('step 0: val loss 1.0', flush=True)\ntime.sleep(60)")
    assert branch("", "--patience 0.005") == 2
    said = capsys.readouterr().err
    assert "failed, so the others were not trained: it showed no new loss for 300 ms (its last one was after 0" in said
    (folder / "train.py").write_text("import time\ntime.sleep(60)")
    assert branch("", "--patience 0.005 --out other") == 2
    assert "it showed no new loss for 300 ms (nothing that it printed matches --loss-regex" in capsys.readouterr().err


def test_a_check_that_fails_before_the_first_branch_ends(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    late = RESUMES.replace("args.wrong", '""').replace("import argparse,", "import argparse, time,")
    (folder / "train.py").write_text(f"import sys; assert sys.argv[6] != '2e-08', 'no rate'\n{late}time.sleep(1)")
    assert branch("--lr {lr} --steps {steps}", "--lr 0.02 --jobs 8") == 2
    said = capsys.readouterr()
    assert "is not known: with 2e-08 in place of 0.02 the script failed: it ended with status 1: Asse" in said.out
    assert "batch 16, seed 1: finished" in said.err
