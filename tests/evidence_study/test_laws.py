from __future__ import annotations

import math
import random

import pytest
from evidence.laws import LAWS, fit_law, units_by_noise, units_by_sign

BATCHES = [8, 16, 32, 64, 128, 256]


def test_the_laws_by_hand() -> None:
    assert units_by_noise(30, 10) == 4
    # Steps of a fixed size fall by (1 − √(𝓑/B))² each: most per unit at B = 4𝓑, where it is 1/4 of the most per step.
    assert units_by_sign(40, 10) == pytest.approx(1.0)
    assert units_by_sign(10, 10) == units_by_sign(5, 10) == math.inf
    assert all(units_by_sign(batch, 10) > 1 for batch in (11, 20, 39, 41, 100, 1000))
    assert units_by_sign(1e9, 10) == pytest.approx(1e9 / 160, rel=1e-3)


@pytest.mark.parametrize(("law", "critical"), [("noise", 20.0), ("noise", 300.0), ("sign", 3.0), ("sign", 6.0)])
def test_a_fit_gives_the_critical_batch_back(law: str, critical: float) -> None:
    logs = [5 + math.log(LAWS[law](batch, critical)) for batch in BATCHES]
    found = fit_law(law, BATCHES, logs, [0.02] * 6, n_seeds=5)
    assert found.critical == pytest.approx(critical, rel=1e-3)  # the second grid
    assert found.low <= critical <= found.high
    assert (found.dof, found.misfit) == (4, pytest.approx(0, abs=0.01))
    other = fit_law("sign" if law == "noise" else "noise", BATCHES, logs, [0.02] * 6, n_seeds=5)
    assert other.misfit > 5


def test_the_interval_covers() -> None:
    """95 % of fits with errors as they are given."""
    draw, hits = random.Random(4), 0
    for _ in range(60):
        logs = [math.log(units_by_noise(batch, 40)) + 0.05 * draw.gauss(0, 1) for batch in BATCHES]
        found = fit_law("noise", BATCHES, logs, [0.05] * 6, n_seeds=5)
        hits += found.low <= 40 <= found.high
    assert hits >= 51  # 85 % of 60: 3.5 standard errors


def test_bounds_and_refusals() -> None:
    flat = fit_law("noise", BATCHES, [0.0] * 6, [0.05] * 6, n_seeds=5)
    assert flat.high == math.inf
    steep = fit_law("noise", BATCHES, [math.log(batch) for batch in BATCHES], [0.05] * 6, n_seeds=5)
    assert steep.low == 0
    with pytest.raises(ValueError, match="needs 3 batch sizes or more, got 2"):
        fit_law("noise", [1, 2], [0, 0], [1, 1], n_seeds=3)
