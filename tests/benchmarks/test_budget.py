"""The benchmark of budgets: that it measures what it says."""

from __future__ import annotations

from benchmarks.budget import ROLES, STAYS, seconds_of_blocks, settle
from benchmarks.gpt import GptShape
from benchmarks.training import Setup


def test_a_probe_beside_training_is_timed() -> None:
    setup = Setup(1, 1, micro_batches=2, sequences=1, shape=GptShape(width=8, depth=1, heads=2, context=8))
    state, pace = settle(setup, STAYS)
    assert state
    assert pace.every > 1
    blocks = seconds_of_blocks(setup, state, 2, 3, 2, 0)
    assert len(blocks) == 2
    assert all(set(block) == set(ROLES) and min(block.values()) > 0 for block in blocks)
