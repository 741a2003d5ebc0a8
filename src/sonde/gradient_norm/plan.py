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

from sonde.gradient_norm.power_sums import is_read_in_blocks
from sonde.gradient_norm.refused_gradients import (
    HeldError,
    check_elements,
    check_marks,
    check_share,
    check_stages,
    unexpected,
)
from sonde.parallel.placements import (
    check_mesh,
    from_local,
    local_tensor,
    mesh_of_all_ranks,
    ranks_of,
    root_of,
    shard_of,
    size_along,
    spec_of,
    stage_ranks,
)
from sonde.parallel.shares import Share, same_placement, share_of
from sonde.parallel.unwrap import Inventory

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
        gradients: as they are in `.grad`, if they are partial.
        locals: this rank's parts of the gradients.
    """

    group: ParameterGroup
    indices: Sequence[int] = ()
    gradients: Sequence[Tensor] = ()
    locals: list[Tensor] = field(default_factory=list)


_State = tuple[Any, ...]
"""Of a gradient: the `id` of its spec, which the plan keeps and which knows the shape, and what this rank's part is
like; of a plain one, None, and what it is like."""
_FINISHED = frozenset((Tensor, type(None)))


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
        is_alone: whether no other rank holds anything that this rank counts.
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
        self._specs: list[Any] = [None] * len(self.parameters)
        """How each gradient was placed when it was last seen; without a gradient, how its parameter is."""
        self._partials: dict[int, Any] = {}
        """The last partial spec of a gradient. If such a gradient is missing, this rank joins the sum with zeros, since
        its peers may have it."""
        self._states: list[_State | None] = []
        self._request_problem = HeldError(problem)
        self.n_replicas: dict[int, int] = {}
        self.groups: tuple[ParameterGroup, ...] = ()
        self.shares: list[Share] = []
        self._partial_now: set[int] = set()
        self._unusable: set[int] = set()
        if replicas is not None:
            indices_of: dict[object, list[int]] = {}
            for i, parameter in enumerate(self.parameters):
                indices_of.setdefault(id(parameter), []).append(i)
            if names is not None:  # a tied weight goes by any of its names
                indices_of |= {name: indices_of[id(p)] for name, p in zip(names, parameters, strict=True)}
            self._request_problem.attempt(self._declare, replicas, indices_of, otherwise=None)
        self._request_problem.attempt(self.use_stages, pp_mesh, otherwise=None)
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
        spec = self._partials[index]
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
        # The hot path, run for every parameter at every step: comprehensions, and one comparison of two lists.
        gradients = self._gradients()
        locals_ = [getattr(g, "_local_tensor", g) for g in gradients]
        if not _FINISHED.issuperset(map(type, locals_)):  # a collective may still be writing to some
            locals_ = [g if g is None else local_tensor(g) for g in gradients]
        states: list[_State | None] = [
            None
            if t is None
            else (None, t.device, t.dtype, t.layout, t.shape)
            if g is t
            else (id(g._spec), t.device, t.dtype)
            for g, t in zip(gradients, locals_, strict=True)
        ]
        absent = self._unusable
        if states != self._states:
            if not self._fits(gradients, states):
                return None
            absent = absent.union(i for i, state in enumerate(states) if state is None)
        collected = []
        for group in self.groups:
            indices = [i for i in group.indices if i not in absent] if absent else group.indices
            whole = [gradients[i] for i in indices] if group.key.is_partial else []
            collected.append(Collected(group, indices, whole, [locals_[i] for i in indices]))
        return collected

    def _fits(self, gradients: Sequence[Tensor | None], states: Sequence[_State | None]) -> bool:
        """Whether those gradients that exist are placed as planned, though perhaps by other objects than before."""
        for i, (gradient, state, planned) in enumerate(zip(gradients, states, self._states, strict=True)):
            if gradient is None:
                # Peers may have a partial gradient here, and then wait for this rank's: it must join with zeros.
                if i in self._partials and i not in self._partial_now:
                    return False
            elif state != planned:
                spec = spec_of(gradient)
                if planned is None or state is None or state[1:] != planned[1:]:
                    return False
                if not same_placement(spec, self._specs[i]) or (
                    spec is not None and spec.shape != self._specs[i].shape
                ):
                    return False
                self._specs[i], self._states[i] = spec, state
        return True

    def _regroup(self) -> None:
        self._memory: dict[Callable[[NormPlan], Any], Any] = {}
        problem = HeldError()
        try:
            self._sort_into_groups(problem)
        except Exception as error:  # a tensor of a kind that nobody knows, or a defect: peers wait for this rank
            problem = HeldError(unexpected("gradients cannot be grouped", error))
        self.gradient_problem = problem.first
        self.device = self._device_of_sums()
        meshes = [m for m in (self.mesh, self.pp_mesh) if m is not None]
        self.is_alone = all(m.size() == 1 for m in meshes) and not any(share.ranks for share in self.shares)

    def _sort_into_groups(self, problem: HeldError) -> None:
        """Sort parameters by how their gradients are spread over ranks; hold the first gradient that cannot be counted.

        If a gradient is missing, the spec seen before counts, or the parameter's own.
        """
        gradients = self._gradients()
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
        self._states, self._unusable, self._partial_now = [None] * len(gradients), set(), set()
        for i, (parameter, gradient) in enumerate(zip(self.parameters, gradients, strict=True)):
            if gradient is None and (not parameter.requires_grad or is_lazy(parameter)):
                continue
            tensor, n_replicas = parameter if gradient is None else gradient, self.n_replicas.get(i)
            spec = spec_of(tensor)
            if gradient is None:
                spec = self._partials.get(i) or self._specs[i] or spec
            local = local_tensor(tensor)
            layout = torch.strided if gradient is None else local.layout
            state = (None, local.device, tensor.dtype, layout, local.shape)
            self._specs[i], self._states[i] = spec, state if spec is None else (id(spec), *state[1:3])
            try:
                if vars(parameter):
                    check_marks(parameter, is_declared=n_replicas is not None)
                share = _share(spec, shares)
            except ValueError as error:  # no share is known: the gradient is in no group
                problem.keep(ValueError(f"gradient of {self.name_of(i)}: {error}"))
                continue
            if share.partial:
                self._partials[i] = spec
                self._partial_now.add(i)
            kind = (share, local.device, n_replicas, tensor.dtype, None if gradient is None else layout)
            try:
                if kind not in countable:
                    check_share(share, local.device, self.mesh, n_replicas=n_replicas)
                    check_stages(share, self.pp_mesh, self.in_stage)
                    if gradient is not None:
                        check_elements(tensor, allow_sparse=self.allow_sparse)
                    countable.add(kind)
            except ValueError as error:
                problem.keep(ValueError(f"gradient of {self.name_of(i)}: {error}"))
                self._unusable.add(i)  # it stays in its group: if it is partial, its peers sum theirs, this rank zeros
            alike = (share, n_replicas, self._parts[i], local.device, tensor.dtype, is_read_in_blocks(tensor))
            members.setdefault(alike, []).append(i)
        groups: dict[Key, ParameterGroup] = {}
        for (share, n_replicas, part, device, dtype, in_blocks), indices in members.items():
            key = Key(share.ranks, share.n_shards, n_replicas, part, device, dtype, bool(share.partial), in_blocks)
            # Shares on different meshes may have the same ranks: their members become one group.
            together = tuple(sorted((*(groups[key].indices if key in groups else ()), *indices)))
            groups[key] = ParameterGroup(key, share, together)
        self.groups = tuple(groups[key] for key in sorted(groups, key=lambda key: key.order))
        self.shares = list(shares.values())


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
