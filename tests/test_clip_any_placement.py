"""Properties: whatever the mesh and the placements, it is the dense norm; how gradients are cut changes no bit."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

import sonde
from tests.ranks import Ranks

MESHES = [(4,), (2, 2), (4, 1), (1, 4)]


@dataclass(frozen=True)
class Case:
    """Gradients by seed, each with its shape and where its dims go, per mesh axis: a dim to shard, or None."""

    seed: int
    mesh: tuple[int, ...]
    order: float
    gradients: tuple[tuple[tuple[int, ...], tuple[int | None, ...]], ...]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    mesh = draw(st.sampled_from(MESHES))
    gradients = []
    for _ in range(draw(st.integers(1, 5))):
        shape = tuple(draw(st.lists(st.integers(0, 7), min_size=1, max_size=3)))
        axis = st.one_of(st.none(), st.integers(0, len(shape) - 1))
        gradients.append((shape, tuple(draw(axis) for _ in mesh)))
    order = draw(st.sampled_from([0.5, 1.0, 2.0, 3.0, math.inf]))
    return Case(draw(st.integers(0, 2**31)), mesh, order, tuple(gradients))


def dense(case: Case) -> list[Tensor]:
    generator = torch.Generator().manual_seed(case.seed)
    return [torch.randn(shape, generator=generator) for shape, _ in case.gradients]


def _norms(case: Case) -> tuple[float, float]:
    mesh = init_device_mesh("cpu", case.mesh, mesh_dim_names=("a", "b")[: len(case.mesh)])
    parameters = []
    for gradient, (_, dims) in zip(dense(case), case.gradients, strict=True):
        placements: list[Placement] = [Replicate() if dim is None else Shard(dim) for dim in dims]
        p = nn.Parameter(distribute_tensor(torch.zeros_like(gradient), mesh, placements))
        p.grad = distribute_tensor(gradient, mesh, placements)
        parameters.append(p)
    return tuple(float(sonde.clip_grad_norm_(parameters, None, case.order, mesh=on)) for on in (mesh, None))  # type: ignore[return-value]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases())
def test_random_placements_on_random_meshes_are_the_dense_norm(ranks4: Ranks, case: Case) -> None:
    together = torch.cat([g.flatten().double() for g in dense(case)])
    exact = together.abs().max() if math.isinf(case.order) and together.numel() else None
    if exact is None:
        exact = together.abs().pow(case.order).sum().pow(1 / case.order) if together.numel() else torch.zeros(())
    expected = float(exact.float())
    for with_mesh, without in ranks4(_norms, case):
        # Rounded once, from fp64: the same bits as the dense gradient's, however it is cut.
        assert with_mesh == without == expected
