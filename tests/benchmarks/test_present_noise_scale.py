"""The benchmark of the present noise scale: its committed numbers stand on the pages."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.present_noise_scale import (
    N_PIECES,
    UNITS_PER_PIECE,
    as_table,
    cells,
    estimated_and_exact,
    layers,
    piece_gradients,
    simulate,
    summary,
)

from tests.oracles import population, window_by_hand

ROOT = Path(__file__).parents[2]


def committed(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((ROOT / "benchmarks/results/present_noise_scale.json").read_text())[name]
    return found


def page(name: str) -> str:
    return " ".join((ROOT / "docs" / name).read_text().split())


def percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f}"


def test_the_pages_have_the_numbers_of_the_results() -> None:
    found = [cell["covered"] for cell in committed("moving weights")]
    mean, low, high = percent(statistics.mean(found)), percent(min(found)), percent(max(found))
    assert f"In its {len(found)} settings" in page("batch-size.md")
    assert f"present value in {mean} % of runs on average, and in {low} to {high} % in each" in page("batch-size.md")
    below, above = sum(c < 0.9 for c in found), sum(c > 0.98 for c in found)
    assert f"coverage of the present noise scale, {len(found)} settings" in page("limits.md")
    assert f"{mean} % on average; {below} settings below 90 % ({low} % at worst" in page("limits.md")
    assert f"{above} above 98 % ({high} % at most)" in page("limits.md")
    assert f"{percent(min(found), 0)} to {percent(max(found), 0)} % in {len(found)} settings" in page("limits.md")


def test_the_pages_have_the_numbers_after_a_fall_and_of_heavy_tails() -> None:
    fallen = [cell["covered"] for cell in committed("after a fall")]
    assert f"coverage is {percent(min(fallen))} to {percent(max(fallen))} %" in page("batch-size.md")
    tails = committed("heavy tails")
    for dof, words in ((3, "of runs where Student's t of 3 degrees of freedom"), (5, "with 5 degrees")):
        covered = [cell["covered"] for cell in tails if cell["optimizer"] == f"t, {dof} degrees of freedom"]
        assert f"in {percent(min(covered), 0)} to {percent(max(covered), 0)} % {words}" in page("limits.md")


def test_the_simulated_gradients_are_those_of_autograd() -> None:
    """Of every example apart, for both layers and two runs; and the same pieces made of them."""
    draw = torch.Generator().manual_seed(0)
    x, y = (torch.randn(20, n, generator=draw, dtype=torch.float64) for n in (4, 3))
    y = y.softmax(-1)
    shapes = ((4, 6), (6,), (6, 3), (3,))
    weights = [torch.randn(2, *shape, generator=draw, dtype=torch.float64, requires_grad=True) for shape in shapes]
    chosen = torch.randint(20, (2, N_PIECES, UNITS_PER_PIECE), generator=draw)

    def gradients(k: int, run: int) -> torch.Tensor:
        """Of layer k: [examples, parameters]."""
        w1, b1, w2, b2 = (weight[run] for weight in weights)
        losses = torch.nn.functional.cross_entropy(torch.tanh(x @ w1 + b1) @ w2 + b2, y, reduction="none")
        pairs = [torch.autograd.grad(loss, weights[2 * k : 2 * k + 2], retain_graph=True) for loss in losses]
        return torch.stack([torch.cat([grad[run].flatten() for grad in pair]) for pair in pairs])

    detached = [weight.detach() for weight in weights]
    for k, (inputs, error) in enumerate(layers(detached, x, y)):
        pieces = piece_gradients(inputs, error, chosen)
        found = estimated_and_exact(pieces, inputs, error)
        for run in range(2):
            each = gradients(k, run)
            torch.testing.assert_close(pieces[run], each[chosen[run]].mean(1))
            exact = population(each)
            units = [float(UNITS_PER_PIECE)] * N_PIECES
            by_hand = window_by_hand(list(pieces[run]), [1.0] * N_PIECES, units, pieces[run].mean(0))
            assert found[run].tolist() == pytest.approx([*by_hand, exact.trace_cov, exact.grad_sq], rel=1e-10)


def test_a_small_run_makes_the_table() -> None:
    windows = simulate("sgd", 0.2, n_runs=3, n_windows=12)
    found = list(cells("sgd", 0.2, windows, checkpoints=(2, 12)))
    assert [(cell.window, cell.part) for cell in found[:3]] == [(2, "total"), (2, "first layer"), (2, "second layer")]
    assert {cell.unknown for cell in found if cell.window == 2} == {1.0}  # two windows have no interval
    assert {cell.covered for cell in found if cell.window == 2} == {1.0}
    assert as_table(found).count("\n") == 4
    assert "Not known, which counts as held" in summary(found)
