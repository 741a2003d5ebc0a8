"""Compares the options and gradients of the ranks of a norm, inside the sum over ranks that the norm needs anyway.

Each rank has a number that should be the same on some ranks: a digest d, a whole number that stands for its options or
its parameters, or the power sum of gradients that should be copies. It adds the number times a coefficient of its own,
and the coefficients of the ranks that should agree sum to 0. So the sum over ranks is 0 if all numbers are equal. If
some differ, the sum is 0 by chance about once in 100,000 cases. Sums of digests are exact in fp64: a digest has 20
bits, a coefficient 18, and 16,383 ranks add 15. With more ranks, digests have fewer bits. If the shards of a copy are
on several ranks, each of these ranks multiplies its power sum by the sum of their coefficients: so the sum is 0 if all
copies are equal, whichever ranks hold the shards of the other copies.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import math
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

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
_TIE_TOLERANCE = 1e-14
"""Largest relative difference of the numbers that stand for equal gradients; see `ties`. Rounding leaves 1e-15."""
_NOT_WHOLE = 1e-6
_N_TIES, _N_TIE_STAGES = 16, 16
"""Slots for shapes and for pipeline stages. With more shapes or more stages, some of them share a slot."""

KINDS = ("up to 6", "inf")
"""Kinds of norm_type. Each kind takes another collective."""
COMPARED = (
    *("norm_type", "max_norm", "nonfinite", "stages", "verify", "groups", "parameters", "partial"),
    *("plain", "sharded"),
)
"""What is compared: digests, and power sums of copies. The error message names the first difference in this order."""
_WIDTH = _N_CONTRASTS + 1
_COMPARED_AT = len(KINDS)
_REPLICAS_AT = _COMPARED_AT + _WIDTH * len(COMPARED)
_TIES_AT = _REPLICAS_AT + 1
WHOLE_STAGE, PROOFS = 0, 1 + _N_TIES
"""Rows of ties: all gradients of a stage together, and how many of them prove something if another has them too."""
N_SLOTS = _TIES_AT + (2 + _N_TIES) * _N_TIE_STAGES
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
        self._numbers = [0.0] * N_SLOTS
        if kind is not None:
            self._numbers[KINDS.index(kind)] = 1.0
        self._on_device: list[tuple[int, Tensor]] = []

    def add_digest(self, name: str, value: int, among: Contrast) -> None:
        """Compare a digest over the ranks of `among`; with a maximum, these must be all ranks of the collective."""
        # The last coefficient is minus the sum of the others. So all products together are below 2·n·2^(bits of both).
        bits = min(_DIGEST_BITS, _MAX_EXACT_BITS - _COEFFICIENT_BITS - 1 - among.n_ranks.bit_length())
        at = _COMPARED_AT + _WIDTH * COMPARED.index(name)
        value %= 2**bits
        # Of a maximum, the largest d and the largest 2^21 − d: they add up to more than 2^21 if any two differ.
        numbers = [value, _LARGE - value] if self._uses_max else [c * value for c in among.coefficients]
        self._numbers[at : at + len(numbers)] = numbers

    def add_copies(self, name: str, power: Tensor, among: Contrast, tolerance: float) -> None:
        """Compare the power sum of gradients that all these ranks should have, up to this relative difference.

        With a maximum, call it once, with the largest element.
        """
        at = _COMPARED_AT + _WIDTH * COMPARED.index(name)
        if self._uses_max:  # logarithms, whose difference is relative: of an fp64 number, above 0
            value = (power.log() + 1024).clamp(min=0)
            numbers = [value, _LARGE - value, torch.full_like(value, math.log1p(tolerance))]
        else:
            numbers = [*(c * power for c in among.coefficients), (tolerance * among.scale * power).square()]
        self._on_device += [(at + k, number) for k, number in enumerate(numbers)]

    def add_replicas(self, n_distinct: float) -> None:
        """Check the declared `replicas=`: each rank adds 1/n for each of them, which must add up to a whole number."""
        if not self._uses_max:
            self._numbers[_REPLICAS_AT] = n_distinct

    def add_tie(self, row: int, number: Tensor, *, stage: int, n_stages: int) -> None:
        """Look for an equal gradient on other pipeline stages.

        Args:
            row: the row of the gradient's shape, which no other gradient of this stage uses; `WHOLE_STAGE`; `PROOFS`.
            number: this rank's part of the number that stands for the gradient.
            stage: the position of this stage among all stages.
            n_stages: how many these are.
        """
        self._on_device.append((_TIES_AT + row * _N_TIE_STAGES + _stage_slot(stage, n_stages), number))

    def slots(self, device: torch.device) -> Tensor:
        """The numbers, [N_SLOTS], for the vector that is reduced."""
        slots = to_device(torch.tensor(self._numbers, dtype=torch.float64, device="cpu"), device)
        for at, number in self._on_device:
            slots[at] += number
        return slots


def disagreements(slots: Tensor, *, uses_max: bool, has_stages: bool) -> Tensor:
    """The comparisons that failed, [1 + compared + 1 (+ ties)]; `first_disagreement` has their names.

    Args:
        slots: the numbers after the reduction, [N_SLOTS].
        uses_max: the reduction was a maximum, not a sum.
        has_stages: whether there are pipeline stages. Only stages have ties, and only sums show them.
    """
    kinds = (slots[:_COMPARED_AT] > 0).sum(0, keepdim=True) > 1
    compared = slots[_COMPARED_AT:_REPLICAS_AT].view(-1, _WIDTH)
    # Of numbers that are not finite, nothing is known.
    if uses_max:
        differ = (compared[:, 0] + compared[:, 1] > _LARGE + compared[:, 2]) & (compared[:, 0] < math.inf)
    else:
        differ = compared[:, :-1].square().sum(1) > _N_CONTRASTS * compared[:, -1]
    tied = [_neighbours_are_equal(slots).any(1)] if has_stages and not uses_max else []
    distinct = slots[_REPLICAS_AT:_TIES_AT]
    return torch.cat([kinds, differ, (distinct - distinct.round()).abs() > _NOT_WHOLE, *tied])


def first_disagreement(disagreeing: Sequence[bool]) -> tuple[str, int]:
    """The name of the first comparison that failed, and the row of a tie.

    Args:
        disagreeing: the result of `disagreements`, on the host; at least one entry is true.
    """
    names = ["kind", *COMPARED, "replicas"]
    first = list(disagreeing).index(True)
    return (names[first], 0) if first < len(names) else ("tie", first - len(names))


def tied_stages(slots: Tensor, row: int, stage: int, n_stages: int) -> tuple[int, bool]:
    """How many pipeline stages have the gradient of a tie, and whether this stage has it. Waits for the device."""
    longest = length = 1
    tied = 0.0
    numbers = _tie_numbers(slots)[row].tolist()
    for number, is_equal in zip(sorted(numbers)[1:], _neighbours_are_equal(slots)[row].tolist(), strict=True):
        length = length + 1 if is_equal else 1
        if length > longest:
            longest, tied = length, number
    return longest, abs(numbers[_stage_slot(stage, n_stages)] - tied) <= 2 * _TIE_TOLERANCE * tied


def _neighbours_are_equal(slots: Tensor) -> Tensor:
    """Whether the number of a stage equals the next larger number, [1 + shapes, stages - 1]."""
    numbers = _tie_numbers(slots).sort(dim=1).values
    smaller, larger = numbers[:, :-1], numbers[:, 1:]
    return (smaller > 0) & larger.isfinite() & (larger - smaller <= _TIE_TOLERANCE * larger)


def _tie_numbers(slots: Tensor) -> Tensor:
    """The numbers of whole stages, then those of each row for shapes, [1 + shapes, stages]."""
    rows = slots[_TIES_AT:].view(2 + _N_TIES, _N_TIE_STAGES)
    return torch.cat([(rows[WHOLE_STAGE] * (rows[PROOFS] > 0)).unsqueeze(0), rows[1:PROOFS]])


def _stage_slot(stage: int, n_stages: int) -> int:
    # Of more stages than slots, neighbours share a slot: the first and the last, which may tie embeddings, do not.
    return stage * _N_TIE_STAGES // max(n_stages, _N_TIE_STAGES)


def tie_row(shape: Sequence[int]) -> int:
    """The row in which gradients of this shape are compared over pipeline stages."""
    return 1 + digest("tie", tuple(shape)) % _N_TIES
