"""The norm and the clip of a model that is cut over real ranks, beside those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor.debug import CommDebugMode

import sonde
from tests.sharded import ORDERS, WAYS, Cut, exact_gradients, norm_of, whole


def expected_gradients(way: str) -> dict[str, torch.Tensor]:
    exact = exact_gradients(experts=way.startswith("EP"))
    return {n: g for n, g in exact.items() if way != "TP with sequence parallelism" or n != "front.scale"}


@pytest.fixture
def ranks_for(request: pytest.FixtureRequest) -> Any:
    return lambda way: request.getfixturevalue(f"ranks{WAYS[way][0]}")


def _norms(way: str, with_mesh: bool) -> dict[str, Any]:
    cut: Cut = WAYS[way][1]()
    options = {"mesh": cut.mesh, "replicas": cut.replicas} if with_mesh else {}
    found = []
    for order in ORDERS:
        with CommDebugMode() as counted:
            norm = sonde.clip_grad_norm_(cut.parameters.items(), None, order, pp_mesh=cut.pp_mesh, **options)
        found.append((float(norm), counted.get_total_counts()))
    return {"norms": found, "collectives": cut.collectives, "partial": cut.partial}


@pytest.mark.parametrize("with_mesh", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_the_norm_is_that_of_one_process(ranks_for: Any, way: str, with_mesh: bool) -> None:
    if way == "EP, plain experts" and not with_mesh:
        pytest.skip("plain experts need a mesh: nothing else tells that they differ from rank to rank")
    results = ranks_for(way)(_norms, way, with_mesh)
    assert all(r["norms"] == results[0]["norms"] for r in results)  # to the last bit
    for order, (norm, collectives) in zip(ORDERS, results[0]["norms"], strict=True):
        assert norm == pytest.approx(norm_of(expected_gradients(way), order), rel=1e-6)
        assert collectives == (1 if with_mesh else results[0]["collectives"]) + results[0]["partial"]


def _clip(way: str, planned: bool) -> dict[str, Any]:
    cut: Cut = WAYS[way][1]()
    if planned:
        plan = sonde.group_parameters_for_norm(
            cut.parameters.items(), mesh=cut.mesh, pp_mesh=cut.pp_mesh, replicas=cut.replicas, verify=True
        )
        norm = sonde.clip_grad_norm_distributed_(plan, 0.05, 2.0, cut.pp_mesh)
        with CommDebugMode() as counted:
            again = sonde.clip_grad_norm_distributed_(plan, None, 2.0, cut.pp_mesh)
    else:
        options: dict[str, Any] = {"mesh": cut.mesh, "pp_mesh": cut.pp_mesh, "replicas": cut.replicas}
        norm = sonde.clip_grad_norm_(cut.parameters.items(), 0.05, **options)
        with CommDebugMode() as counted:  # partial gradients were written back: they are not reduced again
            again = sonde.clip_grad_norm_(cut.parameters.items(), None, **options)
    # full_tensor is a collective: the same parameters on all ranks of a stage, and those have them in one order.
    clipped = {n: whole(p.grad) for n, p in cut.parameters.items() if p.grad is not None}
    return {"norm": float(norm), "again": float(again), "clipped": clipped, "counts": counted.get_total_counts()}


@pytest.mark.parametrize("planned", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_the_clip_is_that_of_one_process(ranks_for: Any, way: str, planned: bool) -> None:
    exact = expected_gradients(way)
    total = norm_of(exact, 2.0)
    assert total > 0.2  # so that clipping changes something
    seen: set[str] = set()
    for result in ranks_for(way)(_clip, way, planned):
        assert result["norm"] == pytest.approx(total, rel=1e-6)
        assert result["again"] == pytest.approx(0.05, rel=1e-4)  # torch's 1e-6 beside the norm is in it
        assert result["counts"] == 1
        for name, gradient in result["clipped"].items():
            reference = exact[name]
            if name == "back.experts.w" and gradient.shape != reference.shape:
                continue  # this rank's expert alone
            torch.testing.assert_close(gradient.double(), reference * 0.05 / total, rtol=1e-4, atol=1e-8)
            seen.add(name)
    assert seen >= set(exact) - {"back.experts.w"}
