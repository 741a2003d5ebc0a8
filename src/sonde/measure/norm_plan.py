"""How the gradients of many parameters lie over ranks, worked out once and used at every step.

A call afterwards only collects gradients and sees whether each still lies as it did: one `is` per parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sonde.measure.placements import WHOLE, Layout, check_layout, layout_of_spec, local_of, ranks_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Key:
    """What gradients have in common that are read by the same kernels and summed over the same ranks.

    Attributes:
        ranks: that hold the other shards of what this rank holds, itself included; empty where it holds all.
        n_shards: distinct shards that the gradient is cut into.
        n_replicas: ranks among those summed that hold the same values, where that was declared.
        part: which part of the model they belong to.
        device: where they are.
        dtype: of their elements.
        is_partial: whether they are still to be summed over some ranks.
    """

    ranks: tuple[int, ...]
    n_shards: int
    n_replicas: int | None
    part: int
    device: torch.device
    dtype: torch.dtype
    is_partial: bool

    @property
    def order(self) -> tuple[object, ...]:
        """Sorts groups alike on every rank, the sharded first, so that their sums run while others are read."""
        rest = (self.n_shards, self.n_replicas or 0, self.part, str(self.device), str(self.dtype), self.is_partial)
        return (not self.ranks, *in_order(self.ranks), *rest)


def in_order(ranks: tuple[int, ...]) -> tuple[object, ...]:
    """Sorts sets of ranks alike on every rank: by the offsets between them first, as they themselves differ."""
    return tuple(rank - ranks[0] for rank in ranks), ranks


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters whose gradients lie alike.

    Attributes:
        key: how.
        layout: of one of them; that of the others has the same ranks.
        indices: which they are, in the plan's order.
    """

    key: Key
    layout: Layout
    indices: tuple[int, ...]


@dataclass(frozen=True)
class Collected:
    """The gradients of one group that are there now.

    Attributes:
        group: whose.
        indices: of the parameters that have one.
        gradients: as they are in `.grad`.
        locals: this rank's parts of them.
    """

    group: ParameterGroup
    indices: list[int] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    locals: list[Tensor] = field(default_factory=list)


class NormPlan:
    """Parameters grouped by how their gradients lie over ranks; reusable as long as these are the parameters.

    Where a gradient turns out to lie otherwise than its parameter (a norm weight's under sequence parallelism), or
    otherwise than before, the groups are made anew.

    Args:
        parameters: a tensor that comes twice counts once.
        names: of the parameters, for messages.
        mesh: all ranks that hold any of the model; None to sum gradients over the ranks of their own meshes.
        replicas: how many of the mesh's ranks hold the same values, by tensor or name, where that cannot be seen.
        parts: which part of the model each parameter belongs to, from 0; one part for all by default.
        allow_sparse: count sparse gradients too, rather than refuse them.

    Raises:
        ValueError: when `replicas` is given without a mesh, or names what is not there, or is no number of ranks.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        names: Sequence[str] | None = None,
        *,
        mesh: DeviceMesh | None = None,
        replicas: Mapping[Any, int] | None = None,
        parts: Sequence[int] | None = None,
        allow_sparse: bool = False,
    ) -> None:
        first = {id(p): i for i, p in reversed(list(enumerate(parameters)))}
        once = sorted(first.values())
        self.parameters = [parameters[i] for i in once]
        self.mesh = mesh
        self._allow_sparse = allow_sparse
        self.n_parts = max(parts, default=0) + 1 if parts else 1
        self._names = [names[i] for i in once] if names is not None else None
        self._parts = [parts[i] for i in once] if parts else [0] * len(once)
        self._mesh_ranks = ranks_of(mesh) if mesh is not None else None
        self._replicas = self._read_replicas(replicas) if replicas else {}
        self._regroup()

    def _read_replicas(self, replicas: Mapping[Any, int]) -> dict[int, int]:
        if self._mesh_ranks is None:
            raise ValueError("replicas= counts ranks of a mesh, got mesh=None: pass the mesh of all ranks")
        by_name = {self.name_of(i): i for i in range(len(self.parameters))}
        by_id = {id(p): i for i, p in enumerate(self.parameters)}
        counts = {}
        for whose, count in replicas.items():
            index = by_name.get(whose) if isinstance(whose, str) else by_id.get(id(whose))
            if index is None:
                what = repr(whose) if isinstance(whose, str) else f"a tensor of shape {tuple(whose.shape)}"
                raise ValueError(f"replicas= has {what}, which is not among the parameters: pass it with the others")
            if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= len(self._mesh_ranks):
                raise ValueError(
                    f"replicas of {self.name_of(index)} must be a number of the mesh's {len(self._mesh_ranks)} ranks, "
                    f"got {count!r}: how many of them hold the same values?"
                )
            counts[index] = count
        return counts

    def name_of(self, index: int) -> str:
        """What to call a parameter."""
        if self._names is not None:
            return self._names[index]
        return f"parameter {index} of shape {tuple(self.parameters[index].shape)}"

    @property
    def groups(self) -> tuple[ParameterGroup, ...]:
        """In the order in which they are summed, which is the same on every rank."""
        return self._groups

    @property
    def layouts(self) -> list[Layout]:
        """One for each set of ranks that gradients are cut over: without a mesh, a collective each, in this order."""
        return self._layouts

    @property
    def by_key(self) -> dict[Key, list[Tensor]]:
        """The parameters of each group."""
        return {group.key: [self.parameters[i] for i in group.indices] for group in self._groups}

    @property
    def device(self) -> torch.device:
        """Where sums over ranks are made: where the meshes are, for gradients may be offloaded."""
        meshes = [self.mesh, *(group.layout.mesh for group in self._groups)]
        kind = next((mesh.device_type for mesh in meshes if mesh is not None), None)
        devices = [group.key.device for group in self._groups] or [torch.device("cpu")]
        if kind is None or kind == devices[0].type:
            return devices[0]
        of_kind = [device for device in devices if device.type == kind]
        return of_kind[0] if of_kind else torch.device(kind)

    def zeros(self, index: int) -> Tensor:
        """A gradient of zeros for a parameter that has none, lying as its gradient did when it had one."""
        from torch.distributed.tensor import DTensor

        spec = self._specs[index]
        local = torch.zeros_like(local_of(self.parameters[index]))
        return DTensor.from_local(
            local, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride
        )

    def collect(self) -> tuple[list[Collected], ValueError | None]:
        """The gradients that are there now, by group, and what is wrong with one that is in no group."""
        found = None if self._problem is not None else self._as_planned()
        if found is None:
            self._regroup()
            found = self._as_planned()
            assert found is not None  # planned just now
        return found, self._problem

    def _as_planned(self) -> list[Collected] | None:
        """None when a gradient does not lie as planned."""
        parameters, specs, devices = self.parameters, self._specs, self._devices
        found = []
        for group in self._groups:
            one = Collected(group)
            for i in group.indices:
                gradient = parameters[i].grad
                if gradient is None:
                    continue
                spec = getattr(gradient, "_spec", None)
                if spec is not specs[i]:
                    if not _lie_alike(spec, specs[i]):
                        return None
                    specs[i] = spec
                local = gradient if spec is None else gradient._local_tensor  # type: ignore[attr-defined]
                if type(local) is not Tensor:
                    local = local_of(gradient)  # a collective may still be writing to it
                if local.device != devices[i] or (local.is_sparse and not self._allow_sparse):
                    return None
                one.indices.append(i)
                one.gradients.append(gradient)
                one.locals.append(local)
            found.append(one)
        return found

    def _regroup(self) -> None:
        """Sort parameters by how their gradients lie; those without one by how it lay before, or they themselves."""
        before: list[Any] = getattr(self, "_specs", [None] * len(self.parameters))
        layouts = _Layouts()
        checked: set[tuple[int, torch.device]] = set()
        members: dict[tuple[Any, ...], list[int]] = {}
        self._specs: list[Any] = []
        self._devices: list[torch.device] = []
        self._problem: ValueError | None = None
        for i, (parameter, last) in enumerate(zip(self.parameters, before, strict=True)):
            tensor = parameter if parameter.grad is None else parameter.grad
            own = getattr(parameter, "_spec", None)
            spec = getattr(tensor, "_spec", None) if parameter.grad is not None or last is None else last
            device = (tensor if spec is None else local_of(tensor)).device
            self._specs.append(spec)
            self._devices.append(device)
            try:
                if tensor.is_sparse and not self._allow_sparse:
                    raise ValueError("it is sparse, and only dense ones can be counted: use Embedding(sparse=False)")
                if tensor.is_complex():
                    raise ValueError("it is complex, and only real ones can be counted: use torch.view_as_real")
                if own is not spec:
                    # A rank on which this gradient is missing takes the parameter's layout for the gradient's.
                    layouts.number_of(own)
                number = layouts.number_of(spec)
                if (number, device) not in checked:
                    check_layout(layouts[number], device, self._mesh_ranks)
                    checked.add((number, device))
            except ValueError as error:
                self._problem = self._problem or ValueError(f"gradient of {self.name_of(i)}: {error}")
                continue
            what = (number, device, tensor.dtype, self._parts[i], self._replicas.get(i))
            members.setdefault(what, []).append(i)
        groups: dict[Key, ParameterGroup] = {}
        for (number, device, dtype, part, n_replicas), indices in members.items():
            layout = layouts[number]
            key = Key(layout.sharding_ranks, layout.n_shards, n_replicas, part, device, dtype, bool(layout.partial))
            others = groups[key].indices if key in groups else ()
            groups[key] = ParameterGroup(key, layout, tuple(sorted((*others, *indices))))
        self._groups = tuple(groups[key] for key in sorted(groups, key=lambda key: key.order))
        by_ranks = {layout.sharding_ranks: layout for layout in layouts.all if layout.sharding_ranks}
        self._layouts = [by_ranks[ranks] for ranks in sorted(by_ranks, key=in_order)]


class _Layouts:
    """The layouts that DTensors' specs describe, each once: hashing a placement takes as long as all else together."""

    def __init__(self) -> None:
        self.all: list[Layout] = []
        self._numbers: dict[tuple[Any, ...], int] = {}

    def number_of(self, spec: Any) -> int:
        """The number of a spec's layout; None is a plain tensor's."""
        placed = () if spec is None else (spec.mesh, *spec.placements)
        number = self._numbers.get(placed)
        if number is None:
            self.all.append(WHOLE if spec is None else layout_of_spec(spec))
            number = self._numbers[placed] = len(self.all) - 1
        return number

    def __getitem__(self, number: int) -> Layout:
        return self.all[number]


def _lie_alike(a: Any, b: Any) -> bool:
    """Whether two DTensor specs, or None for plain tensors, place elements alike; shapes do not matter."""
    if a is None or b is None:
        return a is b
    return bool(a.placements == b.placements and (a.mesh is b.mesh or a.mesh == b.mesh))
