"""The norm of a whole model's gradient, however it is cut: local power sums, weighed, and summed over ranks.

With a mesh of all ranks that is one collective. Without one, gradients that are cut over the same ranks share one.
What is wrong on one rank is told to the others in the same collective, so that none is left waiting.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from sonde.measure.placements import Layout, layout_of, local_of, ranks_of, share
from sonde.measure.power_sums import power_sum

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Gradient:
    """One parameter's gradient, or that it has none.

    Attributes:
        name: for messages.
        parameter: whose it is; says where a missing gradient would lie.
        value: plain or DTensor; None where there is none.
        n_replicas: ranks among those summed that hold the same values, where that cannot be seen: experts that are
            plain tensors, different on each rank. None where it can.
    """

    name: str
    parameter: Tensor
    value: Tensor | None
    n_replicas: int | None = None


@dataclass(frozen=True)
class GlobalNorm:
    """What was measured.

    Attributes:
        norm: of the whole gradient, 0-dim, fp64, the same bits on every rank.
        failed: how many ranks found something wrong, 0-dim; 0 unless one did.
        locals: this rank's parts of the gradients, what was partial summed already.
    """

    norm: Tensor
    failed: Tensor
    locals: list[Tensor]


@dataclass
class _Sum:
    """Local tensors that are summed over the same ranks."""

    group: dist.ProcessGroup | None
    by_share: dict[float, list[Tensor]] = field(default_factory=dict)

    def add(self, tensor: Tensor, counts: float) -> None:
        self.by_share.setdefault(counts, []).append(tensor)


def global_norm(
    gradients: Sequence[Gradient],
    order: float,
    *,
    mesh: DeviceMesh | None = None,
    pp_mesh: DeviceMesh | None = None,
) -> GlobalNorm:
    """The p-norm of all gradients of all ranks together, each element counted once.

    Args:
        gradients: this rank's; the same parameters on every rank of a stage.
        order: p > 0, or `math.inf`.
        mesh: all ranks that hold any of the model; everything takes one collective then.
        pp_mesh: the pipeline stages, each with parameters of its own.

    Returns:
        A `GlobalNorm`.

    Raises:
        ValueError: for a gradient that cannot be counted, naming it and the way out; where values can be read without
            waiting, on every rank.
    """
    device = next((local_of(g.parameter).device for g in gradients), torch.device("cpu"))
    sums, locals_, problem = _sort(gradients, mesh, pp_mesh)
    stages = pp_mesh.get_group() if pp_mesh is not None and not (mesh and ranks_of(pp_mesh) <= ranks_of(mesh)) else None
    under_way = []
    for one in sums:
        packed = _pack(one, order, failed=problem is not None, device=device)
        under_way.append((packed, _start(packed, one.group, order)))
    total = torch.zeros(3, dtype=torch.float64, device=device)
    for packed, work in under_way:
        if work is not None:
            work.wait()
        total = torch.maximum(total, packed) if math.isinf(order) else total + packed
    if stages is not None and (work := _start(total, stages, order)) is not None:
        work.wait()
    value, is_nan, failed = total.unbind()
    if device.type == "cpu" and failed.item():  # at hand: nothing is waited for
        raise problem or ValueError(
            "another rank found a gradient that cannot be counted, and says which: gradients are as they were"
        )
    if problem is not None:
        raise problem
    norm = torch.where(is_nan > 0, torch.nan, value) if math.isinf(order) else value.pow(1.0 / order)
    return GlobalNorm(norm, failed, locals_)


def _sort(
    gradients: Sequence[Gradient], mesh: DeviceMesh | None, pp_mesh: DeviceMesh | None
) -> tuple[list[_Sum], list[Tensor], ValueError | None]:
    """Which tensors are summed over which ranks, in an order that is the same on every rank."""
    problem: ValueError | None = None
    everything = _Sum(_group_over(tuple(sorted(ranks_of(mesh)))) if mesh is not None else None)
    n_stages = pp_mesh.size() if mesh is not None and pp_mesh is not None and ranks_of(pp_mesh) <= ranks_of(mesh) else 1
    by_ranks: dict[tuple[int, ...], _Sum] = {}
    layouts: dict[tuple[int, ...], Layout] = {}
    locals_: list[Tensor] = []
    for gradient in gradients:
        try:
            layout = _layout(gradient, mesh)
        except ValueError as error:
            problem = problem or error
            continue
        if mesh is not None:
            one, counts = everything, share(layout, n_ranks=mesh.size(), n_stages=n_stages)
            if gradient.n_replicas is not None:
                counts = 1.0 / gradient.n_replicas
        else:
            ranks = layout.sharding_ranks
            one, counts = by_ranks.setdefault(ranks, _Sum(None)), 1.0
            layouts[ranks] = layout
        if gradient.value is not None:
            local = local_of(gradient.value)
            locals_.append(local)
            one.add(local, counts)
    if mesh is not None:
        return [everything], locals_, problem
    # Sharded ones first, so that their reductions run while whole gradients are read; in the same order on every rank.
    ordered = sorted(by_ranks, key=lambda ranks: (not ranks, ranks))
    for ranks in ordered:
        by_ranks[ranks].group = _group_of(layouts[ranks]) if ranks else None
    return [by_ranks[ranks] for ranks in ordered], locals_, problem


def _layout(gradient: Gradient, mesh: DeviceMesh | None) -> Layout:
    tensor = gradient.parameter if gradient.value is None else gradient.value
    if tensor.is_sparse:
        raise ValueError(f"gradient of {gradient.name} is sparse, and only dense ones can be counted: use sparse=False")
    try:
        layout = layout_of(tensor)
    except ValueError as error:
        raise ValueError(f"gradient of {gradient.name}: {error}") from error
    if layout.mesh is None:
        return layout
    if mesh is not None and not ranks_of(layout.mesh) <= ranks_of(mesh):
        raise ValueError(
            f"gradient of {gradient.name} lies on ranks {sorted(ranks_of(layout.mesh))}, which mesh= "
            f"({sorted(ranks_of(mesh))}) does not contain: pass the mesh of all ranks that hold the model"
        )
    on = local_of(tensor).device.type
    if on not in (layout.mesh.device_type, "cpu"):  # the CPU: offloaded
        raise ValueError(
            f"gradient of {gradient.name} is on {on} and its mesh on {layout.mesh.device_type}: move it there, or make "
            "the mesh where the gradient is"
        )
    return layout


def _pack(one: _Sum, order: float, *, failed: bool, device: torch.device) -> Tensor:
    """[sum or largest, whether it is NaN, whether this rank failed]: one vector, one collective."""
    packed = torch.zeros(3, dtype=torch.float64, device=device)
    for counts, tensors in one.by_share.items():
        for where in dict.fromkeys(t.device for t in tensors):
            value = power_sum([t for t in tensors if t.device == where], order).to(device, non_blocking=True)
            packed[0] = torch.maximum(packed[0], value) if math.isinf(order) else packed[0] + counts * value
    if math.isinf(order):
        # MAX over ranks loses NaN.
        packed[1] = packed[0].isnan()
        packed[0] = packed[0].nan_to_num(nan=0.0, posinf=math.inf)
    if failed:
        packed[2] = 1.0
    return packed


def _start(packed: Tensor, group: dist.ProcessGroup | None, order: float) -> dist.Work | None:
    if group is None or group.size() == 1:
        return None
    op = dist.ReduceOp.MAX if math.isinf(order) else dist.ReduceOp.SUM
    return cast("dist.Work | None", dist.all_reduce(packed, op=op, group=group, async_op=True))


def _group_of(layout: Layout) -> dist.ProcessGroup:
    assert layout.mesh is not None
    if len(layout.sharded) == 1:
        return layout.mesh.get_group(layout.sharded[0])
    return _group_over(layout.sharding_ranks)


def _group_over(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    world: Any = dist.group.WORLD
    assert world is not None
    return world if len(ranks) == world.size() else _made_over(ranks, id(world))


@functools.lru_cache(maxsize=256)
def _made_over(ranks: tuple[int, ...], world: int) -> dist.ProcessGroup:
    """A process group of these ranks, made by them alone; `world` tells one initialisation from the next."""
    return cast(dist.ProcessGroup, dist.new_group(list(ranks), use_local_synchronization=True))
