"""Properties: for any mesh and placements the norm is the dense norm, to the last bit."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import sonde
from tests.ranks import Ranks, mesh_of

MESHES = {4: [(4,), (2, 2), (4, 1), (1, 4)], 8: [(8,), (2, 4), (2, 2, 2), (4, 1, 2)]}
Where = int | str | None


@dataclass(frozen=True)
class Case:
    """Gradients drawn by a seed, each with its shape, its placements and whether it is strided.

    A placement on a mesh axis is the dim to shard, "sum", "avg", or None for a copy. A strided gradient is placed as
    FSDP2 places what tensor parallelism has cut along the same dim. With `is_exact`, elements have so few bits that the
    order of summation cannot matter.
    """

    seed: int
    is_exact: bool
    mesh: tuple[int, ...]
    order: float
    gradients: tuple[tuple[tuple[int, ...], tuple[Where, ...], bool], ...]


def cases(n_ranks: int) -> st.SearchStrategy[Case]:
    @st.composite
    def drawn(draw: st.DrawFn) -> Case:
        mesh = draw(st.sampled_from(MESHES[n_ranks]))
        gradients = []
        for _ in range(draw(st.integers(1, 5))):
            shape = tuple(draw(st.lists(st.integers(0, 7), min_size=1, max_size=3)))
            axis = st.one_of(st.none(), st.sampled_from(["sum", "avg"]), st.integers(0, len(shape) - 1))
            where = tuple(draw(axis) for _ in mesh)
            is_strided = len(mesh) == 2 and where[0] == where[1] and isinstance(where[0], int) and draw(st.booleans())
            if is_strided:  # torch only cuts evenly here
                shape = tuple(8 if dim == where[0] else n for dim, n in enumerate(shape))
            gradients.append((shape, where, is_strided))
        order = draw(st.sampled_from([0.5, 1.0, 2.0, 3.0, 6.0, math.inf]))
        return Case(draw(st.integers(0, 2**31)), draw(st.booleans()), mesh, order, tuple(gradients))

    return drawn()


def dense(case: Case) -> list[Tensor]:
    generator = torch.Generator().manual_seed(case.seed)
    shapes = [shape for shape, *_ in case.gradients]
    if case.is_exact:
        return [torch.randint(-512, 513, shape, generator=generator) / 64.0 for shape in shapes]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def part_of(n: int, at: int) -> int:
    """The multiple of a partial gradient that rank `at` of n holds: the multiples add up to 1 without rounding."""
    if n == 1:
        return 1
    return (2, -1)[at] if n == 2 else (1, -1, 1, *[0] * (n - 3))[at]


def _placed(gradient: Tensor, mesh: DeviceMesh, where: tuple[Where, ...], is_strided: bool) -> DTensor:
    sharding: list[Placement] = [Shard(w) if isinstance(w, int) else Replicate() for w in where]
    if is_strided:
        assert isinstance(where[0], int)
        sharding[0] = _StridedShard(where[0], split_factor=mesh.size(1))
    # Each rank cuts its own copy. With a source rank, torch 2.9 pads shards, and fails for shapes with a 0.
    local = distribute_tensor(gradient, mesh, sharding, src_data_rank=None).to_local().clone()
    for axis, w in enumerate(where):
        if isinstance(w, str):
            n = mesh.size(axis)
            local = local * part_of(n, mesh.get_local_rank(axis)) * (n if w == "avg" else 1)
    placements = [Partial(w) if isinstance(w, str) else s for w, s in zip(where, sharding, strict=True)]
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=gradient.shape, stride=gradient.stride())


def _norms(case: Case) -> tuple[float, float]:
    mesh = mesh_of(case.mesh, ("a", "b", "c")[: len(case.mesh)])
    parameters = []
    for gradient, (_, where, is_strided) in zip(dense(case), case.gradients, strict=True):
        p = nn.Parameter(distribute_tensor(torch.zeros_like(gradient), mesh, [Replicate()] * mesh.ndim))
        p.grad = _placed(gradient, mesh, where, is_strided)
        parameters.append(p)
    return tuple(float(sonde.clip_grad_norm_(parameters, None, case.order, mesh=on)) for on in (mesh, None))  # type: ignore[return-value]


def _assert_dense(ranks: Ranks, case: Case) -> None:
    joined = torch.cat([g.flatten().double() for g in dense(case)])
    exact = joined.abs().max() if math.isinf(case.order) and joined.numel() else None
    if exact is None:
        exact = joined.abs().pow(case.order).sum().pow(1 / case.order) if joined.numel() else torch.zeros(())
    expected = float(exact.float())
    for with_mesh, without in ranks(_norms, case):
        # Rounded once, from fp64: the same bits as the dense gradient's, however it is cut.
        assert with_mesh == without == expected


def examples(n: int) -> settings:
    return settings(max_examples=n, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@examples(40)
@given(case=cases(4))
def test_random_placements_on_random_meshes_are_the_dense_norm(ranks4: Ranks, case: Case) -> None:
    _assert_dense(ranks4, case)


@examples(15)
@given(case=cases(8))
def test_random_placements_on_eight_ranks(ranks8: Ranks, case: Case) -> None:
    _assert_dense(ranks8, case)
