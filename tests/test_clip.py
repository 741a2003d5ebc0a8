from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import sonde
from tests.ranks import Ranks


def gradients(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    parameters = [nn.Parameter(torch.randn(s, dtype=dtype)) for s in shapes]
    for p in parameters:
        p.grad = torch.randn_like(p)
    return parameters


def copies(parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    others = [nn.Parameter(p.detach().clone()) for p in parameters]
    for p, q in zip(parameters, others, strict=True):
        q.grad = None if p.grad is None else p.grad.clone()
    return others


@pytest.mark.parametrize("max_norm", [0.0, 0.5, 1e6, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_as_torch(max_norm: float, dtype: torch.dtype) -> None:
    ours = gradients((7, 3), (1000,), (), (90, 110), dtype=dtype)
    theirs = copies(ours)
    got = sonde.clip_grad_norm_(ours, max_norm)
    expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm)
    assert got.dtype == expected.dtype
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-6, atol=0)


def test_large_gradients_are_clipped_to_the_norm_asked_for() -> None:
    parameters = gradients((4096, 2048))
    exact = float(parameters[0].grad.double().norm())  # type: ignore[union-attr]
    assert float(sonde.clip_grad_norm_(parameters, 1.0)) == pytest.approx(exact, rel=1e-7)
    assert float(parameters[0].grad.double().norm()) == pytest.approx(1.0, rel=1e-6)  # type: ignore[union-attr]


def test_huge_gradients_are_clipped_and_not_zeroed() -> None:
    """Their squares overflow in fp32: torch's norm is infinite, and its clip sets everything to 0."""
    parameters = gradients((400, 300))
    for p in parameters:
        p.grad.mul_(1e30)  # type: ignore[union-attr]
    theirs = copies(parameters)
    sonde.clip_grad_norm_(parameters, 1.0)
    assert float(parameters[0].grad.norm()) == pytest.approx(1.0, rel=1e-5)  # type: ignore[union-attr]
    torch.nn.utils.clip_grad_norm_(theirs, 1.0)
    assert float(theirs[0].grad.norm()) == 0.0  # type: ignore[union-attr]  # if this fails, torch has mended it


def test_single_tensor_generator_missing_and_repeated() -> None:
    a, b = gradients((3,), (4,))
    alone = float(a.grad.norm())  # type: ignore[union-attr]
    assert float(sonde.clip_grad_norm_(a, 1e6)) == pytest.approx(alone)
    both = math.hypot(alone, float(b.grad.norm()))  # type: ignore[union-attr]
    untouched = nn.Parameter(torch.ones(2))
    assert float(sonde.clip_grad_norm_((p for p in (a, b, untouched)), 1e6)) == pytest.approx(both)
    assert untouched.grad is None
    assert float(sonde.clip_grad_norm_([a, a, b], 1e6)) == pytest.approx(both)  # tied weights count once
    assert float(sonde.clip_grad_norm_([untouched], 1.0)) == 0.0


@pytest.mark.parametrize("max_norm", [-1.0, math.nan])
def test_refuses_a_bad_threshold(max_norm: float) -> None:
    (p,) = gradients((3,))
    before = p.grad.clone()  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"max_norm must be ≥ 0, got .*: use math.inf to measure"):
        sonde.clip_grad_norm_(p, max_norm)
    assert torch.equal(p.grad, before)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_not_finite(bad: float) -> None:
    a, b = gradients((3,), (4,))
    a.grad[0] = bad  # type: ignore[index]
    before = b.grad.clone()  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match=rf"the gradient norm is {bad}"):
        sonde.clip_grad_norm_([a, b], 1.0, error_if_nonfinite=True)
    assert torch.equal(b.grad, before)  # type: ignore[arg-type]
    assert not math.isfinite(float(sonde.clip_grad_norm_([a, b], math.inf)))


def _sharded() -> tuple[float, list[float]]:
    mesh = init_device_mesh("cpu", (2,))
    p = nn.Parameter(distribute_tensor(torch.ones(5), mesh, [Shard(0)]))  # 3 on one rank, 2 on the other
    p.grad = distribute_tensor(torch.full((5,), 2.0), mesh, [Shard(0)])
    norm = sonde.clip_grad_norm_(p, 1.0)
    return float(norm), p.grad.full_tensor().tolist()  # type: ignore[attr-defined]


def test_sharded_gradients_are_clipped_by_the_norm_of_all_shards(ranks2: Ranks) -> None:
    for norm, clipped in ranks2(_sharded):
        assert norm == pytest.approx(math.sqrt(20), rel=1e-7)
        assert clipped == pytest.approx([2 / math.sqrt(20)] * 5, rel=1e-6)


def test_returns_a_tensor_without_waiting() -> None:
    assert isinstance(sonde.clip_grad_norm_(gradients((3,)), 1.0), Tensor)
