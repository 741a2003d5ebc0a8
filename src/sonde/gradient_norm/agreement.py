"""Compares what the ranks of a norm were asked and what they hold, inside the sum over ranks that is made anyway.

Each rank adds d times a coefficient of its own, d a whole number that stands for what the rank holds. The coefficients
of the ranks that should agree sum to 0. So the sum over ranks is 0 exactly when all d are equal (but for one chance in
100,000). It stays exact in fp64: d has 20 bits, a coefficient 18, and 16,384 ranks add 15 more; with more ranks, d has
fewer bits. The local power sums of gradients that should be copies of each other are compared in the same way.
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

_N_CONTRASTS = 4
_COEFFICIENT_BITS, _DIGEST_BITS = 18, 20
_MAX_EXACT_BITS = 53

_MIN_TOLERANCE = 1e-4
"""Of a large group. Kernels that add in a random order on GPUs leave 1e-5. Undeclared experts differ by 3e-3, and one
small gradient that is missing on one of 4 ranks by 4e-4."""
_ONE_ELEMENT = 3e-3
"""Of one element: a sum over a batch that nearly cancels may lose that much of itself, in any dtype."""
_N_ULPS = 16
"""Elements may differ by so many units in the last place, as the root mean square over ranks."""
_TIE_TOLERANCE = 1e-13
"""Below it two power sums are of equal gradients: rounding alone gives 1e-15, and chance takes 1e13 steps."""
_N_TIES, _N_TIE_STAGES = 16, 16
"""Shapes and pipeline stages that have a number of their own; further ones share it."""

KINDS = ("up to 6", "above 6", "inf")
"""Orders of a norm, by the collectives that they take."""
DIGESTS = ("norm_type", "max_norm", "nonfinite", "stages", "number", "groups", "parameters", "partial")
"""Compared in this order: the first that differs is the cause that ranks are told."""
_COPIES = ("plain", "sharded")
_KIND_AT, _DIGEST_AT = 0, len(KINDS)
_COPIES_AT = _DIGEST_AT + 2 * len(DIGESTS)
_TIES_AT = _COPIES_AT + (_N_CONTRASTS + 1) * len(_COPIES)
N_SLOTS = _TIES_AT + _N_TIES * _N_TIE_STAGES
"""Numbers that a rank adds to the vector that is summed: a fixed count, so that ranks that disagree do not hang."""


@dataclass(frozen=True)
class Place:
    """Where this rank stands among ranks that should agree.

    Attributes:
        at: its position, from 0.
        of: how many ranks these are.
    """

    at: int
    of: int


@dataclass(frozen=True)
class Asked:
    """What a rank was asked for.

    Attributes:
        order: p of the norm.
        max_norm: the threshold; None to measure alone.
        nonfinite: what happens when the norm is not finite.
        wrongly: whether it cannot be done, for what was asked.
    """

    order: float
    max_norm: float | None = None
    nonfinite: str = "ignore"
    wrongly: bool = False


def digest(*parts: object) -> int:
    """A whole number from 1 below 2**20 that stands for these values; others have it with a chance of 1e-6."""
    hashed = hashlib.blake2b("\0".join(map(repr, parts)).encode(), digest_size=8).digest()
    return 1 + int.from_bytes(hashed, "little") % int(2**_DIGEST_BITS - 1)


def copies_tolerance(order: float, dtype: torch.dtype, n_elements: int) -> float:
    """Largest relative difference of power sums of gradients that are copies but for rounding.

    It is the root mean square over ranks. Differences of elements by a relative e are independent, so those of Σ|x|^p
    are about p·e/√n. Independent gradients differ by about p/√n, so both are told apart whatever n is. Above p = 2, few
    large elements make most of the sum, and n counts for less: its p-th root is taken.

    Args:
        order: p of the norm. With `math.inf`, the largest elements are compared, and n does not help.
        dtype: of the gradients.
        n_elements: of all of them together, on this rank.
    """
    eps = torch.finfo(dtype).eps
    if math.isinf(order):
        return max(_MIN_TOLERANCE, 4 * eps, _ONE_ELEMENT / math.sqrt(max(n_elements, 1)))
    one_element = max(_ONE_ELEMENT, _N_ULPS * max(order, 1.0) * eps)
    return max(_MIN_TOLERANCE, one_element / math.pow(max(n_elements, 1), 1.0 / max(order, 2.0)))


class Ballot:
    """What this rank adds to one sum over ranks: digests as numbers, and power sums that stay on the device.

    Args:
        kind: of the order, one of `KINDS`; None if this rank's order is not known.
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
        """Compare a digest over the ranks of `place`; with a maximum over ranks, these must be all its ranks."""
        at = _DIGEST_AT + 2 * DIGESTS.index(name)
        value %= 2 ** _digest_bits(place.of)
        if self._uses_max:  # the largest d and the largest 2^20 − d: they add up to more than 2^20 if any two differ
            self._numbers[at], self._numbers[at + 1] = value, 2**_DIGEST_BITS - value
        else:
            for k in range(2):
                self._numbers[at + k] = _coefficients(place.of)[k][place.at] * value

    def add_copies(self, power: Tensor, place: Place, tolerance: float, *, is_sharded: bool) -> None:
        """Compare the power sum of gradients that all ranks of `place` should hold alike, up to this relative part."""
        self._powers.setdefault(int(is_sharded), []).append((power, place, tolerance))

    def add_tie(self, shape: Sequence[int], power: Tensor, *, stage: int) -> None:
        """Look for a gradient of this shape, with this power sum, on other pipeline stages.

        Args:
            shape: of the whole gradient; no other gradient of this stage has its slot.
            power: this rank's part of the power sum.
            stage: which stage this is.
        """
        self._ties.append((_TIES_AT + tie_slot(shape) * _N_TIE_STAGES + stage % _N_TIE_STAGES, power))

    def slots(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """[N_SLOTS], for the vector that is reduced."""
        slots = torch.tensor(self._numbers, dtype=dtype)
        if device.type == "cuda":
            slots = slots.pin_memory()  # only a copy from pinned memory does not wait
        slots = slots.to(device, non_blocking=True)
        for kind, powers in self._powers.items():
            start = _COPIES_AT + kind * (_N_CONTRASTS + 1)
            if self._uses_max:
                largest = torch.stack([power for power, _, _ in powers]).max()
                slots[start], slots[start + 1] = largest, largest.reciprocal()
                slots[start + 2] = max(tolerance for _, _, tolerance in powers)
                continue
            for power, place, tolerance in powers:
                for k, coefficient in enumerate(_normalised(place.of, place.at)):
                    slots[start + k] += coefficient * power
                slots[start + _N_CONTRASTS] += (tolerance * power).square()
        for at, power in self._ties:
            slots[at] += power
        return slots


def disagreements(slots: Tensor, *, uses_max: bool) -> Tensor:
    """What the ranks of a sum disagree in: [1 + digests + 2 + ties], true for each; names by `which`.

    Args:
        slots: after the reduction, [N_SLOTS].
        uses_max: how they were reduced.
    """
    kinds = (slots[_KIND_AT:_DIGEST_AT] > 0).sum(0, keepdim=True) > 1
    digests = slots[_DIGEST_AT:_COPIES_AT].view(-1, 2)
    copies = slots[_COPIES_AT:_TIES_AT].view(-1, _N_CONTRASTS + 1)
    if uses_max:
        differ = digests.sum(1) > 2**_DIGEST_BITS
        # The largest power sum times the largest inverse of a power sum; NaN, where all are 0, is not above anything.
        changed = copies[:, 0] * copies[:, 1] > 1.0 + copies[:, 2]
        tied = torch.zeros(_N_TIES, dtype=torch.bool, device=slots.device)
    else:
        differ = (digests != 0).any(1)
        changed = copies[:, :_N_CONTRASTS].square().sum(1) > _N_CONTRASTS * copies[:, _N_CONTRASTS]
        tied = _neighbours_are_equal(slots).any(1)
    finite = copies.isfinite().all() if not uses_max else copies[:, 0].isfinite().all()
    return torch.cat([kinds, differ, changed & finite, tied])


def which(disagreeing: Sequence[bool]) -> tuple[str, int]:
    """The name of the first disagreement, and its slot if it is a tie.

    Args:
        disagreeing: as `disagreements` returns, on the host; at least one is true.
    """
    names = ["kind", *DIGESTS, *_COPIES]
    first = list(disagreeing).index(True)
    return (names[first], -1) if first < len(names) else ("tie", first - len(names))


def n_tied_stages(slots: Tensor, tie: int) -> int:
    """On how many pipeline stages the gradient of a tie is. Waits for the device."""
    longest = length = 1
    for is_equal in _neighbours_are_equal(slots)[tie].tolist():
        length = length + 1 if is_equal else 1
        longest = max(longest, length)
    return longest


def _neighbours_are_equal(slots: Tensor) -> Tensor:
    """Whether each power sum of a shape is the next larger one's equal, [shapes, stages - 1]."""
    powers = slots[_TIES_AT:].view(_N_TIES, _N_TIE_STAGES).sort(dim=1).values
    smaller, larger = powers[:, :-1], powers[:, 1:]
    return (smaller > 0) & (larger - smaller <= _TIE_TOLERANCE * larger)


def second_sum_follows(slots: Tensor) -> bool:
    """Whether all ranks whose order is known make a second sum. Waits for the device."""
    voted = dict(zip(KINDS, (slots[_KIND_AT:_DIGEST_AT] > 0).tolist(), strict=True))
    return voted.pop("above 6") and not any(voted.values())


def tie_slot(shape: Sequence[int]) -> int:
    """Where gradients of this shape are compared over pipeline stages."""
    return digest("tie", tuple(shape)) % _N_TIES


def _digest_bits(n: int) -> int:
    # The last coefficient is minus the sum of the others: all products together are below 2·n·2^(bits of both).
    return min(_DIGEST_BITS, _MAX_EXACT_BITS - _COEFFICIENT_BITS - 1 - n.bit_length())


@functools.lru_cache(maxsize=64)
def _coefficients(n: int) -> tuple[tuple[int, ...], ...]:
    """[contrasts][n]: odd whole numbers below 2^17, the same on every rank; the last makes each row sum to 0."""
    numbers = random.Random(n)
    rows = []
    for _ in range(_N_CONTRASTS):
        row = [(numbers.getrandbits(_COEFFICIENT_BITS) - 2 ** (_COEFFICIENT_BITS - 1)) | 1 for _ in range(n - 1)]
        rows.append((*row, -sum(row)))
    return tuple(rows)


@functools.lru_cache(maxsize=256)
def _normalised(n: int, at: int) -> tuple[float, ...]:
    """This rank's coefficients, of mean square 1 over the ranks."""
    scales = [math.sqrt(sum(c * c for c in row) / n) or 1.0 for row in _coefficients(n)]
    return tuple(row[at] / scale for row, scale in zip(_coefficients(n), scales, strict=True))
