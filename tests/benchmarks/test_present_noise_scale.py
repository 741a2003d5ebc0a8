"""The benchmark of the noise scale now: what it records, and how it judges."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from benchmarks.present_noise_scale import (
    PACES,
    average_lines,
    averages,
    exact_average,
    judge,
    last_readings,
    level_at,
    table,
)
from benchmarks.recorded_runs import Recorded, estimated

from tests.batch_size.stats.windows import gaussian_windows

BATCH, B_SIMPLE = 32, 64.0


def still_run(n_steps: int = 400) -> Recorded:
    """A training whose noise scale is 64 at every step."""
    windows = gaussian_windows([B_SIMPLE] * n_steps, n_runs=1, seed=1)[:, 0].tolist()
    exact = [[float(step), 1.0, 1 / B_SIMPLE] for step in range(1, n_steps + 1, 5)]
    return Recorded("lm", "adamw", "constant", 0, BATCH, windows, exact)


def test_a_still_noise_scale_is_held() -> None:
    run = still_run()
    found = list(judge(run, None))
    assert {(r.pace, r.by) for r in found} == {(pace, by) for pace in PACES for by in ("filter", "last half")}
    of_filter = [r for r in found if r.by == "filter"]
    assert sum(r.holds for r in of_filter) >= 0.85 * len(of_filter)  # readings of one run depend on each other
    assert all(r.batches == pytest.approx(2.0) for r in found)
    assert level_at(run, 200) == pytest.approx((math.log(B_SIMPLE), 0.0), abs=1e-9)
    text = table(found, lambda r: "all", "")
    assert text.count("\n") == 1 + 2 * len(PACES)
    assert "every window: 0 of 0 runs" in last_readings(found)  # it is shorter than 1,000 steps
    assert exact_average(run) == (pytest.approx(math.log(B_SIMPLE)), pytest.approx(0.0, abs=1e-9))
    assert all(a.low <= B_SIMPLE <= a.high and a.holds for a in averages(run))
    doubled = replace(run, exact=[(step, 2 * trace_cov, grad_sq) for step, trace_cov, grad_sq in run.exact])
    assert not any(a.holds for a in averages(doubled) if a.pace == "every window")
    assert "every window: 100 % of 1" in average_lines(list(averages(run)))


def test_what_is_recorded_is_unbiased() -> None:
    """Of a quadratic loss: tr Σ and |G|² by hand."""
    weight = torch.zeros(3, requires_grad=True)

    class Quadratic:
        """A loss whose gradient is minus its data."""

        @staticmethod
        def loss(data: torch.Tensor) -> torch.Tensor:
            return -(data @ weight).mean()

    generator = torch.Generator().manual_seed(0)
    found = torch.tensor(
        [
            estimated(Quadratic, [weight], (torch.randn(32, 3, generator=generator) + 1).chunk(4))[0]  # type: ignore[arg-type]
            for _ in range(2000)
        ]
    )
    error = found.std(0) / 2000**0.5
    assert ((found.mean(0) - torch.tensor([3.0, 3.0])).abs() < 4 * error).all()
