"""What a model is wrapped in, which parameters it trains, and which block each belongs to by its name."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from sonde.parallel.data_ranks import DataRanks, ExpertRanks, check_whole_mesh, data_ranks, find_experts
from sonde.parallel.placements import check_mesh, gathered_parameters, is_dtensor, ranks_of, reduction_dtypes
from sonde.parallel.process_groups import check_group, group_of_mesh
from sonde.parallel.refused_models import refuse_hidden_gradients, refuse_inner_module
from sonde.parallel.unwrap import Optimizers, given_optimizers, parameters_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

GroupOf = Callable[[str], str]


@dataclass(frozen=True)
class Wrapper:
    """What a model is wrapped in, and its parameters.

    Attributes:
        name: "plain", "DistributedDataParallel", "FSDP2" and the like, for people.
        ddp: the DDP module, or the first of several; None without DDP.
        group: the ranks that windows are summed over; None for a single process.
        data: which of these ranks have data of their own.
        experts: which parameters several of these ranks feed in one backward, under expert parallelism; None without.
        mesh: these ranks, if parameters are cut over them; None if every rank holds whole parameters.
        pp_mesh: the pipeline stages, each with parameters of its own; None without a pipeline.
        sequence_group: ranks that hold parts of the same sequences, under context parallelism; None without.
        parameters: trainable parameters of this rank by clean name (no `module.`, no `_orig_mod.`), each tensor once.
        leaves: the tensor that backward makes the gradient of each of them for, [parameters]: the parameter itself, or
            the whole one that FSDP2 gathers.
        frozen: the other parameters, likewise by name. They may require a gradient, if no given optimizer holds them.
        optimizers: the given ones that hold any of the model; empty if none was given, or none does. Not kept alive.
        reduced_in: dtypes in which FSDP2 reduces gradients, where these are not the gradients' own.
        stand_ins: what FSDP2 shows at times in the place of parameters, frozen ones included.
    """

    name: str
    ddp: DistributedDataParallel | None
    group: dist.ProcessGroup | None
    data: DataRanks
    experts: ExpertRanks | None
    mesh: DeviceMesh | None
    pp_mesh: DeviceMesh | None
    sequence_group: dist.ProcessGroup | None
    parameters: dict[str, nn.Parameter]
    leaves: list[Tensor]
    frozen: dict[str, nn.Parameter]
    optimizers: weakref.WeakSet[Any]
    reduced_in: list[torch.dtype]
    stand_ins: list[Tensor]

    @property
    def has_cut_leaves(self) -> bool:
        """Whether backward makes gradients that are DTensors, even on a mesh of a single rank."""
        return any(map(is_dtensor, self.leaves))

    @property
    def n_ranks(self) -> int:
        """Ranks that have data of their own."""
        return self.data.n_ranks


def find_wrapper(
    model: nn.Module,
    process_group: dist.ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    pp_mesh: DeviceMesh | None = None,
    expert_mesh: DeviceMesh | None = None,
    cp_mesh: DeviceMesh | None = None,
    *,
    optimizer: Optimizers = None,
) -> Wrapper:
    """Find a model's wrapper, its ranks and its trainable parameters. Under FSDP2, all ranks have to call this.

    Args:
        model: a plain or compiled module, one wrapped in DDP, in any nesting of the two, or one cut by FSDP2.
        process_group: for a plain module whose gradients the user reduces over ranks.
        mesh: all ranks that hold any of the model, where no parameter is on all of them.
        pp_mesh: the pipeline stages, one axis of `mesh`, which it stands for where it is all of it.
        expert_mesh: the ranks over which experts are spread, where FSDP2 does not cut the other parameters. A mesh of
            one rank says that they are not spread.
        cp_mesh: the ranks that hold parts of the same sequences, one axis of `mesh`, which it stands for where it is
            all of it.
        optimizer: that steps the model, or several in a list. What none of them holds counts as frozen.

    Raises:
        ValueError: for a model that hides its gradients, has no trainable parameters, or has complex or lazy ones; for
            a mesh or a group that is none, or is without this rank.
    """
    check_model(model)
    check_group(process_group)
    if mesh is not None:
        check_mesh("mesh", mesh)
    expert_mesh, cp_mesh = _axis("expert_mesh", expert_mesh), _axis("cp_mesh", cp_mesh)
    ddp = next((m for m in model.modules() if isinstance(m, DistributedDataParallel)), None)
    gathered = gathered_parameters(model)
    parameters = _by_name(model, requires_grad=True)
    frozen = _by_name(model, requires_grad=False)
    # Other optimizers do not count: whether they will ever step cannot be known before training begins.
    trainable = {id(p) for p in parameters.values()}
    stepped_by = [(each, {id(p) for p in parameters_of(each)}) for each in given_optimizers(optimizer)]
    optimizers = [each for each, ids in stepped_by if not ids.isdisjoint(trainable)]
    if optimizers:
        stepped = {id(p) for p in parameters_of(*optimizers)}
        frozen |= {name: p for name, p in parameters.items() if id(p) not in stepped}
        parameters = {name: p for name, p in parameters.items() if id(p) in stepped}
    held = dict(parameters)
    if gathered and ddp is None and process_group is None and not any(map(is_dtensor, parameters.values())):
        held |= frozen  # plain adapters of frozen weights that FSDP2 cuts: these show the ranks
    is_cut = pp_mesh is not None or cp_mesh is not None or any(map(is_dtensor, held.values()))
    if ddp is None and not is_cut and process_group is None:
        refuse_inner_module(model)
    if ddp is not None and (cut := [name for name, p in parameters.items() if is_dtensor(p)]):
        _refuse_beside_ddp(ddp, parameters, cut)
    if is_cut and process_group is not None:
        raise ValueError("process_group= is for plain modules, and a sharded model knows its ranks: leave it out")
    leaves: list[Tensor] = [gathered.get(id(p), p) for p in parameters.values()]
    if is_cut:
        mesh = mesh if mesh is not None else pp_mesh
        if mesh is None and not any(map(is_dtensor, held.values())):
            mesh = cp_mesh
        everything: list[Tensor] = [*parameters.values(), *frozen.values()]
        used = [gathered.get(id(p), p) for p in everything]
        experts = find_experts(everything, used, expert_mesh, n_trainable=len(parameters))
        mesh = check_whole_mesh(held, mesh, experts.indices if experts is not None else ())
        over_ddp = ranks_of(mesh) if ddp is None else set(dist.get_process_group_ranks(ddp.process_group))
        if cp_mesh is not None and over_ddp != ranks_of(mesh):
            raise ValueError("DDP averages over other ranks than those of mesh=: pass mesh=, a mesh of DDP's ranks")
        fed_by_one = [leaf for i, leaf in enumerate(used[: len(held)]) if experts is None or i not in experts.indices]
        group, data = group_of_mesh(mesh), data_ranks(mesh, fed_by_one, pp_mesh, cp_mesh)
    else:
        if expert_mesh is not None:
            raise ValueError("expert_mesh= is for experts that are DTensors, got a model without: make them DTensors")
        experts = None
        group, mesh = (ddp.process_group if ddp is not None else process_group), None
        data = DataRanks(*((dist.get_rank(group), group.size()) if group is not None else (0, 1)))
    return Wrapper(
        name=_wrapper_name(ddp, gathered, held)
        + (f" with experts over {experts.n_ranks} ranks" if experts is not None else "")
        + (" over context parallelism" if cp_mesh is not None else "")
        + (" in pipeline stages" if pp_mesh is not None else ""),
        ddp=ddp,
        group=group,
        data=data,
        experts=experts,
        mesh=mesh,
        pp_mesh=pp_mesh,
        sequence_group=group_of_mesh(cp_mesh) if cp_mesh is not None else None,
        parameters=parameters,
        leaves=leaves,
        frozen=frozen,
        optimizers=weakref.WeakSet(optimizers),
        reduced_in=reduction_dtypes(model),
        stand_ins=list(gathered.values()),
    )


def _axis(name: str, mesh: DeviceMesh | None) -> DeviceMesh | None:
    """One axis of several ranks, as given; None for one rank, which shares nothing."""
    if mesh is not None:
        check_mesh(name, mesh, n_axes=1)
    return mesh if mesh is not None and mesh.size() > 1 else None


def _refuse_beside_ddp(ddp: nn.Module, parameters: Mapping[str, nn.Parameter], cut: Sequence[str]) -> NoReturn:
    """Refuse a model of which DDP holds one part, and of which parameters are cut over ranks.

    Raises:
        ValueError: naming a parameter, and whether DDP holds it.
    """
    held = {id(p) for p in ddp.parameters()}
    if (name := next((name for name in cut if id(parameters[name]) in held), None)) is not None:
        raise ValueError(
            f"DDP holds {name!r}, which is cut over ranks (a DTensor), and cannot reduce it: use fully_shard (FSDP2)"
        )
    raise ValueError(
        f"DDP holds one part of the model, and {cut[0]!r} outside that part is cut over ranks (a DTensor): attach a "
        "probe to each part, or cut all parts by fully_shard (FSDP2)"
    )


def check_model(model: nn.Module) -> None:
    """Refuse what is no model, or one that hides its gradients, has no trainable parameters, or lazy or complex ones.

    Raises:
        ValueError: naming the module or the parameter.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got {model!r:.80}: pass the one that the loop calls")
    refuse_hidden_gradients(model)
    parameters = _by_name(model, requires_grad=True)
    if not parameters:
        raise ValueError(
            f"the model ({type(model).__name__}) has no trainable parameters: attach after requires_grad is set"
        )
    if lazy := next((name for name, p in parameters.items() if is_lazy(p)), None):
        raise ValueError(
            f"{lazy!r} has no shape yet, since a lazy module takes it from its first input: attach after one forward "
            "pass"
        )
    if unreal := next((name for name, p in parameters.items() if not p.is_floating_point()), None):
        raise ValueError(
            f"gradients must be real, got {parameters[unreal].dtype} for {unreal!r}: "
            "freeze it while attaching, or keep its real and imaginary parts as two parameters"
        )


def _wrapper_name(
    ddp: nn.Module | None, gathered: Mapping[int, nn.Parameter], parameters: Mapping[str, nn.Parameter]
) -> str:
    if ddp is not None:
        return "DistributedDataParallel"
    if not any(map(is_dtensor, parameters.values())):
        return "plain"
    if not gathered:
        return "tensor parallel"
    return "FSDP2 over tensor parallel" if any(map(is_dtensor, gathered.values())) else "FSDP2"


def _by_name(model: nn.Module, *, requires_grad: bool) -> dict[str, nn.Parameter]:
    named: dict[str, nn.Parameter] = {}
    for name, parameter in _named_parameters(model):
        if parameter.requires_grad == requires_grad:
            clean = clean_name(name)
            named[name if clean in named else clean] = parameter  # a model's own child may be named "module"
    return named


def _named_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Parameters by name; those of a list of pipeline stages without the stage's place, if the names differ anyway."""
    named = list(model.named_parameters())
    if isinstance(model, nn.ModuleList):
        short = [(name.partition(".")[2], p) for name, p in named]
        if len({name for name, _ in short}) == len(short):
            return short
    return named


def clean_name(name: str) -> str:
    """A parameter's name without the parts that DDP and torch.compile add."""
    return ".".join(part for part in name.split(".") if part not in ("module", "_orig_mod"))


def block_of(name: str) -> str:
    """The top-level block of a parameter: its path up to the first number or, without a number, its module.

    PEFT puts `base_model.model` before every path.

    Example:
        >>> [block_of(n) for n in ("model.layers.12.attn.q.weight", "model.embed.weight", "head.bias", "scale")]
        ['model.layers.12', 'model.embed', 'head', 'scale']
        >>> block_of("base_model.model.model.embed_tokens.lora_embedding_A.default")
        'model.embed_tokens'
    """
    parts = name.removeprefix("base_model.model.").split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return ".".join(parts[:-1][:2]) or name


def comm_hook_name(ddp: DistributedDataParallel | None) -> str | None:
    """The name of the communication hook that is registered with DDP, for people; None without one."""
    hooks = getattr(ddp, "_comm_hooks", None) or []
    return next((getattr(hook, "__name__", type(hook).__name__) for hook, _ in hooks), None)


def lowest_precision(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """The dtype with the fewest mantissa bits."""
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
