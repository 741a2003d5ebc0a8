"""Repeated pieces and ranks are recognised, and independent ones are not, however alike or sparse they are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sonde.batch_size.stats.comparisons import Repeats, rank_mark, repeats_piece, same_ranks
from sonde.batch_size.stats.dependence import Dependence

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


def flags(pieces: Tensor) -> list[float]:
    return [float(repeats_piece(window)) for window in pieces]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [3, 8])
def test_independent_pieces_are_no_repeats(kind: str, n: int) -> None:
    generator = torch.Generator().manual_seed(n)
    assert sum(flags(draw(kind, 1000, n, generator))) == 0


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"zero", "sparse"}))
@pytest.mark.parametrize("rounding", [0.0, 1e-7])
def test_two_equal_pieces_are_found_wherever_they_are(kind: str, rounding: float) -> None:
    """Rounding: of fp32 kernels that add in another order."""
    generator = torch.Generator().manual_seed(0)
    pieces = draw(kind, 50, 5, generator)
    for window in pieces:
        a, b = torch.randperm(5, generator=generator)[:2].tolist()
        window[a] = window[b] * (1 + rounding * torch.randn(window.shape[1], generator=generator))
    assert flags(pieces) == [1.0] * 50


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_accumulators_in_fp32_find_the_same(dtype: torch.dtype) -> None:
    """Also where a difference of squares would cancel: pieces differ by a hundredth of what they share."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        pieces = 10 * torch.randn(ELEMENTS, generator=generator) + draw("gaussian", 1, 4, generator)[0]
        assert float(repeats_piece(pieces.to(dtype))) == 0
        pieces[3] = pieces[1] * (1 + 1e-7 * torch.randn(ELEMENTS, generator=generator))
        assert float(repeats_piece(pieces.to(dtype))) == 1


def test_pieces_that_are_all_the_same_or_differ_by_rounding_to_16_bits_prove_nothing() -> None:
    ones = torch.ones(4, ELEMENTS, dtype=torch.float64)
    assert float(repeats_piece(ones)) == 0
    signal = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(0))
    nearly = signal + 1e-4 * torch.randn(8, ELEMENTS, generator=torch.Generator().manual_seed(1))
    assert float(repeats_piece(nearly.bfloat16().double())) == 0


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_gradients_that_are_not_finite_prove_nothing(bad: float) -> None:
    pieces = draw("gaussian", 1, 4, torch.Generator().manual_seed(0))[0]
    pieces[0] = bad
    pieces[1] = bad
    assert float(repeats_piece(pieces)) == 0


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


def test_one_repeat_in_five_windows_is_doubted_and_one_in_ten_is_chance() -> None:
    for every, is_doubted in ((1, True), (4, True), (10, False)):
        watch = Dependence(50.0)
        for window in range(400):
            is_repeat = window % every == 0
            watch.update(Repeats(n_ranks=2, n_repeating=2 * is_repeat))
        assert (watch.doubts().get("dependent_pieces") is not None) == is_doubted
        restored = Dependence(50.0)
        restored.load_state_dict(watch.state_dict())
        assert restored.doubts().get("dependent_pieces") == watch.doubts().get("dependent_pieces")


@pytest.mark.parametrize("is_lasting", [True, False])
def test_only_ranks_that_are_the_same_again_and_again_are_doubted(is_lasting: bool) -> None:
    watch = Dependence(50.0)
    for window in range(50):
        pair = (1, 2) if is_lasting else (window % 7, 7)
        watch.update(Repeats(same_ranks=frozenset({pair}), n_compared=17))
    assert ("two ranks (1 and 2)" in (watch.doubts().get("same_data") or "")) == is_lasting
    assert (watch.doubts().get("same_data") is not None) == is_lasting


@pytest.mark.parametrize("every", [1, 3])
def test_among_few_ranks_any_two_that_are_the_same_count(every: int) -> None:
    watch = Dependence(50.0)
    for window in range(60):
        pairs = frozenset({((0, 1), (0, 2), (1, 2))[window % 3]} if window % every == 0 else set())
        watch.update(Repeats(same_ranks=pairs, n_compared=3))
    assert f"in {100 / every:.0f} % of the windows" in (watch.doubts().get("same_data") or "").replace("34 %", "33 %")


def test_three_equal_ranks_are_two_pairs() -> None:
    ranks = draw("gaussian", 1, 6, torch.Generator().manual_seed(0))[0][[0, 1, 2, 1, 3, 1]]
    marks, spread = marks_of(ranks)
    assert same_ranks(marks, spread=spread) == {(1, 3), (1, 5)}


def test_the_fifth_repeat_is_the_first_to_be_judged_and_a_mended_sampler_is_believed_again() -> None:
    watch = Dependence(2.0)
    for window in range(1, 6):
        watch.update(Repeats(n_ranks=1, n_repeating=1))
        assert (watch.doubts().get("dependent_pieces") is not None) == (window == 5)
    assert "100 % of the windows" in (watch.doubts().get("dependent_pieces") or "")
    for _ in range(200):
        watch.update(Repeats(n_ranks=1, n_repeating=0))
    assert watch.doubts().get("dependent_pieces") is None
