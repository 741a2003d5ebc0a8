"""Scores of examples in certain places of a batch: chance where rows are independent, loud where rows share samples."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import Tensor

from sonde.batch_size.stats.dependence import Dependence, order_scores, scores_of_examples


def rows(n: int, seed: int = 0, power: int = 3) -> Tensor:
    """Skewed and heavy in the tails, with a mean."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 4, dtype=torch.float64, generator=generator) ** power + 0.5


@pytest.mark.parametrize("n", [8, 9, 63, 64, 512])
def test_over_random_orders_scores_have_mean_0_and_variance_1(n: int) -> None:
    """2,000 orders tell a mean to ± 0.022 and a variance to some 4 %; the variance is too large by 3/n at most."""
    batch, generator = rows(n, seed=n), torch.Generator().manual_seed(1)
    scores = torch.stack([order_scores(batch[torch.randperm(n, generator=generator)])[:3] for _ in range(2000)])
    assert scores.mean(0).abs().max() < 4 * 0.023
    assert (scores.var(0) < 1.15).all()
    assert (scores.var(0) > 0.85 * (1 - 3 / n)).all()


def test_scores_by_hand() -> None:
    """Rows of length 1 in two directions: products are 1 and −1, and −1/15 on average over all pairs."""
    batch = torch.tensor([1.0] * 4 + [-1.0] * 8 + [1.0] * 4, dtype=torch.float64)[:, None]
    near, opposite, half, n = order_scores(batch).tolist()
    variance = (1 - (1 / 15) ** 2) * 16 / 13
    assert near == pytest.approx((11 / 15 - 6 / 14) / math.sqrt(variance * (1 / 15 + 1 / 14)))
    assert opposite == pytest.approx((1 + 1 / 15) * math.sqrt(8 / variance))
    assert half == pytest.approx((-1 + 1 / 15) * math.sqrt(8 / variance))
    assert n == 1.0


@pytest.mark.parametrize("batch", [rows(7), torch.ones(16, 4), torch.zeros(16, 4), torch.full((16, 4), math.nan)])
def test_too_few_equal_and_infinite_rows_have_no_score(batch: Tensor) -> None:
    assert order_scores(batch)[3] == 0
    assert order_scores(batch).isfinite().all()


def shared(kind: str, n: int, seed: int) -> Tensor:
    fresh = rows(n, seed)
    match kind:
        case "flip":
            return 0.7 * fresh + 0.3 * fresh.flip(0)
        case "roll":
            return 0.7 * fresh + 0.3 * fresh.roll(1, 0)
        case "repeated":
            return fresh[: (n + 2) // 3].repeat_interleave(3, 0)[:n] + rows(n, seed + 10**6)
        case "views":
            return torch.cat([fresh[: n // 2], fresh[: n // 2]]) + rows(n, seed + 10**6)
        case "sorted":
            return fresh[fresh.sum(1).argsort()]
    return fresh


def doubt_of(watch: Dependence) -> str | None:
    return watch.doubts().get("dependent_examples")


def watched(kind: str, n: int, windows: int = 200) -> Dependence:
    watch = Dependence(50.0)
    for seed in range(windows):
        watch.add(scores_of_examples(*order_scores(shared(kind, n, seed)).tolist()))
    return watch


@pytest.mark.parametrize("n", [32, 256])
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (
            "flip",
            "the second and the last but one, and so on are more alike than chance allows",
        ),
        ("roll", "neighbouring rows of a batch are more alike than chance allows"),
        ("repeated", "neighbouring rows of a batch are more alike than chance allows"),
        ("views", "rows half a batch apart are more alike than chance allows"),
    ],
)
def test_rows_that_share_samples_are_named(kind: str, words: str, n: int) -> None:
    doubt = doubt_of(watched(kind, n))
    assert doubt is not None
    assert words in doubt
    assert "mixup, cutmix or repeated augmentation" in doubt


@pytest.mark.parametrize("n", [8, 32, 256])
@pytest.mark.parametrize("kind", ["fresh", "sorted"])
def test_independent_rows_are_not_accused_in_any_order(kind: str, n: int) -> None:
    """Rows of a batch may be sorted, by length for one: the batch is of independent rows all the same."""
    assert doubt_of(watched(kind, n, 1000)) is None


@pytest.mark.parametrize(("excess", "is_doubted"), [(0.3, True), (0.0, False), (-0.3, False), (0.03, False)])
def test_pieces_that_differ_more_than_examples_say(excess: float, is_doubted: bool) -> None:
    watch, generator = Dependence(50.0), torch.Generator().manual_seed(0)
    for _ in range(200):
        drawn = excess + 0.2 * float(torch.randn((), generator=generator))
        watch.add({"excess": (max(-1.0, min(1.0, drawn)), 1.0)})
    doubt = doubt_of(watch)
    assert (doubt is not None) == is_doubted
    if doubt is not None:
        assert "pieces have 1." in doubt
    restored = Dependence(50.0)
    restored.load_state_dict(json.loads(json.dumps(watch.state_dict())))
    assert doubt_of(restored) == doubt
