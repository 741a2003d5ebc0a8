"""The benchmark of per-example norms: a tiny run of it."""

from __future__ import annotations

import math

import pytest
from benchmarks.per_example import Options, run


@pytest.mark.parametrize("tied", [False, True])
def test_a_tiny_run_is_exact_and_timed(tied: bool) -> None:
    error, cost = run(Options(blocks=2, sequences=3, width=16, depth=1, context=8, vocabulary=11, tied=tied))
    assert error < 2e-6
    assert cost.n_blocks == 2
    assert math.isfinite(cost.median)
    assert cost.window_seconds > 0
