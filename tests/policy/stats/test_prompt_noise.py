"""The noise of prompts and of completions, beside a population in which both are known."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sonde.policy.stats.prompt_noise import RunningPromptNoise, solve_prompts

DIM, G_SQ, OF_PROMPTS, OF_COMPLETION = 40, 2.0, 3.0, 12.0
"""|G|², the variance of a prompt's expectation, and the variance of one completion given the prompt; sums over DIM."""


def window(
    sizes: list[tuple[int, int]], weights: list[float], generator: torch.Generator
) -> tuple[Tensor, Tensor, float]:
    """Prompts with groups in two halves and with given weights."""
    mean = torch.full((DIM,), (G_SQ / DIM) ** 0.5, dtype=torch.float64)
    total, sq_norms, counts, all_of_them = sum(weights), [], [], torch.zeros(DIM, dtype=torch.float64)
    for (n1, n2), weight in zip(sizes, weights, strict=True):
        own = mean + normal(DIM, OF_PROMPTS, generator)
        halves = []
        for n in (n1, n2):
            m = torch.stack([own + normal(DIM, OF_COMPLETION, generator) for _ in range(n)]).mean(0)
            halves.append(m * n / (n1 + n2) * weight / total)
        h = halves[0] + halves[1]
        all_of_them += h
        sq_norms.append([float(part.square().sum()) for part in (h, *halves)])
        counts.append([weight * n1 / (n1 + n2), weight * n2 / (n1 + n2), n1, n2])
    return fp64(*sq_norms), fp64(*counts), float(all_of_them.square().sum())


def fp64(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def normal(dim: int, variance: float, generator: torch.Generator) -> Tensor:
    return torch.randn(dim, generator=generator, dtype=torch.float64) * (variance / dim) ** 0.5


@pytest.mark.parametrize(
    ("sizes", "weights"),
    [
        ([(3, 2)] * 6, [1.0] * 6),
        ([(4, 4)] * 6, [1.0, 2.0, 0.5, 1.0, 3.0, 1.0]),
    ],
)
def test_both_parts_are_unbiased(sizes: list[tuple[int, int]], weights: list[float]) -> None:
    generator, running = torch.Generator().manual_seed(0), RunningPromptNoise()
    estimates = []
    for _ in range(1500):
        solved = solve_prompts(*window(sizes, weights, generator))
        running.update(solved)
        assert solved.from_completions is not None
        estimates.append((solved.noise.trace_cov, solved.noise.grad_sq, solved.from_completions))
    values = torch.tensor(estimates, dtype=torch.float64)
    within = OF_COMPLETION / sum(sizes[0])
    for got, error, true in zip(
        values.mean(0).tolist(), (values.std(0) / 1500**0.5).tolist(), (OF_PROMPTS + within, G_SQ, within), strict=True
    ):
        assert error < 0.03 * true
        assert abs(got - true) < 3.5 * error
    assert running.completions_share == pytest.approx(within / (OF_PROMPTS + within), rel=0.15)
    assert running.windows.levels()[0].status == "resolved"


def test_two_prompts_by_hand() -> None:
    # Two prompts of two completions in one dimension: contributions 1 + 3 and 2 + 2, so g = 8 and 8, F = 8.
    counts = fp64([0.5, 0.5, 1.0, 1.0]).repeat(2, 1)
    solved = solve_prompts(fp64([16.0, 1.0, 9.0], [16.0, 4.0, 4.0]), counts, 64.0)
    assert solved.noise.trace_cov == pytest.approx(0.0)
    assert solved.noise.grad_sq == pytest.approx(64.0)
    # Halves' means are 4 and 12 in the first, 8 and 8 in the second: (64 + 0)/2 · (1/4 + 1/4)/2
    assert solved.from_completions == pytest.approx(0.5 * 64.0 / 4)


def test_prompts_with_one_completion_give_no_completions_part() -> None:
    solved = solve_prompts(fp64([1.0, 1.0, 0.0], [4.0, 4.0, 0.0]), fp64([1.0, 0.0, 1.0, 0.0]).repeat(2, 1), 5.0)
    assert solved.from_completions is None
    running = RunningPromptNoise()
    assert running.completions_share is None
    running.update(solved)
    assert running.completions_share is None


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="need at least 2 prompts to tell noise from signal, got 1"):
        solve_prompts(fp64([1.0, 1.0, 0.0]), fp64([1.0, 0.0, 1.0, 0.0]), 1.0)
    with pytest.raises(ValueError, match="every prompt needs a positive weight in the loss, got 0"):
        solve_prompts(fp64([1.0, 1.0, 0.0]).repeat(2, 1), fp64([1.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]), 1.0)
