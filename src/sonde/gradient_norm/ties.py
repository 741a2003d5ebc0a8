"""Finds gradients that two pipeline stages both have, which would count twice, silently: tied weights, as a rule.

A stage adds, for each of a few gradients, a number t to the sum over ranks, in a slot of its own; then all ranks see
whether two stages have the same t. Up to 4,096 elements x_i count: t = Σ w_i (|x_i| + 0.3 x_i), with fixed random
weights w_i from 1 to 2. So t depends on the order and the signs of elements, and rounding is small against it.
Independent gradients of n elements have equal t, up to a relative 1e-14, in 6.5e-15·√n of cases. Too few elements may
be equal by chance: see `_MIN_NONZERO`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sonde.gradient_norm.plan import Collected, NormPlan
from sonde.parallel.devices import to_device, zero_sums
from sonde.parallel.process_groups import digest

_TOLERANCE = 1e-14
"""Largest relative difference of the numbers that stand for equal gradients. Rounding leaves 1e-15."""
_N_ROWS, N_STAGES = 16, 16
"""Slots for shapes and for pipeline stages. With more shapes or more stages, some of them share a slot."""
WHOLE_STAGE, _PROOFS = 0, 1 + _N_ROWS
"""Rows for all gradients of a stage together, and for how many of them prove something if another has them too."""
N_SLOTS = (2 + _N_ROWS) * N_STAGES
"""How many numbers a rank adds to the summed vector."""

_SAMPLE = 4096
_MIN_NONZERO = 8
"""Fewer nonzero elements on a rank prove nothing. 8 random elements of 5 bits each are all equal in 9e-13 of cases; in
bf16, an element has 8 bits without its exponent."""
_SIGN = 0.3


def candidates(plan: NormPlan) -> dict[int, int]:
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
        slot, is_unique = row_of(shape), len(indices) == 1 and shape not in declared
        if is_unique or by_slot.get(slot, (0, WHOLE_STAGE))[1] == WHOLE_STAGE:
            by_slot[slot] = indices[0], slot if is_unique else WHOLE_STAGE
    return dict(by_slot.values())


def numbers(plan: NormPlan, rows: Mapping[int, int], collected: Sequence[Collected]) -> Tensor:
    """What this rank adds to the sum over ranks, [N_SLOTS].

    Args:
        plan: with pipeline stages.
        rows: of the parameters to look at, by index; see `candidates`.
        collected: the gradients of the sum.
    """
    assert plan.pp_mesh is not None
    slots = zero_sums(2 + _N_ROWS, N_STAGES, device=plan.device)
    of_stage = slots[:, slot_of(plan.pp_mesh.get_local_rank(), plan.n_stages)]
    for gradients in collected:
        for index, local in zip(gradients.indices, gradients.locals, strict=True):
            if index not in rows or local.is_sparse or not local.numel():
                continue
            number, is_telling = _number(local, _weights(local.device))
            number = to_device(plan.weight(gradients.key) * number, plan.device)
            is_telling = to_device(is_telling, plan.device)
            of_stage[WHOLE_STAGE] += number  # if no gradient proves anything, nothing is compared
            of_stage[_PROOFS] += is_telling
            if (row := rows[index]) != WHOLE_STAGE:
                of_stage[row] += torch.where(is_telling, number, 0.0)
    return slots.view(-1)


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


def found(slots: Tensor) -> Tensor:
    """Whether two stages have the same gradient, after the sum over ranks, [1 + shapes]: whole stages, then by row."""
    return _neighbours_are_equal(slots).any(1)


def tied_stages(slots: Tensor, row: int, stage: int, n_stages: int) -> tuple[int, bool]:
    """How many pipeline stages have the gradient of a tie, and whether this stage has it. Waits for the device."""
    longest = length = 1
    tied = 0.0
    by_stage = _by_stage(slots)[row].tolist()
    for number, is_equal in zip(sorted(by_stage)[1:], _neighbours_are_equal(slots)[row].tolist(), strict=True):
        length = length + 1 if is_equal else 1
        if length > longest:
            longest, tied = length, number
    return longest, abs(by_stage[slot_of(stage, n_stages)] - tied) <= 2 * _TOLERANCE * tied


def _neighbours_are_equal(slots: Tensor) -> Tensor:
    """Whether the number of a stage equals the next larger number, [1 + shapes, stages - 1]."""
    in_order = _by_stage(slots).sort(dim=1).values
    smaller, larger = in_order[:, :-1], in_order[:, 1:]
    return (smaller > 0) & larger.isfinite() & (larger - smaller <= _TOLERANCE * larger)


def _by_stage(slots: Tensor) -> Tensor:
    """The numbers of whole stages, then those of each row for shapes, [1 + shapes, stages]."""
    rows = slots.view(-1, N_STAGES)
    return torch.cat([(rows[WHOLE_STAGE] * (rows[_PROOFS] > 0)).unsqueeze(0), rows[1:_PROOFS]])


def slot_of(stage: int, n_stages: int) -> int:
    """The slot of a pipeline stage in each row."""
    # Of more stages than slots, neighbours share a slot: the first and the last, which may tie embeddings, do not.
    return stage * N_STAGES // max(n_stages, N_STAGES)


def row_of(shape: Sequence[int]) -> int:
    """The row in which gradients of this shape are compared over pipeline stages."""
    return 1 + digest(tuple(shape)) % _N_ROWS


def message(plan: NormPlan, slots: Tensor, row: int, rows: Mapping[int, int]) -> str:
    """What to say of a tie.

    Args:
        plan: of this rank.
        slots: after the sum over ranks.
        row: of the tie.
        rows: as for `numbers`.
    """
    if row == WHOLE_STAGE:
        return (
            "ranks of pp_mesh= have the same gradients throughout, as data-parallel copies do: pass the axis of the "
            "pipeline stages as pp_mesh=, or none if there are no stages"
        )
    assert plan.pp_mesh is not None
    n_stages, is_here = tied_stages(slots, row, plan.pp_mesh.get_local_rank(), plan.n_stages)
    here = next((i for i, its_row in rows.items() if its_row == row), None)
    if here is None or not is_here:
        name, key, n_all, n_copies = "a parameter of other stages", "its name there", "n", "m"
    else:
        name = plan.name_of(here)
        key = repr(name) if plan.names else "tensor"
        n_shards = max((group.n_shards for group, indices in plan.groups.items() if here in indices), default=1)
        in_stage = plan.mesh.size() // plan.n_stages // n_shards if plan.mesh is not None else 1
        n_all, n_copies = str(n_stages * in_stage), str(in_stage)
    return (
        f"{name} has the same gradient on {n_stages} pipeline stages and would count {n_stages} times: pass mesh= of "
        f"all ranks, and replicas={{{key}: {n_all}}} on each of them if it is tied, or replicas={{{key}: {n_copies}}} "
        "if not"
    )
