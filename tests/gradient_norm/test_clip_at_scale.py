"""4,096 ranks without machines: one of them, with a process group that only pretends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.at_scale import N_PARAMETERS


def test_a_plan_for_4096_ranks_and_6000_parameters() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.at_scale"],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found["collectives"] == 1
    assert found["bytes"] <= 64_000
    assert found["groups"] == 3  # over dp and over both axes of which one replicates is the same
    # The pretended sum is this rank's alone: 6 elements of each parameter, each of them one of n_shards·8/4096.
    n_shards = [64, 512, 64, 8]
    expected = sum(N_PARAMETERS / 4 * 6 * n * 8 / 4096 for n in n_shards)
    assert found["sq_norm"] == pytest.approx(expected, rel=1e-5)
    assert found["planning_seconds"] <= 2  # what was aimed at; `make bench-norm` says what it takes, some 0.1 s
