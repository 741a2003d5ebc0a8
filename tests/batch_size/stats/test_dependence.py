"""What shares data (ranks, micro-batches, rows of a batch) is named; independent data are never accused."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence

import pytest
import torch
from torch import Tensor

from sonde.batch_size.stats.comparisons import (
    ProjectedWindow,
    neighbour_products,
    order_of_pieces,
    order_scores,
    rank_mark,
    same_ranks,
    scores_of_examples,
    scores_of_pieces,
    standard_score,
)
from sonde.batch_size.stats.dependence import Dependence

ELEMENTS = 20


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def after(numbers: Iterable[dict[str, tuple[float, float]]], memory: float = 100.0) -> Dependence:
    """A watch that has seen numbers of windows; one that has loaded its state says the same."""
    watch, restored = Dependence(memory), Dependence(memory)
    for of_window in numbers:
        watch.add(of_window)
    restored.load_state_dict(json.loads(json.dumps(watch.state_dict())))
    assert restored.doubts() == watch.doubts()
    return watch


# Noise between ranks, and between all pieces.


def same_data(within: float, between: float, differ: float, *, windows: int = 20) -> str:
    """What is said after windows of some noise within and between ranks, which scatter by a part of it."""
    scatter = [1 + 0.1 * (window % 3 - 1) for window in range(windows)]
    watch = after(({"differences": (differ, 1.0), "consistency": (within * s, between)} for s in scatter), memory=50.0)
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
    said = same_data(within, between, differ)
    assert words in said
    assert bool(said) == bool(words)
    assert not same_data(within, between, differ, windows=4)  # too early to say


def test_an_uncertain_judgement_is_not_given() -> None:
    """One loss spike may be all of it."""
    windows = [150.0 if window == 10 else 1.0 for window in range(20)]
    watch = after(({"differences": (1.0, 1.0), "consistency": (within, 1.0)} for within in windows), memory=50.0)
    assert watch.consistency is not None
    assert watch.consistency > 3
    assert not watch.doubts()


# Two ranks with the same gradient.


def gradients(kind: str, windows: int, n: int, seed: int = 0) -> Tensor:
    """Gradients of independent pieces, [windows, n, elements]."""
    noise, other = random(windows, n, ELEMENTS, seed=seed), random(windows, n, ELEMENTS, seed=seed + 1)
    of_elements, of_pieces = other[0, 0], other[..., :1]
    return {
        "gaussian": lambda: 0.5 * of_elements + noise,
        "signal": lambda: 10 * of_elements + noise,  # |G|² is 100 times a piece's noise
        "heavy": lambda: noise / other,  # Cauchy, without a mean
        "few": lambda: noise[..., :4],
        "one direction": lambda: noise[..., :1] * of_elements,
        "sparse": lambda: noise * (of_pieces > 1.5),  # most pieces touch no row that is compared, and some the same
        "zero": lambda: torch.zeros_like(noise),
        "bf16": lambda: (3 * of_elements + noise).bfloat16().double(),
    }[kind]()


KINDS = ["gaussian", "signal", "heavy", "few", "one direction", "sparse", "zero", "bf16"]


def pairs_in(ranks: Tensor) -> set[tuple[int, int]] | frozenset[tuple[int, int]]:
    """Ranks of one window, [ranks, elements], that seem to have the same gradient."""
    mean_square = max(float(ranks.square().sum(1).mean()), 1e-300)
    spread = 1 - float(ranks.mean(0).square().sum()) / mean_square
    return same_ranks(torch.stack([rank_mark(r) for r in ranks]), spread=spread)


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_with_the_same_data_are_named_and_others_are_not(kind: str) -> None:
    for n in (3, 64):
        assert not any(pairs_in(ranks) for ranks in gradients(kind, 200, n))
    if kind in ("zero", "sparse"):
        return
    for window, ranks in enumerate(gradients(kind, 50, 6)):
        a, b = [*itertools.combinations(range(6), 2)][window % 15]
        ranks[b] = ranks[a] * (1 + 1e-7 * random(ranks.shape[1], seed=window))
        assert pairs_in(ranks) == {(a, b)}


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


# Neighbouring pieces.


def score_of(pieces: Tensor) -> float | None:
    counts = {"n_comparing": 1.0, "n_by_place": 0.0, "n_by_units": 0.0}
    mean_square = float(pieces.square().sum(1).mean())
    numbers = scores_of_pieces(counts, *neighbour_products(pieces).tolist(), mean_square=mean_square)
    return numbers["neighbours"][0] if numbers else None


@pytest.mark.parametrize("n", [3, 4, 5, 6])
def test_over_all_orders_the_score_has_mean_0_and_variance_1(n: int) -> None:
    pieces = random(n, 7, seed=n) ** 3 + 1
    scores = [score_of(pieces[list(order)]) or 0.0 for order in itertools.permutations(range(n))]
    assert sum(scores) / len(scores) == pytest.approx(0.0, abs=1e-12)
    assert sum(s * s for s in scores) / len(scores) == pytest.approx(1.0, rel=1e-9)


@pytest.mark.parametrize("value", [0.0, 1.0, math.nan, math.inf])
def test_pieces_that_differ_by_rounding_or_are_not_finite_have_no_score(value: float) -> None:
    assert score_of(torch.full((4, 5), value, dtype=torch.float64) * (1 + 1e-13 * random(4, 5))) is None


def scores_of(pieces: Tensor) -> list[dict[str, tuple[float, float]]]:
    """The scores of many windows, [windows, pieces, elements], at once; they are those of each."""
    n = pieces.shape[1]
    products = pieces @ pieces.transpose(1, 2)
    off = ~torch.eye(n, dtype=torch.bool)
    centred = torch.where(off, products - products[:, off].mean(1)[:, None, None], 0.0)
    variance = ((n - 1) * centred.square().sum((1, 2)) - 2 * centred.sum(2).square().sum(1)) / (n * (n - 1))
    scores = (centred.diagonal(1, 1, 2).sum(1) / variance.sqrt()).tolist()
    assert scores[:5] == pytest.approx([score_of(window) for window in pieces[:5]])
    return [{"neighbours": (score, 1.0)} for score in scores]


def shuffled(windows: int, n: int, seed: int) -> Tensor:
    """Pieces of two samples of a finite data set, which is shuffled anew in each epoch."""
    torch.manual_seed(seed)
    samples = 0.5 * random(ELEMENTS, seed=seed) + random(8 * n, ELEMENTS, seed=seed) ** 3
    return torch.cat([samples[torch.randperm(8 * n)].view(4, n, 2, ELEMENTS).mean(2) for _ in range(windows // 4)])


@pytest.mark.parametrize("kind", ["gaussian", "heavy", "shuffled"])
@pytest.mark.parametrize("n", [3, 8])
def test_independent_pieces_raise_no_alarm(kind: str, n: int) -> None:
    """60,000 windows: 600 times as many as the watch remembers."""
    watch, worst = Dependence(100.0), 0.0
    for seed in range(3):
        pieces = shuffled(20_000, n, seed) if kind == "shuffled" else gradients(kind, 20_000, n, seed)
        for numbers in scores_of(pieces):
            watch.add(numbers)
            worst = max(worst, abs(watch._of["neighbours"].standard_errors))
        assert not watch.doubts()
    assert worst < 5.5  # standard errors; 6 and a mean score of 0.25 are needed for a doubt


DEPENDENT: dict[str, Callable[[Tensor], Tensor]] = {
    "two equal neighbours": lambda x: x[:, [0, 0, 2, 3]],
    "the last equals the first": lambda x: x[:, [0, 1, 2, 0]],
    "the second half repeats the first": lambda x: x[:, [0, 1, 0, 1]],
    "each neighbour shares half of its data": lambda x: (x[:, :4] + x[:, 1:5]) / 2,
    "two losses of each batch": lambda x: x[:, [0, 0, 1, 1]] + 0.5 * x[:, [2, 3, 4, 2]],
}


@pytest.mark.parametrize("kind", DEPENDENT)
def test_dependent_pieces_are_doubted_within_a_hundred_windows(kind: str) -> None:
    watch = after(scores_of(DEPENDENT[kind](gradients("gaussian", 100, 5, seed=1))))
    assert "independent" in watch.doubts()["dependent_pieces"]
    for numbers in scores_of(gradients("gaussian", 500, 4, seed=2)):  # mended: the doubt goes
        watch.add(numbers)
    assert not watch.doubts()


def test_many_ranks_do_not_turn_a_weak_dependence_into_an_alarm() -> None:
    """0.1 standard errors on each of 1,024 ranks: 3.2 on all together."""
    watch = after([{"neighbours": standard_score(0.1 * 1024, 1024.0, 1024)}] * 500)
    assert watch._of["neighbours"].standard_errors > 6
    assert not watch.doubts()


# Pieces of two kinds, or whose losses are sums.


def test_an_order_by_chance_raises_no_doubt() -> None:
    """Over 20 runs of 500 windows, at each window."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        watch = Dependence(100.0)
        for sign in torch.randint(0, 2, (500,), generator=generator) * 2 - 1:
            watch.add({"place": (float(sign), 1.0), "units": (float(sign), 1.0)})
            assert not watch.doubts()
    assert "smaller gradient" in after([{"place": (-1.0, 1.0)}] * 100).doubts()["dependent_pieces"]


def test_only_pieces_that_can_be_compared_are() -> None:
    small, large = torch.tensor(1.0), torch.tensor(4.0)
    assert order_of_pieces([large, small], [8.0, 8.0]) == [1.0, 1.0, 0.0, 0.0]
    assert order_of_pieces([small, large], [8.0, 8.0]) == [-1.0, 1.0, 0.0, 0.0]
    assert order_of_pieces([large, small, small], [12.0, 8.0, 4.0]) == [0.0, 0.0, 1.0, 1.0]
    assert order_of_pieces([small, large], [12.0, 4.0]) == [0.0, 0.0, -1.0, 1.0]
    for sizes in ([], [8.0], [8.0, 9.0], [8.0, 8.0, 8.0]):
        assert order_of_pieces([small] * len(sizes), sizes) == [0.0] * 4


# Rows of a batch.


def rows(n: int, seed: int = 0) -> Tensor:
    """Skewed and heavy in the tails, with a mean."""
    return random(n, 4, seed=seed) ** 3 + 0.5


@pytest.mark.parametrize("n", [8, 9, 64, 512])
def test_over_random_orders_scores_of_rows_have_mean_0_and_variance_1(n: int) -> None:
    """2,000 orders tell a mean to ± 0.022 and a variance to some 4 %; the variance is too large by 3/n at most."""
    batch, generator = rows(n, seed=n), torch.Generator().manual_seed(1)
    scores = torch.stack([order_scores(batch[torch.randperm(n, generator=generator)])[:3] for _ in range(2000)])
    assert scores.mean(0).abs().max() < 4 * 0.023
    assert (scores.var(0) < 1.15).all()
    assert (scores.var(0) > 0.85 * (1 - 3 / n)).all()


@pytest.mark.parametrize("batch", [rows(7), torch.ones(16, 4), torch.zeros(16, 4), torch.full((16, 4), math.nan)])
def test_too_few_equal_and_infinite_rows_have_no_score(batch: Tensor) -> None:
    assert order_scores(batch)[3:].tolist() == [0, 0]
    assert order_scores(batch).isfinite().all()


def ordered(kind: str, n: int, seed: int) -> Tensor:
    fresh, half = rows(n, seed), n // 2
    return {
        "flip": lambda: 0.7 * fresh + 0.3 * fresh.flip(0),
        "roll": lambda: 0.7 * fresh + 0.3 * fresh.roll(1, 0),
        "repeated": lambda: fresh[: (n + 2) // 3].repeat_interleave(3, 0)[:n] + rows(n, seed + 10**6),
        "views": lambda: torch.cat([fresh[:half], fresh[:half]]) + rows(n, seed + 10**6),
        "sorted": lambda: fresh[fresh.sum(1).argsort()],
        "pairs": lambda: torch.stack([fresh[:half], -fresh[:half]], 1).flatten(0, 1) + 0.3 * rows(n, seed + 10**6),
        "opposed halves": lambda: torch.cat([fresh[:half], -fresh[:half]]) + 0.3 * rows(n, seed + 10**6),
        "twice": lambda: fresh[:half].repeat(2, 1)[torch.randperm(n, generator=torch.Generator().manual_seed(seed))],
        "of few kinds": lambda: rows(6)[torch.randint(6, (n,), generator=torch.Generator().manual_seed(seed))],
        "fresh": lambda: fresh,
    }[kind]()


def of_rows(kind: str, n: int, windows: int) -> Sequence[dict[str, tuple[float, float]]]:
    return [scores_of_examples(*order_scores(ordered(kind, n, seed)).tolist()) for seed in range(windows)]


@pytest.mark.parametrize("n", [32, 256])
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("flip", "the second and the last but one, and so on are more alike than chance allows"),
        ("roll", "neighbouring rows of a batch are more alike than chance allows"),
        ("repeated", "neighbouring rows of a batch are more alike than chance allows"),
        ("views", "rows half a batch apart are more alike than chance allows"),
        ("twice", "each row of a batch is there several times"),
        ("pairs", "neighbouring rows of a batch have opposed gradients"),
        ("opposed halves", "rows half a batch apart have opposed gradients"),
    ],
)
def test_rows_that_share_samples_are_named(kind: str, words: str, n: int) -> None:
    doubt = after(of_rows(kind, n, 200), memory=50.0).doubts()["dependent_examples"]
    assert words in doubt
    assert "opposed" in words or "mixup, cutmix or repeated augmentation" in doubt


@pytest.mark.parametrize("n", [8, 32, 256])
@pytest.mark.parametrize("kind", ["fresh", "sorted", "of few kinds"])
def test_independent_rows_are_not_accused_in_any_order(kind: str, n: int) -> None:
    """Rows of a batch may be sorted, by length for one: the batch is of independent rows all the same."""
    assert not after(of_rows(kind, n, 500), memory=50.0).doubts()


@pytest.mark.parametrize(("excess", "is_doubted"), [(0.3, True), (0.0, False), (-0.3, False), (0.03, False)])
def test_pieces_that_differ_more_than_examples_say(excess: float, is_doubted: bool) -> None:
    drawn = (excess + 0.2 * random(200)).clamp(-1, 1).tolist()
    doubts = after(({"excess": (each, 1.0)} for each in drawn), memory=50.0).doubts()
    assert ("pieces have 1." in doubts.get("dependent_examples", "")) == is_doubted


# |G|² itself, and batches that are held against each other.


def windows(n_windows: int, n: int, *, compared: float, common: float = 0.0, mean: float = 0.0) -> Dependence:
    """Windows of n rows in 4 dims. A part of each row's noise is taken from the others, as contrastive losses do."""
    watch, generator = Dependence(100.0), torch.Generator().manual_seed(0)
    for _ in range(n_windows):
        noise = torch.randn(n, 4, generator=generator)
        drawn = noise - compared * noise.mean(0) + mean
        seen = drawn - common  # what the rows' own gradients say, where a part of the batch's is in none of them
        small, big = float(seen.square().sum(1).mean()), float(seen.mean(0).square().sum())
        grad_sq = (n * big - small) / (n - 1)
        watch.add({"signal": (n * grad_sq / small, 1.0)})
        watch.see_window(ProjectedWindow(drawn.mean(0), grad_sq, small / n))
    return watch


@pytest.mark.parametrize(("compared", "is_doubted"), [(0.0, False), (0.3, True), (0.9, True)])
def test_a_negative_signal_is_impossible_for_independent_rows(compared: float, is_doubted: bool) -> None:
    doubts = windows(150, 32, compared=compared).doubts()
    assert ("standard errors below 0" in doubts.get("negative_signal", "")) == is_doubted


def test_at_no_signal_a_thousand_judgements_accuse_hardly_any_run() -> None:
    """The worst case, in one dim: of 300 such runs, less than 2 % fell below 4.7 standard errors."""
    generator = torch.Generator().manual_seed(2)
    accused = []
    for _ in range(30):
        watch, squares = Dependence(100.0), torch.randn(1000, generator=generator).square().tolist()
        for square in squares:
            watch.add({"signal": (square - 1, 1.0)})
            accused += watch.doubts()
    assert not accused


@pytest.mark.parametrize(("common", "is_doubted"), [(0.0, False), (0.2, True)])
def test_batches_have_no_more_in_common_than_their_examples_say(common: float, is_doubted: bool) -> None:
    doubts = windows(150, 32, compared=0.0, common=common, mean=0.2).doubts()
    assert ("batches have more in common" in doubts.get("dependent_examples", "")) == is_doubted


# Windows that take turns.


def sizes(n_windows: int, *, period: int = 1, times: float = 1.0, every: int = 1, trend: float = 0.0) -> Dependence:
    """Windows whose mean squares scatter by 1.35 times; each `period`-th is so many times as large."""
    watch = Dependence(100.0)
    for i, scatter in enumerate(random(n_windows).tolist()):
        number = 1 + i * every
        watch.see_size(number, math.exp(0.3 * scatter + trend * i) * (times if number % period == 0 else 1.0))
    return watch


@pytest.mark.parametrize("every", [1, 7])  # no period divides it
@pytest.mark.parametrize("trend", [0.0, 0.05])
@pytest.mark.parametrize("period", [2, 3, 4, 5, 8])
def test_windows_that_take_turns_are_named(period: int, trend: float, every: int) -> None:
    doubt = sizes(128, period=period, times=9.0, every=every, trend=trend).doubts()["phases"]
    said = re.match(rf"one window in {period} has gradients (\d\.?\d?) times as large as the others", doubt)
    assert said is not None
    assert 2.7 < float(said[1]) < 3.4  # neighbours are of both kinds


@pytest.mark.parametrize("trend", [0.0, 0.05, -0.05])
def test_windows_of_one_kind_are_not_accused(trend: float) -> None:
    watch = Dependence(100.0)
    for number, scatter in enumerate(random(2000, seed=3).tolist(), start=1):
        watch.see_size(number, math.exp(0.5 * scatter + trend * number))
        assert number % 10 or "phases" not in watch.doubts()
