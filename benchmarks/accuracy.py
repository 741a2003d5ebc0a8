"""Accuracy of each estimator, against the exact gradients of a finite population at frozen weights."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.contestants import PLAIN, Entry, Estimate
from benchmarks.gpt import TINY, build, sequences
from benchmarks.training import Run, Setup, draw_windows

POPULATION = 512
"""Sequences that windows are drawn from, with replacement."""


@dataclass(frozen=True)
class Moments:
    """Exact moments of one sequence's gradient over the population: |G|² and tr Σ."""

    grad_sq: float
    trace_cov: float

    @property
    def b_simple(self) -> float:
        """tr Σ/|G|², in sequences."""
        return self.trace_cov / self.grad_sq


@dataclass(frozen=True)
class Bias:
    """Mean error of one quantity over independent runs, and the standard error of that mean, both relative.

    Attributes:
        mean: 0.01 means 1 % too large.
        standard_error: the standard error of `mean`.
        n_runs: number of runs with a result.
    """

    mean: float
    standard_error: float
    n_runs: int


@dataclass(frozen=True)
class Accuracy:
    """Bias of an estimator's results; None where no run had a result."""

    b_simple: Bias | None
    trace_cov: Bias | None
    grad_sq: Bias | None


def population() -> Tensor:
    """The sequences, [population, tokens], spread over the text."""
    text = sequences(TINY)
    return text[:: len(text) // POPULATION][:POPULATION]


def train_then_freeze(setup: Setup, n_windows: int, path: Path) -> Moments:
    """Train the small model on the population, save its weights, and return the exact moments there."""
    alone = Setup(ranks=1, threads=setup.threads, micro_batches=1, sequences=setup.units, shape=TINY, lr=3e-3)
    run = Run(alone)
    contestant = PLAIN.make(run)
    for window in draw_windows(alone, population(), n_windows, seed=2):
        run.train_window(contestant, window)
    torch.save(run.model.state_dict(), path)
    return exact_moments(run.model.state_dict(), population())


def exact_moments(weights: dict[str, Tensor], tokens: Tensor) -> Moments:
    """|G|² and tr Σ from every sequence's own gradient in float64, by one backward per sequence."""
    model = build(TINY, torch.device("cpu")).double()
    model.load_state_dict(weights)
    parameters = list(model.parameters())
    mean = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64)
    sq_norm = 0.0
    for sequence in tokens:
        grad = torch.cat([g.flatten() for g in torch.autograd.grad(model(sequence[None]), parameters)])
        mean += grad / len(tokens)
        sq_norm += float(grad @ grad) / len(tokens)
    grad_sq = float(mean @ mean)
    return Moments(grad_sq=grad_sq, trace_cov=sq_norm - grad_sq)


def estimates(setup: Setup, entry: Entry, weights_path: Path, n_windows: int, seeds: Sequence[int]) -> list[Estimate]:
    """The estimates after `n_windows` windows at frozen weights, one for each seed."""
    weights = torch.load(weights_path)
    results = []
    for seed in seeds:
        run = Run(setup.frozen(TINY), weights)
        estimator: Any = entry.make(run)
        for window in draw_windows(run.setup, population(), n_windows, seed=seed):
            run.train_window(estimator, window)
        assert all(torch.equal(p, weights[name]) for name, p in run.model.state_dict().items()), "the weights moved"
        results.append(estimator.estimate())
    return results


def accuracy(results: Sequence[Estimate], exact: Moments) -> Accuracy:
    """Compare the results of independent runs with the truth."""
    return Accuracy(
        b_simple=_bias([r.b_simple for r in results], exact.b_simple),
        trace_cov=_bias([r.trace_cov for r in results], exact.trace_cov),
        grad_sq=_bias([r.grad_sq for r in results], exact.grad_sq),
    )


def _bias(values: Sequence[float | None], exact: float) -> Bias | None:
    errors = [v / exact - 1 for v in values if v is not None]
    if not errors:
        return None
    spread = statistics.stdev(errors) if len(errors) > 1 else math.nan
    return Bias(statistics.fmean(errors), spread / math.sqrt(len(errors)), len(errors))
