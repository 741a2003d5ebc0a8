"""Scores of neighbouring pieces: exact over all orders, silent on healthy data, loud on dependent pieces."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from sonde.batch_size.stats.dependence import Dependence, neighbour_products, scores_of_pieces, standard_score

ELEMENTS = 20


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def score_of(pieces: Tensor) -> float | None:
    counts = {"n_comparing": 1.0, "n_by_place": 0.0, "n_by_units": 0.0}
    mean_square = float(pieces.square().sum(1).mean())
    numbers = scores_of_pieces(counts, *neighbour_products(pieces).tolist(), mean_square=mean_square)
    return numbers["neighbours"][0] if numbers else None


def doubt_of(watch: Dependence) -> str | None:
    return watch.doubts().get("dependent_pieces")


@pytest.mark.parametrize("n", [3, 4, 5, 6])
def test_over_all_orders_the_score_has_mean_0_and_variance_1(n: int) -> None:
    pieces = random(n, 7, seed=n) ** 3 + 1
    scores = [score_of(pieces[list(order)]) for order in itertools.permutations(range(n))]
    assert sum(scores) / len(scores) == pytest.approx(0.0, abs=1e-12)  # type: ignore[arg-type]
    assert sum(s * s for s in scores) / len(scores) == pytest.approx(1.0, rel=1e-9)  # type: ignore[operator]


def test_a_score_by_hand() -> None:
    """Pieces 0 and 1 are equal, the others orthogonal: with products 1, 0, 0, … the neighbours have the only 1."""
    pieces = torch.eye(4, dtype=torch.float64)[[0, 0, 1, 2]]
    # Two of four places are neighbours with probability 1/2: (1 − 1/2)/√(1/2 · 1/2) = 1.
    assert score_of(pieces) == pytest.approx(1.0)
    assert score_of(pieces[[0, 2, 1, 3]]) == pytest.approx(-1.0)


@pytest.mark.parametrize("value", [0.0, 1.0, math.nan, math.inf])
def test_pieces_that_differ_by_rounding_or_are_not_finite_have_no_score(value: float) -> None:
    pieces = torch.full((4, 5), value, dtype=torch.float64) * (1 + 1e-13 * random(4, 5))
    assert score_of(pieces) is None


def scores_of(pieces: Tensor) -> Tensor:
    """The scores of many windows, [windows, pieces, elements]; the test below compares them with those of each."""
    n = pieces.shape[1]
    products = pieces @ pieces.transpose(1, 2)
    off = ~torch.eye(n, dtype=torch.bool)
    centred = torch.where(off, products - products[:, off].mean(1)[:, None, None], 0.0)
    variance = ((n - 1) * centred.square().sum((1, 2)) - 2 * centred.sum(2).square().sum(1)) / (n * (n - 1))
    return centred.diagonal(1, 1, 2).sum(1) / variance.sqrt()


def test_scores_of_many_windows_are_those_of_each() -> None:
    pieces = random(5, 6, 7)
    assert torch.allclose(scores_of(pieces), torch.tensor([score_of(window) for window in pieces], dtype=torch.float64))


def healthy(kind: str, windows: int, n: int, seed: int) -> Tensor:
    """Pieces of independent samples: [windows, n, elements]."""
    torch.manual_seed(seed)
    signal = random(ELEMENTS, seed=seed) * 0.5
    if kind == "gaussian":
        return signal + random(windows, n, ELEMENTS, seed=seed)
    if kind == "heavy":  # without a variance
        return signal + torch.distributions.StudentT(torch.tensor(1.2)).sample((windows, n, ELEMENTS)).double()
    assert kind == "finite"  # shuffled anew in each epoch, two samples in a piece
    samples = signal + random(8 * n, ELEMENTS, seed=seed) ** 3
    epochs = [samples[torch.randperm(8 * n)].view(4, n, 2, ELEMENTS).mean(2) for _ in range(windows // 4)]
    return torch.cat(epochs)


@pytest.mark.parametrize("kind", ["gaussian", "heavy", "finite"])
@pytest.mark.parametrize("n", [3, 4, 8])
def test_healthy_runs_raise_no_alarm(kind: str, n: int) -> None:
    """100,000 windows: 1,000 times as many as the watch remembers."""
    watch = Dependence(100.0)
    worst = 0.0
    for part in range(5):
        for score in scores_of(healthy(kind, 20_000, n, seed=part)).tolist():
            watch.add({"neighbours": (score, 1.0)})
            worst = max(worst, abs(watch._of["neighbours"].standard_errors))
        assert doubt_of(watch) is None
    assert worst < 5.5  # standard errors; 6 and a mean score of 0.25 are needed for a doubt


DEPENDENT = {
    "two equal neighbours": lambda x: x[:, [0, 0, 2, 3]],
    "the last equals the first": lambda x: x[:, [0, 1, 2, 0]],
    "the second half repeats the first": lambda x: x[:, [0, 1, 0, 1]],
    "each neighbour shares half of its data": lambda x: (x[:, :4] + x[:, 1:5]) / 2,
    "two losses of each batch": lambda x: x[:, [0, 0, 1, 1]] + 0.5 * x[:, [2, 3, 4, 2]],
}


@pytest.mark.parametrize("kind", DEPENDENT)
def test_dependent_pieces_are_doubted_within_a_hundred_windows(kind: str) -> None:
    pieces = DEPENDENT[kind](healthy("gaussian", 100, 5, seed=1))
    watch = Dependence(100.0)
    for score in scores_of(pieces).tolist():
        watch.add({"neighbours": (score, 1.0)})
    assert "independent" in (doubt_of(watch) or "")
    restored = Dependence(100.0)
    restored.load_state_dict(watch.state_dict())
    assert doubt_of(restored) == doubt_of(watch)
    for score in scores_of(healthy("gaussian", 500, 4, seed=2)).tolist():  # mended: the doubt goes
        restored.add({"neighbours": (score, 1.0)})
    assert doubt_of(restored) is None


def test_many_ranks_do_not_turn_a_weak_dependence_into_an_alarm() -> None:
    watch = Dependence(100.0)
    for _ in range(500):  # 0.1 standard errors on each of 1,024 ranks: 3.2 on all together
        watch.add({"neighbours": standard_score(0.1 * 1024, 1024.0, 1024)})
    assert watch._of["neighbours"].standard_errors > 6
    assert doubt_of(watch) is None
