"""The same data on ranks or in micro-batches is named, and chance is not."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor

from sonde.batch_size.stats.dependence import Dependence, rank_mark, same_ranks


def watched(within: float, between: float, *, scatter: float = 0.1, windows: int = 20, differ: float = 1.0) -> str:
    """What is said after windows of some noise within and between ranks, which scatter by a part of it."""
    watch = Dependence(50.0)
    for window in range(windows):
        watch.add({"differences": (differ, 1.0), "consistency": (within * (1 + scatter * (window % 3 - 1)), between)})
    restored = Dependence(50.0)
    restored.load_state_dict(json.loads(json.dumps(watch.state_dict())))
    assert restored.doubts() == watch.doubts()
    return watch.doubts().get("same_data", "")


@pytest.mark.parametrize(
    ("within", "between", "differ", "words"),
    [
        (1.0, 1.0, 1e-12, "all pieces have the same gradient"),
        (1.0, 0.0, 1.0, "not at all between them"),
        (8.0, 1.0, 1.0, "× less between ranks than within ranks"),
        (1.0, 10.0, 1.0, "× more between ranks"),
        (0.0, 1.0, 1.0, "more between ranks"),
        (2.0, 1.0, 1.0, ""),
    ],
)
def test_the_same_data_is_named(within: float, between: float, differ: float, words: str) -> None:
    said = watched(within, between, differ=differ)
    assert words in said
    assert bool(said) == bool(words)
    assert not watched(within, between, differ=differ, windows=4)  # too early to say


def test_an_uncertain_judgement_is_not_given() -> None:
    """One loss spike may be all of it."""
    assert watched(8.0, 1.0, scatter=0.0)
    watch = Dependence(50.0)
    for window in range(20):
        watch.add({"differences": (1.0, 1.0), "consistency": (150.0 if window == 10 else 1.0, 1.0)})
    assert watch.consistency is not None
    assert watch.consistency > 3
    assert not watch.doubts()


ELEMENTS = 40


def draw(kind: str, windows: int, n: int, generator: torch.Generator) -> Tensor:
    """Gradients of independent pieces, [windows, n, elements]."""

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    noise = random(windows, n, ELEMENTS)
    if kind == "gaussian":
        return noise
    if kind == "signal":  # |G|² is 100 times a piece's noise
        return 10 * random(ELEMENTS) + noise
    if kind == "heavy":  # Cauchy, without a mean
        return noise / random(windows, n, ELEMENTS)
    if kind == "few":
        return noise[..., :4]
    if kind == "one direction":
        return noise[..., :1] * random(ELEMENTS)
    if kind == "sparse":  # most pieces touch no row that is compared, and some touch the same
        return noise * (random(windows, n, 1) > 1.5)
    if kind == "zero":
        return torch.zeros_like(noise)
    assert kind == "bf16"
    return (3 * random(ELEMENTS) + noise).bfloat16().double()


KINDS = ["gaussian", "signal", "heavy", "few", "one direction", "sparse", "zero", "bf16"]


def marks_of(ranks: Tensor) -> tuple[Tensor, float]:
    """Marks of ranks' gradients, and their spread; [ranks, elements]."""
    mean_square = max(float(ranks.square().sum(1).mean()), 1e-300)
    return torch.stack([rank_mark(r) for r in ranks]), 1 - float(ranks.mean(0).square().sum()) / mean_square


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [3, 64])
def test_ranks_with_data_of_their_own_are_not_accused(kind: str, n: int) -> None:
    for ranks in draw(kind, 200, n, torch.Generator().manual_seed(0)):
        marks, spread = marks_of(ranks)
        assert not same_ranks(marks, spread=spread)


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"zero", "sparse"}))
def test_two_ranks_with_the_same_data_are_named(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    for ranks in draw(kind, 50, 6, generator):
        a, b = sorted(torch.randperm(6, generator=generator)[:2].tolist())
        ranks[b] = ranks[a] * (1 + 1e-7 * torch.randn(ranks.shape[1], generator=generator))
        marks, spread = marks_of(ranks)
        assert same_ranks(marks, spread=spread) == {(a, b)}


@pytest.mark.parametrize(("every", "is_doubted"), [(1, True), (4, False), (10, False)])
@pytest.mark.parametrize("is_lasting", [True, False])
def test_ranks_that_are_the_same_again_and_again_are_doubted(every: int, is_doubted: bool, is_lasting: bool) -> None:
    """By chance some two of many may be the same, but not the same two in two windows in a row."""
    watch = Dependence(50.0)
    for window in range(200):
        pair = (1, 2) if is_lasting else (window % 7, 7)
        watch.see_ranks(frozenset({pair} if window % every == 0 else ()))
        assert window >= 5 or not watch.doubts()
    said = watch.doubts().get("same_data") or ""
    assert ("two ranks (1 and 2) had the same gradient" in said) == bool(said) == (is_doubted and is_lasting)
    restored = Dependence(50.0)
    restored.load_state_dict(watch.state_dict())
    assert restored.doubts() == watch.doubts()
    for _ in range(200):  # mended
        restored.see_ranks(frozenset())
    assert not restored.doubts()
