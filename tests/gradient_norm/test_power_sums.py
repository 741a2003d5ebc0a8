from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from sonde.gradient_norm.power_sums import power_sum


def exact(tensors: list[Tensor], order: float) -> float:
    joined = torch.cat([t.reshape(-1).double() for t in tensors] or [torch.zeros(0)])
    if math.isinf(order):
        return float(joined.abs().max()) if joined.numel() else 0.0
    return math.fsum((joined.abs() ** order).tolist())


@pytest.mark.parametrize("order", [0.5, 1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_small_large_empty_and_uneven(order: float, dtype: torch.dtype) -> None:
    shapes = [(3,), (0,), (), (40_000,), (7, 5), (500, 301), (0, 4), (1,)]
    tensors = [torch.randn(s, dtype=torch.float64).to(dtype) for s in shapes]
    assert float(power_sum(tensors, order)) == pytest.approx(exact(tensors, order), rel=1e-13)


def test_mixed_dtypes_and_strides() -> None:
    tensors = [
        torch.randn(30, 40).t(),
        torch.randn(10, dtype=torch.float64),
        torch.randn(8, 12).bfloat16()[::2],
        torch.randn(1, 6).expand(5, 6),
    ]
    assert float(power_sum(tensors, 2.0)) == pytest.approx(exact(tensors, 2.0), rel=1e-13)


@pytest.mark.parametrize("order", [1.0, 2.0, 3.0])
def test_powers_beyond_the_range_of_fp32(order: float) -> None:
    """1e30 squared overflows, and 1e-30 squared vanishes."""
    for size in (1e30, 1e-30):
        tensor = size * torch.ones(1000)
        assert float(power_sum([tensor], order)) == pytest.approx(1000 * float(tensor[0].double()) ** order, rel=1e-12)


def test_no_elements_sum_to_zero() -> None:
    assert float(power_sum([], 2.0)) == 0.0
    assert float(power_sum([torch.zeros(0), torch.zeros(3, 0)], math.inf)) == 0.0


@pytest.mark.parametrize("order", [2.0, math.inf])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_is_not_lost(order: float, bad: float) -> None:
    for n in (10, 300_000):
        tensor = torch.ones(n)
        tensor[n // 2] = bad
        total = float(power_sum([torch.ones(5), tensor], order))
        assert math.isnan(total) if math.isnan(bad) else math.isinf(total)


def test_gradients_are_only_read() -> None:
    tensors = [torch.randn(100), torch.randn(200_000)]
    before = [t.clone() for t in tensors]
    for order in (1.0, 2.0, 3.0, math.inf):
        power_sum(tensors, order)
    assert all(torch.equal(t, b) for t, b in zip(tensors, before, strict=True))


@pytest.mark.parametrize("n", [100, 9_000, 70_000, 300_000])
def test_alignment_does_not_change_one_bit(n: int) -> None:
    """Replicas hold the same gradient at different addresses, and must clip it by the same factor."""
    values = torch.randn(n)
    padded = torch.zeros(n + 32)
    norms = set()
    for offset in range(32):
        at = padded[offset : offset + n]
        at.copy_(values)
        norms.add(float(power_sum([at], 2.0)))
    assert len(norms) == 1


def test_how_tensors_are_cut_does_not_change_one_bit() -> None:
    """Rounded once, from fp64: 300 random partitions of the same elements give the same fp32 norm."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(300_000, generator=generator)
    norms = set()
    for _ in range(300):
        cuts = torch.randint(0, len(values), (9,), generator=generator).sort().values.tolist()
        parts = [values[a:b].clone() for a, b in zip([0, *cuts], [*cuts, len(values)], strict=True)]
        order = torch.randperm(len(parts), generator=generator).tolist()
        norms.add(float(power_sum([parts[i] for i in order], 2.0).sqrt().float()))
    assert len(norms) == 1
