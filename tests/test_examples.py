"""Every example runs as its first lines say, from a folder of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import sonde

EXAMPLES = Path(__file__).parent.parent / "examples"

COMMANDS = {
    "plain_loop.py": [sys.executable],
    "single_gpu.py": [sys.executable],
    "ddp_torchrun.py": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    "accelerate_ddp.py": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    "fsdp2.py": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    "pipeline.py": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    "fsdp2_clip.py": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
}
COMMANDS["trl_grpo.py"] = [sys.executable]
MEASURES_NOISE = sorted(COMMANDS.keys() - {"fsdp2_clip.py", "trl_grpo.py"})


def test_every_example_is_run() -> None:
    assert {p.name for p in EXAMPLES.glob("*.py")} == set(COMMANDS)


def run_example(name: str, folder: Path) -> str:
    """What it prints."""
    done = subprocess.run(
        [*COMMANDS[name], str(EXAMPLES / name)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_sharded_example(tmp_path: Path) -> None:
    said = run_example("fsdp2_clip.py", tmp_path)
    losses, norms = zip(*re.findall(r"loss ([\d.]+), gradient norm ([\d.]+)", said), strict=True)
    assert len(losses) == 3
    assert float(losses[-1]) < float(losses[0])
    assert all(float(norm) > 0 for norm in norms)


@pytest.mark.slow
def test_reinforcement_learning_example(tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="the example of TRL needs trl")
    said = run_example("trl_grpo.py", tmp_path)
    found = re.findall(
        r"step (\d+): entropy ([\d.]+) nats a token; forecast ([-+.e\d]+) ± ([.e\d-]+) nats a token", said
    )
    assert [int(step) for step, *_ in found] == [1, 11, 21, 31]
    assert float(found[-1][1]) < float(found[0][1])  # it has become surer of itself
    assert all(float(se) > 0 for *_, se in found)
    learned = said.split("learning from")[1].split("evaluated on")[0]
    assert len(re.findall(r"^\d\+\d= ", learned, flags=re.M)) == 4


@pytest.mark.slow
@pytest.mark.parametrize("name", MEASURES_NOISE)
def test_example(name: str, tmp_path: Path) -> None:
    if name == "accelerate_ddp.py":
        pytest.importorskip("accelerate", reason="the example of Accelerate needs accelerate")
    said = run_example(name, tmp_path)
    (log,) = tmp_path.glob("runs/*/records.jsonl")
    run = sonde.read_run(log)
    last = run.readings[-1]
    assert run.ended == "closed"
    assert last.window == 150
    assert last.dropped == {}
    assert last.status == "resolved"
    # A small byte model on English: between a handful and a few thousand contexts, wherever the seed leads.
    assert 5 < (last.metrics["gns/b_simple"] or 0) < 5000
    ranks = 1 if name in ("plain_loop.py", "single_gpu.py", "pipeline.py") else 2
    assert run.header.setup["ranks"] == ranks
    assert last.pieces["per_window"] == {"pipeline.py": 8, "single_gpu.py": 1}.get(name, 4 * ranks)
    assert last.metrics["gns/covered"] == 1.0
    if name != "pipeline.py":  # its loss is on the last stage, and the first one writes the log
        _, losses = run.series("loss")
        assert losses[-1] < losses[0] - 1
    assert "B_simple" in said
