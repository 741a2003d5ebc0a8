"""The study of reinforcement learning: critical batches are found again; sonde's noise beside the exact one."""

from __future__ import annotations

import math

import pytest
import torch
from evidence.rl import measured, sweep
from evidence.rl_answers import critical, fewest, trend
from evidence.sums import Batch, Sums, prompt_noise


def needed(n_crit: float, scatter: float, seed: int) -> list[tuple[float, list[list[float | None]]]]:
    """Steps by the law, at two rates of which the second is the better, with seeds that scatter."""
    generator = torch.Generator().manual_seed(seed)
    made: list[tuple[float, list[list[float | None]]]] = []
    for rollouts in (16, 64, 256, 1024):
        noise = scatter * torch.randn(8, generator=generator)
        steps = [20 * (1 + n_crit / rollouts) * math.exp(float(each)) for each in noise]
        made.append((rollouts, [[1.5 * s for s in steps], [*steps], [0.1, *[None] * 7]]))
    return made


@pytest.mark.parametrize("power", [0.0, 1.0])
def test_a_critical_batch_is_found_again_with_what_it_follows(power: float) -> None:
    """N_crit ∝ group^power. A seed scatters by 5 %, so N_crit is known to some per cent, on a grid in steps of 5 %."""
    found = trend({g: needed(100 * (g / 4) ** power, 0.05, seed=g) for g in (2, 4, 16)}, draws=20)
    assert found.low - 0.05 <= power <= found.high + 0.05
    assert found.high - found.low < 0.3
    assert found.critical[4][0] == pytest.approx(100, rel=0.2)


def test_the_best_rate_is_that_of_the_least_median() -> None:
    """Policies that are stuck count as infinite."""
    assert fewest([[1.0, None, None], [4.0, 9.0, None], [8.0, 10.0, 11.0]], range(3)) == 9.0
    assert fewest([[1.0, None, None], [4.0, 9.0, None]], [0, 0, 0]) == 1.0
    assert fewest([[None, None]], range(2)) == math.inf


def test_a_batch_that_never_arrives_is_left_out() -> None:
    swept = needed(100, 0.0, seed=0)
    assert critical([*swept, (4096, [[None] * 8])], range(8)) == critical(swept, range(8))


def test_sonde_measures_the_noise_of_prompts() -> None:
    """At fixed weights, near the start: the exact B_simple lies in sonde's interval, and the share is nearly right.

    By its own page, sonde's share is too large by a fraction of about 1/8, since advantages couple the halves.
    """
    task = Sums(base=3, width=4)
    weights = {name: w.double() for name, w in task.start(1, seed=0).items()}
    exact = prompt_noise(task, weights)
    reading = measured(task, weights, Batch(8, 8), n_windows=10, seed=1)
    assert reading.low is not None
    assert reading.low < exact.b_simple(8) < (reading.high or math.inf)
    assert reading.completions_share == pytest.approx(exact.completions_share(8), rel=0.25)


def test_a_sweep_counts_steps_until_the_target() -> None:
    """Of 3 steps none is enough; and of the rates, larger ones are farther on: they arrive first."""
    assert sweep("digits", "adam", 64, 8, 1, seeds=2, most=3)["steps"] == [[None, None]] * 5
    rows = sweep("exact", "sgd", 256, 8, 1, seeds=2, most=40)["steps"]
    arrived = [max(steps) for steps in rows if None not in steps]
    assert arrived
    assert all(0 < steps <= 40 for steps in arrived)
