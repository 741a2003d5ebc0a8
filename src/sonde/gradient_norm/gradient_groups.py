"""Groups of gradients that are spread alike over ranks, and how parameters are sorted into these groups."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from sonde.gradient_norm.held_error import HeldError
from sonde.gradient_norm.power_sums import is_read_in_blocks
from sonde.gradient_norm.refused_gradients import check_elements, check_layout, check_stages
from sonde.parallel.placements import local_tensor
from sonde.parallel.shares import Share, share_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


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
        """A sort key that puts sharded groups first: their sums over ranks run while other groups are read."""
        rest = (self.n_shards, self.n_replicas or 0, self.part, str(self.device), str(self.dtype), self.is_partial)
        return (not self.ranks, self.ranks, *rest)


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters whose gradients have one `Key`.

    Attributes:
        key: what the gradients have in common.
        layout: the layout of one of its gradients; the layouts of the others have the same ranks.
        indices: which parameters these are, in the plan's order.
        in_blocks: those of them whose squares are summed in blocks.
    """

    key: Key
    layout: Share
    indices: tuple[int, ...]
    in_blocks: frozenset[int] = frozenset()


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


@dataclass(frozen=True)
class Grouping:
    """Where every gradient was when the parameters were last sorted into groups.

    Attributes:
        groups: groups of sharded gradients first.
        layouts: one for each set of ranks that gradients are cut over. Without a mesh each takes one collective, in
            this order.
        meshes: the gradients' meshes that contain this rank, each once, in the same order on every rank.
        devices: of each gradient's local part, or of the parameter's if there is no gradient; [parameters].
        dtypes: of each gradient, or of the parameter; [parameters].
        left_out: parameters in no group: they have no gradient, and are frozen or not initialised.
        lazy: those of them that are not initialised, as in `nn.LazyLinear`, and so have no shape.
        unusable: parameters in a group whose gradients cannot be counted.
        block_shapes: the shapes of gradients that are read in blocks, by parameter.
        problem: what is wrong with a gradient.
    """

    groups: tuple[ParameterGroup, ...] = ()
    layouts: list[Share] = field(default_factory=list)
    meshes: list[DeviceMesh] = field(default_factory=list)
    devices: list[torch.device] = field(default_factory=list)
    dtypes: list[torch.dtype] = field(default_factory=list)
    left_out: list[int] = field(default_factory=list)
    lazy: frozenset[int] = frozenset()
    unusable: set[int] = field(default_factory=set)
    block_shapes: dict[int, torch.Size] = field(default_factory=dict)
    problem: HeldError = field(default_factory=HeldError)


class SeenSpecs:
    """The DTensor spec that each gradient had when it was last seen; None for a plain tensor.

    Attributes:
        latest: the last spec of each parameter's gradient; [parameters].
        partial: the last spec that was partial, by parameter. If such a gradient is missing, this rank joins the
            sum with zeros, since its peers may have the gradient.
    """

    def __init__(self, n_parameters: int) -> None:
        self.latest: list[Any] = [None] * n_parameters
        self.partial: dict[int, Any] = {}

    def look(self, index: int, parameter: Tensor) -> Any:
        """The spec of a parameter's gradient now; if there is no gradient, the spec it had, or the parameter's own."""
        if parameter.grad is not None:
            spec = getattr(parameter.grad, "_spec", None)
        else:
            spec = self.partial.get(index) or self.latest[index] or getattr(parameter, "_spec", None)
        self.latest[index] = spec
        return spec


def group_gradients(
    parameters: Sequence[Tensor],
    seen: SeenSpecs,
    *,
    mesh: DeviceMesh | None,
    pp_mesh: DeviceMesh | None,
    in_stage: Collection[int],
    n_replicas: Mapping[int, int],
    parts: Sequence[int],
    allow_sparse: bool,
    name_of: Callable[[int], str],
) -> Grouping:
    """Sort parameters by how their gradients are spread over ranks.

    Args:
        parameters: each tensor once. If its gradient is missing, the spec seen before counts, or its own.
        seen: the specs seen before; updated.
        mesh: all ranks that hold any of the model, if it was given.
        pp_mesh: the pipeline stages, if they were given.
        in_stage: the ranks of this rank's pipeline stage; empty without a mesh.
        n_replicas: how many ranks hold the same values, by parameter, where it was declared.
        parts: which part of the model each parameter belongs to.
        allow_sparse: whether sparse gradients count.
        name_of: a parameter's name in messages.

    Returns:
        The groups, and the first error of a gradient that cannot be counted.
    """
    layouts = _DistinctLayouts(mesh, pp_mesh, in_stage)
    # Without a mesh, the order of layouts is the order of collectives. It must not depend on which gradients exist:
    # so the parameters' own layouts come first, and stand in for those of missing gradients.
    for parameter in parameters:
        if (spec := getattr(parameter, "_spec", None)) is not None and not _is_left_out(parameter):
            layouts.offer(spec)
    # One look for each parameter: attribute by attribute this loop is most of what a first call costs.
    tensors = [p if p.grad is None else p.grad for p in parameters]
    devices = [t.device if getattr(t, "_spec", None) is None else local_tensor(t).device for t in tensors]
    dtypes = [t.dtype for t in tensors]
    left_out: list[int] = []
    unusable: set[int] = set()
    problem = HeldError()
    block_shapes: dict[int, torch.Size] = {}
    members: dict[tuple[Any, ...], list[int]] = {}
    usable: set[tuple[Any, ...]] = set()
    for i, (parameter, tensor) in enumerate(zip(parameters, tensors, strict=True)):
        has_gradient = tensor is not parameter
        if not has_gradient and (not parameter.requires_grad or is_lazy(parameter)):
            left_out.append(i)
            continue
        try:
            if vars(parameter):
                _check_attributes(parameter, is_declared=i in n_replicas)
            number = layouts.number_of(seen.look(i, parameter))
        except ValueError as error:  # no layout is known: the gradient is in no group
            problem.keep(ValueError(f"gradient of {name_of(i)}: {error}"))
            continue
        if layouts.all[number].partial:
            seen.partial[i] = seen.latest[i]
        kind = (number, devices[i], n_replicas.get(i), dtypes[i], tensor.layout if has_gradient else None)
        try:
            if kind not in usable:
                layouts.check(number, devices[i], n_replicas.get(i))
                if has_gradient:
                    check_elements(tensor, allow_sparse=allow_sparse)
                usable.add(kind)
        except ValueError as error:
            problem.keep(ValueError(f"gradient of {name_of(i)}: {error}"))
            unusable.add(i)  # it stays in its group: if it is partial, its peers sum theirs, and this rank adds zeros
        if is_read_in_blocks(tensor):
            block_shapes[i] = tensor.shape
        members.setdefault((number, devices[i], dtypes[i], parts[i], n_replicas.get(i)), []).append(i)
    return Grouping(
        groups=_groups(members, layouts.all, block_shapes.keys()),
        layouts=_by_ranks(layouts.all),
        meshes=_meshes_of_this_rank(layouts.all),
        devices=devices,
        dtypes=dtypes,
        left_out=left_out,
        lazy=frozenset(i for i in left_out if is_lazy(parameters[i])),
        unusable=unusable,
        block_shapes=block_shapes,
        problem=problem,
    )


def marks_of(parameter: Tensor) -> tuple[bool, bool, bool]:
    """The attributes by which other frameworks mark parameters that they have cut: of FSDP's first version, of
    DeepSpeed's ZeRO-3, and of Megatron's tensor parallelism."""
    return (
        bool(getattr(parameter, "_fsdp_flattened", False)),
        hasattr(parameter, "ds_id"),
        bool(getattr(parameter, "tensor_model_parallel", False)),
    )


def _check_attributes(parameter: Tensor, *, is_declared: bool) -> None:
    """Refuse plain tensors whose attributes say that other frameworks have cut them.

    Raises:
        ValueError: for a parameter of FSDP's first version, of DeepSpeed's ZeRO-3, or of Megatron's tensor parallelism.
    """
    is_flattened, is_partitioned, is_shard = marks_of(parameter)
    if is_flattened:
        raise ValueError(
            "FSDP's first version does not tell how it cuts parameters: use fully_shard, or FSDP's own clip_grad_norm_"
        )
    if is_partitioned:
        raise ValueError(
            "DeepSpeed's ZeRO-3 holds it in parts that it does not show: set gradient_clipping in DeepSpeed's "
            "configuration, and read engine.get_global_grad_norm()"
        )
    if is_shard and not is_declared and not hasattr(parameter, "_spec"):
        raise ValueError(
            "its attribute tensor_model_parallel says that it is a shard, and a plain tensor does not show over which "
            "ranks: pass mesh= of all ranks, and replicas= (how many of them hold the same shard)"
        )


def _is_left_out(parameter: Tensor) -> bool:
    """Whether a parameter is frozen and has no gradient from before."""
    return parameter.grad is None and not parameter.requires_grad


def _groups(
    members: Mapping[tuple[Any, ...], list[int]], layouts: Sequence[Share], in_blocks: Set[int]
) -> tuple[ParameterGroup, ...]:
    """Layouts on different meshes may have the same ranks: their members become one group."""
    groups: dict[Key, ParameterGroup] = {}
    for (number, device, dtype, part, n_replicas), indices in members.items():
        layout = layouts[number]
        key = Key(layout.ranks, layout.n_shards, n_replicas, part, device, dtype, bool(layout.partial))
        earlier = groups[key].indices if key in groups else ()
        together = tuple(sorted((*earlier, *indices)))
        groups[key] = ParameterGroup(key, layout, together, frozenset(in_blocks & set(together)))
    return tuple(groups[key] for key in sorted(groups, key=lambda key: key.order))


def _by_ranks(layouts: Sequence[Share]) -> list[Share]:
    by_ranks: dict[tuple[int, ...], Share] = {}
    for layout in layouts:
        if layout.ranks:
            by_ranks.setdefault(layout.ranks, layout)
    return list(by_ranks.values())


def _meshes_of_this_rank(layouts: Sequence[Share]) -> list[DeviceMesh]:
    meshes = dict.fromkeys(layout.mesh for layout in layouts if layout.mesh is not None)
    return [mesh for mesh in meshes if mesh.get_coordinate() is not None]


class _DistinctLayouts:
    """The layouts of DTensor specs, each once and numbered: hashing a placement costs as much as all other planning."""

    def __init__(self, mesh: DeviceMesh | None, pp_mesh: DeviceMesh | None, in_stage: Collection[int]) -> None:
        self.all: list[Share] = []
        self._mesh, self._pp_mesh, self._in_stage = mesh, pp_mesh, in_stage
        self._numbers: dict[tuple[Any, ...], int] = {}

    def offer(self, spec: Any) -> None:
        """Number a spec's layout, if it is a known one."""
        with contextlib.suppress(ValueError):  # if a gradient has this layout too, the error names that gradient
            self.number_of(spec)

    def number_of(self, spec: Any) -> int:
        """The number of a spec's layout; None is a plain tensor's.

        Raises:
            ValueError: for a placement that is not known.
        """
        placed = () if spec is None else (spec.mesh, *spec.placements)
        number = self._numbers.get(placed)
        if number is None:
            self.all.append(share_of(spec))
            number = self._numbers[placed] = len(self.all) - 1
        return number

    def check(self, number: int, device: torch.device, n_replicas: int | None) -> None:
        """Refuse a gradient of this layout that cannot be summed with the others.

        Raises:
            ValueError: as `check_layout` and `check_stages`.
        """
        check_layout(self.all[number], device, self._mesh, n_replicas=n_replicas)
        check_stages(self.all[number], self._pp_mesh, self._in_stage)
