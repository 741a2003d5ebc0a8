"""Random layouts of parallelism × dtypes × p × thresholds × calls, on real ranks, against one process in float64."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard

import sonde
from tests.ranks import Ranks, mesh_of

MESHES = {4: [(4,), (2, 2), (4, 1), (1, 4)], 8: [(8,), (2, 4), (2, 2, 2), (4, 1, 2)]}
ORDERS = (0.5, 1.0, 1.7, 2.0, 2.0, 2.0, 3.0, 6.0, math.inf)
CALLS = ("drop-in", "drop-in", "bare", "planned", "planned twice", "two steps")
ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
"""Of a clipped element: two roundings in its dtype, and the norm's in fp32."""


@dataclass
class Layout:
    """Parameters of this rank, what their gradients are in one process, and how to call the clip.

    Attributes:
        text: in words, for a failure.
        mesh: all ranks.
        pp_mesh: the pipeline stages, if there are any.
        parameters: of this rank, by name.
        dense: the gradients of the whole model, each once, in fp64.
        own: this rank's part of each gradient of its own once it is summed, by name; None without a gradient.
        replicas: of parameters whose layout does not show on how many ranks they are.
        n_partial: collectives that sum partial gradients.
    """

    text: str
    mesh: DeviceMesh
    pp_mesh: DeviceMesh | None
    parameters: dict[str, nn.Parameter]
    dense: list[Tensor]
    own: dict[str, Tensor | None]
    replicas: dict[str, int]
    n_partial: int


def _shape(draw: random.Random) -> tuple[int, ...]:
    if draw.random() < 0.15:  # read in blocks
        return draw.choice([(64, 256), (16384,), (40, 300), (8, 16, 96), (2048, 8), (9001,)])
    return tuple(draw.randint(0, 9) for _ in range(draw.randint(1, 3)))


def _placements(draw: random.Random, mesh: DeviceMesh, shape: tuple[int, ...], may_be_partial: bool) -> list[Any]:
    where = [
        draw.choice(
            [Replicate(), *(Shard(d) for d in range(len(shape)))]
            + ([Partial("sum"), Partial("avg")] if may_be_partial else [])
        )
        for _ in range(mesh.ndim)
    ]
    even = mesh.ndim == 2 and where[0] == where[1] and type(where[0]) is Shard
    if even and shape[where[0].dim] % mesh.size() == 0 and draw.random() < 0.5:
        where[0] = _StridedShard(where[0].dim, split_factor=mesh.size(1))
    return where


def _placed(gradient: Tensor, mesh: DeviceMesh, where: list[Any]) -> tuple[DTensor, Tensor]:
    """The gradient, and this rank's part of it once partial axes are summed."""
    whole = [Replicate() if isinstance(w, Partial) else w for w in where]
    own = distribute_tensor(gradient, mesh, whole, src_data_rank=None).to_local().clone()
    local = own.clone()
    for axis, w in enumerate(where):
        if isinstance(w, Partial):  # multiples that add up to 1 without rounding
            n, at = mesh.size(axis), mesh.get_local_rank(axis)
            local *= (1 if n == 1 else (2, -1, *[0] * (n - 2))[at]) * (n if w.reduce_op == "avg" else 1)
    return DTensor.from_local(local, mesh, where, run_check=False, shape=gradient.shape, stride=gradient.stride()), own


def drawn(seed: int) -> Layout:
    """The same layout on every rank; each rank its own parts of it."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    shape = draw.choice(MESHES[dist.get_world_size()])
    has_stages = len(shape) == 2 and shape[0] > 1 and draw.random() < 0.35
    names = ("pp", "dp") if has_stages else ("a", "b", "c")[: len(shape)]
    mesh = mesh_of(shape, names)
    layout = Layout(f"seed {seed}, mesh {shape} {names}", mesh, mesh["pp"] if has_stages else None, {}, [], {}, {}, 0)
    bins = set()
    for stage in range(shape[0] if has_stages else 1):
        is_mine = not has_stages or mesh.get_local_rank("pp") == stage
        on = mesh["dp"] if has_stages else mesh
        for k in range(draw.randint(1, 4)):
            name, size, dtype = f"{stage}.{k}", _shape(draw), draw.choice([torch.float32] * 3 + list(ROUNDING))
            scale = draw.choice([1.0] * 6 + [1e-3, 1e4] if dtype is torch.float16 else [1.0] * 6 + [1e-12, 1e25])
            gradient = (torch.randn(size, generator=generator) * scale).to(dtype)
            kind = draw.choice(
                ["plain", "plain", "DTensor", "DTensor", "DTensor", "DTensor", "on an axis", "expert", "none"]
            )
            on_axis = on[draw.choice(names)] if kind == "on an axis" and on.ndim > 1 else on
            if kind == "expert" and (has_stages or len(shape) != 2):
                kind = "plain"
            own = gradient
            if kind == "none":
                placed = None
            elif kind == "plain":
                placed = gradient.clone()
            elif kind == "expert":  # one for each row of the mesh, a plain tensor on all ranks of that row
                experts = [gradient * (1 + 2 * row) for row in range(shape[0])]
                placed = experts[mesh.get_local_rank(0)].clone()
                own = placed.clone()
                layout.replicas[name] = shape[1]
                layout.dense += experts[1:]
                gradient = experts[0]
            else:
                where = _placements(draw, on_axis, size, dtype in (torch.float32, torch.float64) and scale == 1.0)
                # The kinds of partial sums, each of which takes a collective over each of its axes.
                bins |= {
                    (stage, on_axis.mesh_dim_names, axis, dtype, w.reduce_op)
                    for axis, w in enumerate(where)
                    if isinstance(w, Partial) and is_mine
                }
                placed, own = _placed(gradient, on_axis, where)
            layout.text += f"; {name} {kind} {size} {dtype} × {scale:g}" + (
                f" {where}" if "D" in kind or "axis" in kind else ""
            )
            if placed is not None:
                layout.dense.append(gradient)
            if is_mine:
                zeros = torch.zeros_like(gradient) if placed is None else torch.zeros_like(placed)
                if isinstance(placed, DTensor) and any(isinstance(w, Partial) for w in placed.placements):
                    zeros = distribute_tensor(torch.zeros_like(gradient), on_axis, src_data_rank=None)
                layout.parameters[name] = nn.Parameter(zeros)
                layout.parameters[name].grad = placed
                layout.own[name] = None if placed is None else own.double()
    layout.n_partial = len(bins)
    layout.dense = [g.double() for g in layout.dense]
    return layout


def _norm(dense: list[Tensor], order: float) -> float:
    joined = torch.cat([g.reshape(-1) for g in dense] or [torch.zeros(0, dtype=torch.float64)]).abs()
    if not joined.numel():
        return 0.0
    return float(joined.max() if math.isinf(order) else joined.pow(order).sum().pow(1 / order))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _clip(layout: Layout, call: str, order: float, max_norm: float | None) -> tuple[float, int]:
    """The norm, and the number of collectives."""
    named, mesh, pp_mesh = layout.parameters, layout.mesh, layout.pp_mesh
    options: dict[str, Any] = {"mesh": mesh, "pp_mesh": pp_mesh, "replicas": layout.replicas or None}
    if call == "two steps":
        present = {n: p.grad for n, p in named.items() if p.grad is not None}
        replicas = {n: k for n, k in layout.replicas.items() if n in present}
        norm = sonde.get_total_norm(present.items(), order, mesh=mesh, pp_mesh=pp_mesh, replicas=replicas or None)
        sonde.clip_grads_with_norm_(named.values(), math.inf if max_norm is None else max_norm, norm)
        return float(norm), -1
    plan = sonde.group_parameters_for_norm(named.items(), **options) if "planned" in call else None
    if call == "planned twice":
        sonde.clip_grad_norm_distributed_(plan, None, order)  # type: ignore[arg-type]
    with CommDebugMode() as counted:
        if plan is not None:
            norm = sonde.clip_grad_norm_distributed_(plan, max_norm, order)
        elif call == "bare":
            norm = sonde.clip_grad_norm_(named.values(), max_norm, order)
        else:
            norm = sonde.clip_grad_norm_(named.items(), max_norm, order, **options)
    return float(norm), -1 if call == "bare" else counted.get_total_counts()


def _fuzz(first: int, n: int) -> list[str]:
    """What is wrong with n layouts."""
    wrong = []
    for seed in range(first, first + n):
        layout, draw = drawn(seed), random.Random(-seed)
        call, order = draw.choice(CALLS), draw.choice(ORDERS)
        if call == "bare" and (layout.replicas or layout.pp_mesh is not None):
            call = "drop-in"  # only a mesh and a declaration can tell
        exact = _norm(layout.dense, order)
        max_norm = draw.choice([None, math.inf, 0.0, 0.3, 0.3 * exact, 0.3 * exact, 3 * exact])
        if exact == 0 or not exact < 1e37:  # beyond fp32
            continue
        text = f"{call}, p {order}, to {max_norm}, {layout.text}"
        norm, n_collectives = _clip(layout, call, order, max_norm)
        # Rounded once, from fp64: the same bits as the dense gradient's, however it is cut. (Blocks give 7 digits.)
        is_rounded_once = max((g.numel() for g in layout.dense), default=0) < 8192
        if norm != (pytest.approx(exact, rel=1.2e-7 if is_rounded_once else 1e-6)):
            wrong.append(f"norm {norm} for {exact}: {text}")
        if n_collectives not in (-1, 1 + layout.n_partial):
            wrong.append(f"{n_collectives} collectives for {1 + layout.n_partial}: {text}")
        coefficient = 1.0 if max_norm in (None, math.inf) else min(1.0, max_norm / (exact + 1e-6))  # type: ignore[operator]
        for name, p in layout.parameters.items():
            own = layout.own[name]
            if own is None or any(isinstance(w, Partial) for w in getattr(p.grad, "placements", ())):
                continue  # a partial gradient is summed by a clip, not by a mere norm or the second of two steps
            got = _local(p.grad)  # type: ignore[arg-type]
            rounding = ROUNDING[p.dtype]
            tiny = torch.finfo(p.dtype).tiny
            if not torch.allclose(got.double(), own * coefficient, rtol=rounding, atol=tiny):
                wrong.append(f"{name} is not × {coefficient}: {text}")
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 70])
def test_random_layouts_on_four_ranks(ranks4: Ranks, first: int) -> None:
    for wrong in ranks4(_fuzz, first, 70):
        assert not wrong, "\n".join(wrong[:5])


@pytest.mark.slow
def test_random_layouts_on_eight_ranks(ranks8: Ranks) -> None:
    for wrong in ranks8(_fuzz, 10_000, 30):
        assert not wrong, "\n".join(wrong[:5])
