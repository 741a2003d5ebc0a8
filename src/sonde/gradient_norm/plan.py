"""How the gradients of many parameters are spread over ranks: worked out once, used at every step.

Each later call only collects the gradients and checks that they are still placed as planned, mostly by `is`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from sonde.gradient_norm.held_error import HeldError, unexpected
from sonde.gradient_norm.power_sums import is_read_in_blocks
from sonde.gradient_norm.refused_gradients import check_elements, check_marks, check_share, check_stages
from sonde.parallel.inventory import Inventory
from sonde.parallel.meshes import check_mesh, mesh_of_all_ranks, ranks_of, root_of, size_along, stage_ranks
from sonde.parallel.placements import from_local, local_tensor, shard_of, spec_of
from sonde.parallel.shares import Share, same_placement, share_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")


@dataclass(frozen=True)
class Key:
    """What the gradients of a group have in common: the same kernels read them, the same ranks sum them.

    Attributes:
        ranks: this rank and those that hold the other shards of what it holds; empty if it holds everything.
        n_shards: distinct shards that the gradient is cut into.
        n_replicas: how many of the summed ranks hold the same values, where the user declared it.
        part: which part of the model the gradients belong to.
        device: where they are.
        dtype: of their elements.
        is_partial: whether they must still be summed over some ranks.
        in_blocks: whether their squares are summed in blocks.
    """

    ranks: tuple[int, ...]
    n_shards: int
    n_replicas: int | None
    part: int
    device: torch.device
    dtype: torch.dtype
    is_partial: bool
    in_blocks: bool

    @property
    def order(self) -> tuple[object, ...]:
        """A sort key that puts sharded groups first: their sums over ranks run while other groups are read."""
        reading = (str(self.device), str(self.dtype), self.is_partial, self.in_blocks)
        return (not self.ranks, self.ranks, self.n_shards, self.n_replicas or 0, self.part, *reading)


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters whose gradients have one `Key`.

    Attributes:
        key: what the gradients have in common.
        share: of one of its gradients; the shares of the others have the same ranks.
        indices: which parameters these are, in the plan's order.
    """

    key: Key
    share: Share
    indices: tuple[int, ...]


@dataclass(frozen=True)
class Collected:
    """The gradients of one group that exist now.

    Attributes:
        group: the group.
        indices: the parameters that have a gradient.
        gradients: as they are in `.grad`.
        locals: this rank's parts of the gradients.
    """

    group: ParameterGroup
    indices: list[int] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    locals: list[Tensor] = field(default_factory=list)


@dataclass(slots=True)
class _Seen:
    """How a parameter's gradient was when it was last seen; without a gradient, how the parameter itself was.

    Attributes:
        spec: None for a plain tensor.
        partial: its last spec that was partial. If such a gradient is missing, this rank joins the sum with zeros,
            since its peers may have the gradient.
        device: of its local part.
        dtype: of its elements.
        shape: of the whole.
        is_usable: whether it can be counted.
    """

    spec: Any = None
    partial: Any = None
    device: torch.device | None = None
    dtype: torch.dtype | None = None
    shape: torch.Size | None = None
    is_usable: bool = True


class NormPlan(Mapping[Key, list[Tensor]]):
    """How the gradients of some parameters are spread over ranks, for clipping at every step.

    `group_parameters_for_norm` makes a plan, `clip_grad_norm_distributed_` takes it. It reads as a mapping, from what
    the gradients of a group have in common to the group's parameters. It stays valid as long as the parameters are the
    same: if a gradient is placed differently from its parameter (a norm weight's under sequence parallelism), or
    differently from the last call, the next call regroups the parameters by itself.

    Args:
        parameters: a tensor that comes twice counts once.
        names: of the parameters, for messages.
        mesh: all ranks that hold any of the model; None to sum gradients over the ranks of their own meshes, or over
            one of these meshes if it has all ranks of the job and other gradients are not cut over it.
        pp_mesh: the pipeline stages, each with parameters of its own.
        replicas: how many of the mesh's ranks hold the same values, by tensor or name, where the layout cannot show it.
        parts: which part of the model each parameter belongs to, from 0; as many parts on every rank; one part for all
            by default.
        part_names: what the parts are called; the ranks compare it.
        allow_sparse: count sparse gradients too, rather than refuse them.
        module: where the parameters are from; one that is replaced later is then noticed.
        problem: an error that was found in the caller's request already.
        are_gradients: the tensors themselves are counted, not their `.grad`; each as often as it comes.

    Attributes:
        parameters: each tensor once; released while the plan is cached.
        mesh: as passed.
        pp_mesh: the pipeline stages, if they are known.
        in_stage: the ranks of the mesh that have the same parameters: those of this rank's pipeline stage, in order;
            empty without a mesh.
        n_stages_in_mesh: pipeline stages among the ranks of the mesh; 1 if the stages take a collective of their own.
        part_names: as passed.
        n_parts: parts of the model.
        allow_sparse: as passed.
        has_names: whether the caller named the parameters.
        n_replicas: on how many ranks a parameter is, where the caller declared it.
        groups: parameters whose gradients are spread alike; groups of sharded gradients first.
        shares: how these gradients are spread, each way once, in the same order on every rank.
        gradient_problem: what is wrong on this rank with a gradient.
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
        are_gradients: bool = False,
    ) -> None:
        if mesh is not None:
            check_mesh("mesh", mesh)
        else:
            mesh = mesh_of_all_ranks(parameters)
        first = {id(p): i for i, p in reversed([*enumerate(parameters)])}
        self._positions = list(range(len(parameters))) if are_gradients else sorted(first.values())
        self._are_gradients = are_gradients
        self.parameters = [parameters[i] for i in self._positions]
        self.mesh = mesh
        self.pp_mesh: DeviceMesh | None = None
        self.in_stage: tuple[int, ...] = () if mesh is None else tuple(sorted(ranks_of(mesh)))
        self.n_stages_in_mesh = 1
        self.allow_sparse = allow_sparse
        self.part_names = tuple(part_names)
        self.n_parts = len(part_names) or max(parts or (), default=0) + 1
        self.has_names = names is not None
        self._names = [names[i] for i in self._positions] if names is not None else []
        self._parts = [parts[i] for i in self._positions] if parts else [0] * len(self._positions)
        self._inventory = None if module is None else Inventory(module)
        self._module_parameters: Mapping[str, Tensor] = {}
        self._unplanned: dict[str, Tensor] = {}
        self._seen = [_Seen() for _ in self.parameters]
        self._memory: dict[Callable[[NormPlan], Any], Any] = {}
        self._request_problem = HeldError(problem)
        self.n_replicas: dict[int, int] = {}
        self.groups: tuple[ParameterGroup, ...] = ()
        self.shares: list[Share] = []
        self._left_out: list[int] = []
        self.gradient_problem: ValueError | None = None
        if replicas is not None:
            indices_of: dict[object, list[int]] = {}
            for i, parameter in enumerate(self.parameters):
                indices_of.setdefault(id(parameter), []).append(i)
            if names is not None:  # a tied weight goes by any of its names
                indices_of |= {name: indices_of[id(p)] for name, p in zip(names, parameters, strict=True)}
            with self._request_problem.hold():
                self._declare(replicas, indices_of)
        with self._request_problem.hold():
            self.use_stages(pp_mesh)
        if self.pp_mesh is None:
            self._regroup()

    def _declare(self, replicas: Mapping[Any, int], indices_of: Mapping[object, Sequence[int]]) -> None:
        """Note the declared replicas by parameter; `indices_of` knows parameters by `id` and by name."""
        if not isinstance(replicas, Mapping):
            raise ValueError(
                f"replicas must be a mapping from parameters or their names to numbers of ranks, got {replicas!r:.60}: "
                "pass {name: how many ranks hold the same values}"
            )
        if replicas and self.mesh is None:
            raise ValueError("replicas= counts ranks of a mesh, got mesh=None: pass the mesh of all ranks")
        counts: dict[int, int] = {}
        for key, n in replicas.items():
            indices = indices_of.get(key if isinstance(key, str) else id(key))
            if indices is None:
                got = f"a tensor of shape {tuple(key.shape)}" if isinstance(key, Tensor) else repr(key)
                raise ValueError(f"replicas= has {got}, which is not among the parameters: pass it with the others")
            if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= len(self.in_stage):
                raise ValueError(
                    f"replicas of {self.name_of(indices[0])} must be a number of the mesh's {len(self.in_stage)} "
                    f"ranks, got {n!r}: pass how many ranks hold the same values"
                )
            counts |= dict.fromkeys(indices, n)
        self.n_replicas = counts

    def rebind(self, parameters: Sequence[Tensor], mesh: DeviceMesh | None, pp_mesh: DeviceMesh | None) -> None:
        """Plan for a list of tensors like the one that was passed, and for equal meshes.

        With an empty list the plan keeps no tensor alive, and is of no use until it gets another list.
        """
        self.parameters = [parameters[i] for i in self._positions] if parameters else []
        self.mesh, self.pp_mesh = mesh or self.mesh, pp_mesh

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

    def name_of(self, index: int) -> str:
        """What to call a parameter in messages."""
        if self.has_names:
            return self._names[index]
        parameter = self.parameters[index]
        shape = "no shape yet" if is_lazy(parameter) else f"shape {tuple(parameter.shape)}"
        return f"parameter {index} of {shape}"

    def description(self, index: int) -> str:
        """Name (if any), global shape and dtype of a parameter."""
        parameter = self.parameters[index]
        return f"{self._names[index] if self.has_names else ''}{tuple(parameter.shape)}{parameter.dtype}"

    def with_shapes(self) -> Iterator[tuple[int, Tensor]]:
        """Indices and parameters, except those of lazy modules that have not run yet."""
        return ((i, p) for i, p in enumerate(self.parameters) if not is_lazy(p))

    def weight(self, group: ParameterGroup) -> float:
        """The part of its power sum that this rank counts, so that every element counts once in the sum over ranks."""
        if self.mesh is None:
            return 1.0
        return group.share.weight(self.mesh.size(), n_stages=self.n_stages_in_mesh, n_replicas=group.key.n_replicas)

    def remembered(self, compute: Callable[[NormPlan], T]) -> T:
        """What a function makes of this plan, until parameters are regrouped."""
        if compute not in self._memory:
            self._memory[compute] = compute(self)
        value: T = self._memory[compute]
        return value

    def __getitem__(self, key: Key) -> list[Tensor]:
        return {group.key: [self.parameters[i] for i in group.indices] for group in self.groups}[key]

    def __iter__(self) -> Iterator[Key]:
        return (group.key for group in self.groups)

    def __len__(self) -> int:
        return len(self.groups)

    # A plan is itself: the equality of mappings would compare tensors.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def _device_of_sums(self) -> torch.device:
        meshes = [self.mesh, self.pp_mesh, *(group.share.mesh for group in self.groups)]
        kind = next((mesh.device_type for mesh in meshes if mesh is not None), None)
        devices = [group.key.device for group in self.groups if group.key.device.type != "meta"]
        devices = devices or [torch.device("cpu")]
        if kind is None or kind == devices[0].type:
            return devices[0]
        return next((device for device in devices if device.type == kind), torch.device(kind))

    @property
    def request_problem(self) -> ValueError | None:
        """What is wrong on this rank with the request: its options, the pipeline stages, or a replaced parameter."""
        return self._request_problem.first or self._missing_stages() or self._replaced_parameter()

    def _replaced_parameter(self) -> ValueError | None:
        if self._inventory is None:
            return None
        now = self._inventory.parameters()
        if now is not self._module_parameters:
            known = set(map(id, self.parameters))
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
        if self.pp_mesh is not None:
            return None
        if self.mesh is not None:
            if size_along(self.mesh, "pp") == 1:
                return None
            return ValueError("mesh= has an axis 'pp', but pp_mesh= was not given: pass pp_mesh=mesh['pp']")
        if (root := self.remembered(_root_with_stages)) is None:
            return None
        return ValueError(
            f"the mesh {root.mesh_dim_names} that gradients are cut over has pipeline stages, and each has gradients "
            "that the others lack: pass mesh= (that mesh) and pp_mesh=mesh['pp'], or the mesh of this stage alone as "
            "mesh= to count its gradients alone"
        )

    def zeros(self, index: int) -> Tensor:
        """Zeros in place of a missing gradient that was partial before, placed as it was then."""
        spec = self._seen[index].partial
        local = torch.zeros(shard_of(spec)[0], dtype=spec.tensor_meta.dtype, device=spec.mesh.device_type)
        return from_local(local, spec)

    def collect(self) -> list[Collected]:
        """The gradients that exist now, by group; the parameters are regrouped first if a gradient is placed anew."""
        collected = None if self.gradient_problem is not None else self._collect_as_planned()
        if collected is None:
            self._regroup()
            collected = self._collect_as_planned()
            assert collected is not None  # planned just now
        return collected

    def _gradients(self) -> list[Any]:
        return self.parameters if self._are_gradients else [p.grad for p in self.parameters]

    def _collect_as_planned(self) -> list[Collected] | None:
        """None when a gradient is not placed as planned."""
        parameters, gradients, all_seen = self.parameters, self._gradients(), self._seen
        if any(gradients[i] is not None for i in self._left_out):
            return None
        collected = []
        # The hot path, run for every parameter at every step: it compares, mostly by `is`, and avoids calls.
        for group in self.groups:
            of_group = Collected(group)
            for i in group.indices:
                gradient, seen = gradients[i], all_seen[i]
                if parameters[i].shape != seen.shape:
                    return None
                if gradient is None:
                    # Peers may have a partial gradient here, and then wait for this rank's: it must join with zeros.
                    if seen.partial is not None and not group.key.is_partial:
                        return None
                    continue
                if not seen.is_usable:
                    continue
                spec = getattr(gradient, "_spec", None)
                if spec is not seen.spec:
                    if not same_placement(spec, seen.spec):
                        return None
                    seen.spec = spec
                local = gradient if spec is None else gradient._local_tensor
                if type(local) is not Tensor:
                    local = local_tensor(gradient)  # a collective may still be writing to it
                if local.device != seen.device or local.dtype is not seen.dtype:
                    return None
                if local.layout is not torch.strided and (group.key.in_blocks or not self.allow_sparse):
                    return None
                of_group.indices.append(i)
                of_group.gradients.append(gradient)
                of_group.locals.append(local)
            collected.append(of_group)
        return collected

    def _regroup(self) -> None:
        self._memory, problem = {}, HeldError()
        try:
            self._sort_into_groups(problem)
        except Exception as error:  # a tensor of a kind that nobody knows, or a defect: peers wait for this rank
            problem = HeldError(unexpected("gradients cannot be grouped", error))
        self.gradient_problem = problem.first
        self.device = self._device_of_sums()

    def _sort_into_groups(self, problem: HeldError) -> None:
        """Sort parameters by how their gradients are spread over ranks; hold the first gradient that cannot be counted.

        If a gradient is missing, the spec seen before counts, or the parameter's own.
        """
        gradients, left_out = self._gradients(), []
        # Hashing a placement costs as much as all other planning: each way to place a gradient is worked out once.
        shares: dict[tuple[Any, ...], Share] = {}
        # Without a mesh, the order of shares is the order of collectives. It must not depend on which gradients exist:
        # so the parameters' own shares come first, and stand in for those of missing gradients.
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            if (spec := spec_of(parameter)) is not None and (gradient is not None or parameter.requires_grad):
                with contextlib.suppress(ValueError):  # if a gradient has this share too, the error names that gradient
                    _share(spec, shares)
        members: dict[tuple[Any, ...], list[int]] = {}
        countable: set[tuple[Any, ...]] = set()
        for i, (parameter, gradient, seen) in enumerate(zip(self.parameters, gradients, self._seen, strict=True)):
            if gradient is None and (not parameter.requires_grad or is_lazy(parameter)):
                left_out.append(i)
                continue
            tensor, n_replicas = parameter if gradient is None else gradient, self.n_replicas.get(i)
            seen.spec = spec_of(tensor) if gradient is not None else seen.partial or seen.spec or spec_of(tensor)
            seen.shape, seen.dtype, seen.device = parameter.shape, tensor.dtype, local_tensor(tensor).device
            seen.is_usable = True
            try:
                if vars(parameter):
                    check_marks(parameter, is_declared=n_replicas is not None)
                share = _share(seen.spec, shares)
            except ValueError as error:  # no share is known: the gradient is in no group
                problem.keep(ValueError(f"gradient of {self.name_of(i)}: {error}"))
                continue
            seen.partial = seen.spec if share.partial else seen.partial
            kind = (share, seen.device, n_replicas, seen.dtype, None if gradient is None else tensor.layout)
            try:
                if kind not in countable:
                    check_share(share, seen.device, self.mesh, n_replicas=n_replicas)
                    check_stages(share, self.pp_mesh, self.in_stage)
                    if gradient is not None:
                        check_elements(tensor, allow_sparse=self.allow_sparse)
                    countable.add(kind)
            except ValueError as error:
                problem.keep(ValueError(f"gradient of {self.name_of(i)}: {error}"))
                seen.is_usable = False  # it stays in its group: if it is partial, its peers sum theirs, this rank zeros
            alike = (share, n_replicas, self._parts[i], seen.device, seen.dtype, is_read_in_blocks(tensor))
            members.setdefault(alike, []).append(i)
        groups: dict[Key, ParameterGroup] = {}
        for (share, n_replicas, part, device, dtype, in_blocks), indices in members.items():
            key = Key(share.ranks, share.n_shards, n_replicas, part, device, dtype, bool(share.partial), in_blocks)
            # Shares on different meshes may have the same ranks: their members become one group.
            together = tuple(sorted((*(groups[key].indices if key in groups else ()), *indices)))
            groups[key] = ParameterGroup(key, share, together)
        self.groups = tuple(groups[key] for key in sorted(groups, key=lambda key: key.order))
        self.shares, self._left_out = list(shares.values()), left_out


def _share(spec: Any, shares: dict[tuple[Any, ...], Share]) -> Share:
    """The share of a spec, one object for all that are placed alike."""
    placed = () if spec is None else (spec.mesh, *spec.placements)
    share = shares.get(placed)
    if share is None:
        share = shares[placed] = share_of(spec)
    return share


def _root_with_stages(plan: NormPlan) -> DeviceMesh | None:
    """The whole mesh around that of some parameters, if it has pipeline stages."""
    # Not by shares, which are kept for equal meshes: those may be axes of different ones.
    roots = (root_of(spec.mesh) for p in plan.parameters if (spec := spec_of(p)) is not None)
    return next((root for root in roots if size_along(root, "pp") > 1), None)
