"""Compares the options and gradients of the ranks of a norm, inside the sum over ranks that the norm needs anyway.

Each rank has a digest d, a whole number that stands for its options or its parameters. It adds d times a coefficient of
its own, and the coefficients of the ranks that should agree sum to 0. So the sum over ranks is 0 if all digests are
equal. If some differ, the sum is 0 by chance about once in 100,000 cases. Sums are exact in fp64: a digest has 20 bits,
a coefficient 18, and 16,383 ranks add 15. With more ranks, digests have fewer bits. The local power sums of gradients
that should be copies are compared in the same way. If the shards of a copy are on several ranks, each of these ranks
multiplies its power sum by the sum of their coefficients: so the sum is 0 if all copies are equal, whichever ranks hold
the shards of the other copies.
"""

from __future__ import annotations

import functools
import hashlib
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sonde.parallel.devices import to_device

_N_CONTRASTS = 4
_COEFFICIENT_BITS, _DIGEST_BITS = 18, 20
_MAX_EXACT_BITS = 53

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
DIGESTS = ("norm_type", "max_norm", "nonfinite", "stages", "verify", "number", "groups", "parameters", "partial")
"""What digests stand for. The error message names the first difference in this order."""
_COPIES = ("plain", "sharded")
_KIND_AT, _DIGEST_AT = 0, len(KINDS)
_COPIES_AT = _DIGEST_AT + 2 * len(DIGESTS)
_REPLICAS_AT = _COPIES_AT + (_N_CONTRASTS + 1) * len(_COPIES)
_TIES_AT = _REPLICAS_AT + 1
_WHOLE, _PROOF, _FIRST_SHAPE = 0, 1, 2
N_SLOTS = _TIES_AT + (_FIRST_SHAPE + _N_TIES) * _N_TIE_STAGES
"""How many numbers a rank adds to the summed vector. The number is fixed, so that ranks that disagree do not hang."""


@dataclass(frozen=True)
class Place:
    """The position of this rank among the ranks that should agree.

    Attributes:
        index: the position, from 0.
        n_ranks: the number of these ranks.
        partners: the positions of the ranks that hold the other shards of a copy. The copy is compared as a whole.
    """

    index: int
    n_ranks: int
    partners: tuple[int, ...] = ()


@dataclass(frozen=True)
class NormRequest:
    """The options of a rank's call.

    Attributes:
        order: p of the norm.
        max_norm: the threshold; None only measures.
        nonfinite: how a norm that is not finite is treated.
        is_wrong: whether the call cannot be served, because of its options or parameters.
    """

    order: float
    max_norm: float | None = None
    nonfinite: str = "ignore"
    is_wrong: bool = False


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
            self._numbers[_KIND_AT + KINDS.index(kind)] = 1.0
        self._powers: dict[int, list[tuple[Tensor, Place, float]]] = {}
        self._ties: list[tuple[int, Tensor]] = []

    def add_digest(self, name: str, value: int, place: Place) -> None:
        """Compare a digest over the ranks of `place`; with a maximum, these must be all ranks of the collective."""
        at = _DIGEST_AT + 2 * DIGESTS.index(name)
        value %= 2 ** _digest_bits(place.n_ranks)
        if self._uses_max:  # the largest d and the largest 2^20 − d: they add up to more than 2^20 if any two differ
            self._numbers[at], self._numbers[at + 1] = value, 2**_DIGEST_BITS - value
        else:
            for k in range(2):
                self._numbers[at + k] = _coefficients(place.n_ranks)[k][place.index] * value

    def add_copies(self, power: Tensor, place: Place, tolerance: float, *, is_sharded: bool) -> None:
        """Compare the power sum of gradients that all ranks of `place` should have, up to this relative difference."""
        self._powers.setdefault(int(is_sharded), []).append((power, place, tolerance))

    def add_replicas(self, n_distinct: float) -> None:
        """Check the declared `replicas=`: each rank adds 1/n for each of them, which must add up to a whole number."""
        if not self._uses_max:
            self._numbers[_REPLICAS_AT] = n_distinct

    def add_tie(self, shape: Sequence[int], number: Tensor, *, stage: Place) -> None:
        """Look for an equal gradient on other pipeline stages.

        Args:
            shape: the shape of the whole gradient. No other gradient of this stage uses its slot.
            number: this rank's part of the number that stands for the gradient.
            stage: the position of this stage among all stages.
        """
        self._ties.append((_tie_at(_FIRST_SHAPE + tie_slot(shape), stage), number))

    def add_whole_stage(self, number: Tensor, n_proofs: Tensor, *, stage: Place) -> None:
        """Look for another stage that has the same gradients throughout.

        Args:
            number: this rank's part of the number that stands for all of them.
            n_proofs: how many of them prove something if another stage has them too; without any, nothing is compared.
            stage: the position of this stage among all stages.
        """
        self._ties += [(_tie_at(_WHOLE, stage), number), (_tie_at(_PROOF, stage), n_proofs)]

    def slots(self, device: torch.device) -> Tensor:
        """The numbers, [N_SLOTS], for the vector that is reduced."""
        slots = to_device(torch.tensor(self._numbers, dtype=torch.float64, device="cpu"), device)
        for kind, powers in self._powers.items():
            start = _COPIES_AT + kind * (_N_CONTRASTS + 1)
            if self._uses_max:
                # Of the root, since the inverse of an fp64 number below 6e-309 is infinite.
                largest = torch.stack([power for power, _, _ in powers]).max().sqrt()
                slots[start], slots[start + 1] = largest, largest.reciprocal()
                slots[start + 2] = max(tolerance for _, _, tolerance in powers)
                continue
            for power, place, tolerance in powers:
                for k, coefficient in enumerate(_normalised(place)):
                    slots[start + k] += coefficient * power
                slots[start + _N_CONTRASTS] += (tolerance * power).square()
        for at, power in self._ties:
            slots[at] += power
        return slots


def disagreements(slots: Tensor, *, uses_max: bool) -> Tensor:
    """The comparisons that failed, [1 + digests + 2 + 1 + 1 + ties]; `first_disagreement` has their names.

    Args:
        slots: the numbers after the reduction, [N_SLOTS].
        uses_max: the reduction was a maximum, not a sum.
    """
    digests = slots[_DIGEST_AT:_COPIES_AT].view(-1, 2)
    kinds = (slots[_KIND_AT:_DIGEST_AT] > 0).sum(0, keepdim=True) > 1
    copies = slots[_COPIES_AT:_REPLICAS_AT].view(-1, _N_CONTRASTS + 1)
    if uses_max:
        differ = digests.sum(1) > 2**_DIGEST_BITS
        # The largest element over the smallest of the ranks' largest; NaN, where all are 0, is not above anything.
        changed = (copies[:, 0] * copies[:, 1]).square() > 1.0 + copies[:, 2]
        tied = torch.zeros(1 + _N_TIES, dtype=torch.bool, device=slots.device)
    else:
        differ = (digests != 0).any(1)
        changed = copies[:, :_N_CONTRASTS].square().sum(1) > _N_CONTRASTS * copies[:, _N_CONTRASTS]
        tied = _neighbours_are_equal(slots).any(1)
    finite = copies.isfinite().all() if not uses_max else copies[:, 0].isfinite().all()
    distinct = slots[_REPLICAS_AT:_TIES_AT]
    return torch.cat([kinds, differ, changed & finite, (distinct - distinct.round()).abs() > _NOT_WHOLE, tied])


def first_disagreement(disagreeing: Sequence[bool]) -> tuple[str, int]:
    """The name of the first comparison that failed, and its slot if it is a tie.

    Args:
        disagreeing: the result of `disagreements`, on the host; at least one entry is true.
    """
    names = ["kind", *DIGESTS, *_COPIES, "replicas", "whole stages"]
    first = list(disagreeing).index(True)
    return (names[first], -1) if first < len(names) else ("tie", first - len(names))


def tied_stages(slots: Tensor, tie: int, stage: Place) -> tuple[int, bool]:
    """How many pipeline stages have the gradient of a tie, and whether this stage has it. Waits for the device."""
    longest = length = 1
    tied = 0.0
    row = 1 + tie
    numbers = _tie_numbers(slots)[row].tolist()
    for number, is_equal in zip(sorted(numbers)[1:], _neighbours_are_equal(slots)[row].tolist(), strict=True):
        length = length + 1 if is_equal else 1
        if length > longest:
            longest, tied = length, number
    return longest, abs(numbers[_stage_slot(stage)] - tied) <= 2 * _TIE_TOLERANCE * tied


def _neighbours_are_equal(slots: Tensor) -> Tensor:
    """Whether the number of a stage equals the next larger number, [1 + shapes, stages - 1]."""
    numbers = _tie_numbers(slots).sort(dim=1).values
    smaller, larger = numbers[:, :-1], numbers[:, 1:]
    return (smaller > 0) & larger.isfinite() & (larger - smaller <= _TIE_TOLERANCE * larger)


def _tie_numbers(slots: Tensor) -> Tensor:
    """The numbers of whole stages, then those of each slot for shapes, [1 + shapes, stages]."""
    rows = slots[_TIES_AT:].view(_FIRST_SHAPE + _N_TIES, _N_TIE_STAGES)
    return torch.cat([(rows[_WHOLE] * (rows[_PROOF] > 0)).unsqueeze(0), rows[_FIRST_SHAPE:]])


def _tie_at(row: int, stage: Place) -> int:
    return _TIES_AT + row * _N_TIE_STAGES + _stage_slot(stage)


def _stage_slot(stage: Place) -> int:
    # Of more stages than slots, neighbours share a slot: the first and the last, which may tie embeddings, do not.
    return stage.index * _N_TIE_STAGES // max(stage.n_ranks, _N_TIE_STAGES)


def tie_slot(shape: Sequence[int]) -> int:
    """The slot in which gradients of this shape are compared over pipeline stages."""
    return digest("tie", tuple(shape)) % _N_TIES


def _digest_bits(n: int) -> int:
    # The last coefficient is minus the sum of the others. So all products together are below 2·n·2^(bits of both).
    return min(_DIGEST_BITS, _MAX_EXACT_BITS - _COEFFICIENT_BITS - 1 - n.bit_length())


@functools.lru_cache(maxsize=64)
def _coefficients(n: int) -> tuple[tuple[int, ...], ...]:
    """[contrasts][n]: odd whole numbers below 2^17, the same on every rank. The last number makes its row sum to 0."""
    numbers = random.Random(n)
    rows = []
    for _ in range(_N_CONTRASTS):
        row = [(numbers.getrandbits(_COEFFICIENT_BITS) - 2 ** (_COEFFICIENT_BITS - 1)) | 1 for _ in range(n - 1)]
        rows.append((*row, -sum(row)))
    return tuple(rows)


@functools.lru_cache(maxsize=256)
def _normalised(place: Place) -> tuple[float, ...]:
    """The coefficients of this rank and its partners, added up and scaled to a mean square of 1 over the copies.

    With partners, the mean square is 1 over all ways to choose them.
    """
    n, n_shards = place.n_ranks, 1 + len(place.partners)
    # The mean square of the sum of m of n numbers that sum to 0 and whose mean square is 1.
    spread = math.sqrt(n_shards * (n - n_shards) / max(n - 1, 1)) or 1.0
    sums = [sum(row[at] for at in (place.index, *place.partners)) for row in _coefficients(n)]
    scales = [math.sqrt(sum(c * c for c in row) / n) or 1.0 for row in _coefficients(n)]
    return tuple(total / (scale * spread) for total, scale in zip(sums, scales, strict=True))
