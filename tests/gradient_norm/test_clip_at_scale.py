"""One of 4,096 ranks on one machine, with a fake process group."""

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
    measured = json.loads(done.stdout.strip().splitlines()[-1])
    assert measured["collectives"] == 1
    assert measured["bytes"] <= 64_000
    assert measured["groups"] == 3  # sharded over dp, and sharded over dp and replicated over tp, are one group
    # The fake group sums nothing: the result is this rank's 6 elements of each parameter, weighed by n_shards·8/4096.
    n_shards = [64, 512, 64, 8]
    expected = sum(N_PARAMETERS / 4 * 6 * n * 8 / 4096 for n in n_shards)
    assert measured["sq_norm"] == pytest.approx(expected, rel=1e-5)
    assert measured["planning_seconds"] <= 2  # the goal; `make bench-norm` measures about 0.1 s
