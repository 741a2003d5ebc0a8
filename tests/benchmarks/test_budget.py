"""The benchmark of budgets: that it measures what it says, and that sparse windows keep the interval honest."""

from __future__ import annotations

import math

from benchmarks.budget import CHECKPOINTS, N_WINDOWS, cost_of, judge, sign_test
from benchmarks.present_noise_scale import simulate


def test_intervals_of_sparse_windows_hold_the_present_value() -> None:
    windows = simulate("adamw", 0.003, n_runs=16, n_windows=N_WINDOWS)
    resolved = {}
    for every, horizon in ((4, "measured"), (16, "measured"), (16, "training")):
        cells = list(judge(windows, every, horizon, 0))
        assert len(cells) == len(CHECKPOINTS)
        covered = sum(share for share, _, _ in cells) / len(cells)
        resolved[every, horizon] = sum(share for _, share, _ in cells) / len(cells)
        # 48 intervals: 95 % less three standard deviations, were they independent.
        assert covered >= 0.95 - 3 * math.sqrt(0.95 * 0.05 / 48), (every, horizon)
    assert resolved[16, "measured"] > 0.5
    assert resolved[16, "training"] < 0.2  # a horizon of 50 windows holds three measured ones: no interval


def test_a_probe_beside_training_is_timed() -> None:
    found = cost_of(6, 8, 40, budget=0.5)
    assert found.n_tensors == 6
    assert found.every >= 1
    assert found.window_seconds > 0
    assert found.low <= found.slower <= found.high


def test_the_sign_tests_interval() -> None:
    """Of 20 values, the 6th and the 15th: outside of them the median lies with a probability of 4 %."""
    assert sign_test([float(i) for i in range(1, 21)]) == (6.0, 15.0)
