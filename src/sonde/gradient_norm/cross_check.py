"""Turns a plan into the numbers that `agreement` compares over ranks."""

from __future__ import annotations

import bisect
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from sonde.gradient_norm.agreement import KINDS, Ballot, NormRequest, Place, digest
from sonde.gradient_norm.plan import Key, NormPlan
from sonde.gradient_norm.ties import Candidate, tie_candidates
from sonde.parallel.meshes import axes_over, place_along, ranks_of


@dataclass(frozen=True)
class SumPlaces:
    """The positions of this rank in one sum over ranks.

    Attributes:
        everyone: the position among all ranks of the sum.
        stage: the position among the ranks of its pipeline stage, which hold the same parameters; None in a sum over
            stages.
    """

    everyone: Place
    stage: Place | None


ALONE = SumPlaces(Place(0, 1), Place(0, 1))


def places_in_mesh(plan: NormPlan) -> SumPlaces:
    """This rank's positions in the sum over all ranks of the plan's mesh."""
    assert plan.mesh is not None
    everyone = Place(*place_along(plan.mesh, range(plan.mesh.ndim)))
    return SumPlaces(everyone, everyone if plan.n_stages_in_mesh == 1 else _place_in_stage(plan, ()))


def places_among(ranks: Iterable[int]) -> SumPlaces:
    """This rank's positions in a sum over ranks that hold shards of the same gradients, and so the same parameters."""
    ranks = sorted(ranks)
    place = Place(ranks.index(dist.get_rank()), len(ranks))
    return SumPlaces(place, place)


def places_over_stages(plan: NormPlan) -> SumPlaces:
    """This rank's positions in a sum over pipeline stages, which hold different parameters."""
    assert plan.pp_mesh is not None
    return SumPlaces(Place(plan.pp_mesh.get_local_rank(), plan.pp_mesh.size()), None)


def _copies_place(plan: NormPlan, sharding_ranks: tuple[int, ...]) -> Place | None:
    """This rank's position among the ranks that should hold the same values; None if no other ranks should.

    Args:
        plan: a plan with a mesh.
        sharding_ranks: the ranks that hold the shards of one gradient, with this rank; empty for a whole gradient.
    """
    assert plan.mesh is not None
    if len(plan.in_stage) == max(len(sharding_ranks), 1):
        return None
    shards, stages = axes_over(plan.mesh, sharding_ranks), axes_over(plan.mesh, ())
    if plan.pp_mesh is not None and plan.n_stages_in_mesh > 1:
        stages = axes_over(plan.mesh, ranks_of(plan.pp_mesh))
    if shards is None or stages is None:  # they are axes of another grid of these ranks
        return _place_in_stage(plan, sharding_ranks)
    return Place(*place_along(plan.mesh, [a for a in range(plan.mesh.ndim) if a not in shards and a not in stages]))


def _place_in_stage(plan: NormPlan, sharding_ranks: Collection[int]) -> Place:
    """This rank's position among the ranks of its stage, and the positions of those that hold the other shards."""
    own, *others = (bisect.bisect_left(plan.in_stage, rank) for rank in (dist.get_rank(), *sharding_ranks))
    return Place(own, len(plan.in_stage), tuple(at for at in others if at != own))


@dataclass(frozen=True)
class Holdings:
    """The parameters of a rank, for comparison with other ranks; computed once for a plan.

    Attributes:
        number: the number of parameters.
        parameters: digest of names, shapes and dtypes, in any order.
        partial: digest of the parameters whose gradients must still be summed, in their order.
        n_distinct: 1/n for each parameter that the caller declared to be on n ranks, added up.
        ties: the parameters that may be tied over pipeline stages, by index.
        copies: for each group, this rank's position among the ranks that should hold the same values; None if no other
            rank should, or if the caller declared how many do.
    """

    number: int
    parameters: int
    partial: int
    n_distinct: float
    ties: dict[int, Candidate]
    copies: dict[Key, Place | None]


def holdings(plan: NormPlan) -> Holdings:
    """The parameters of this rank, for comparison."""
    return plan.remembered(_holdings)


def _holdings(plan: NormPlan) -> Holdings:
    copies: dict[Key, Place | None] = {}
    for group in plan.groups:
        is_compared = plan.mesh is not None and group.key.n_replicas is None
        copies[group.key] = _copies_place(plan, group.key.ranks) if is_compared else None
    descriptions = [plan.description(i) for i, _ in plan.with_shapes() if i not in plan.n_replicas]
    partial = sorted(i for group in plan.groups if group.key.is_partial for i in group.indices)
    return Holdings(
        number=len(descriptions),
        parameters=digest(sorted(descriptions)),
        partial=digest([plan.description(i) for i in partial]),
        n_distinct=sum(1.0 / n for n in plan.n_replicas.values()),
        ties=tie_candidates(plan),
        copies=copies,
    )


def ballot(plan: NormPlan, held: Holdings, request: NormRequest, places: SumPlaces, *, uses_max: bool) -> Ballot:
    """The digests of this rank's options and parameters, for one sum over ranks."""
    cast = Ballot(kind_of(request.order), uses_max=uses_max)
    questions = {
        "norm_type": request.order,
        "max_norm": _in_fp32(request.max_norm),
        "nonfinite": request.nonfinite,
        "stages": plan.n_stages,
        "groups": (plan.n_parts, plan.part_names),
    }
    for name, value in questions.items():
        cast.add_digest(name, digest(value), places.everyone)
    if places.stage is not None:
        cast.add_replicas(held.n_distinct)
    # A maximum over ranks cannot compare the ranks of each stage apart.
    if places.stage is not None and not (uses_max and plan.n_stages > 1):
        cast.add_digest("number", held.number, places.stage)
        cast.add_digest("parameters", held.parameters, places.stage)
        cast.add_digest("partial", held.partial, places.stage)
    return cast


def _in_fp32(max_norm: float | None) -> float:
    """A threshold for comparison: None and infinity both only measure, and 0.1 is the same as torch.tensor(0.1)."""
    return math.inf if max_norm is None else torch.tensor(max_norm, dtype=torch.float32, device="cpu").item()


def kind_of(order: float) -> str | None:
    """The kind of a norm_type, one of `KINDS`; None for NaN, which stands for a norm_type that cannot be used."""
    if math.isnan(order):
        return None
    return KINDS[math.isinf(order)]


def add_copies(cast: Ballot, held: Holdings, key: Key, power: Tensor, tolerance: float, *, only_whole: bool) -> None:
    """Compare the power sum of a group's gradients over the ranks that should hold the same gradients.

    Args:
        cast: the ballot of this rank; changed.
        held: the parameters of this rank.
        key: the group's key.
        power: the group's power sum on this rank.
        tolerance: the largest relative difference that rounding explains.
        only_whole: compare only gradients that all summed ranks should hold.
    """
    place = held.copies.get(key)
    if place is not None and not (only_whole and key.ranks):
        cast.add_copies(power, place, tolerance, is_sharded=bool(key.ranks))
