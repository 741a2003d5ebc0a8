"""The error messages of ranks that disagree: what differs, the likely cause, and the way out."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sonde.gradient_norm.agreement import NormRequest, disagreements, first_disagreement, n_tied_stages, tie_slot
from sonde.gradient_norm.cross_check import holdings
from sonde.gradient_norm.plan import NormPlan

_MAX_NAMED = 5


def disagreement(plan: NormPlan, request: NormRequest, slots: Tensor, *, uses_max: bool) -> ValueError | None:
    """The error that every rank of a sum raises if they disagree.

    Args:
        plan: the plan of this rank.
        request: the options of this rank.
        slots: the numbers after the reduction. They are read, which waits for the device.
        uses_max: the reduction was a maximum, not a sum.
    """
    disagreeing = disagreements(slots, uses_max=uses_max).tolist()
    if not any(disagreeing):
        return None
    name, slot = first_disagreement(disagreeing)
    own = {"norm_type": f"{request.order:g}", "max_norm": f"{request.max_norm}", "nonfinite": request.nonfinite}
    if name in ("kind", "norm_type"):
        text = f"norm_type differs between ranks, got {own['norm_type']} on this rank: pass the same on every rank"
    elif name in own:
        text = f"{name} differs between ranks, got {own[name]} on this rank: pass the same on every rank"
    elif name == "stages":
        given = f"one of {plan.n_stages} stages" if plan.pp_mesh is not None else "none"
        text = f"pp_mesh= differs between ranks, got {given} on this rank: pass it on every rank"
    elif name == "groups":
        groups = _first_names(plan.part_names) or "none"
        text = (
            f"by_group= differs between ranks, got {groups} on this rank: name the same groups on every rank; for a "
            "group that this rank has no gradient of, pass an empty tensor, torch.empty(0)"
        )
    elif name == "number":
        text = _different_parameters(plan, same_number=False)
    elif name == "parameters":
        text = _different_parameters(plan, same_number=True)
    elif name == "partial":
        text = (
            "partial gradients come in another order on other ranks, so different gradients would be added up: list "
            "the parameters in the same order on every rank"
        )
    elif name == "tie":
        text = _tied(plan, slot, n_tied_stages(slots, slot))
    else:
        text = _not_copies(plan, name)
    return ValueError(f"{text}. No gradient has been changed")


def _first_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more


def _different_parameters(plan: NormPlan, *, same_number: bool) -> str:
    n, ranks, declare, stages = len(plan.descriptions), "ranks of mesh=", "replicas=", "pass pp_mesh= if they are"
    if plan.pp_mesh is not None:
        ranks, stages = "ranks of one pipeline stage", "check that pp_mesh= is the axis of the"
    elif plan.mesh is None:
        ranks, declare = "ranks that hold shards of one gradient", "mesh= and replicas="
    if same_number:
        how = "since their names, shapes or dtypes differ:"
    else:
        how = (
            "since their numbers differ: pass all parameters on every rank, even those without a gradient (a plan in "
            "place of a list of gradients),"
        )
    return (
        f"{ranks} have different parameters ({n} on this rank), {how} {stages} pipeline stages, and declare parameters "
        f"that only some ranks have by {declare}"
    )


def _not_copies(plan: NormPlan, kind: str) -> str:
    indices = [
        i
        for group in plan.groups
        if bool(group.key.ranks) == (kind == "sharded") and group.key.n_replicas is None
        for i in group.indices
    ]
    first = f" (here {len(indices)}, the first is {plan.name_of(indices[0])})" if indices else ""
    if kind == "sharded":
        return (
            f"DTensors on a part of mesh={first} have gradients that differ between ranks that should hold the same: "
            "pass pp_mesh= if these are pipeline stages, declare experts by replicas=, or sum the gradients over the "
            "ranks first"
        )
    return (
        f"plain gradients{first} differ between ranks that should hold the same: declare experts and shards by "
        "replicas= (how many ranks hold the same values), pass pp_mesh= if these are pipeline stages, or sum the "
        "gradients over the ranks first; group_parameters_for_norm(..., verify=True) names the parameter"
    )


def _tied(plan: NormPlan, slot: int, n_stages: int) -> str:
    here = [plan.name_of(i) for i, shape in holdings(plan).ties.items() if tie_slot(shape) == slot]
    name = here[0] if here else "a parameter"
    text = f"{name} has the same gradient on {n_stages} pipeline stages and would count {n_stages} times: pass "
    if plan.mesh is None:
        return (
            f"{text}mesh= of all ranks and, if it is tied over these stages, replicas={{{name!r}: how many of their "
            "ranks hold it}, on each stage by its name there"
        )
    shards = [g.key.n_shards for g in plan.groups for i in g.indices if plan.name_of(i) == name]
    n_copies = plan.mesh.size() // plan.n_stages // max(shards, default=1)
    return (
        f"{text}replicas={{{name!r}: {n_stages * n_copies}}} if it is tied over them, on each stage by its name there, "
        f"and replicas={{{name!r}: {n_copies}}} if not"
    )
