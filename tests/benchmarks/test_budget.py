"""The benchmark of budgets: that it measures what it says, and that sparse windows keep the interval honest."""

from __future__ import annotations

import math

from benchmarks.budget import CHECKPOINTS, N_WINDOWS, ROLES, STAYS, judge, seconds_of_blocks, settle
from benchmarks.gpt import GptShape
from benchmarks.present_noise_scale import simulate
from benchmarks.training import Setup


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
    setup = Setup(1, 1, micro_batches=2, sequences=1, shape=GptShape(width=8, depth=1, heads=2, context=8))
    state, pace = settle(setup, STAYS)
    assert state
    assert pace.every > 1
    blocks = seconds_of_blocks(setup, state, 2, 3, 2, 0)
    assert len(blocks) == 2
    assert all(set(block) == set(ROLES) and min(block.values()) > 0 for block in blocks)
