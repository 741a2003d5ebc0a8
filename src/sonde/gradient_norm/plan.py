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
from sonde.parallel.shares import Share, share_of
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
class Collected:
    """The gradients of one group that exist now.

    Attributes:
        key: of the group.
        indices: the parameters that have a gradient.
        gradients: as they are in `.grad`, if they are partial.
        locals: this rank's parts of the gradients.
    """

    key: Key
    indices: Sequence[int] = ()
    gradients: Sequence[Tensor] = ()
    locals: list[Tensor] = field(default_factory=list)


_State = tuple[Any, ...]
"""Of a gradient: its spec, which knows the shape, and what this rank's part is like; of a plain one, None, and what it
is like. States are mostly compared by `is`, which tuples try first."""
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
        by_part: the name of the part of the model that each parameter belongs to; the ranks compare these names. None
            for one part without a name.
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
        part_names: of the parts of the model, in order.
        n_parts: how many there are, or 1.
        names: of the parameters; empty if the caller gave none.
        n_replicas: on how many ranks a parameter is, where the caller declared it.
        groups: the indices of parameters whose gradients are spread alike; groups of sharded gradients first.
        shares: how these gradients are spread, each way once, in the same order on every rank.
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
        by_part: Sequence[str] | None = None,
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
        self.part_names = tuple(sorted(set(by_part or ())))
        self.n_parts = max(len(self.part_names), 1)
        self.names = [names[i] for i in self._positions] if names is not None else []
        place = {name: k for k, name in enumerate(self.part_names)}
        self._parts = [place[by_part[i]] if by_part else 0 for i in self._positions]
        self._inventory = None if module is None else Inventory(module)
        self._module_parameters: Mapping[str, Tensor] = {}
        self._unplanned: dict[str, Tensor] = {}
        self._specs: list[Any] = [None] * len(self.parameters)
        """How each gradient was placed when it was planned; without a gradient, how its parameter was."""
        self._partials: dict[int, Any] = {}
        """The last partial spec of a gradient. If such a gradient is missing, this rank joins the sum with zeros, since
        its peers may have it."""
        self._states: list[_State | None] = []
        self._request_problem = HeldError(problem)
        self.n_replicas: dict[int, int] = {}
        self.groups: dict[Key, list[int]] = {}
        self.shares: list[Share] = []
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
        if self.names:
            return self.names[index]
        parameter = self.parameters[index]
        shape = "no shape yet" if is_lazy(parameter) else f"shape {tuple(parameter.shape)}"
        return f"parameter {index} of {shape}"

    def description(self, index: int) -> str:
        """Name (if any), global shape and dtype of a parameter."""
        parameter = self.parameters[index]
        return f"{self.names[index] if self.names else ''}{tuple(parameter.shape)}{parameter.dtype}"

    def with_shapes(self) -> Iterator[tuple[int, Tensor]]:
        """Indices and parameters, except those of lazy modules that have not run yet."""
        return ((i, p) for i, p in enumerate(self.parameters) if not is_lazy(p))

    def weight(self, key: Key) -> float:
        """The part of a group's power sum that this rank counts, so that every element counts once over all ranks."""
        if self.mesh is None:
            return 1.0
        return 1.0 / key.n_replicas if key.n_replicas else key.n_shards * self.n_stages_in_mesh / self.mesh.size()

    def remembered(self, compute: Callable[[NormPlan], T]) -> T:
        """What a function makes of this plan, until parameters are regrouped."""
        if compute not in self._memory:
            self._memory[compute] = compute(self)
        value: T = self._memory[compute]
        return value

    def __getitem__(self, key: Key) -> list[Tensor]:
        return [self.parameters[i] for i in self.groups[key]]

    def __iter__(self) -> Iterator[Key]:
        return iter(self.groups)

    def __len__(self) -> int:
        return len(self.groups)

    # A plan is itself: the equality of mappings would compare tensors.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def _device_of_sums(self) -> torch.device:
        meshes = [self.mesh, self.pp_mesh, *(share.mesh for share in self.shares)]
        devices = [key.device for key in self.groups if key.device.type != "meta"] or [torch.device("cpu")]
        kind = next((mesh.device_type for mesh in meshes if mesh is not None), devices[0].type)
        return next((device for device in devices if device.type == kind), torch.device(kind))

    @property
    def problem(self) -> ValueError | None:
        """What is wrong on this rank: with the request, its pipeline stages, a replaced parameter, or a gradient."""
        return self.problem_of_plan or self._missing_stages() or self.remembered(_missing_mesh)

    @property
    def problem_of_plan(self) -> ValueError | None:
        """What is wrong already while the pipeline stages may still be given."""
        of_mesh = self._missing_stages() if self.mesh is not None else None
        return self._request_problem.first or of_mesh or self._replaced_parameter() or self._gradient_problem

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

    def roots(self) -> list[DeviceMesh]:
        """The whole meshes around those that gradients are cut over."""
        # Not by shares, which are kept for equal meshes: those may be axes of different ones. Nor by parameters where
        # there are gradients: torch gives a parameter the first of all equal meshes that it has seen.
        tensors = [g for g in self._gradients() if g is not None] or self.parameters
        return [root_of(spec.mesh) for tensor in tensors if (spec := spec_of(tensor)) is not None]

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

    def collect(self) -> list[Collected] | None:
        """The gradients that exist now, by group; the parameters are regrouped first if a gradient is placed anew.

        None if a gradient cannot be counted.
        """
        collected = self._collect_as_planned()
        if collected is None:
            self._regroup()
            collected = self._collect_as_planned()
        return collected

    def _gradients(self) -> list[Any]:
        return self.parameters if self._are_gradients else [p.grad for p in self.parameters]

    def _collect_as_planned(self) -> list[Collected] | None:
        """None when a gradient is not placed as planned, or cannot be counted."""
        if self._gradient_problem is not None:
            return None
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
            else (g._spec, t.device, t.dtype)
            for g, t in zip(gradients, locals_, strict=True)
        ]
        is_complete = states == self._states
        if not (is_complete or self._lacks_some(states)):
            return None
        # Equal specs in other objects are known by `is` next time.
        self._states = states if is_complete else [a or b for a, b in zip(states, self._states, strict=True)]
        collected = []
        for key, indices in self.groups.items():
            present = indices if is_complete else [i for i in indices if states[i] is not None]
            whole = [gradients[i] for i in present] if key.is_partial else []
            collected.append(Collected(key, present, whole, [locals_[i] for i in present]))
        return collected

    def _lacks_some(self, states: Sequence[_State | None]) -> bool:
        """Whether gradients are as planned except that some are missing."""
        for i, (state, planned) in enumerate(zip(states, self._states, strict=True)):
            if state is not None:
                if state != planned:
                    return False
            # Peers may have a partial gradient here, and wait for this rank's: it must join with zeros.
            elif self._partials.get(i, self._specs[i]) is not self._specs[i]:
                return False
        return True

    def _regroup(self) -> None:
        self._memory: dict[Callable[[NormPlan], Any], Any] = {}
        problem = HeldError()
        problem.attempt(self._sort_into_groups, problem, otherwise=None, what="gradients cannot be grouped")
        self._gradient_problem = problem.first
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
        alike: dict[tuple[Any, ...], list[int]] = {}
        self._states = [None] * len(gradients)
        for i, (parameter, gradient) in enumerate(zip(self.parameters, gradients, strict=True)):
            if gradient is None and (not parameter.requires_grad or is_lazy(parameter)):
                continue
            tensor, n_replicas = parameter if gradient is None else gradient, self.n_replicas.get(i)
            spec = spec_of(tensor)
            if gradient is None:
                spec = self._partials.get(i) or self._specs[i] or spec
            local = local_tensor(tensor)
            device, dtype, layout = local.device, tensor.dtype, torch.strided if gradient is None else local.layout
            self._specs[i] = spec
            self._states[i] = (spec, device, dtype) if spec is not None else (None, device, dtype, layout, local.shape)
            try:
                if vars(parameter):
                    check_marks(parameter, is_declared=n_replicas is not None)
                share = _share(spec, shares)
            except ValueError as error:  # no share is known: the gradient is in no group
                problem.keep(ValueError(f"gradient of {self.name_of(i)}: {error}"))
                continue
            if share.partial:
                self._partials[i] = spec
            has_gradient, in_blocks = gradient is not None, is_read_in_blocks(tensor)
            elements = (dtype, layout, local.is_meta) if has_gradient else None
            kind = (share, n_replicas, self._parts[i], device, dtype, in_blocks, elements)
            alike.setdefault(kind, []).append(i)
        groups: dict[Key, list[int]] = {}
        for (share, n_replicas, part, device, dtype, in_blocks, elements), indices in alike.items():
            try:
                check_share(share, device, self.mesh, n_replicas=n_replicas)
                check_stages(share, self.pp_mesh, self.in_stage)
                if elements is not None:
                    check_elements(*elements)
            except ValueError as error:
                problem.keep(ValueError(f"gradient of {self.name_of(indices[0])}: {error}"))
            key = Key(share.ranks, share.n_shards, n_replicas, part, device, dtype, bool(share.partial), in_blocks)
            # Shares on different meshes may have the same ranks: their members become one group.
            groups.setdefault(key, []).extend(indices)
        self.groups = {key: sorted(groups[key]) for key in sorted(groups, key=lambda key: key.order)}
        self.shares = list(shares.values())


def _share(spec: Any, shares: dict[tuple[Any, ...], Share]) -> Share:
    """The share of a spec, one object for all that are placed alike."""
    placed = () if spec is None else (spec.mesh, *spec.placements)
    share = shares.get(placed)
    if share is None:
        share = shares[placed] = share_of(spec)
    return share


def _missing_mesh(plan: NormPlan) -> ValueError | None:
    """Some gradients are cut over an axis of a mesh, and others are not: are the ranks along other axes copies?

    They are under tensor parallelism, and are none where they hold other experts. Only a sum over them would show it,
    and only the caller knows whether they call too. torch's own clip refuses plain gradients beside DTensors.
    """
    if plan.mesh is not None or len({key.ranks for key in plan.groups}) < 2:
        return None
    largest = max(share.mesh.size() for share in plan.shares if share.mesh is not None) * plan.n_stages
    if all(root.size() <= largest for root in plan.roots()):
        return None
    return ValueError(
        "some gradients are cut over an axis of a mesh, and others are not, so it does not show which ranks hold the "
        "same: pass mesh= (all ranks that hold the model), and replicas= for parameters that only some of them have, "
        "as experts"
    )


def _root_with_stages(plan: NormPlan) -> DeviceMesh | None:
    """The whole mesh around that of some gradients, if it has pipeline stages."""
    return next((root for root in plan.roots() if size_along(root, "pp") > 1), None)
