"""Σ|x|^p of local tensors: in fp64, or in fixed blocks as fast as memory, unless blocks would lose digits."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode

import sonde
from sonde.gradient_norm.power_sums import block_length, is_read_in_blocks, power_sum
from tests.gradient_norm.placed_gradients import noise, plain
from tests.ranks import Ranks, mesh_of


def exact(tensors: list[Tensor], order: float = 2.0) -> float:
    joined = torch.cat([t.reshape(-1).double() for t in tensors] or [torch.zeros(0)])
    if math.isinf(order):
        return float(joined.abs().max()) if joined.numel() else 0.0
    return math.fsum((joined.abs() ** order).tolist())


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


SMALL = [(3,), (0,), (), (40_000,), (7, 5), (500, 301), (0, 4), (1,), *[(16, 9)] * 20]
STRIDED = [
    torch.randn(30, 40).t(),
    torch.randn(10, dtype=torch.float64),
    torch.randn(8, 12).bfloat16()[::2],
    torch.randn(1, 6).expand(5, 6),
]


@pytest.mark.parametrize("order", [0.5, 1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_small_large_empty_and_uneven(order: float, dtype: torch.dtype) -> None:
    tensors = [noise(k, *s).to(dtype) for k, s in enumerate(SMALL)]
    before = [t.clone() for t in tensors]
    assert float(power_sum(tensors, order)) == pytest.approx(exact(tensors, order), rel=1e-13)
    assert all(torch.equal(t, b) for t, b in zip(tensors, before, strict=True))
    assert float(power_sum(STRIDED, order)) == pytest.approx(exact(STRIDED, order), rel=1e-13)
    assert float(power_sum([], order)) == float(power_sum([torch.zeros(0), torch.zeros(3, 0)], order)) == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "shape",
    [(512, 1024), (300, 700), (64, 256), (2, 40_000), (8192,), (10_007,), (2048, 8), (2, 2**20), (512, 0), (7, 0, 3)],
    ids=str,
)
def test_blocks_are_as_exact_as_fp32_needs(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Joined with others of their shape or not, in one piece or converted in several."""
    gradients = [noise(k, *shape).to(dtype) for k in range(3)]
    assert is_read_in_blocks(gradients[0]) == (0 not in shape)
    # Elements far smaller than a block's sum so far are rounded off; in half precision, more of them fall on one side.
    assert float(power_sum(gradients, 2.0, in_blocks=True)) == pytest.approx(exact(gradients), rel=1e-7)


@pytest.mark.parametrize("in_blocks", [True, False])
@pytest.mark.parametrize("size", [1e30, 1e-30, 1e-22, 0.0])
def test_squares_beyond_fp32_are_measured_again(size: float, in_blocks: bool) -> None:
    tensors = [torch.randn(3, 5) * size, torch.randn(512, 512) * size]
    assert float(power_sum(tensors, 2.0, in_blocks=in_blocks)) == pytest.approx(exact(tensors), rel=1e-8, abs=0)


@pytest.mark.parametrize("in_blocks", [True, False])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_not_lost(bad: float, in_blocks: bool) -> None:
    for order in (2.0, math.inf):
        for n in (10, 300_000):
            tensor = torch.ones(n).index_fill(0, torch.tensor([n // 2]), bad)
            assert str(float(power_sum([torch.ones(5), tensor], order, in_blocks=in_blocks))) == str(bad)


def test_memory_that_is_kept_serves_in_and_out_of_inference_mode() -> None:
    """Each thread keeps some, made at its first use."""
    found = []

    def twice() -> None:
        for mode in (True, False):
            with torch.inference_mode(mode):
                found.append(float(power_sum([torch.ones(8, 2048)] * 2, 2.0, in_blocks=True)))

    thread = threading.Thread(target=twice)
    thread.start()
    thread.join()
    assert found == [2 * 8 * 2048] * 2


LAYOUTS = {
    **{f"{n} columns": torch.randn(2**20 // n, n) for n in (1024, 257, 511, 1000, 1600, 2053, 2880, 50257)},
    "convolutions": torch.randn(512, 256, 3, 3),
    "channels last": torch.randn(512, 256, 3, 3).to(memory_format=torch.channels_last),
    "channels last, wide": torch.randn(64, 512, 3, 30).to(memory_format=torch.channels_last),
    "transposed": torch.randn(2048, 1024).t(),
    "expanded": torch.randn(1, 1024).expand(1024, 1024),
    "every second column": torch.randn(1024, 2048)[:, ::2],
    "one number": torch.randn(1, 1, 1).expand(300, 1, 3000),
}


@pytest.mark.parametrize("gradient", LAYOUTS.values(), ids=LAYOUTS)
def test_gradients_of_any_strides_are_read_without_a_copy(gradient: Tensor) -> None:
    """What is contiguous in memory is not converted either: that would return 64k elements of fp64 at a time."""
    parameter = nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient
    with LargestBuffer() as seen:
        norm = float(sonde.clip_grad_norm_(parameter, None))
    assert norm == pytest.approx(exact([gradient]) ** 0.5, rel=1e-7)
    has_gaps = gradient.untyped_storage().nbytes() != 4 * gradient.numel()
    assert seen.elements <= (2**17 if has_gaps else max(gradient.numel() // 128, 1000)) < gradient.numel()


def test_blocks_divide_the_last_dim_and_its_usual_shards() -> None:
    for size in range(1, 6000):
        length = block_length(size)
        assert length == 0 or (size % length == 0 and 128 <= length <= 2048)
        assert length == 256 or size % 256 != 0
    for size in (640, 960, 1600, 2000, 2880, 4304, 50304):
        assert block_length(size // 2) == block_length(size // 4) == block_length(size)
    assert block_length(2053) == 0  # a prime number


@pytest.mark.parametrize("n", [100, 9_000, 70_000, 300_000])
def test_alignment_does_not_change_one_bit(n: int) -> None:
    """Replicas hold the same gradient at different addresses, and must clip it by the same factor."""
    values, padded = torch.randn(n), torch.zeros(n + 32)
    norms = set()
    for offset in range(32):
        at = padded[offset : offset + n].copy_(values)
        norms |= {(float(power_sum([at], 2.0)), float(power_sum([at], 2.0, in_blocks=True)))}
    assert len(norms) == 1


def test_how_tensors_are_cut_does_not_change_one_bit() -> None:
    """Rounded once, from fp64: random partitions of the same elements give the same fp32 norm."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(300_000, generator=generator)
    norms = set()
    for _ in range(200):
        cuts = torch.randint(0, len(values), (9,), generator=generator).sort().values.tolist()
        parts = [values[a:b].clone() for a, b in zip([0, *cuts], [*cuts, len(values)], strict=True)]
        order = torch.randperm(len(parts), generator=generator).tolist()
        norms.add(float(power_sum([parts[i] for i in order], 2.0).sqrt().float()))
    assert len(norms) == 1


@pytest.mark.parametrize("size", [2048, 2880])
def test_no_cut_on_a_block_border_changes_one_bit(size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(192, size, generator=generator)
    sums: list[float] = []
    for _ in range(150):
        rows = torch.randint(0, 193, (5,), generator=generator).sort().values.tolist()
        n_shards = 2 ** int(torch.randint(0, 4, (), generator=generator))
        columns = list(range(size // n_shards, size, size // n_shards))
        parts = [
            whole[a:b, c:d].clone()
            for a, b in zip([0, *rows], [*rows, 192], strict=True)
            for c, d in zip([0, *columns], [*columns, size], strict=True)
        ]
        sums.append(float(power_sum([p for p in parts if p.numel()], 2.0, in_blocks=True)))
    assert len(set(torch.tensor(sums, dtype=torch.float64).sqrt().float().tolist())) == 1
    # The order of the sum in fp64 differs, the norms of the blocks do not: a cut inside a block would change 1e-10.
    assert max(sums) / min(sums) - 1 < 1e-13


def _cut(inner: tuple[int, ...]) -> list[float]:
    mesh = mesh_of((2, 2), ("a", "b"))
    gradient = noise(1, 130, *inner)
    norms = [float(sonde.clip_grad_norm_(plain(gradient), None))]
    for dims in ((None, None), (0, None), (0, 0), (0, 1), (None, 1)):
        cut = [Replicate() if dim is None else Shard(dim) for dim in dims]
        p = nn.Parameter(distribute_tensor(torch.zeros_like(gradient), mesh, cut))
        p.grad = distribute_tensor(gradient, mesh, cut)
        assert is_read_in_blocks(p.grad)
        norms.append(float(sonde.clip_grad_norm_(p, None, mesh=mesh)))
    return [norm / norms[0] for norm in norms]


@pytest.mark.parametrize("inner", [(1024,), (1000,), (2880,), (512, 3, 3), (6, 1000), (257,)], ids=str)
def test_the_norm_does_not_depend_on_the_ranks(ranks4: Ranks, inner: tuple[int, ...]) -> None:
    """A cut inside a block (of 257 columns) changes the eighth digit at most."""
    for ratios in ranks4(_cut, inner):
        assert ratios == (pytest.approx([1.0] * 6, rel=1e-7) if inner == (257,) else [1.0] * 6)


def _huge_on_one_rank(size: float) -> list[Any]:
    """Only rank 1's shard leaves the range of fp32, and only this rank reads it again."""
    mesh, parts = mesh_of((2,)), [noise(0, 256, 512), noise(1, 256, 512) * size]
    p = nn.Parameter(distribute_tensor(torch.zeros(512, 512), mesh, [Shard(0)]))
    p.grad = distribute_tensor(torch.zeros(512, 512), mesh, [Shard(0)])
    p.grad.to_local().copy_(parts[dist.get_rank()])
    results = []
    for on in (mesh, None):
        with CommDebugMode() as counted:
            norm = float(sonde.clip_grad_norm_(p, None, mesh=on))
        results += [norm / exact(parts) ** 0.5, counted.get_total_counts()]
    return results


@pytest.mark.parametrize("size", [1.0, 1e25])
def test_a_shard_beyond_fp32_takes_no_collective_more(ranks2: Ranks, size: float) -> None:
    assert ranks2(_huge_on_one_rank, size) == [pytest.approx([1.0, 1, 1.0, 1], rel=1e-6)] * 2
