"""One of 4,096 ranks on one machine, with a fake process group."""

from __future__ import annotations

import pytest
from benchmarks.at_scale import N_PARAMETERS, measure

from tests.new_process import in_new_process


def test_a_plan_for_4096_ranks_and_6000_parameters() -> None:
    measured = in_new_process(measure)
    assert measured["collectives"] == 1
    assert measured["bytes"] <= 64_000
    assert measured["groups"] == 3  # sharded over dp, and sharded over dp and replicated over tp, are one group
    # The fake group sums nothing: the result is this rank's 6 elements of each parameter, weighed by n_shards·8/4096.
    n_shards = [64, 512, 64, 8]
    expected = sum(N_PARAMETERS / 4 * 6 * n * 8 / 4096 for n in n_shards)
    assert measured["sq_norm"] == pytest.approx(expected, rel=1e-5)
    assert measured["planning_seconds"] <= 2  # the goal; `make bench-norm` measures about 0.1 s
