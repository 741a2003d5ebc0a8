"""Blocks of windows: by hand, against whole tables of windows, and how many a long run has."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from sonde.batch_size.stats.filter import Block, Blocks


def test_a_block_by_hand() -> None:
    """8 windows: the first 30 steps count as none, and log(38/30) is longer than a block."""
    blocks, v = Blocks(), 0.5
    one = torch.tensor([[3.0, 1.0], [0.0, 0.0], [2.0, -3.0]], dtype=torch.float64)
    other = torch.tensor([[5.0, 2.0], [0.0, 0.0], [2.0, -3.0]], dtype=torch.float64)
    found = [blocks.add(end, one if end % 2 else other, v) for end in range(1, 9)]
    assert found[:7] == [None] * 7
    block = found[7]
    assert block is not None
    assert (block.end, block.n_steps, block.n_windows) == (8, 8, 8)
    assert block.log_time == pytest.approx(math.log(38 / 30))
    # |F|² is 1 + 1.5 or 2 + 2.5, 0, and 0 for −3 + 1, which noise alone explains.
    assert block.sizes.tolist() == pytest.approx([3.5, 0.0, 0.0])
    # Tensors compare with a relative tolerance of 1e-7 in float64.
    torch.testing.assert_close(block.means, torch.tensor([[4 / 3.5, 1.5 / 3.5], [0, 0], [2, -3]], dtype=torch.float64))
    expected = torch.zeros(3, 2, 2, dtype=torch.float64)
    # Each window is 1 and 0.5 away from the means.
    expected[0] = 8 / 3.5**2 * torch.tensor([[1.0, 0.5], [0.5, 0.25]], dtype=torch.float64)
    torch.testing.assert_close(block.scatter, expected)
    assert blocks.complete == [block]
    assert blocks.unfinished is None


def ends_of(blocks: Blocks) -> list[tuple[int, int, int]]:
    return [(block.end, block.n_steps, block.n_windows) for block in blocks.all]


def filled(ends: Iterable[int], into: Blocks | None = None) -> Blocks:
    generator, blocks = torch.Generator().manual_seed(0), into or Blocks()
    for end in ends:
        blocks.add(end, torch.randn(1, 2, generator=generator, dtype=torch.float64).exp(), 1 / 8)
    return blocks


def test_a_jump_of_the_learning_rate_ends_a_block() -> None:
    """So that no block is of two noise scales; but not one of too few windows, or of a short time."""

    def ends(rates: dict[int, float | None]) -> list[int]:
        blocks, rate = Blocks(), None
        for step in range(1, 1001):
            rate = rates.get(step, rate)
            blocks.add(step, torch.ones(1, 2, dtype=torch.float64), 1 / 8, rate)
        assert sum(block.n_windows for block in blocks.all) == sum(block.n_steps for block in blocks.all) == 1000
        return [block.end for block in blocks.complete]

    usual = ends({})
    before, after = next((a, b) for a, b in itertools.pairwise(usual) if a > 400)
    for rate in (0.1, 10.0, 0.0):
        cut = ends({1: 1.0, before + 60: rate})
        assert before + 59 in cut
        assert after not in cut
    assert ends({1: 1.0, before + 60: 0.8}) == usual  # it changes by too little
    assert ends({before + 60: 1.0}) == usual  # it was not known
    assert ends({1: 1.0, before + 10: 0.1}) == usual  # log(1 + 10/400) is too short
    # A rate that jumps at every step: at most 4 blocks in the time of one.
    assert len(ends({step: float(1 + 9 * (step % 2)) for step in range(1, 1001)})) <= 4 * (len(usual) + 1)


def test_a_long_run_is_kept_in_few_numbers() -> None:
    """Also where a block has thousands of windows, and where its windows are far apart."""
    blocks = filled(range(1, 20_001))
    assert len(blocks.complete) < 40
    assert len(json.dumps(blocks.state_dict())) < 12_000
    # A million steps, of which one in 100 is measured after the first 20,000.
    filled(range(20_100, 1_000_001, 100), blocks)
    assert 45 < len(blocks.all) < 80
    assert sum(block.n_steps for block in blocks.all) == 1_000_000
    assert len(json.dumps(blocks.state_dict())) < 20_000


def of_table(windows: Tensor, v: float) -> tuple[Tensor, Tensor, Tensor]:
    """Sizes, means and scatter of a table of windows at once; [windows, series, 2]."""
    sizes = (windows[..., 1] + v * windows[..., 0]).clamp(min=0).mean(0)
    scaled = windows / sizes[:, None]
    away = scaled - scaled.mean(0)
    return sizes, scaled.mean(0), torch.einsum("wsi,wsj->sij", away, away)


def test_a_block_under_way_is_that_of_its_windows_at_once() -> None:
    """Also where the scatter is a billionth of the mean, in which sums of squares would lose all digits."""
    generator = torch.Generator().manual_seed(1)
    scatter = torch.tensor([1.0, 1e-3, 1e-9], dtype=torch.float64)[:, None]
    windows = 2 + scatter * torch.randn(3000, 3, 2, generator=generator, dtype=torch.float64)
    blocks = Blocks()
    first: Block | None = None
    for i, window in enumerate(windows):
        first = first or blocks.add(1000 + i, window, 0.25)  # the first block has the first 8
        if first is not None:
            break
    for i, window in enumerate(windows[8:58]):
        assert blocks.add(1008 + i, window, 0.25) is None
    assert first is not None
    assert blocks.unfinished is not None
    for block, own in ((first, windows[:8]), (blocks.unfinished, windows[8:58])):
        sizes, means, sums = of_table(own, 0.25)
        torch.testing.assert_close(block.sizes, sizes)
        torch.testing.assert_close(block.means, means)
        # 1e-16 of the mean is 1e-7 of a scatter of 1e-9.
        torch.testing.assert_close(block.scatter, sums, rtol=1e-5, atol=0.0)
