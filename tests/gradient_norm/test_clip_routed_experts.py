"""Expert parallelism as mixtures of experts are trained: tokens travel by all-to-all, parameters are fully sharded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

import sonde
from tests.gradient_norm.routed_experts import exact_gradients, experts_and_fsdp
from tests.ranks import Ranks
from tests.sharded import ORDERS, norm_of, whole


def _clipped(dim: int | None, with_mesh: bool) -> dict[str, Any]:
    cut = experts_and_fsdp(dim=dim)
    mesh = cut.mesh if with_mesh else None
    norms, counts = [], []
    for order in ORDERS:
        with CommDebugMode() as counted:
            norms.append(float(sonde.clip_grad_norm_(cut.parameters.items(), None, order, mesh=mesh)))
        counts.append(counted.get_total_counts())
    sonde.clip_grad_norm_(cut.parameters.items(), 0.05, mesh=mesh)
    grads = {n: p.grad for n, p in cut.parameters.items() if p.grad is not None}
    meshes = {g.device_mesh.shape for g in grads.values() if isinstance(g, DTensor)}
    return {"norms": norms, "counts": counts, "clipped": {n: whole(g) for n, g in grads.items()}, "meshes": meshes}


@pytest.mark.parametrize("with_mesh", [True, False])
@pytest.mark.parametrize("dim", [0, 1, None])
def test_fully_sharded_experts_with_routed_tokens(ranks4: Ranks, dim: int | None, with_mesh: bool) -> None:
    exact = exact_gradients()
    total = norm_of(exact, 2.0)
    assert total > 0.2
    results = ranks4(_clipped, dim, with_mesh)
    assert all(r["norms"] == results[0]["norms"] for r in results)
    for norm, order in zip(results[0]["norms"], ORDERS, strict=True):
        assert norm == pytest.approx(norm_of(exact, order), rel=1e-6)
    assert results[0]["counts"] == [1] * len(ORDERS)
    assert results[0]["meshes"] == {(4,), (2,) if dim is None else (2, 2)}  # what torch's own function refuses
    for name, gradient in results[0]["clipped"].items():
        torch.testing.assert_close(gradient.double(), exact[name] * 0.05 / total, rtol=1e-4, atol=1e-8)
    assert set(results[0]["clipped"]) == set(exact)
