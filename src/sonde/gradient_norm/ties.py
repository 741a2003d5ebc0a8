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
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sonde.gradient_norm.agreement import PROOFS, WHOLE_STAGE, Ballot, tie_row
from sonde.gradient_norm.plan import Collected, NormPlan
from sonde.parallel.devices import to_device

_SAMPLE = 4096
_MIN_NONZERO = 8
"""Fewer nonzero elements on a rank prove nothing. 8 random elements of 5 bits each are all equal in 9e-13 of cases; in
bf16, an element has 8 bits without its exponent."""
_SIGN = 0.3


def tie_candidates(plan: NormPlan) -> dict[int, int]:
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


def add_ties(ballot: Ballot, plan: NormPlan, candidates: Mapping[int, int], collected: Sequence[Collected]) -> None:
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
