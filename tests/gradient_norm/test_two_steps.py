"""The norm now and the clip later: `get_total_norm` and `clip_grads_with_norm_`."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode

import sonde
from tests.gradient_norm.placed_gradients import noise, plain
from tests.ranks import Ranks, mesh_of
from tests.sharded import ORDERS, WAYS, exact_gradients, norm_of, whole


@pytest.mark.parametrize("order", [0.5, 1.0, 2.0, 3.0, 6.0, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_norm_is_torchs_and_changes_nothing(order: float, dtype: torch.dtype) -> None:
    tensors = [noise(k, *s).to(dtype) for k, s in enumerate(((7, 3), (), (300, 400)))]
    before = [t.clone() for t in tensors]
    norm = sonde.get_total_norm(tensors, order)
    assert norm.dtype == dtype
    expected = torch.nn.utils.get_total_norm([t.double() for t in tensors], order)  # in fp32, torch is 2e-5 off
    torch.testing.assert_close(norm.double(), expected, rtol=1e-6, atol=0)
    assert all(torch.equal(t, b) and t.grad is None for t, b in zip(tensors, before, strict=True))
    tensors[0][0, 0] = math.nan
    assert math.isnan(sonde.get_total_norm(tensors, order))
    with pytest.raises(RuntimeError, match=r"the gradient norm is nan: .*error_if_nonfinite=False"):
        sonde.get_total_norm(tensors, order, error_if_nonfinite=True)


def _on_ranks(way: str) -> dict[str, Any]:
    cut = WAYS[way][1]()
    norms, counts = [], []
    for order in ORDERS:
        named = [(n, p.grad) for n, p in cut.parameters.items() if p.grad is not None]
        groups = [name.split(".")[0] for name, _ in named]
        with CommDebugMode() as counted:
            norm, by_group = sonde.get_total_norm(
                named, order, mesh=cut.mesh, pp_mesh=cut.pp_mesh, replicas=cut.replicas, by_group=groups
            )
        norms.append((float(norm), {name: float(value) for name, value in by_group.items()}))
        counts.append(counted.get_total_counts())
    plan = sonde.group_parameters_for_norm(
        cut.parameters.items(), mesh=cut.mesh, pp_mesh=cut.pp_mesh, replicas=cut.replicas
    )
    norm = sonde.get_total_norm(plan)
    sonde.clip_grads_with_norm_(plan, 0.05, norm)
    after = {n: whole(p.grad) for n, p in cut.parameters.items() if p.grad is not None}
    return {"norms": norms, "counts": counts, "planned": float(norm), "after": after, "partial": cut.partial}


@pytest.mark.parametrize("way", ["DDP", "FSDP2", "TP with sequence parallelism", "FSDP2 over TP", "EP, plain experts"])
def test_on_ranks_the_norm_and_its_groups_are_those_of_one_process(request: pytest.FixtureRequest, way: str) -> None:
    exact = exact_gradients(experts=way.startswith("EP"))
    if way == "TP with sequence parallelism":
        exact = {n: g for n, g in exact.items() if n != "front.scale"}
    results = request.getfixturevalue(f"ranks{WAYS[way][0]}")(_on_ranks, way)
    for rank, result in enumerate(results):
        assert result["norms"] == results[0]["norms"]
        assert result["counts"] == [1 + result["partial"]] * len(ORDERS)
        for order, (norm, by_group) in zip(ORDERS, result["norms"], strict=True):
            assert norm == pytest.approx(norm_of(exact, order), rel=1e-6)
            for group in ("front", "back"):
                part = {n: g for n, g in exact.items() if n.startswith(group)}
                assert by_group[group] == pytest.approx(norm_of(part, order), rel=1e-6)
        assert result["planned"] == result["norms"][ORDERS.index(2.0)][0]
        for name, gradient in result["after"].items():
            reference = exact[name]
            if way == "EP, plain experts" and name == "back.experts.w":
                reference = reference[rank % 2 : rank % 2 + 1]
            torch.testing.assert_close(gradient.double(), reference * 0.05 / norm_of(exact, 2.0), rtol=1e-4, atol=1e-8)


def test_one_call_and_two_steps_give_the_same_bits() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        grad = torch.randn(37, generator=generator)
        threshold = float(torch.rand((), generator=generator)) + 0.1
        together, ours, theirs = (plain(grad) for _ in range(3))
        norm = sonde.clip_grad_norm_([together], threshold)
        sonde.clip_grads_with_norm_([ours], threshold, sonde.get_total_norm([grad]))
        torch.nn.utils.clip_grads_with_norm_([theirs], threshold, norm)
        assert torch.equal(together.grad, ours.grad)  # type: ignore[arg-type]
        assert torch.equal(together.grad, theirs.grad)  # type: ignore[arg-type]


def _overflows_on_one_rank() -> str:
    """fp64 gradients on rank 1: the norm is finite there, and infinite in fp32."""
    dtype = torch.float64 if dist.get_rank() else torch.float32
    gradient = torch.full((4,), 1e38 * (10 if dist.get_rank() else 1), dtype=dtype)
    mesh = mesh_of((2,), ("pp",))
    try:
        return str(float(sonde.get_total_norm([gradient], error_if_nonfinite=True, mesh=mesh, pp_mesh=mesh)))
    except RuntimeError as error:
        return str(error)


def test_an_overflow_in_fp32_is_told_from_gradients_that_are_not_finite(ranks2: Ranks) -> None:
    first, second = ranks2(_overflows_on_one_rank)
    assert "the gradient norm is inf" in first
    assert "gradients of another rank are not, or it overflows in fp32" in second
