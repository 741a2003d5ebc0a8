"""Which measurements count after restarts."""

from __future__ import annotations

import pytest

from sonde.policy.stats.entropy_verdict import judge_entropy
from sonde.policy.stats.forecast_point import StepsKept, steps_kept
from tests.policy.stats.points import points

SURE = {"entropy_se": 0.01}


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


def in_starts(*starts: list[tuple[int, float]]) -> list[dict[str, object]]:
    return [
        {"step": step, "entropy": entropy, "segment": segment, **SURE}
        for segment, start in enumerate(starts)
        for step, entropy in start
    ]


@pytest.mark.parametrize(
    ("starts", "left"),
    [
        ([[(10, 2.7), (20, 2.0), (30, 0.5)], [(30, 1.9), (40, 1.85)]], [10, 20, 30, 40]),
        ([[(100, 2.7), (200, 2.0), (300, 0.5)], [(50, 2.7), (150, 2.0), (300, 1.9)]], [50, 150, 300]),
        ([[(1, 2.7), (11, 2.0)], [(1, 2.7), (11, 1.9)], [(11, 1.9), (21, 1.8)]], [1, 11, 21]),
    ],
)
def test_a_new_start_takes_all_steps_again_from_its_first_one(
    starts: list[list[tuple[int, float]]], left: list[int]
) -> None:
    """The first measured step of a start may equal the last one of the start before, or lie before all of them."""
    run = steps_kept(points(*in_starts(*starts)))
    assert steps(run) == left
    assert run.positions == tuple(left)
    assert set(run.starts) == {0}
    assert run.n_undone == sum(map(len, starts)) - len(left)
    verdict = judge_entropy(points(*in_starts(*starts)))
    assert verdict.kind in ("falling", "fallen")
    are = "measurement of these steps before the restart is" if run.n_undone == 1 else "restart are"
    assert f"{are} left out." in verdict.basis


def test_a_new_start_after_the_last_step_undoes_nothing() -> None:
    run = steps_kept(points(*in_starts([(1, 1.0), (11, 1.0)], [(12, 1.0), (22, 1.0)])))
    assert (steps(run), run.n_undone) == ([1, 11, 12, 22], 0)
