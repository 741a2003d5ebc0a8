"""Which measurements count after restarts."""

from __future__ import annotations

from sonde.policy.stats.steps_kept import StepsKept, steps_kept
from tests.policy.stats.points import points


def kept(*steps: int) -> StepsKept:
    return steps_kept(points(*({"step": step} for step in steps)))


def steps(run: StepsKept) -> list[int]:
    return [point.step for point in run.points]


def test_without_a_restart_everything_counts() -> None:
    run = kept(1, 6, 11, 11)
    assert (steps(run), run.positions, run.starts, run.n_undone) == ([1, 6, 11, 11], (1, 6, 11, 11), (0,) * 4, 0)
    assert run.label(0) == "step 1"


def test_two_restarts_from_checkpoints() -> None:
    run = kept(1, 11, 21, 31, 15, 25, 35, 16, 26)
    assert (steps(run), run.n_undone) == ([1, 11, 15, 16, 26], 4)
    assert run.positions == (1, 11, 15, 16, 26)


def test_steps_counted_from_the_beginning_again_come_after_the_others() -> None:
    run = kept(1, 11, 21, 1, 11, 1)
    assert (run.positions, run.n_undone) == ((1, 11, 21, 22, 32, 33), 0)
    assert [run.label(i) for i in (0, 3, 5)] == ["step 1, 2 restarts ago", "step 1 before the restart", "step 1"]


def test_a_checkpoint_of_the_second_start_undoes_nothing_of_the_first() -> None:
    run = kept(10, 20, 30, 5, 15, 25, 6)
    assert (steps(run), run.n_undone) == ([10, 20, 30, 5, 6], 2)
    assert run.positions == (10, 20, 30, 31, 32)
