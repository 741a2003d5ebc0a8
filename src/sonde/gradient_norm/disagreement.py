"""The error messages of ranks that disagree: what differs, the likely cause, and the way out."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sonde.gradient_norm.agreement import NormRequest, disagreements, first_disagreement, tie_slot, tied_stages
from sonde.gradient_norm.cross_check import holdings, places_over_stages
from sonde.gradient_norm.plan import NormPlan

_MAX_NAMED = 5
_FIXED = {
    "verify": "verify= differs between ranks: pass the same on every rank",
    "partial": (
        "partial gradients come in another order on other ranks, so different gradients would be added up: list the "
        "parameters in the same order on every rank"
    ),
    "whole stages": (
        "ranks of pp_mesh= have the same gradients throughout, as data-parallel copies do: pass the axis of the "
        "pipeline stages as pp_mesh=, or none if there are no stages"
    ),
}
"""What there is to say if it is the same on every rank, by what differs."""
_REMEDIES = {
    "stages": "pass it on every rank",
    "groups": (
        "name the same groups on every rank; for a group that this rank has no gradient of, pass an empty tensor, "
        "torch.empty(0)"
    ),
    "replicas": "on each rank that holds the same values, pass how many these ranks are",
}
"""How to mend options that differ, if it is not enough to pass the same on every rank."""


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
    text = _FIXED.get(name) or _of_options(name, plan, request) or _of_gradients(name, plan, slots, slot)
    # Without a mesh, ranks that share no sum with this rank do not hear of it, and clip.
    whose = "No gradient" if plan.mesh is not None else "No gradient of this rank"
    return ValueError(f"{text}. {whose} has been changed")


def _of_options(name: str, plan: NormPlan, request: NormRequest) -> str:
    """What options differ; empty if it is something else that differs."""
    given = f"one of {plan.n_stages} stages" if plan.pp_mesh is not None else "none"
    groups = first_names(plan.part_names) or "none"
    options = {
        "kind": f"norm_type differs between ranks, got {request.order:g}",
        "norm_type": f"norm_type differs between ranks, got {request.order:g}",
        "max_norm": f"max_norm differs between ranks, got {request.max_norm}",
        "nonfinite": f"nonfinite or error_if_nonfinite differs between ranks, got nonfinite={request.nonfinite!r}",
        "stages": f"pp_mesh= differs between ranks, got {given}",
        "groups": f"by_group= differs between ranks, got {groups}",
        "replicas": f"replicas= does not fit over all ranks, got {sorted(set(plan.n_replicas.values())) or 'none'}",
    }
    if name not in options:
        return ""
    return f"{options[name]} on this rank: {_REMEDIES.get(name, 'pass the same on every rank')}"


def _of_gradients(name: str, plan: NormPlan, slots: Tensor, slot: int) -> str:
    """Which parameters or gradients differ."""
    if name in ("number", "parameters"):
        return _different_parameters(plan, same_number=name == "parameters")
    return _tied(plan, slots, slot) if name == "tie" else _not_copies(plan, name)


def first_names(names: Sequence[str]) -> str:
    """The first of some names, for a message, and how many more there are."""
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more


def _different_parameters(plan: NormPlan, *, same_number: bool) -> str:
    n, ranks, declare, stages = holdings(plan).number, "ranks of mesh=", "replicas=", "pass pp_mesh= if they are"
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


def _tied(plan: NormPlan, slots: Tensor, slot: int) -> str:
    n_stages, is_here = tied_stages(slots, slot, places_over_stages(plan).everyone)
    here = [i for i, candidate in holdings(plan).ties.items() if tie_slot(candidate.shape) == slot]
    if not here or not is_here:
        return (
            f"{n_stages} other pipeline stages have the same gradient of one parameter, which would count {n_stages} "
            "times: declare it on those stages as their messages say; this stage does not hold it"
        )
    name = plan.name_of(here[0])
    key = repr(name) if plan.has_names else "tensor"
    which = ", on each stage by its name there" if plan.has_names else f", where tensor is {name}"
    text = f"{name} has the same gradient on {n_stages} pipeline stages and would count {n_stages} times: pass "
    if plan.mesh is None:
        return (
            f"{text}mesh= of all ranks and, if it is tied over these stages, replicas={{{key}: n}}{which}; n is how "
            "many of their ranks hold it"
        )
    n_shards = max((group.key.n_shards for group in plan.groups if here[0] in group.indices), default=1)
    n_copies = plan.mesh.size() // plan.n_stages // n_shards
    return (
        f"{text}replicas={{{key}: {n_stages * n_copies}}} if it is tied over them{which}, and "
        f"replicas={{{key}: {n_copies}}} if not"
    )
