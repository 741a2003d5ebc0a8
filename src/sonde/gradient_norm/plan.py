"""How the gradients of many parameters are spread over ranks: worked out once, used at every step.

Each later call only collects the gradients and checks that they are still placed as planned: one `is` per parameter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from sonde.gradient_norm.gradient_groups import (
    Collected,
    Grouping,
    Key,
    ParameterGroup,
    SeenSpecs,
    group_gradients,
)
from sonde.gradient_norm.held_error import HeldError, unexpected
from sonde.parallel.inventory import Inventory
from sonde.parallel.meshes import check_mesh, ranks_of, stage_ranks
from sonde.parallel.placements import from_local, local_tensor, shard_of
from sonde.parallel.shares import Share, same_placement

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


T = TypeVar("T")


class NormPlan(Mapping[Key, list[Tensor]]):
    """How the gradients of some parameters are spread over ranks, for clipping at every step.

    `group_parameters_for_norm` makes a plan, `clip_grad_norm_distributed_` takes it. It reads as a mapping, from what
    the gradients of a group have in common to the group's parameters. It stays valid as long as the parameters are the
    same: if a gradient is placed differently from its parameter (a norm weight's under sequence parallelism), or
    differently from the last call, the next call regroups the parameters by itself.

    Args:
        parameters: a tensor that comes twice counts once.
        names: of the parameters, for messages.
        mesh: all ranks that hold any of the model; None to sum gradients over the ranks of their own meshes.
        pp_mesh: the pipeline stages, each with parameters of its own.
        replicas: how many of the mesh's ranks hold the same values, by tensor or name, where the layout cannot show it.
        parts: which part of the model each parameter belongs to, from 0; as many parts on every rank; one part for all
            by default.
        part_names: what the parts are called; the ranks compare it.
        allow_sparse: count sparse gradients too, rather than refuse them.
        module: where the parameters are from; one that is replaced later is then noticed.
        problem: an error that was found in the caller's request already.

    Attributes:
        parameters: each tensor once, in the order of `positions`.
        positions: where each of them first stood in the list that was passed.
        mesh: as passed.
        pp_mesh: the pipeline stages, if they are known.
        in_stage: the ranks of the mesh that have the same parameters: those of this rank's pipeline stage, in order;
            empty without a mesh.
        n_stages_in_mesh: pipeline stages among the ranks of the mesh; 1 if the stages take a collective of their own.
        part_names: as passed.
        allow_sparse: as passed.
        n_parts: parts of the model.
        device: where sums over ranks are made: on the meshes' device, since gradients may be offloaded from it.

    Raises:
        ValueError: when `mesh` is not a mesh, or does not contain this rank. Any other error is held as the `problem`
            of this rank until the next sum over ranks, so that all ranks hear of it.

    Example:
        >>> import sonde
        >>> layer = torch.nn.Linear(2, 1)
        >>> plan = sonde.group_parameters_for_norm(layer.named_parameters())
        >>> layer(torch.tensor([[2.0, 2.0]])).sum().backward()
        >>> sonde.clip_grad_norm_distributed_(plan, 1.0)
        tensor(3.)
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
        part_names: Sequence[str] = (),
        allow_sparse: bool = False,
        module: nn.Module | None = None,
        problem: ValueError | None = None,
    ) -> None:
        if mesh is not None:
            check_mesh("mesh", mesh)
        first_positions = {id(p): i for i, p in reversed(list(enumerate(parameters)))}
        self.positions = sorted(first_positions.values())
        self.parameters = [parameters[i] for i in self.positions]
        self.mesh = mesh
        self.pp_mesh: DeviceMesh | None = None
        self.in_stage: tuple[int, ...] = () if mesh is None else tuple(sorted(ranks_of(mesh)))
        self.n_stages_in_mesh = 1
        self.allow_sparse = allow_sparse
        self.part_names = tuple(part_names)
        self.n_parts = len(part_names) or max(parts or (), default=0) + 1
        self._inventory = None if module is None else Inventory(module)
        self._module_parameters: Mapping[str, Tensor] = {}
        self._unplanned: dict[str, Tensor] = {}
        self._names = [names[i] for i in self.positions] if names is not None else None
        self._parts = [parts[i] for i in self.positions] if parts else [0] * len(self.positions)
        self._seen = SeenSpecs(len(self.parameters))
        self._shapes: list[torch.Size] = []
        self._memory: dict[str, Any] = {}
        self._request_problem = HeldError(problem)
        self._n_replicas: dict[int, int] = {}
        self._grouping = Grouping()
        if replicas is not None:
            index_of: dict[int | str, int] = {id(p): i for i, p in enumerate(self.parameters)}
            if names is not None:  # a tied weight goes by any of its names
                index_of |= {name: index_of[id(p)] for name, p in zip(names, parameters, strict=True)}
            with self._request_problem.hold():
                self._n_replicas = _count_replicas(replicas, mesh, index_of, self.name_of)
        with self._request_problem.hold():
            self.use_stages(pp_mesh)
        if self.pp_mesh is None:
            self._regroup()

    def release(self) -> None:
        """Keep no tensor alive from now on. The plan is of no use until `rebind`."""
        self.parameters = []

    def rebind(self, parameters: Sequence[Tensor], mesh: DeviceMesh | None, pp_mesh: DeviceMesh | None) -> None:
        """Plan for the tensors of a list like the one that was passed, and for equal meshes, after `release`."""
        self.parameters = [parameters[i] for i in self.positions]
        self.mesh, self.pp_mesh = mesh, pp_mesh

    def use_stages(self, pp_mesh: DeviceMesh | None) -> None:
        """Sum over these pipeline stages from now on; None keeps the known ones.

        Raises:
            ValueError: when it is not a mesh of one axis that contains this rank, when it does not show which ranks of
                `mesh` are in this stage, or when the plan knows other stages.
        """
        if pp_mesh is None or pp_mesh is self.pp_mesh:
            return
        check_mesh("pp_mesh", pp_mesh, n_axes=1)
        if self.pp_mesh is None:
            if self.mesh is not None and pp_mesh.size() > 1 and ranks_of(pp_mesh) <= set(self.in_stage):
                self.in_stage, self.n_stages_in_mesh = stage_ranks(self.mesh, pp_mesh), pp_mesh.size()
            self.pp_mesh = pp_mesh
            self._regroup()
        elif ranks_of(pp_mesh) != ranks_of(self.pp_mesh):
            raise ValueError(
                "pp_mesh has other ranks than the plan's pp_mesh: pass the one that the plan was made with, or none"
            )

    @property
    def n_stages(self) -> int:
        """Pipeline stages, as far as they are known; 1 without them."""
        return self.pp_mesh.size() if self.pp_mesh is not None else 1

    @property
    def has_names(self) -> bool:
        """Whether the caller named the parameters."""
        return self._names is not None

    def name_of(self, index: int) -> str:
        """What to call a parameter in messages."""
        if self._names is not None:
            return self._names[index]
        parameter = self.parameters[index]
        shape = "no shape yet" if is_lazy(parameter) else f"shape {tuple(parameter.shape)}"
        return f"parameter {index} of {shape}"

    @property
    def descriptions(self) -> list[str]:
        """Name (if any), global shape and dtype of each parameter with a shape whose replicas were not declared."""
        return [
            f"{self._names[i] if self._names is not None else ''}{tuple(p.shape)}{p.dtype}"
            for i, p in self.with_shapes()
            if i not in self._n_replicas
        ]

    @property
    def partial_descriptions(self) -> list[str]:
        """Name (if any) and global shape of the parameters whose gradients must still be summed, in that order."""
        partial = sorted(i for group in self.groups if group.key.is_partial for i in group.indices)
        return [
            f"{self._names[i] if self._names is not None else ''}{tuple(self.parameters[i].shape)}" for i in partial
        ]

    def with_shapes(self) -> Iterator[tuple[int, Tensor]]:
        """Indices and parameters, except those of lazy modules that have not run yet."""
        lazy = self._grouping.lazy
        return ((i, p) for i, p in enumerate(self.parameters) if i not in lazy)

    def is_declared(self, index: int) -> bool:
        """Whether the caller declared on how many ranks a parameter is."""
        return index in self._n_replicas

    @property
    def declared_replicas(self) -> list[int]:
        """On how many ranks each of the declared parameters is."""
        return list(self._n_replicas.values())

    def remembered(self, name: str, compute: Callable[[NormPlan], T]) -> T:
        """What was computed under this name, until parameters change their shapes or are regrouped."""
        is_any_lazy = bool(self._grouping.lazy)
        shapes = [p.shape for _, p in self.with_shapes()] if is_any_lazy else [p.shape for p in self.parameters]
        if shapes != self._shapes:
            self._shapes, self._memory = shapes, {}
        if name not in self._memory:
            self._memory[name] = compute(self)
        value: T = self._memory[name]
        return value

    @property
    def groups(self) -> tuple[ParameterGroup, ...]:
        """Parameters whose gradients are spread alike; groups of sharded gradients first."""
        return self._grouping.groups

    @property
    def layouts(self) -> list[Share]:
        """One for each set of ranks that gradients are cut over; without a mesh one collective each, in this order."""
        return self._grouping.layouts

    @property
    def meshes(self) -> list[DeviceMesh]:
        """The gradients' meshes that contain this rank, each once, in the same order on every rank."""
        return self._grouping.meshes

    def __getitem__(self, key: Key) -> list[Tensor]:
        for group in self.groups:
            if group.key == key:
                return [self.parameters[i] for i in group.indices]
        raise KeyError(key)

    def __iter__(self) -> Iterator[Key]:
        return (group.key for group in self.groups)

    def __len__(self) -> int:
        return len(self.groups)

    # A plan is itself: the equality of mappings would compare tensors.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def _device_of_sums(self) -> torch.device:
        meshes = [self.mesh, self.pp_mesh, *(group.layout.mesh for group in self.groups)]
        kind = next((mesh.device_type for mesh in meshes if mesh is not None), None)
        devices = [group.key.device for group in self.groups if group.key.device.type != "meta"]
        devices = devices or [torch.device("cpu")]
        if kind is None or kind == devices[0].type:
            return devices[0]
        of_kind = [device for device in devices if device.type == kind]
        return of_kind[0] if of_kind else torch.device(kind)

    @property
    def request_problem(self) -> ValueError | None:
        """What is wrong on this rank with the request: its options, the pipeline stages, or a replaced parameter."""
        return self._request_problem.first or self._missing_stages() or self._replaced_parameter()

    @property
    def gradient_problem(self) -> ValueError | None:
        """What is wrong on this rank with a gradient."""
        return self._grouping.problem.first

    def _replaced_parameter(self) -> ValueError | None:
        if self._inventory is None:
            return None
        now = self._inventory.parameters()
        if now is not self._module_parameters:
            known = {id(p) for p in self.parameters}
            self._module_parameters, self._unplanned = now, {n: p for n, p in now.items() if id(p) not in known}
        # Without a gradient it takes no part in this norm. (So do the gathered parameters that FSDP2 shows at times.)
        name = next((name for name, p in self._unplanned.items() if p.grad is not None), None)
        if name is None:
            return None
        return ValueError(
            f"{name} came into the module, or replaced another parameter there, after the plan was made, and has a "
            "gradient: make the plan again by group_parameters_for_norm"
        )

    def _missing_stages(self) -> ValueError | None:
        if self.mesh is None or self.pp_mesh is not None:
            return None
        axes = dict(zip(self.mesh.mesh_dim_names or (), self.mesh.shape, strict=False))
        if axes.get("pp", 1) == 1:
            return None
        return ValueError("mesh= has an axis 'pp', but pp_mesh= was not given: pass pp_mesh=mesh['pp']")

    def zeros(self, index: int) -> Tensor:
        """Zeros in place of a missing gradient that was partial before, placed as it was then."""
        spec = self._seen.partial[index]
        local = torch.zeros(shard_of(spec)[0], dtype=spec.tensor_meta.dtype, device=spec.mesh.device_type)
        return from_local(local, spec)

    def collect(self) -> list[Collected]:
        """The gradients that exist now, by group; the parameters are regrouped first if a gradient is placed anew."""
        collected = None if self._grouping.problem.first is not None else self._collect_as_planned()
        if collected is None:
            self._regroup()
            collected = self._collect_as_planned()
            assert collected is not None  # planned just now
        return collected

    def _collect_as_planned(self) -> list[Collected] | None:
        """None when a gradient is not placed as planned."""
        parameters, grouping = self.parameters, self._grouping
        latest, partial = self._seen.latest, self._seen.partial
        devices, dtypes, unusable = grouping.devices, grouping.dtypes, grouping.unusable
        if any(parameters[i].grad is not None for i in grouping.left_out):
            return None
        for i, shape in grouping.block_shapes.items():  # few: these are large
            if (large := parameters[i].grad) is not None and large.shape != shape:
                return None
        collected = []
        # The hot path, run for every parameter at every step: it compares, mostly by `is`, and avoids calls.
        for group in grouping.groups:
            gradients = Collected(group)
            for i in group.indices:
                gradient = parameters[i].grad
                if gradient is None:
                    # Peers may have a partial gradient here, and then wait for this rank's: it must join with zeros.
                    if i in partial and not group.key.is_partial:
                        return None
                    continue
                if i in unusable:
                    continue
                spec = getattr(gradient, "_spec", None)
                if spec is not latest[i]:
                    if not same_placement(spec, latest[i]):
                        return None
                    latest[i] = spec
                local = gradient if spec is None else gradient._local_tensor  # type: ignore[attr-defined]
                if type(local) is not Tensor:
                    local = local_tensor(gradient)  # a collective may still be writing to it
                if local.device != devices[i] or local.dtype is not dtypes[i]:
                    return None
                if local.layout is not torch.strided and not self.allow_sparse:
                    return None
                gradients.indices.append(i)
                gradients.gradients.append(gradient)
                gradients.locals.append(local)
            collected.append(gradients)
        return collected

    def _regroup(self) -> None:
        self._memory = {}
        try:
            self._grouping = group_gradients(
                self.parameters,
                self._seen,
                mesh=self.mesh,
                pp_mesh=self.pp_mesh,
                in_stage=self.in_stage,
                n_replicas=self._n_replicas,
                parts=self._parts,
                allow_sparse=self.allow_sparse,
                name_of=self.name_of,
            )
        except Exception as error:  # a tensor of a kind that nobody knows, or a defect: peers wait for this rank
            problem = HeldError(unexpected("gradients cannot be grouped", error))
            self._grouping = dataclasses.replace(self._grouping, problem=problem)
        self.device = self._device_of_sums()


def _count_replicas(
    replicas: Mapping[Any, int],
    mesh: DeviceMesh | None,
    index_of: Mapping[int | str, int],
    name_of: Callable[[int], str],
) -> dict[int, int]:
    """Declared replicas by parameter; `index_of` knows parameters by `id` and by name."""
    if not isinstance(replicas, Mapping):
        raise ValueError(
            f"replicas must be a mapping from parameters or their names to numbers of ranks, got {replicas!r:.60}: "
            "pass {name: how many ranks hold the same values}"
        )
    if not replicas:
        return {}
    if mesh is None:
        raise ValueError("replicas= counts ranks of a mesh, got mesh=None: pass the mesh of all ranks")
    counts = {}
    for key, count in replicas.items():
        index = index_of.get(key if isinstance(key, str) else id(key))
        if index is None:
            got = f"a tensor of shape {tuple(key.shape)}" if isinstance(key, Tensor) else repr(key)
            raise ValueError(f"replicas= has {got}, which is not among the parameters: pass it with the others")
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= mesh.size():
            raise ValueError(
                f"replicas of {name_of(index)} must be a number of the mesh's {mesh.size()} ranks, got {count!r}: "
                "pass how many ranks hold the same values"
            )
        counts[index] = count
    return counts
