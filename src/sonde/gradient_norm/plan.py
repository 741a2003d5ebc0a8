"""How the gradients of many parameters lie over ranks, worked out once and used at every step.

A call afterwards only collects gradients and sees whether each still lies as it did: one `is` per parameter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sonde.gradient_norm.gradient_groups import Collected, Key, ParameterGroup
from sonde.parallel.placements import (
    WHOLE,
    Layout,
    check_elements,
    check_layout,
    check_mesh,
    check_stages,
    layout_of_spec,
    local_tensor,
    ranks_of,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class NormPlan:
    """Parameters grouped by how their gradients lie over ranks; reusable as long as these are the parameters.

    Where a gradient turns out to lie otherwise than its parameter (a norm weight's under sequence parallelism), or
    otherwise than before, the groups are made anew.

    Args:
        parameters: a tensor that comes twice counts once.
        names: of the parameters, for messages.
        mesh: all ranks that hold any of the model; None to sum gradients over the ranks of their own meshes.
        pp_mesh: the pipeline stages, each with parameters of its own.
        replicas: how many of the mesh's ranks hold the same values, by tensor or name, where that cannot be seen.
        parts: which part of the model each parameter belongs to, from 0; as many parts on every rank; one part for all
            by default.
        allow_sparse: count sparse gradients too, rather than refuse them.

    Raises:
        ValueError: when `mesh` is none, or does not hold this rank. What else is wrong on this rank is kept as the
            `problem`, for all ranks to hear of it by the next sum.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        names: Sequence[str] | None = None,
        *,
        mesh: DeviceMesh | None = None,
        pp_mesh: DeviceMesh | None = None,
        replicas: Mapping[Any, int] | None = None,
        parts: Sequence[int] | None = None,
        allow_sparse: bool = False,
    ) -> None:
        if mesh is not None:
            check_mesh("mesh", mesh)
        first = {id(p): i for i, p in reversed(list(enumerate(parameters)))}
        once = sorted(first.values())
        self._once = once
        self.parameters = [parameters[i] for i in once]
        self.mesh = mesh
        self.allow_sparse = allow_sparse
        self.n_parts = max(parts or (), default=0) + 1
        self._names = [names[i] for i in once] if names is not None else None
        self._parts = [parts[i] for i in once] if parts else [0] * len(once)
        self.pp_mesh: DeviceMesh | None = None
        """The pipeline stages, where there are any."""
        by_id = {id(p): i for i, p in enumerate(self.parameters)}
        # A tied weight goes by either name.
        by_name = {n: by_id[id(p)] for n, p in zip(names, parameters, strict=True)} if names is not None else {}
        self._replicas: dict[int, int] = {}
        self._bad_replicas: ValueError | None = None
        try:
            self._replicas = self._read_replicas(replicas or {}, by_id, by_name)
        except ValueError as error:
            self._bad_replicas = error
        self._specs: list[Any] = [None] * len(self.parameters)
        self._partial: dict[int, Any] = {}
        """How gradients that were seen partial lay then: their ranks take part with zeros where they are missing."""
        self.bad_request: ValueError | None = None
        """What was wrong with what it was asked for."""
        self._bad_stages: ValueError | None = None
        try:
            self.use_stages(pp_mesh)
        except ValueError as error:
            self._bad_stages = error
        if self.pp_mesh is None:
            self._regroup()

    def use_stages(self, pp_mesh: DeviceMesh | None) -> None:
        """Sum over these pipeline stages from now on; None for those known already.

        Raises:
            ValueError: when it is no mesh of one axis with this rank in it, or others are known.
        """
        if pp_mesh is None or pp_mesh is self.pp_mesh:
            return
        check_mesh("pp_mesh", pp_mesh, n_axes=1)
        if self.pp_mesh is None:
            self.pp_mesh = pp_mesh
            self._regroup()
        elif ranks_of(pp_mesh) != ranks_of(self.pp_mesh):
            raise ValueError("pp_mesh is not that of the plan: pass the same, or leave it out")

    def _read_replicas(
        self, replicas: Mapping[Any, int], by_id: Mapping[int, int], by_name: Mapping[str, int]
    ) -> dict[int, int]:
        if not replicas:
            return {}
        if self.mesh is None:
            raise ValueError("replicas= counts ranks of a mesh, got mesh=None: pass the mesh of all ranks")
        counts = {}
        for whose, count in replicas.items():
            index = by_name.get(whose) if isinstance(whose, str) else by_id.get(id(whose))
            if index is None:
                what = f"a tensor of shape {tuple(whose.shape)}" if isinstance(whose, Tensor) else repr(whose)
                raise ValueError(f"replicas= has {what}, which is not among the parameters: pass it with the others")
            if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= self.mesh.size():
                raise ValueError(
                    f"replicas of {self.name_of(index)} must be a number of the mesh's {self.mesh.size()} ranks, "
                    f"got {count!r}: how many of them hold the same values?"
                )
            counts[index] = count
        return counts

    def let_go(self) -> None:
        """Forget the tensors and meshes, until `hold`."""
        self.parameters, self.mesh, self.pp_mesh = [], None, None

    def hold(self, parameters: Sequence[Tensor], mesh: DeviceMesh | None, pp_mesh: DeviceMesh | None) -> None:
        """Take up again, with parameters and meshes like those that the plan was made for."""
        self.parameters, self.mesh, self.pp_mesh = [parameters[i] for i in self._once], mesh, pp_mesh

    def name_of(self, index: int) -> str:
        """What to call a parameter."""
        if self._names is not None:
            return self._names[index]
        return f"parameter {index} of shape {tuple(self.parameters[index].shape)}"

    @property
    def said_of_each(self) -> list[str]:
        """Name, if it has one, shape over all ranks, and dtype of each parameter whose replicas were not declared."""
        return [
            f"{self._names[i] if self._names is not None else ''}{tuple(p.shape)}{p.dtype}"
            for i, p in enumerate(self.parameters)
            if i not in self._replicas
        ]

    @property
    def groups(self) -> tuple[ParameterGroup, ...]:
        """Those of sharded gradients first."""
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
        devices = [group.key.device for group in self._groups if group.key.device.type != "meta"]
        devices = devices or [torch.device("cpu")]
        if kind is None or kind == devices[0].type:
            return devices[0]
        of_kind = [device for device in devices if device.type == kind]
        return of_kind[0] if of_kind else torch.device(kind)

    def zeros(self, index: int) -> Tensor:
        """A gradient of zeros for a parameter that has none, lying as its gradient did when it had a partial one."""
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        spec = self._partial[index]
        shape, _ = compute_local_shape_and_global_offset(spec.shape, spec.mesh, spec.placements)
        local = torch.zeros(shape, dtype=spec.tensor_meta.dtype, device=spec.mesh.device_type)
        return DTensor.from_local(
            local, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride
        )

    @property
    def problem(self) -> ValueError | None:
        """What is wrong on this rank."""
        return (
            self.bad_request or self._bad_replicas or self._bad_stages or self._unknown_stages() or self._bad_gradient
        )

    def _unknown_stages(self) -> ValueError | None:
        if self.mesh is None or self.pp_mesh is not None:
            return None
        axes = dict(zip(self.mesh.mesh_dim_names or (), self.mesh.shape, strict=False))
        if axes.get("pp", 1) == 1:
            return None
        return ValueError("mesh= has an axis 'pp', and no pp_mesh= was given: pass pp_mesh=mesh['pp']")

    def collect(self) -> tuple[list[Collected], ValueError | None]:
        """The gradients that are there now, by group, and what is wrong with one that is in no group."""
        found = None if self._bad_gradient is not None else self._as_planned()
        if found is None:
            self._regroup()
            found = self._as_planned()
            assert found is not None  # planned just now
        return found, self.problem

    def _as_planned(self) -> list[Collected] | None:
        """None when a gradient does not lie as planned."""
        parameters, specs, devices, dtypes = self.parameters, self._specs, self._devices, self._dtypes
        if any(parameters[i].grad is not None for i in self._without):
            return None
        found = []
        for group in self._groups:
            one = Collected(group)
            for i in group.indices:
                gradient = parameters[i].grad
                if gradient is None:
                    if i in self._partial and not group.key.is_partial:
                        return None
                    continue
                if i in self._unusable:
                    continue
                spec = getattr(gradient, "_spec", None)
                if spec is not specs[i]:
                    if not _lie_alike(spec, specs[i]):
                        return None
                    specs[i] = spec
                local = gradient if spec is None else gradient._local_tensor  # type: ignore[attr-defined]
                if type(local) is not Tensor:
                    local = local_tensor(gradient)  # a collective may still be writing to it
                if local.device != devices[i] or local.dtype is not dtypes[i]:
                    return None
                if local.layout is not torch.strided and not self.allow_sparse:
                    return None
                one.indices.append(i)
                one.gradients.append(gradient)
                one.locals.append(local)
            found.append(one)
        return found

    def _regroup(self) -> None:
        """Sort parameters by how their gradients lie; those without one by how it lay before, or they themselves."""
        layouts = _Layouts()
        # Their own layouts first: without a mesh these say what is summed in which order, whatever gradients are there.
        # A gradient that lies otherwise than its parameter is missing on a rank for which the parameter's is taken.
        for parameter in self.parameters:
            if (own := getattr(parameter, "_spec", None)) is not None and not _is_left_out(parameter):
                layouts.offer(own)
        self._bad_gradient: ValueError | None = None
        self._without: list[int] = []
        self._unusable: set[int] = set()
        self._devices = [local_tensor(p if p.grad is None else p.grad).device for p in self.parameters]
        self._dtypes = [(p if p.grad is None else p.grad).dtype for p in self.parameters]
        members: dict[tuple[Any, ...], list[int]] = {}
        for i, parameter in enumerate(self.parameters):
            if _is_left_out(parameter):
                self._without.append(i)
                continue
            try:
                number = self._place(i, parameter, layouts)
            except ValueError as error:
                self._found_bad(i, error)
                continue
            what = (number, self._devices[i], self._dtypes[i], self._parts[i], self._replicas.get(i))
            members.setdefault(what, []).append(i)
        groups: dict[Key, ParameterGroup] = {}
        for (number, device, dtype, part, n_replicas), indices in members.items():
            layout = layouts[number]
            key = Key(layout.sharding_ranks, layout.n_shards, n_replicas, part, device, dtype, bool(layout.partial))
            others = groups[key].indices if key in groups else ()
            groups[key] = ParameterGroup(key, layout, tuple(sorted((*others, *indices))))
        self._groups = tuple(groups[key] for key in sorted(groups, key=lambda key: key.order))
        by_ranks: dict[tuple[int, ...], Layout] = {}
        for layout in layouts.all:
            if layout.sharding_ranks:
                by_ranks.setdefault(layout.sharding_ranks, layout)
        self._layouts = list(by_ranks.values())
        meshes = dict.fromkeys(layout.mesh for layout in layouts.all if layout.mesh is not None)
        self.meshes = [mesh for mesh in meshes if mesh.get_coordinate() is not None]
        """The meshes with this rank that gradients lie on, each once, in the same order on every rank."""

    def _place(self, i: int, parameter: Tensor, layouts: _Layouts) -> int:
        """The number of the layout that a parameter's gradient has, or will have.

        Raises:
            ValueError: when it has none that is known.
        """
        if getattr(parameter, "_fsdp_flattened", False):
            raise ValueError(
                "FSDP's first version does not tell how it is cut: use fully_shard, or FSDP's own clip_grad_norm_"
            )
        gradient = parameter.grad
        if gradient is not None:
            spec = getattr(gradient, "_spec", None)
        else:
            spec = self._partial.get(i) or self._specs[i] or getattr(parameter, "_spec", None)
        self._specs[i] = spec
        number = layouts.number_of(spec)
        layout, n_replicas = layouts[number], self._replicas.get(i)
        if layout.partial:
            self._partial[i] = spec
        what = (number, self._devices[i], n_replicas)
        try:
            if what not in layouts.checked:
                check_layout(layout, self._devices[i], self.mesh, n_replicas=n_replicas)
                check_stages(layout, self.pp_mesh)
                layouts.checked.add(what)
            if gradient is not None:
                check_elements(gradient, allow_sparse=self.allow_sparse)
        except ValueError as error:
            self._found_bad(i, error)
            self._unusable.add(i)  # if it is partial, this rank takes part with zeros: the others sum theirs
        return number

    def _found_bad(self, i: int, error: ValueError) -> None:
        self._bad_gradient = self._bad_gradient or ValueError(f"gradient of {self.name_of(i)}: {error}")


class _Layouts:
    """The layouts that DTensors' specs describe, each once: hashing a placement takes as long as all else together."""

    def __init__(self) -> None:
        self.all: list[Layout] = []
        self.checked: set[tuple[int, torch.device, int | None]] = set()
        self._numbers: dict[tuple[Any, ...], int] = {}

    def offer(self, spec: Any) -> None:
        """Number a spec's layout, unless it has none."""
        with contextlib.suppress(ValueError):  # what is not known is told of the gradient that has it, if one does
            self.number_of(spec)

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


def _is_left_out(parameter: Tensor) -> bool:
    """Whether it is frozen, and has no gradient from before."""
    return parameter.grad is None and not parameter.requires_grad


def _lie_alike(a: Any, b: Any) -> bool:
    """Whether two DTensor specs, or None for plain tensors, place elements alike; shapes do not matter."""
    if a is None or b is None:
        return a is b
    return bool(a.placements == b.placements and (a.mesh is b.mesh or a.mesh == b.mesh))
