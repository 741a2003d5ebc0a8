"""What PyTorch's own tests ask of its clip, asked of ours: the same norms, the same scaling, the same errors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sonde
from tests.ranks import Ranks
from tests.sharded import WAYS, exact_gradients, whole

ORDERS = [0.5, 1.5, 2, 4, "inf"]
FOREACH = [None, True, False]


def with_gradients(*gradients: Tensor) -> list[nn.Parameter]:
    parameters = [nn.Parameter(torch.zeros_like(g)) for g in gradients]
    for p, g in zip(parameters, gradients, strict=True):
        p.grad = g.clone()
    return parameters


def grads_of(parameters: list[nn.Parameter]) -> list[Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


def norm_of(parameters: list[nn.Parameter], order: float | str) -> float:
    return float(torch.cat([g.double().flatten() for g in grads_of(parameters)]).norm(float(order)))


@pytest.mark.parametrize("foreach", FOREACH)
@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_all_elements_are_scaled_alike_down_to_the_threshold(order: Any, foreach: bool | None) -> None:
    ramp, flat = torch.arange(1.0, 101.0).view(10, 10), torch.ones(10) / 1000
    parameters = with_gradients(ramp, flat)
    before = norm_of(parameters, order)
    norm = sonde.clip_grad_norm_(parameters, 2, norm_type=order, foreach=foreach)
    after = norm_of(parameters, order)
    assert float(norm) == pytest.approx(before, rel=1e-6)
    assert after == pytest.approx(2.0, rel=1e-5)
    assert after <= before
    factors = torch.cat([(p / g).flatten() for p, g in zip(grads_of(parameters), (ramp, flat), strict=True)])
    assert float(factors.std()) == pytest.approx(0.0, abs=1e-7)


@pytest.mark.parametrize("foreach", FOREACH)
@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_small_gradients_are_left_as_they_are(order: Any, foreach: bool | None) -> None:
    gradients = [torch.rand(10, 10) / 10_000, torch.ones(10) / 500_000]
    parameters = with_gradients(*gradients)
    sonde.clip_grad_norm_(parameters, 2, norm_type=order, foreach=foreach)
    assert all(torch.equal(p, g) for p, g in zip(grads_of(parameters), gradients, strict=True))


def test_one_tensor_is_as_good_as_a_list_of_it() -> None:
    gradient = torch.randn(10)
    (alone,), (listed,) = with_gradients(gradient), with_gradients(gradient)
    assert torch.equal(sonde.clip_grad_norm_(alone, 0.5), sonde.clip_grad_norm_([listed], 0.5))
    assert torch.equal(alone.grad, listed.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("order", [0.1, 1, 2, 3.5, math.inf], ids=str)
@pytest.mark.parametrize("foreach", FOREACH)
@pytest.mark.parametrize(
    ("factor", "where"),
    [(1.0, None), (0.0, None), (math.nan, 0), (math.inf, 1), (-math.inf, None), (math.nan, None)],
    ids=["finite", "zero", "one nan", "one inf", "all −inf", "all nan"],
)
def test_errors_only_where_asked_and_not_finite(
    order: float, foreach: bool | None, factor: float, where: int | None
) -> None:
    gradients = [torch.rand(2, 3) + 1, torch.rand(4) + 1]
    for k in range(2) if where is None else [where]:
        gradients[k] = gradients[k] * factor
    parameters = with_gradients(*gradients)
    if math.isfinite(factor):
        norm = sonde.clip_grad_norm_(parameters, 1.0, order, error_if_nonfinite=True, foreach=foreach)
        assert math.isfinite(norm)
        return
    with pytest.raises(RuntimeError, match=r"the gradient norm is (nan|inf)"):
        sonde.clip_grad_norm_(parameters, 1.0, order, error_if_nonfinite=True, foreach=foreach)
    for p, g in zip(grads_of(parameters), gradients, strict=True):
        assert torch.equal(p.nan_to_num(7.0), g.nan_to_num(7.0))  # not touched
    theirs = with_gradients(*gradients)
    expected = torch.nn.utils.clip_grad_norm_(theirs, 1.0, order, error_if_nonfinite=False, foreach=foreach)
    norm = sonde.clip_grad_norm_(parameters, 1.0, order, error_if_nonfinite=False, foreach=foreach)
    torch.testing.assert_close(norm, expected, equal_nan=True)
    for p, q in zip(grads_of(parameters), grads_of(theirs), strict=True):
        torch.testing.assert_close(p, q, equal_nan=True)


@pytest.mark.parametrize("foreach", FOREACH)
def test_no_gradients_have_a_norm_of_0(foreach: bool | None) -> None:
    assert float(sonde.clip_grad_norm_([nn.Parameter(torch.ones(2))], 1.0, foreach=foreach)) == 0.0
    assert float(sonde.get_total_norm([], foreach=foreach)) == 0.0


def _sharded(way: str, order: float) -> tuple[float, dict[str, Tensor]]:
    cut = WAYS[way][1]()
    norm = sonde.clip_grad_norm_(cut.parameters.values(), 0.05, order, foreach=True)
    return float(norm), {n: whole(p.grad) for n, p in cut.parameters.items() if p.grad is not None}


@pytest.mark.parametrize("order", [2, 1, math.inf], ids=str)
@pytest.mark.parametrize("way", ["FSDP2", "FSDP2 on 4 ranks", "FSDP2 over TP"], ids=["1-D", "1-D, 4 ranks", "2-D"])
def test_a_sharded_clip_is_torchs_clip_of_the_whole(request: pytest.FixtureRequest, way: str, order: float) -> None:
    reference = with_gradients(*exact_gradients().values())
    expected = torch.nn.utils.clip_grad_norm_(reference, 0.05, order)
    for norm, clipped in request.getfixturevalue(f"ranks{WAYS[way][0]}")(_sharded, way, order):
        assert norm == pytest.approx(float(expected), rel=1e-6)
        for name, q in zip(exact_gradients(), grads_of(reference), strict=True):
            torch.testing.assert_close(clipped[name].double(), q, rtol=1e-4, atol=1e-8)


def test_under_ddp_each_rank_clips_by_itself(ranks2: Ranks) -> None:
    reference = with_gradients(*exact_gradients().values())
    expected = float(torch.nn.utils.clip_grad_norm_(reference, 0.05))
    assert [norm for norm, _ in ranks2(_sharded, "DDP", 2.0)] == pytest.approx([expected] * 2, rel=1e-6)
