"""Looks for gradients that two pipeline stages both have: they would count twice, silently.

For each of a few gradients, a stage adds a number t to the sum over ranks, in a slot of its own; then all ranks see
whether two stages have the same t. Up to 4,096 elements x_i count: t = Σ w_i (|x_i| + 0.3 x_i), with fixed random
weights w_i from 1 to 2. So t depends on the order and the signs of elements, and rounding is small against it.

Independent gradients of n elements have equal t, up to a relative 1e-14, in 6.5e-15·√n of cases: 4e-13 for 4,096
elements. The goal was 1e-12 for each pair of stages and each step. (Σ|x| of 2 elements in bf16, which was compared
before, was equal in 5e-4 of cases.) Too few elements may themselves be equal by chance: see `_MIN_NONZERO`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from sonde.gradient_norm.agreement import Ballot, Place, tie_slot
from sonde.gradient_norm.plan import Collected, NormPlan
from sonde.parallel.devices import to_device

_SAMPLE = 4096
_MIN_NONZERO = 8
"""Fewer nonzero elements on a rank prove nothing. 8 random elements of 5 bits each are all equal in 9e-13 of cases; in
bf16, an element has 8 bits without its exponent."""
_SIGN = 0.3


@dataclass(frozen=True)
class Candidate:
    """A parameter that may be tied over pipeline stages.

    Attributes:
        shape: of the whole parameter; its slot is derived from it.
        is_unique: whether no other parameter of this rank has this shape. Otherwise it only counts for the comparison
            of whole stages.
    """

    shape: tuple[int, ...]
    is_unique: bool


def tie_candidates(plan: NormPlan) -> dict[int, Candidate]:
    """Parameters that may be tied over pipeline stages, by index: at most one for each slot."""
    if plan.n_stages == 1:
        return {}
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for i, parameter in plan.with_shapes():
        if parameter.dim() > 0 and i not in plan.n_replicas:
            by_shape.setdefault(tuple(parameter.shape), []).append(i)
    declared = {tuple(p.shape) for i, p in plan.with_shapes() if i in plan.n_replicas}
    # A slot takes the largest of its parameters alone: the numbers of two parameters would be added up.
    by_slot: dict[int, tuple[int, Candidate]] = {}
    for shape, indices in sorted(by_shape.items(), key=lambda item: math.prod(item[0])):
        candidate = Candidate(shape, len(indices) == 1 and shape not in declared)
        slot = tie_slot(shape)
        if candidate.is_unique or slot not in by_slot or not by_slot[slot][1].is_unique:
            by_slot[slot] = indices[0], candidate
    return dict(by_slot.values())


def add_ties(
    cast: Ballot,
    candidates: dict[int, Candidate],
    gradients: Iterable[tuple[Collected, float]],
    stage: Place,
    device: torch.device,
) -> None:
    """Look for gradients that another pipeline stage has too, and for stages whose gradients are all the same.

    Args:
        cast: the ballot of this rank; changed.
        candidates: the parameters to look at.
        gradients: of one sum over ranks, by group, and the weight with which this rank counts each group.
        stage: the position of this stage among all stages.
        device: of the sum.
    """
    whole: list[Tensor] = []
    proofs: list[Tensor] = []
    for group, weight in gradients:
        weights = None
        for index, local in zip(group.indices, group.locals, strict=True):
            candidate = candidates.get(index)
            if candidate is None or local.is_sparse or not local.numel():
                continue
            if weights is None:
                weights = _weights(local.device)
            number, is_telling = _number(local, weights)
            number, is_telling = to_device(weight * number, device), to_device(is_telling, device)
            whole.append(number)
            proofs.append(is_telling)
            if candidate.is_unique:
                cast.add_tie(candidate.shape, torch.where(is_telling, number, 0.0), stage=stage)
    if whole:
        cast.add_whole_stage(torch.stack(whole).sum(), torch.stack(proofs).sum(), stage=stage)


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
