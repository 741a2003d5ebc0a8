"""The study of reinforcement learning: critical batches are found again; sonde's noise beside the exact one."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from evidence.rl import N_RATES, measured, sweep
from evidence.rl_answers import critical, critical_batches, fewest, rollouts_needed, trend
from evidence.sums import Batch, Sums, prompt_noise
from evidence.work import Done, Store


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
    reading = measured(task, weights, Batch(16, 8), n_windows=4, seed=1)
    assert reading.low is not None
    assert reading.low < exact.b_simple(8) < (reading.high or math.inf)
    assert reading.completions_share == pytest.approx(exact.completions_share(8), rel=0.25)


def test_a_sweep_counts_steps_until_the_target() -> None:
    """Of 3 steps none is enough; and of the rates, larger ones are farther on: they arrive first."""
    assert sweep("digits", "adam", 64, 8, 1, seeds=2, most=3)["steps"] == [[None, None]] * N_RATES
    rows = sweep("exact", "sgd", 256, 8, 1, seeds=2, most=40)["steps"]
    arrived = [max(steps) for steps in rows if None not in steps]
    assert arrived
    assert all(0 < steps <= 40 for steps in arrived)


def test_tables_tell_groups_from_reuse(tmp_path: Path) -> None:
    """The same sweep in groups of 8, without reuse, stands in both; a critical batch that grows with reuse is shown."""
    store = Store(tmp_path)
    for group, reuse in ((2, 1), (8, 1), (8, 4)):
        for rollouts, steps in needed(100.0 * reuse, 0.0, seed=0):
            arguments = {"reward": "digits", "optimizer": "sgd", "rollouts": rollouts, "group": group, "reuse": reuse}
            store.append("rl", Done(arguments, {"steps": steps}, 1.0, "abc"))
    of_group, of_reuse = critical_batches(store, draws=3)[1:]
    assert [row[2] for row in (of_group, of_reuse)] == ["group", "reuse"]
    assert of_group[4].startswith("0.00")
    assert float(of_reuse[4].split()[0]) == pytest.approx(1.0, abs=0.02)  # critical batches lie on a grid
    rows = {row[2]: row[3:] for row in rollouts_needed(store, draws=3)}
    assert rows["against"][0] == "16 a step"
    assert rows["group 8"] == rows["reuse 1"] == rows["group 2"]
    assert rows["reuse 4"][0] == "8,320 [8,320, 8,320]"  # 20 steps × 16 × (1 + 400/16)
