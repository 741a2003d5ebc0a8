"""Compares the options and gradients of the ranks of a norm, inside the sum over ranks that the norm needs anyway.

Each rank has a number that should be the same on some ranks: a digest d, a whole number that stands for its options or
its parameters, or the power sum of gradients that should be copies. It adds the number times a coefficient of its own,
and the coefficients of the ranks that should agree sum to 0. So the sum over ranks is 0 if all numbers are equal. If
some differ, the sum is 0 by chance about once in 100,000 cases. Sums of digests are exact in fp64: a digest has 20
bits, a coefficient 18, and 16,383 ranks add 15. With more ranks, digests have fewer bits. Gradients of
equal size have equal power sums to within rounding, as those of experts may. So a few of their elements are compared
too, by a projection of its own for each coefficient. If the shards of a copy are
on several ranks, each of these ranks multiplies its power sum by the sum of their coefficients: so the sum is 0 if all
copies are equal, whichever ranks hold the shards of the other copies.
"""

from __future__ import annotations

import bisect
import ctypes
import functools
import hashlib
import math
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from sonde.gradient_norm import ties
from sonde.gradient_norm.plan import Collected, Key, NormPlan
from sonde.parallel.devices import to_device

_N_CONTRASTS = 4
_COEFFICIENT_BITS, _DIGEST_BITS = 18, 20
_MAX_EXACT_BITS = 53
_LARGE = 2.0 ** (_DIGEST_BITS + 1)
"""Larger than any number that a maximum over ranks compares."""

_MIN_TOLERANCE = 1e-4
"""For a large group. Kernels on GPUs that add in a random order leave differences of 1e-5. Undeclared experts differ by
3e-3. A small gradient that is missing on one of 4 ranks makes a difference of 4e-4."""
_ONE_ELEMENT = 3e-3
"""For one element: a sum over a batch that nearly cancels may lose this part of itself to rounding, in any dtype."""
_N_ULPS = 16
"""Largest difference of elements, in units in the last place: a root mean square over ranks."""
_TENSORS, _ROWS, _ELEMENTS = 4, 8, 64
"""How many of the largest gradients of a group are sampled, rows of each, and elements of these."""
_OF_ELEMENTS = 1e-2
"""Relative difference of sampled elements that rounding may make; `_N_ULPS` in 16 bits."""
_NOT_WHOLE = 1e-6
_MAX_NAMED = 5

KINDS = ("up to 6", "inf")
"""Kinds of norm_type. Each kind takes another collective."""
COMPARED = (
    *("norm_type", "max_norm", "nonfinite", "stages", "groups", "parameters", "partial"),
    *("plain", "sharded", "plain elements", "sharded elements"),
)
"""What is compared: digests, power sums of copies, and some of their elements. The error message names the first
difference in this order."""
_WIDTH = _N_CONTRASTS + 1
_REPLICAS_AT = len(KINDS) + _WIDTH * len(COMPARED)
N_SLOTS = _REPLICAS_AT + 1 + ties.N_SLOTS
"""How many numbers a rank adds to the summed vector. The number is fixed, so that ranks that disagree do not hang."""


@dataclass(frozen=True)
class Contrast:
    """The coefficients by which this rank multiplies its numbers, among the ranks that should agree.

    Attributes:
        coefficients: of this rank, one for each contrast.
        scale: of coefficients, their root mean square over ranks: what a relative difference is multiplied by.
        n_ranks: how many ranks should agree.
    """

    coefficients: tuple[int, ...]
    scale: float
    n_ranks: int


@dataclass(frozen=True)
class NormRequest:
    """The options of a rank's call.

    Attributes:
        order: p of the norm; NaN if it cannot be used.
        max_norm: the threshold; None only measures.
        nonfinite: how a norm that is not finite is treated.
        is_plan: whether only the plans are compared, before there are gradients.
    """

    order: float
    max_norm: float | None = None
    nonfinite: str = "ignore"
    is_plan: bool = False


@dataclass(frozen=True)
class RankSum:
    """One sum over ranks, as this rank compares itself with the others in it.

    Attributes:
        group: its ranks; None for this rank alone.
        everyone: all of them.
        stage: those of this rank's pipeline stage, which hold the same parameters; None in a sum over stages.
        of_ranks: the sum has only gradients that are cut over these ranks, or whole ones if it is empty; None for all.
    """

    group: dist.ProcessGroup | None
    everyone: Contrast
    stage: Contrast | None
    of_ranks: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Holdings:
    """The parameters of a rank, for comparison with other ranks; computed once for a plan.

    Attributes:
        number: the number of parameters.
        parameters: digest of their names, shapes and dtypes, in any order.
        partial: digest of those whose gradients must still be summed, in their order.
        n_distinct: 1/n for each parameter that the caller declared to be on n ranks, added up.
        ties: see `ties.candidates`.
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
    partial = sorted(i for key, indices in plan.groups.items() if key.is_partial for i in indices)
    return Holdings(
        len(descriptions),
        digest(tuple(sorted(descriptions))),
        digest(tuple(plan.description(i) for i in partial)),
        sum(1.0 / n for n in plan.n_replicas.values()),
        ties.candidates(plan),
        copies,
    )


def contrast(ranks: Sequence[int], holders: Collection[int]) -> Contrast:
    """The coefficients of a rank.

    Args:
        ranks: that should agree, in ascending order.
        holders: the rank and, if it holds a shard of a copy, those that hold the other shards. The copy is compared as
            a whole.
    """
    rows, mean_square = _coefficients(len(ranks))
    # A gradient that is cut over ranks of other stages is refused later: these ranks have no place here.
    n = len(ranks)
    at = [i for rank in set(holders) if (i := bisect.bisect_left(ranks, rank)) < n and ranks[i] == rank]
    m = len(at)
    # The mean square of the sum of m of n numbers that sum to 0, over all ways to choose them.
    spread = m * (n - m) / max(n - 1, 1)
    return Contrast(tuple(sum(row[i] for i in at) for row in rows), math.sqrt(mean_square * spread) or 1.0, n)


@functools.lru_cache(maxsize=64)
def _coefficients(n: int) -> tuple[list[list[int]], float]:
    """[contrasts][n]: odd whole numbers below 2^17, the same on every rank; and their mean square.

    The last number of a row makes the row sum to 0.
    """
    numbers = random.Random(n)
    rows = []
    for _ in range(_N_CONTRASTS):
        row = [(numbers.getrandbits(_COEFFICIENT_BITS) - 2 ** (_COEFFICIENT_BITS - 1)) | 1 for _ in range(n - 1)]
        rows.append([*row, -sum(row)])
    return rows, sum(c * c for row in rows for c in row) / (n * len(rows))


@functools.lru_cache(maxsize=256, typed=True)  # asked for the same options at every step
def digest(*parts: object) -> int:
    """A whole number from 1 to 2**20 - 1 that stands for these values. Other values share it in 1e-6 of cases."""
    hashed = hashlib.blake2b("\0".join(map(repr, parts)).encode(), digest_size=8).digest()
    return 1 + int.from_bytes(hashed, "little") % int(2**_DIGEST_BITS - 1)


@functools.lru_cache(maxsize=16)
def _directions(n: int, device: torch.device) -> Tensor:
    """One for each contrast, without a pattern that gradients could share; [contrasts, n]."""
    places = torch.arange(n, dtype=torch.float64, device=device)
    return torch.stack([(places.square() * (k + 1) + places).cos() for k in range(_N_CONTRASTS)])


def copies_tolerance(order: float, dtype: torch.dtype, n_elements: int) -> float:
    """Largest relative difference of power sums of gradients that are copies up to rounding.

    The difference is a root mean square over ranks. If rounding changes each of n elements by a relative e,
    independently, Σ|x|^p changes by about p·e/√n. Independent gradients differ by about p/√n. So the two can be
    distinguished, up to about 4e8 elements: beyond, independent gradients differ by less than the least tolerance,
    which kernels that add in a random order need. Above p = 2, a few large elements make most of the sum: there,
    n^(1/p) stands for √n.

    Args:
        order: p of the norm. With `math.inf`, the largest elements are compared, and n does not help.
        dtype: the gradients' dtype.
        n_elements: elements of all gradients together, on this rank.
    """
    eps = torch.finfo(dtype).eps
    if math.isinf(order):
        return max(_MIN_TOLERANCE, 4 * eps, _ONE_ELEMENT / math.sqrt(max(n_elements, 1)))
    one_element = max(_ONE_ELEMENT, _N_ULPS * max(order, 1.0) * eps)
    return max(_MIN_TOLERANCE, one_element / math.pow(max(n_elements, 1), 1.0 / max(order, 2.0)))


class Ballot:
    """The numbers that this rank adds to one sum over ranks, to be compared: digests, and power sums on the device.

    Args:
        kind: the kind of this rank's norm_type, one of `KINDS`; None if norm_type cannot be used.
        uses_max: the collective takes the maximum over ranks, not the sum.
    """

    def __init__(self, kind: str | None, *, uses_max: bool) -> None:
        self._uses_max = uses_max
        self._numbers = [0.0] * (_REPLICAS_AT + 1)
        if kind is not None:
            self._numbers[KINDS.index(kind)] = 1.0
        self._on_device: list[tuple[int, Tensor]] = []

    def add_digest(self, name: str, value: int, among: Contrast) -> None:
        """Compare a digest over the ranks of `among`; with a maximum, these must be all ranks of the collective."""
        # The last coefficient is minus the sum of the others. So all products together are below 2·n·2^(bits of both).
        bits = min(_DIGEST_BITS, _MAX_EXACT_BITS - _COEFFICIENT_BITS - 1 - among.n_ranks.bit_length())
        at = len(KINDS) + _WIDTH * COMPARED.index(name)
        value %= 2**bits
        # Of a maximum, the largest d and the largest 2^21 − d: they add up to more than 2^21 if any two differ.
        numbers = [value, _LARGE - value] if self._uses_max else [c * value for c in among.coefficients]
        self._numbers[at : at + len(numbers)] = numbers

    def add_copies(self, name: str, power: Tensor, among: Contrast, tolerance: float) -> None:
        """Compare the power sum of gradients that all these ranks should have, up to this relative difference.

        With a maximum, call it once, with the largest element.
        """
        at = len(KINDS) + _WIDTH * COMPARED.index(name)
        if self._uses_max:  # logarithms, whose difference is relative: of an fp64 number, above 0
            value = (power.log() + 1024).clamp(min=0)
            numbers = [value, _LARGE - value, torch.full_like(value, math.log1p(tolerance))]
        else:
            numbers = [*(c * power for c in among.coefficients), (tolerance * among.scale * power).square()]
        self._on_device += [(at + k, number) for k, number in enumerate(numbers)]

    def add_elements(self, name: str, locals_: Sequence[Tensor], among: Contrast) -> None:
        """Compare some elements of gradients that all these ranks should have."""
        dense = [t for t in locals_ if t.layout is torch.strided and t.dim()]
        largest = sorted(dense, key=lambda t: -t.numel())[:_TENSORS]
        rows = (t[:: max(len(t) // _ROWS, 1)][:_ROWS].reshape(-1)[:_ELEMENTS] for t in largest if t.numel())
        sample = torch.cat([torch.zeros(1, dtype=torch.float64, device=dense[0].device), *rows]) if dense else None
        if sample is None:
            return
        tolerance = max(_OF_ELEMENTS, *(_N_ULPS * torch.finfo(t.dtype).eps for t in largest))
        projections = _directions(len(sample), sample.device) @ sample
        at = len(KINDS) + _WIDTH * COMPARED.index(f"{name} elements")
        numbers = [c * p for c, p in zip(among.coefficients, projections, strict=True)]
        numbers.append((tolerance * among.scale) ** 2 * sample.dot(sample))
        self._on_device += [(at + k, number) for k, number in enumerate(numbers)]

    def add_replicas(self, n_distinct: float) -> None:
        """Check the declared `replicas=`: each rank adds 1/n for each of them, which must add up to a whole number."""
        if not self._uses_max:
            self._numbers[_REPLICAS_AT] = n_distinct

    def slots(self, device: torch.device, of_ties: Tensor | None = None) -> Tensor:
        """The numbers, [N_SLOTS], for the vector that is reduced; `of_ties` from `ties.numbers`."""
        numbers = self._numbers + [0.0] * ties.N_SLOTS
        slots = to_device(torch.tensor(numbers, dtype=torch.float64, device="cpu"), device)
        for at, number in self._on_device:
            slots[at] += number
        if of_ties is not None:
            slots[-ties.N_SLOTS :] = of_ties
        return slots


def compared_numbers(
    plan: NormPlan, request: NormRequest, among: RankSum, powers: Sequence[tuple[Collected, Tensor]]
) -> Tensor | None:
    """The numbers that this rank adds to one sum over ranks, to be compared; None if there is nobody to compare with.

    Args:
        plan: of this rank.
        request: its options.
        among: the ranks of the sum.
        powers: the gradients of this sum, and the power sum of each group of them.
    """
    uses_max, has_stages = math.isinf(request.order), plan.n_stages > 1
    if among.everyone.n_ranks == 1 and (uses_max or not has_stages):
        return None
    held = plan.remembered(_holdings)
    ballot = Ballot(None if math.isnan(request.order) else KINDS[uses_max], uses_max=uses_max)
    for name, (value, *_) in _options(plan, request).items():
        ballot.add_digest(name, digest(value), among.everyone)
    if among.stage is not None:
        ballot.add_replicas(held.n_distinct)
    # A maximum over ranks cannot compare the ranks of each stage apart, nor those of each copy.
    if among.stage is not None and not (uses_max and has_stages):
        ballot.add_digest("parameters", held.parameters, among.stage)
        if not request.is_plan:  # a gradient that is partial may still be missing on some ranks
            ballot.add_digest("partial", held.partial, among.stage)
        copies = []
        for gradients, power in powers:
            key, of_copy = gradients.key, held.copies[gradients.key]
            if of_copy is not None and not (uses_max and key.ranks):
                tolerance = copies_tolerance(request.order, key.dtype, sum(g.numel() for g in gradients.locals))
                copies.append(("sharded" if key.ranks else "plain", power, of_copy, tolerance))
        if uses_max and copies:  # the largest elements of all groups are compared at once
            largest = torch.stack([power for _, power, _, _ in copies]).max()
            copies = [("plain", largest, copies[0][2], max(tolerance for *_, tolerance in copies))]
        for each in copies:
            ballot.add_copies(*each)
        if not uses_max:
            for gradients, _ in powers:
                if (of_copy := held.copies[gradients.key]) is not None:
                    ballot.add_elements("sharded" if gradients.key.ranks else "plain", gradients.locals, of_copy)
    are_told = has_stages and not uses_max
    of_ties = ties.numbers(plan, held.ties, [gradients for gradients, _ in powers]) if are_told else None
    return ballot.slots(plan.device, of_ties)


def disagreements(slots: Tensor, *, uses_max: bool, has_stages: bool) -> Tensor:
    """The comparisons that failed, [1 + compared + 1 (+ ties)]; `first_disagreement` has their names.

    Args:
        slots: the numbers after the reduction, [N_SLOTS].
        uses_max: the reduction was a maximum, not a sum.
        has_stages: whether there are pipeline stages. Only stages have ties, and only sums show them.
    """
    kinds, compared, distinct, of_ties = slots.split([len(KINDS), _WIDTH * len(COMPARED), 1, ties.N_SLOTS])
    compared = compared.view(-1, _WIDTH)
    # Of numbers that are not finite, nothing is known.
    if uses_max:
        differ = (compared[:, 0] + compared[:, 1] > _LARGE + compared[:, 2]) & (compared[:, 0] < math.inf)
    else:
        differ = compared[:, :-1].square().sum(1) > _N_CONTRASTS * compared[:, -1]
    tied = [ties.found(of_ties)] if has_stages and not uses_max else []
    are_several, are_parts = (kinds > 0).sum(0, keepdim=True) > 1, (distinct - distinct.round()).abs() > _NOT_WHOLE
    return torch.cat([are_several, differ, are_parts, *tied])


def first_disagreement(disagreeing: Sequence[bool]) -> tuple[str, int]:
    """The name of the first comparison that failed, and the row of a tie.

    Args:
        disagreeing: the result of `disagreements`, on the host; at least one entry is true.
    """
    names = ["kind", *COMPARED, "replicas"]
    first = list(disagreeing).index(True)
    return (names[first], 0) if first < len(names) else ("tie", first - len(names))


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
        text = ties.message(plan, slots[-ties.N_SLOTS :], row, plan.remembered(_holdings).ties)
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
    is_sharded = name.startswith("sharded")
    keys = [key for key in plan if bool(key.ranks) == is_sharded and key.n_replicas is None]
    indices = [i for key in keys for i in plan.groups[key]]
    first = f" (here {len(indices)}, the first is {plan.name_of(indices[0])})" if indices else ""
    what = "DTensors on a part of mesh=" if is_sharded else "plain gradients"
    return (
        f"{what}{first} have gradients that differ between ranks that should hold the same: declare experts and shards "
        "by replicas= (how many ranks hold the same values), pass pp_mesh= if these are pipeline stages, or sum the "
        "gradients over the ranks first; to find them, measure parts of the model alone (max_norm=None)"
    )
