"""One window solved, against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest

from sonde.batch_size.stats.noise_scale import WindowEstimate
from sonde.batch_size.stats.window_row import solve_window
from tests.batch_size.stats.windows import window_row

# Two pieces of 4 units on one rank, h = (3, 1) and (1, 1); each element is a parameter group.
# a_k = 1/2, so g_k = h_k/a_k = (6, 2) and (2, 2), and u = 1/4, v = 1/8.
# First element:  S = (36 + 4)/2 = 20, B = 4² = 16: tr Σ = (20 − 16)/(1/8) = 32, |G|² = (16/4 − 20/8)/(1/8) = 12.
# Second element: S = B = 4: tr Σ = 0, |G|² = (4/4 − 4/8)/(1/8) = 4.
ONE_RANK = [[[3.0, 1.0], [1.0, 1.0]]]


@pytest.mark.parametrize("kappa", [1.0, 0.5, 65536.0, -2.0])
def test_a_window_solved_by_hand_whatever_scaled_the_gradient(kappa: float) -> None:
    solved = solve_window(window_row(ONE_RANK, units=4, kappa=kappa), scale=kappa, n_ranks=1, apart={})
    assert solved.per_group == (WindowEstimate(32.0, 12.0), WindowEstimate(0.0, 4.0))
    assert solved.total == WindowEstimate(32.0, 16.0)
    assert solved.norm == pytest.approx(math.sqrt(4**2 + 2**2))
    assert (solved.effective_units, solved.u) == (8, 1 / 4)
    # Σw · Σ|h|²/w = 2 · 12, and |Σ h|² = 20.
    assert solved.compared == {"differences": (4, 24)}  # of a single rank


def test_two_ranks_are_expressed_as_their_average() -> None:
    """The average of two ranks is half of their sum: squares are a quarter."""
    row = window_row([[[3.0, 1.0]], [[1.0, 1.0]]], units=4)
    solved = solve_window(row, scale=1.0, n_ranks=2, apart={})
    assert solved.total == WindowEstimate(8.0, 4.0)
    assert solved.norm == pytest.approx(math.sqrt(20) / 2)
    assert "consistency" not in solved.compared  # one piece on each rank


def test_noise_within_and_between_ranks_by_hand() -> None:
    """Two ranks of two pieces of 1 unit: g = 4h = 12 and 4 on rank 0, 20 and 28 on rank 1.

    Within each rank, the variance of a unit is 32. The ranks' means are 8 and 24: their variance is 128, and a mean of
    two units has half the variance of a unit, so that between ranks a unit's variance is 256.
    """
    solved = solve_window(window_row([[[3.0], [1.0]], [[5.0], [7.0]]], units=1), scale=1.0, n_ranks=2, apart={})
    assert solved.compared["consistency"] == (32.0, 256.0)


def test_pieces_with_the_same_gradient_do_not_differ() -> None:
    solved = solve_window(window_row([[[0.1, 0.7]] * 3], units=4), scale=1.0, n_ranks=1, apart={})
    assert solved.compared["differences"][0] == pytest.approx(0.0, abs=1e-15)
    assert solved.total.trace_cov == pytest.approx(0.0, abs=1e-13)
