from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from sonde.batch_size.taps.metric import add_parts, norm_parts, norms_of_rows


def sq_norm(grad: Tensor) -> float:
    return float(sq_norms([grad])[0])


def sq_norms(grads: list[Tensor]) -> Tensor:
    return add_parts(len(grads), norm_parts(range(len(grads)), grads, 2), torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (1,), (0,), (7, 3), (8191,), (8192,), (33, 1000), (3, 5, 7, 200)], ids=str)
def test_norm_is_exact_to_fp32(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    grad = torch.randn(shape, dtype=torch.float64).to(dtype)
    expected = float(grad.double().norm())
    # 8191 elements added in fp32 lanes are off by a few 1e-7; fp64 gradients are not rounded to fp32.
    rel = 1e-14 if dtype == torch.float64 else 2e-6
    assert sq_norm(grad) == pytest.approx(expected**2, rel=2 * rel)
    assert float(norms_of_rows(grad).double().square().sum()) == pytest.approx(expected**2, rel=2 * rel)


def test_a_large_norm_is_exact() -> None:
    """torch's flat fp32 sum is off by about 8e-4 here."""
    grad = torch.randn(4096, 4096)
    expected = float(grad.double().norm())
    assert sq_norm(grad) == pytest.approx(expected**2, rel=2e-7)
    assert abs(float(torch.linalg.vector_norm(grad)) / expected - 1) > 1e-5  # if this fails, torch has mended it


@pytest.mark.parametrize("layout", ["transposed", "channels_last", "sliced", "expanded"])
def test_any_memory_layout(layout: str) -> None:
    grad = {
        "transposed": lambda: torch.randn(200, 301).t(),
        "channels_last": lambda: torch.randn(4, 8, 32, 33).to(memory_format=torch.channels_last),
        "sliced": lambda: torch.randn(200, 301)[::2, 1:],
        "expanded": lambda: torch.randn(1, 100).expand(300, 100),
    }[layout]()
    assert sq_norm(grad) == pytest.approx(float(grad.double().norm()) ** 2, rel=2e-6)


def test_sparse_duplicates_add_up_before_they_are_squared() -> None:
    grad = torch.sparse_coo_tensor(torch.tensor([[1, 1, 3]]), torch.ones(3, 2), (5, 2), check_invariants=True)
    assert sq_norm(grad) == pytest.approx(float(grad.to_dense().norm()) ** 2)
    assert sq_norm(grad) == pytest.approx(10)


def test_non_finite_is_not_lost() -> None:
    for bad in (float("nan"), float("inf"), float("-inf")):
        for n in (10, 10_000):
            grad = torch.ones(n)
            grad[-1] = bad
            assert not math.isfinite(sq_norm(grad))


def test_norms_of_mixed_gradients_keep_their_order() -> None:
    grads = [torch.ones(3), torch.ones(20_000), torch.ones(5, dtype=torch.float64), torch.ones(0)]
    assert [float(n) for n in sq_norms(grads)] == pytest.approx([3, 20_000, 5, 0])
    assert sq_norms([]).tolist() == []


def test_squares_are_added_by_owner() -> None:
    parts = [
        ((2,), torch.tensor([[1.0, 2.0], [3.0, 0.0]])),
        ((0, 4), torch.tensor([5.0, 6.0])),
        ((2,), torch.tensor(1.0)),
    ]
    assert add_parts(5, parts, torch.device("cpu")).tolist() == [25.0, 0.0, 15.0, 0.0, 36.0]
    assert add_parts(2, [], torch.device("cpu")).tolist() == [0.0, 0.0]
