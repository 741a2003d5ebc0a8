"""What the ranks of a norm compare, and what to say if they differ: what differs, the likely cause, and the way out."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from sonde.gradient_norm.agreement import (
    KINDS,
    WHOLE_STAGE,
    Ballot,
    Contrast,
    contrast,
    copies_tolerance,
    digest,
    disagreements,
    first_disagreement,
    tied_stages,
)
from sonde.gradient_norm.plan import Collected, Key, NormPlan
from sonde.gradient_norm.ties import add_ties, tie_candidates

_MAX_NAMED = 5


@dataclass(frozen=True)
class NormRequest:
    """The options of a rank's call.

    Attributes:
        order: p of the norm; NaN if it cannot be used.
        max_norm: the threshold; None only measures.
        nonfinite: how a norm that is not finite is treated.
        verify: whether the plan will be verified.
        is_wrong: whether the call cannot be served, because of its options or parameters.
    """

    order: float
    max_norm: float | None = None
    nonfinite: str = "ignore"
    verify: bool = False
    is_wrong: bool = False


@dataclass(frozen=True)
class Peers:
    """The ranks of one sum over ranks, as this rank compares itself with them.

    Attributes:
        everyone: all of them.
        stage: those of its pipeline stage, which hold the same parameters; None in a sum over stages.
    """

    everyone: Contrast
    stage: Contrast | None


@dataclass(frozen=True)
class Holdings:
    """The parameters of a rank, for comparison with other ranks; computed once for a plan.

    Attributes:
        number: the number of parameters.
        parameters: digest of their names, shapes and dtypes, in any order.
        partial: digest of those whose gradients must still be summed, in their order.
        n_distinct: 1/n for each parameter that the caller declared to be on n ranks, added up.
        ties: the parameters that may be tied over pipeline stages, by index, and their rows.
        copies: for each group, the ranks that should hold the same values; None if no other rank should, or if the
            caller declared how many do.
    """

    number: int
    parameters: int
    partial: int
    n_distinct: float
    ties: dict[int, int]
    copies: dict[Key, Contrast | None]


def _holdings(plan: NormPlan) -> Holdings:
    copies: dict[Key, Contrast | None] = {}
    for key in plan:
        is_compared = key.n_replicas is None and len(plan.in_stage) > max(len(key.ranks), 1)
        copies[key] = contrast(plan.in_stage, {dist.get_rank(), *key.ranks}) if is_compared else None
    descriptions = [plan.description(i) for i, _ in plan.with_shapes() if i not in plan.n_replicas]
    partial = sorted(i for group in plan.groups if group.key.is_partial for i in group.indices)
    return Holdings(
        len(descriptions),
        digest(sorted(descriptions)),
        digest([plan.description(i) for i in partial]),
        sum(1.0 / n for n in plan.n_replicas.values()),
        tie_candidates(plan),
        copies,
    )


def compared_numbers(
    plan: NormPlan, request: NormRequest, peers: Peers, powers: Sequence[tuple[Collected, Tensor]] | None
) -> Tensor | None:
    """The numbers that this rank adds to one sum over ranks, to be compared; None if there is nobody to compare with.

    Args:
        plan: of this rank.
        request: its options.
        peers: the ranks of the sum.
        powers: the gradients of this sum, and the power sum of each group of them; None to compare plans, when a
            gradient that is partial may still be missing on some ranks.
    """
    uses_max, has_stages = math.isinf(request.order), plan.n_stages > 1
    if peers.everyone.n_ranks == 1 and (uses_max or not has_stages):
        return None
    held = plan.remembered(_holdings)
    ballot = Ballot(None if math.isnan(request.order) else KINDS[uses_max], uses_max=uses_max)
    for name, (value, _) in _options(plan, request).items():
        ballot.add_digest(name, digest(value), peers.everyone)
    if peers.stage is not None:
        ballot.add_replicas(held.n_distinct)
    # A maximum over ranks cannot compare the ranks of each stage apart, nor those of each copy.
    if peers.stage is not None and not (uses_max and has_stages):
        ballot.add_digest("number", held.number, peers.stage)
        ballot.add_digest("parameters", held.parameters, peers.stage)
        if powers is not None:
            ballot.add_digest("partial", held.partial, peers.stage)
        copies = []
        for gradients, power in powers or ():
            key, among = gradients.group.key, held.copies[gradients.group.key]
            if among is not None and not (uses_max and key.ranks):
                tolerance = copies_tolerance(request.order, key.dtype, sum(g.numel() for g in gradients.locals))
                copies.append(("sharded" if key.ranks else "plain", power, among, tolerance))
        if uses_max and copies:  # the largest elements of all groups are compared at once
            largest = torch.stack([power for _, power, _, _ in copies]).max()
            copies = [("plain", largest, copies[0][2], max(tolerance for *_, tolerance in copies))]
        for each in copies:
            ballot.add_copies(*each)
    if has_stages and not uses_max:
        add_ties(ballot, plan, held.ties, [gradients for gradients, _ in powers or ()])
    return ballot.slots(plan.device)


def disagreement(plan: NormPlan, request: NormRequest, slots: Tensor) -> ValueError | None:
    """The error that every rank of a sum raises if they disagree.

    Args:
        plan: the plan of this rank.
        request: the options of this rank.
        slots: the numbers after the reduction. They are read, which waits for the device.
    """
    disagreeing = disagreements(slots, uses_max=math.isinf(request.order)).tolist()
    if not any(disagreeing):
        return None
    name, row = first_disagreement(disagreeing)
    options = _options(plan, request)
    if name in ("kind", *options):
        text = options["norm_type" if name == "kind" else name][1]
    elif name in ("number", "parameters"):
        text = _different_parameters(plan, same_number=name == "parameters")
    elif name == "partial":
        text = (
            "partial gradients come in another order on other ranks, so different gradients would be added up: list "
            "the parameters in the same order on every rank"
        )
    elif name == "replicas":
        declared = sorted(set(plan.n_replicas.values())) or "none"
        text = (
            f"replicas= does not fit over all ranks, got {declared} on this rank: on each rank that holds the same "
            "values, pass how many these ranks are"
        )
    else:
        text = _tied(plan, slots, row) if name == "tie" else _not_copies(plan, name)
    # Without a mesh, ranks that share no sum with this rank do not hear of it, and clip.
    whose = "No gradient" if plan.mesh is not None else "No gradient of this rank"
    return ValueError(f"{text}. {whose} has been changed")


def _options(plan: NormPlan, request: NormRequest) -> Mapping[str, tuple[object, str]]:
    """What a call was asked for, by name: what is compared, and what to say if it differs."""
    same = "on this rank: pass the same on every rank"
    nonfinite = f"nonfinite={request.nonfinite!r}"
    stages = f"one of {plan.n_stages} stages" if plan.pp_mesh is not None else "none"
    groups = first_names(plan.part_names) or "none"
    # None and infinity both only measure, and 0.1 is the same as torch.tensor(0.1).
    in_fp32 = ctypes.c_float(math.inf if request.max_norm is None else request.max_norm).value
    return {
        "norm_type": (request.order, f"norm_type differs between ranks, got {request.order:g} {same}"),
        "max_norm": (in_fp32, f"max_norm differs between ranks, got {request.max_norm} {same}"),
        "nonfinite": (
            request.nonfinite,
            f"nonfinite or error_if_nonfinite differs between ranks, got {nonfinite} {same}",
        ),
        "stages": (
            plan.n_stages,
            f"pp_mesh= differs between ranks, got {stages} on this rank: pass it on every rank",
        ),
        "verify": (request.verify, f"verify= differs between ranks, got {request.verify} {same}"),
        "groups": (
            (plan.n_parts, plan.part_names),
            f"by_group= differs between ranks, got {groups} on this rank: name the same groups on every rank; for a "
            "group that this rank has no gradient of, pass an empty tensor, torch.empty(0)",
        ),
    }


def first_names(names: Sequence[str]) -> str:
    """The first of some names, for a message, and how many more there are."""
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more


def _different_parameters(plan: NormPlan, *, same_number: bool) -> str:
    n = plan.remembered(_holdings).number
    ranks, declare, stages = "ranks of mesh=", "replicas=", "pass pp_mesh= if they are"
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
    groups = [g for g in plan.groups if bool(g.key.ranks) == (kind == "sharded") and g.key.n_replicas is None]
    indices = [i for group in groups for i in group.indices]
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


def _tied(plan: NormPlan, slots: Tensor, row: int) -> str:
    if row == WHOLE_STAGE:
        return (
            "ranks of pp_mesh= have the same gradients throughout, as data-parallel copies do: pass the axis of the "
            "pipeline stages as pp_mesh=, or none if there are no stages"
        )
    assert plan.pp_mesh is not None
    n_stages, is_here = tied_stages(slots, row, plan.pp_mesh.get_local_rank(), plan.n_stages)
    here = [i for i, its_row in plan.remembered(_holdings).ties.items() if its_row == row]
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
