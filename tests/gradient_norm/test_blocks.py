"""Large gradients on a CPU: squared in fixed blocks, as fast as memory, and in fp64 where blocks would lose digits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode

import sonde
from sonde.gradient_norm.global_norm import global_norm
from sonde.gradient_norm.plan import NormPlan
from sonde.gradient_norm.power_sums import block_length, is_read_in_blocks, power_sum
from tests.ranks import Ranks, mesh_of


def with_gradient(gradient: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient
    return parameter


def norm_of(*gradients: Tensor, **options: Any) -> float:
    return float(sonde.clip_grad_norm_([with_gradient(g) for g in gradients], None, **options))


class LargestBuffer(TorchDispatchMode):
    """The most elements that one operation returned in memory of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = {t.untyped_storage().data_ptr() for t in args if isinstance(t, Tensor)}
        for t in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in inputs:
                self.elements = max(self.elements, t.untyped_storage().nbytes() // t.element_size())
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "shape", [(512, 1024), (300, 700), (64, 256), (2, 40_000), (8192,), (10_007,), (2048, 8)], ids=str
)
def test_blocks_are_as_exact_as_fp32_needs(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    gradient = torch.randn(shape).to(dtype)
    assert is_read_in_blocks(gradient)
    exact = float(gradient.double().square().sum())
    # Elements far smaller than a block's sum so far are rounded off; in half precision, more of them fall on one side.
    assert float(power_sum([gradient], 2.0, in_blocks=True)) == pytest.approx(exact, rel=1e-7)


@pytest.mark.parametrize("columns", [1024, 257, 511, 1000, 1600, 2053, 2880, 50257])
def test_large_gradients_are_not_converted(columns: int) -> None:
    """A pass in fp64 would return 128k elements of fp64 at a time."""
    parameter = with_gradient(torch.randn(2**20 // columns, columns))
    with LargestBuffer() as seen:
        sonde.clip_grad_norm_(parameter, None)
    assert seen.elements <= max(2**20 // 128, 1000)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_convolutions_are_not_converted(memory_format: torch.memory_format) -> None:
    """The last dim is too short for a block. All dims but the first are one row of blocks."""
    gradient = torch.randn(512, 256, 3, 3).to(memory_format=memory_format)
    exact, parameter = float(gradient.double().norm()), with_gradient(gradient)
    with LargestBuffer() as seen:
        norm = float(sonde.clip_grad_norm_(parameter, None))
    assert norm == pytest.approx(exact, rel=1e-7)
    assert seen.elements <= gradient.numel() // 128


def test_blocks_divide_the_last_dim_and_its_usual_shards() -> None:
    for size in range(1, 6000):
        length = block_length(size)
        assert length == 0 or (size % length == 0 and 128 <= length <= 2048)
        assert length == 256 or size % 256 != 0
    for size in (640, 960, 1600, 2000, 2880, 4304, 50304):
        assert block_length(size // 2) == block_length(size // 4) == block_length(size)
    assert block_length(2053) == 0  # a prime number


@pytest.mark.parametrize(
    "gradient",
    [
        torch.randn(2048, 1024).t(),
        torch.randn(64, 512, 3, 30).to(memory_format=torch.channels_last),
        torch.randn(1, 1024).expand(1024, 1024),
        torch.randn(1024, 2048)[:, ::2],
        torch.randn(1, 1, 1).expand(300, 1, 3000),
    ],
    ids=["transposed", "channels last", "expanded", "every second column", "one number"],
)
def test_gradients_of_any_strides_are_read_without_a_copy(gradient: Tensor) -> None:
    exact, parameter = float(gradient.double().norm()), with_gradient(gradient)
    with LargestBuffer() as seen:
        norm = float(sonde.clip_grad_norm_(parameter, None))
    assert norm == pytest.approx(exact, rel=1e-7)
    assert seen.elements <= 2**17 < gradient.numel()


@pytest.mark.parametrize("size", [2048, 2880])
def test_no_cut_on_a_block_border_changes_one_bit(size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(192, size, generator=generator)
    sums: list[float] = []
    for _ in range(200):
        rows = torch.randint(0, 193, (5,), generator=generator).sort().values.tolist()
        n_shards = 2 ** int(torch.randint(0, 4, (), generator=generator))
        columns = list(range(size // n_shards, size, size // n_shards))
        padded = torch.zeros(192 * size + 16)
        parts = []
        for a, b in zip([0, *rows], [*rows, 192], strict=True):
            for c, d in zip([0, *columns], [*columns, size], strict=True):
                part = whole[a:b, c:d]
                offset = int(torch.randint(0, 16, (), generator=generator))  # shards lie anywhere in a flat buffer
                parts.append(padded[offset : offset + part.numel()].view(part.shape).clone().copy_(part))
        sums.append(float(power_sum([p for p in parts if p.numel()], 2.0, in_blocks=True)))
    assert len(set(torch.tensor(sums, dtype=torch.float64).sqrt().float().tolist())) == 1
    # The order of the sum in fp64 differs, the norms of the blocks do not: a cut inside a block would change 1e-10.
    assert max(sums) / min(sums) - 1 < 1e-13


def _any_cut(*inner: int) -> list[float]:
    mesh = mesh_of((2, 2), ("a", "b"))
    gradient = torch.randn(130, *inner, generator=torch.Generator().manual_seed(1))
    cuts: list[list[Any]] = [
        [Replicate(), Replicate()],
        [Shard(0), Replicate()],
        [Shard(0), Shard(0)],
        [Shard(0), Shard(1)],
        [Replicate(), Shard(1)],
    ]
    norms = [norm_of(gradient)]
    for cut in cuts:
        p = nn.Parameter(distribute_tensor(torch.zeros_like(gradient), mesh, cut))
        p.grad = distribute_tensor(gradient, mesh, cut)
        assert is_read_in_blocks(p.grad)
        norms.append(float(sonde.clip_grad_norm_(p, None, mesh=mesh)))
    return norms


@pytest.mark.parametrize("inner", [(1024,), (1000,), (2880,), (512, 3, 3), (6, 1000)], ids=str)
def test_the_norm_does_not_depend_on_the_ranks(ranks4: Ranks, inner: tuple[int, ...]) -> None:
    assert len({norm for norms in ranks4(_any_cut, *inner) for norm in norms}) == 1


def _cut_inside_a_block() -> float:
    mesh = mesh_of((2,))
    gradient = torch.randn(600, 257, generator=torch.Generator().manual_seed(1))
    p = nn.Parameter(distribute_tensor(torch.zeros_like(gradient), mesh, [Shard(1)]))
    p.grad = distribute_tensor(gradient, mesh, [Shard(1)])
    return float(sonde.clip_grad_norm_(p, None, mesh=mesh)) / float(gradient.double().norm())


def test_cuts_inside_a_block_change_the_eighth_digit_at_most(ranks2: Ranks) -> None:
    for ratio in ranks2(_cut_inside_a_block):
        assert ratio == pytest.approx(1.0, rel=1e-7)


@pytest.mark.parametrize("size", [1e30, 1e-30, 1e-22, 0.0])
def test_squares_beyond_fp32_are_measured_again(size: float) -> None:
    gradient = size * torch.randn(512, 512)
    exact = float(gradient.double().norm())
    assert float(global_norm(NormPlan([with_gradient(gradient)]), 2.0).norm) == pytest.approx(exact, rel=1e-8, abs=0)
    # A part of the model that is tiny is measured again, beside one that is not.
    plan = NormPlan([with_gradient(gradient), with_gradient(torch.randn(300, 300))], parts=[0, 1])
    assert float(global_norm(plan, 2.0).by_part[0]) == pytest.approx(exact, rel=1e-8, abs=0)


def test_what_is_not_finite_stays_so() -> None:
    for bad in (math.inf, math.nan):
        gradient = torch.randn(512, 512)
        gradient[3, 5] = bad
        assert str(norm_of(gradient)) == str(bad)


def _huge_on_one_rank(size: float) -> list[Any]:
    """Only rank 1's shard leaves the range of fp32, and only this rank reads it again."""
    mesh, rank = mesh_of((2,)), dist.get_rank()
    local = torch.randn(256, 512, generator=torch.Generator().manual_seed(rank)) * (size if rank else 1.0)
    whole = torch.cat([torch.randn(256, 512, generator=torch.Generator().manual_seed(r)).double() for r in range(2)])
    whole[256:] *= size
    p = nn.Parameter(distribute_tensor(torch.zeros(512, 512), mesh, [Shard(0)]))
    p.grad = distribute_tensor(torch.zeros(512, 512), mesh, [Shard(0)])
    p.grad.to_local().copy_(local)
    results = []
    for on in (mesh, None):
        with CommDebugMode() as counted:
            norm = float(sonde.clip_grad_norm_(p, None, mesh=on))
        results += [norm / float(whole.norm()), counted.get_total_counts()]
    return results


@pytest.mark.parametrize("size", [1.0, 1e25])
def test_a_shard_beyond_fp32_takes_no_collective_more(ranks2: Ranks, size: float) -> None:
    for with_mesh, n_with_mesh, without, n_without in ranks2(_huge_on_one_rank, size):
        assert with_mesh == pytest.approx(1.0, rel=1e-6)
        assert without == pytest.approx(1.0, rel=1e-6)
        assert n_with_mesh == n_without == 1


def test_other_orders_are_read_in_fp64() -> None:
    gradient = torch.randn(512, 512)
    for order in (1.0, 3.0):
        norm = global_norm(NormPlan([with_gradient(gradient)]), order).norm
        assert float(norm**order) == pytest.approx(float(power_sum([gradient], order)), rel=1e-14)
