"""The recipes of docs/branch.md: scripts of three trainers are branched after two lines are changed, at most."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sonde.cli import main
from tests.commands.branch_recipes import (
    LIGHTNING,
    NANOGPT,
    OF_LIGHTNING,
    OF_NANOGPT,
    OF_TRAINER,
    TRAINER,
    changed,
)

pytestmark = pytest.mark.slow  # each run is a process of its own, which imports a trainer


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def train(script: str, *options: str) -> None:
    """Train a first checkpoint with the script as it is."""
    Path("train.py").write_text(script)
    subprocess.run([sys.executable, "train.py", *options], check=True, capture_output=True)


def branch(capsys: pytest.CaptureFixture[str], lines: dict[str, str], script: str, *words: str) -> None:
    """Branch a script with the lines of its recipe, as the page has them."""
    added = [line.strip() for before, after in lines.items() for line in after.splitlines() if line not in before]
    added = [line for line in added if line not in ("callbacks=[", "],")]
    assert len(added) <= 2
    page = (Path(__file__).parents[2] / "docs" / "branch.md").read_text()
    assert all(f"    {line}\n" in page for line in added)
    Path("train.py").write_text(changed(script, lines))
    assert main([*COMMAND, *words]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["noise"], found["unverified"]) == (0.0, {})
    (ratio,) = found["ratios"]
    assert 0.5 < ratio["ratio"] < 2
    for each in found["branches"]:
        assert each["curve"]["units"][-1] == 512
        assert len(each["curve"]["units"]) >= 4


COMMAND = ["branch", "--batches", "8,16", "--units", "512", "--seeds", "1", "--jobs", "2", "--json"]


def test_nanogpt(capsys: pytest.CaptureFixture[str]) -> None:
    train(NANOGPT)
    own = (
        f"cp {{checkpoint}}/ckpt.pt {{out}} && SEED={{seed}} {sys.executable} train.py --init_from=resume "
        "--out_dir={out} --learning_rate={lr} --batch_size=8 --gradient_accumulation_steps=$(({batch}/8)) "
        "--eval_interval=$((64/{batch})) --max_iters=$((128+{steps}))"
    )
    pattern = r"step (?P<step>\d+): .* val loss (?P<loss>\S+)"
    words = ["--checkpoint", "out", "--lr", "2e-3", "--loss-regex", pattern, "--", "sh", "-c", own]
    assert main([*COMMAND, *words]) == 2
    assert "the script ignores {seed}: with 2 in place of 1 its losses are the same" in capsys.readouterr().err
    # With a seed alone, each branch evaluates on other data.
    seed, _ = OF_NANOGPT.items()
    Path("train.py").write_text(changed(NANOGPT, dict([seed])))
    assert main([*COMMAND, *words]) == 2
    assert "the held-out data are others each time: evaluate on the same" in capsys.readouterr().err
    branch(capsys, OF_NANOGPT, NANOGPT, *words)


def test_transformers_trainer(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    fixed = ["--lr_scheduler_type", "constant", "--report_to", "none", "--use_cpu", "--learning_rate", "3e-3"]
    train(TRAINER, "--output_dir", "out", "--max_steps", "64", "--save_steps", "64", *fixed)
    own = (
        "-m sonde run --unit sequences --no-report -- train.py --model_name_or_path {checkpoint} "
        "--output_dir {out} --per_device_train_batch_size {batch} "
        "--learning_rate {lr} --seed {seed} --max_steps {steps} --lr_scheduler_type constant --eval_strategy steps "
        "--eval_steps 0.125 --eval_on_start True --save_strategy no --report_to none --use_cpu"
    )
    words = ["--checkpoint", "out/checkpoint-64", "--lr", "3e-3", "--", sys.executable, *own.split()]
    branch(capsys, OF_TRAINER, TRAINER, *words)


def test_lightning(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("lightning")
    train(LIGHTNING, "--steps", "128")
    own = (
        f"{sys.executable} train.py --resume {{checkpoint}} --batch {{batch}} --lr {{lr}} --seed {{seed}} "
        "--every $((64/{batch})) --steps $((128+{steps}))"
    )
    words = ["--checkpoint", "last.ckpt", "--lr", "8e-3", "--loss", "val_loss", "--", "sh", "-c", own]
    branch(capsys, OF_LIGHTNING, LIGHTNING, *words)
