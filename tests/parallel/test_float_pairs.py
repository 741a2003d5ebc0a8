"""Pairs of fp32 numbers stand for fp64: each operation against fp64, where plain fp32 is off by orders of magnitude."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from sonde.parallel.devices import KEPT_IN_PAIRS, start_copy_to_host, widened, zero_sums
from sonde.parallel.float_pairs import FloatPairs
from sonde.parallel.pairs_over_ranks import exact_bits
from sonde.parallel.process_groups import start_reduce
from tests.ranks import Ranks


def in_pairs(x: Tensor) -> FloatPairs:
    """fp64 numbers as pairs."""
    hi = x.float()
    return FloatPairs(hi, (x - hi).float())


def value(x: Tensor) -> Tensor:
    """Pairs as fp64; plain tensors as they are."""
    return start_copy_to_host(x).values


def numbers(n: int = 1000, *, seed: int = 0, decades: float = 6.0) -> Tensor:
    """Of both signs and many sizes, each exactly a pair, fp64."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, generator=generator, dtype=torch.float64)
    x = x * 10.0 ** (decades * (torch.rand(n, generator=generator, dtype=torch.float64) - 0.5))
    return value(in_pairs(x))


def relative(got: Tensor, expected: Tensor) -> float:
    return float(((got - expected) / expected).abs().max())


OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda x, y: x.abs() + y.abs(),
    "subtract": lambda x, y: x.abs() - (-y.abs()),
    "multiply": lambda x, y: x * y,
    "divide": lambda x, y: x / y,
    "by a number": lambda x, _: x.abs() * 0.1 + 3.3,
    "over a number": lambda x, _: 0.7 / x,
    "square": lambda x, _: x.square(),
    "root": lambda x, _: x.abs().sqrt(),
    "half power": lambda x, _: x.abs().pow(0.5),
    "sum": lambda x, _: x.abs().sum(),
    "sum along a dim": lambda x, _: x.abs().view(10, -1).sum(1),
    "dot": lambda x, y: x.abs().dot(y.abs()),
    "mean": lambda x, _: x.abs().mean(),
    "index_add": lambda x, _: x.new_zeros(7).index_add_(0, torch.arange(len(x)) % 7, x.abs()),
    "in place": lambda x, y: x.clone().mul_(y).add_(1e-3 * x * y).div_(3.0),
    "largest": lambda x, _: x.max(),
    "joined": lambda x, y: torch.cat([x[3:], torch.stack([y[0], y[1]])]).view(-1, 1),
    "clamped": lambda x, _: x.abs().clamp(max=1.0),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_keep_the_precision_of_fp64_nearly(name: str) -> None:
    """2⁻⁴⁴ leaves 4 of 48 bits to the roundings of each operation. fp32 has 2⁻²⁴."""
    x, y = numbers(seed=1), numbers(seed=2)
    expected = OPERATIONS[name](x, y)
    got = OPERATIONS[name](in_pairs(x), in_pairs(y))
    assert isinstance(got, FloatPairs)
    assert got.dtype == torch.float64
    assert relative(value(got), expected) < 2.0**-44
    if name not in ("largest", "joined"):
        assert relative(OPERATIONS[name](x.float(), y.float()).double(), expected) > 2.0**-30


@pytest.mark.parametrize("n", [1, 2, 63, 10_000, 200_000])
def test_sums_are_exact_however_many_and_whatever_their_sizes(n: int) -> None:
    x = numbers(n, seed=n, decades=12.0).square()
    x = value(in_pairs(x))
    expected = math.fsum(x.tolist())
    assert float(value(in_pairs(x).sum())) == pytest.approx(expected, rel=1e-13)


def test_small_owners_beside_large_ones_keep_their_digits() -> None:
    """One sum for each of 50 owners, whose sizes differ by 1e10."""
    generator = torch.Generator().manual_seed(0)
    owners = torch.randint(50, (5000,), generator=generator)
    sizes = 10.0 ** (-10.0 * torch.rand(50, generator=generator, dtype=torch.float64))
    x = value(in_pairs(torch.rand(5000, generator=generator, dtype=torch.float64) * sizes[owners]))
    expected = torch.zeros(50, dtype=torch.float64).index_add_(0, owners, x)
    got = value(in_pairs(torch.zeros(50, dtype=torch.float64)).index_add_(0, owners, in_pairs(x)))
    assert relative(got[sizes > 1e-3], expected[sizes > 1e-3]) < 1e-12
    assert relative(got, expected) < 1e-8  # of the smallest, as many bits are left as fit below the largest


def test_what_is_not_finite_stays_where_it_is() -> None:
    """An infinite square must not look like NaN, nor spoil the sums of other owners."""
    x = widened_pairs(torch.tensor([1e20, 1.0, math.nan, 2.0]))
    squares = x.square()
    assert torch.isinf(squares).tolist() == [True, False, False, False]
    assert torch.isnan(squares).tolist() == [False, False, True, False]
    sums = widened_pairs(torch.zeros(3)).index_add_(0, torch.tensor([0, 1, 2, 1]), squares)
    assert value(sums).tolist()[:2] == [math.inf, 5.0]
    assert torch.isnan(sums).tolist() == [False, False, True]
    assert torch.isinf(squares[:2].sum()).item()
    assert torch.isinf(squares[0] + squares[1]).item()
    assert torch.isinf(squares[0] / 3.0).item()
    assert value(torch.where(torch.isfinite(squares), squares, 0.0)).tolist() == [0.0, 1.0, 0.0, 4.0]


def test_numbers_near_the_largest_and_the_smallest_survive() -> None:
    large = widened_pairs(torch.tensor([1e38, 2e38]))
    assert relative(value(large.sum() / 8.0), torch.tensor(3e38 / 8, dtype=torch.float64)) < 1e-7
    small = widened_pairs(torch.tensor([1e-30, 3e-30]))
    assert relative(value(small.sum()), torch.tensor(4e-30, dtype=torch.float64)) < 1e-7


def test_views_share_their_numbers() -> None:
    x = widened_pairs(torch.arange(6.0))
    first, rest = x.split([2, 4])
    first += 0.1
    rest[1] = rest[1] * 2.0
    assert value(x).tolist() == pytest.approx([0.1, 1.1, 2.0, 6.0, 4.0, 5.0], rel=1e-14)
    x.zero_()
    assert value(rest).tolist() == [0.0] * 4


def test_comparisons_see_the_lower_half() -> None:
    one, more = widened_pairs(torch.tensor([1.0])), widened_pairs(torch.tensor([1.0])) + 1e-12
    assert (more > one).item()
    assert not (more <= one).item()
    assert (more != one).item()
    assert (one == 1.0).item()
    assert torch.maximum(one, more).tolist() == [1.0 + 1e-12]


def test_integers_and_other_dtypes_are_taken_exactly() -> None:
    counts = torch.tensor([2**40 + 1, 2**47 - 1])
    assert widened_pairs(counts).tolist() == counts.double().tolist()
    assert widened_pairs(torch.tensor([True, False])).tolist() == [1.0, 0.0]
    half = torch.tensor([0.1], dtype=torch.bfloat16)
    assert widened_pairs(half).tolist() == half.double().tolist()


def test_an_operation_without_a_rule_is_refused_by_name() -> None:
    with pytest.raises(NotImplementedError, match="have no sin: move them to the CPU first"):
        widened_pairs(torch.ones(2)).sin()


def widened_pairs(x: Tensor) -> Tensor:
    KEPT_IN_PAIRS.add("cpu")
    try:
        pairs = widened(x)
    finally:
        KEPT_IN_PAIRS.discard("cpu")
    assert isinstance(pairs, FloatPairs)
    return pairs


def test_guard_operations_of_a_wrapper_arrive_by_name() -> None:
    """Conversions and views of a wrapper reach `__torch_dispatch__` under these names, on every supported torch."""
    x = widened_pairs(torch.arange(6.0) + 0.5)
    assert isinstance(x, FloatPairs)
    assert x.dtype == torch.float64
    assert type(x.to(torch.float32)) is Tensor
    assert x.t().reshape(2, 3)[1].tolist() == [3.5, 4.5, 5.5]
    assert x.view(3, 2).transpose(0, 1).reshape(-1).tolist() == [0.5, 2.5, 4.5, 1.5, 3.5, 5.5]
    assert type(x > 1.0) is Tensor


def test_only_where_fp64_is_missing_or_pairs_are_asked_for() -> None:
    assert not isinstance(widened(torch.ones(1)), FloatPairs)
    assert not isinstance(zero_sums(2, device=torch.device("cpu")), FloatPairs)


def _summed_over_ranks(spread: float) -> tuple[float, float]:
    """The largest error of a sum over ranks, relative to fp64's: of pairs, and of plain fp32.

    The ranks' numbers differ by up to `spread` times.
    """
    rank, n_ranks = dist.get_rank(), dist.get_world_size()
    own = (1.0 + torch.rand(2000, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)) * 1e-5
    own = value(in_pairs(own * spread ** (rank / (n_ranks - 1))))
    whole, plain, pairs = own.clone(), own.float(), in_pairs(own)
    first, second = pairs[:10], zero_sums(3, device=own.device)  # a view, and numbers that have no memory of their own
    dist.all_reduce(whole)
    dist.all_reduce(plain)
    for summed in (pairs, first, torch.cat([second, pairs])):
        work = start_reduce(summed, dist.group.WORLD)
        assert work is not None
        work.wait()
        if summed is pairs:
            error = relative(value(pairs), whole)
    return error, relative(plain.double(), whole)


def _whole_numbers(n_more: int) -> bool:
    """Whether sums over ranks of whole numbers of `exact_bits`, and so many more, are exact."""
    n_ranks, generator = dist.get_world_size(), torch.Generator().manual_seed(0)
    n_bits = exact_bits(n_ranks) + n_more
    whole = torch.randint(2 ** (n_bits - 1), 2**n_bits, (1000,), generator=generator)
    pairs = widened_pairs(whole)
    work = start_reduce(pairs, dist.group.WORLD)
    assert work is not None
    work.wait()
    return torch.equal(value(pairs), n_ranks * whole.double())


@pytest.mark.parametrize("world", [2, 3, 4])
def test_whole_numbers_are_summed_exactly(world: int, request: Any) -> None:
    """Digests of options are compared by the sum of their squares, which must not round."""
    ranks: Ranks = request.getfixturevalue(f"ranks{world}")
    assert all(ranks(_whole_numbers, 0))
    assert not any(ranks(_whole_numbers, 4))


@pytest.mark.parametrize("world", [2, 3, 4])
def test_one_collective_sums_pairs_over_ranks(world: int, request: Any) -> None:
    """The upper halves leave room for the sum: it loses n · 2⁻³⁹, where plain fp32 loses 2⁻²⁴."""
    ranks: Ranks = request.getfixturevalue(f"ranks{world}")
    for spread in (1.0, 100.0):
        for pairs, plain in ranks(_summed_over_ranks, spread):
            assert pairs < world * 2.0**-39
            assert plain > 2.0**-26
    for pairs, plain in ranks(_summed_over_ranks, 1e6):
        assert pairs <= 2 * plain
