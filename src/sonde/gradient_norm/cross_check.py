"""What the ranks of a norm compare, and what to say if they differ: what differs, the likely cause, and the way out.

Gradients that two pipeline stages both have would count twice, silently. So a stage adds, for each of a few gradients,
a number t to the sum over ranks, in a slot of its own; then all ranks see whether two stages have the same t. Up to
4,096 elements x_i count: t = Σ w_i (|x_i| + 0.3 x_i), with fixed random weights w_i from 1 to 2. So t depends on the
order and the signs of elements, and rounding is small against it. Independent gradients of n elements have equal t, up
to a relative 1e-14, in 6.5e-15·√n of cases. Too few elements may be equal by chance: see `_MIN_NONZERO`.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from sonde.gradient_norm.agreement import (
    KINDS,
    PROOFS,
    WHOLE_STAGE,
    Ballot,
    Contrast,
    contrast,
    copies_tolerance,
    digest,
    first_disagreement,
    tie_row,
    tied_stages,
)
from sonde.gradient_norm.plan import Collected, Key, NormPlan
from sonde.parallel.devices import to_device

_MAX_NAMED = 5
_SAMPLE = 4096
_MIN_NONZERO = 8
"""Fewer nonzero elements on a rank prove nothing. 8 random elements of 5 bits each are all equal in 9e-13 of cases; in
bf16, an element has 8 bits without its exponent."""
_SIGN = 0.3


@dataclass(frozen=True)
class NormRequest:
    """The options of a rank's call.

    Attributes:
        order: p of the norm; NaN if it cannot be used.
        max_norm: the threshold; None only measures.
        nonfinite: how a norm that is not finite is treated.
        verify: whether the plan will be verified.
        is_plan: whether only the plans are compared, before there are gradients.
        is_wrong: whether the call cannot be served, because of its options or parameters.
    """

    order: float
    max_norm: float | None = None
    nonfinite: str = "ignore"
    verify: bool = False
    is_plan: bool = False
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
        digest(tuple(sorted(descriptions))),
        digest(tuple(plan.description(i) for i in partial)),
        sum(1.0 / n for n in plan.n_replicas.values()),
        _tie_candidates(plan),
        copies,
    )


def compared_numbers(
    plan: NormPlan, request: NormRequest, peers: Peers, powers: Sequence[tuple[Collected, Tensor]]
) -> Tensor | None:
    """The numbers that this rank adds to one sum over ranks, to be compared; None if there is nobody to compare with.

    Args:
        plan: of this rank.
        request: its options.
        peers: the ranks of the sum.
        powers: the gradients of this sum, and the power sum of each group of them.
    """
    uses_max, has_stages = math.isinf(request.order), plan.n_stages > 1
    if peers.everyone.n_ranks == 1 and (uses_max or not has_stages):
        return None
    held = plan.remembered(_holdings)
    ballot = Ballot(None if math.isnan(request.order) else KINDS[uses_max], uses_max=uses_max)
    for name, (value, *_) in _options(plan, request).items():
        ballot.add_digest(name, digest(value), peers.everyone)
    if peers.stage is not None:
        ballot.add_replicas(held.n_distinct)
    # A maximum over ranks cannot compare the ranks of each stage apart, nor those of each copy.
    if peers.stage is not None and not (uses_max and has_stages):
        ballot.add_digest("parameters", held.parameters, peers.stage)
        if not request.is_plan:  # a gradient that is partial may still be missing on some ranks
            ballot.add_digest("partial", held.partial, peers.stage)
        copies = []
        for gradients, power in powers:
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
        _add_ties(ballot, plan, held.ties, [gradients for gradients, _ in powers])
    return ballot.slots(plan.device)


def _tie_candidates(plan: NormPlan) -> dict[int, int]:
    """Parameters that may be tied over pipeline stages, by index, at most one for each slot; and their rows.

    A parameter whose shape is not unique on this rank only counts for the comparison of whole stages.
    """
    if plan.n_stages == 1:
        return {}
    by_shape: dict[tuple[int, ...], list[int]] = {}
    declared = {tuple(p.shape) for i, p in plan.with_shapes() if i in plan.n_replicas}
    for i, parameter in plan.with_shapes():
        if parameter.dim() > 0 and i not in plan.n_replicas:
            by_shape.setdefault(tuple(parameter.shape), []).append(i)
    # A slot takes the largest of its parameters alone: the numbers of two parameters would be added up.
    by_slot: dict[int, tuple[int, int]] = {}
    for shape, indices in sorted(by_shape.items(), key=lambda item: math.prod(item[0])):
        slot, is_unique = tie_row(shape), len(indices) == 1 and shape not in declared
        if is_unique or by_slot.get(slot, (0, WHOLE_STAGE))[1] == WHOLE_STAGE:
            by_slot[slot] = indices[0], slot if is_unique else WHOLE_STAGE
    return dict(by_slot.values())


def _add_ties(ballot: Ballot, plan: NormPlan, candidates: Mapping[int, int], collected: Sequence[Collected]) -> None:
    """Look for gradients that another pipeline stage has too, and for stages whose gradients are all the same.

    Args:
        ballot: of this rank; changed.
        plan: with pipeline stages.
        candidates: the rows of parameters to look at, by index.
        collected: the gradients of one sum over ranks.
    """
    assert plan.pp_mesh is not None
    add = functools.partial(ballot.add_tie, stage=plan.pp_mesh.get_local_rank(), n_stages=plan.pp_mesh.size())
    whole: list[Tensor] = []
    proofs: list[Tensor] = []
    for gradients in collected:
        for index, local in zip(gradients.indices, gradients.locals, strict=True):
            if index not in candidates or local.is_sparse or not local.numel():
                continue
            number, is_telling = _number(local, _weights(local.device))
            number = to_device(plan.weight(gradients.group) * number, plan.device)
            is_telling = to_device(is_telling, plan.device)
            whole.append(number)
            proofs.append(is_telling)
            if (row := candidates[index]) != WHOLE_STAGE:
                add(row, torch.where(is_telling, number, 0.0))
    if whole:  # if no gradient proves anything, nothing is compared
        add(WHOLE_STAGE, torch.stack(whole).sum())
        add(PROOFS, torch.stack(proofs).sum())


@functools.lru_cache(maxsize=8)
def _weights(device: torch.device) -> Tensor:
    """Random, as weights with a pattern have equal sums: those of a progression do for (1, 0, 1) and (0, 2, 0)."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    weights = 1.0 + torch.rand(_SAMPLE, generator=generator, dtype=torch.float64, device="cpu")
    return to_device(weights, device)


def _number(local: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The number of a gradient, and whether it proves anything if another gradient has it too, both 0-dim.

    Gradients whose elements are all equal prove nothing: untied gradients may both be 1 throughout.
    """
    elements = _sample(local).to(weights.dtype)
    sizes = elements.abs()
    number = (weights[: len(elements)] * (sizes + _SIGN * elements)).sum()
    is_telling = ((sizes > 0).sum() >= _MIN_NONZERO) & (sizes.amax() > (1 + 1e-6) * sizes.amin())
    return number, is_telling


def _sample(local: Tensor) -> Tensor:
    """Up to 4,096 elements from everywhere: of an embedding, a few columns, since most rows may be zero."""
    for dim in reversed(range(local.dim())):
        step = -(-local.numel() // _SAMPLE)
        if step > 1:
            local = local[(slice(None),) * dim + (slice(None, None, step),)]
    return local.reshape(-1)[:_SAMPLE]


def disagreement(plan: NormPlan, request: NormRequest, slots: Tensor, disagreeing: Sequence[bool]) -> ValueError | None:
    """The error that every rank of a sum raises if they disagree.

    Args:
        plan: the plan of this rank.
        request: the options of this rank.
        slots: the numbers after the reduction.
        disagreeing: which comparisons of them failed.
    """
    if not any(disagreeing):
        return None
    name, row = first_disagreement(disagreeing)
    if name == "tie":
        text = _tied(plan, slots, row)
    elif name in ("kind", *_options(plan, request)):
        text = _other_option("norm_type" if name == "kind" else name, plan, request)
    else:
        text = _other_holdings(name, plan)
    # Without a mesh, ranks that share no sum with this rank do not hear of it, and clip.
    whose = "No gradient" if plan.mesh is not None else "No gradient of this rank"
    return ValueError(f"{text}. {whose} has been changed")


def _options(plan: NormPlan, request: NormRequest) -> Mapping[str, tuple[object, str, object]]:
    """What a call was asked for, as it is compared; what the option is called, and its value in words."""
    # None and infinity both only measure, and 0.1 is the same as torch.tensor(0.1).
    in_fp32 = ctypes.c_float(math.inf if request.max_norm is None else request.max_norm).value
    stages = f"one of {plan.n_stages} stages" if plan.pp_mesh is not None else "none"
    return {
        "norm_type": (request.order, "norm_type", f"{request.order:g}"),
        "max_norm": (in_fp32, "max_norm", request.max_norm),
        "nonfinite": (request.nonfinite, "nonfinite or error_if_nonfinite", f"nonfinite={request.nonfinite!r}"),
        "stages": (plan.n_stages, "pp_mesh=", stages),
        "verify": (request.verify, "verify", request.verify),
        "groups": ((plan.n_parts, plan.part_names), "by_group=", first_names(plan.part_names) or "none"),
    }


def _other_option(name: str, plan: NormPlan, request: NormRequest) -> str:
    _, called, got = _options(plan, request)[name]
    more = "; for a group without a gradient here, pass an empty tensor, torch.empty(0)" if name == "groups" else ""
    return f"{called} differs between ranks, got {got} on this rank: pass the same on every rank{more}"


def first_names(names: Sequence[str]) -> str:
    """The first of some names, for a message, and how many more there are."""
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more


def _other_holdings(name: str, plan: NormPlan) -> str:
    """What to say of ranks that hold other parameters or gradients than they count."""
    if name == "partial":
        return (
            "partial gradients come in another order on other ranks, so different gradients would be added up: list "
            "the parameters in the same order on every rank"
        )
    if name == "replicas":
        return (
            f"replicas= does not fit over all ranks, got {sorted(set(plan.n_replicas.values())) or 'none'} on this "
            "rank: on each rank that holds the same values, pass how many these ranks are"
        )
    if name == "parameters":
        whose = "one pipeline stage" if plan.pp_mesh is not None else "mesh=" if plan.mesh is not None else "one shard"
        return (
            f"ranks of {whose} have different parameters ({plan.remembered(_holdings).number} on this rank): pass all "
            "parameters on every rank, even those without a gradient, in one dtype; pass pp_mesh= if they are pipeline "
            "stages, and declare parameters that only some ranks have by replicas="
        )
    groups = [g for g in plan.groups if bool(g.key.ranks) == (name == "sharded") and g.key.n_replicas is None]
    indices = [i for group in groups for i in group.indices]
    first = f" (here {len(indices)}, the first is {plan.name_of(indices[0])})" if indices else ""
    what = "DTensors on a part of mesh=" if name == "sharded" else "plain gradients"
    return (
        f"{what}{first} have gradients that differ between ranks that should hold the same: declare experts and shards "
        "by replicas= (how many ranks hold the same values), pass pp_mesh= if these are pipeline stages, or sum the "
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
        name, key, n_all, n_copies = "a parameter of other stages", "its name there", "n", "m"
    else:
        name = plan.name_of(here[0])
        key = repr(name) if plan.has_names else "tensor"
        n_shards = max((group.key.n_shards for group in plan.groups if here[0] in group.indices), default=1)
        in_stage = plan.mesh.size() // plan.n_stages // n_shards if plan.mesh is not None else 1
        n_all, n_copies = str(n_stages * in_stage), str(in_stage)
    return (
        f"{name} has the same gradient on {n_stages} pipeline stages and would count {n_stages} times: pass mesh= of "
        f"all ranks, and replicas={{{key}: {n_all}}} on each of them if it is tied, or replicas={{{key}: {n_copies}}} "
        "if not"
    )
