"""Tells all ranks which parameters are no longer trained, so that all begin their averages anew at the same window.

A rank sees only the parameters that it holds: those of its own pipeline stage, and of them only whether this rank
trains them. Every measured window's sum over ranks therefore carries, for each parameter of the whole model, how many
ranks no longer train it. Several of these counts share one number, so that they are few.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sonde.batch_size.taps.window_sums import as_vector
from sonde.parallel.devices import exact_bits
from sonde.parallel.stages import ModelParameters
from sonde.wording import plural, some_of

_MOST_EACH = 3
"""Counts in a number. So the vector does not grow with ranks: in fp64, sums over 100,000 ranks are still exact."""
_N_MOVES = 3
"""Numbers before the counts: of changes, of windows since they began, of these windows' squares."""


@dataclass(frozen=True)
class TrainedChange:
    """Parameters that have stopped or started to be trained, on any rank.

    Attributes:
        groups: the parameter groups that they are in.
        gone: those of them in which no parameter is trained now, on any rank.
        first: number of the first window with the parameters of now.
        alert: name of the alert, "frozen" or "unfrozen".
        message: the change and what follows from it.
    """

    groups: tuple[str, ...]
    gone: tuple[str, ...]
    first: int
    alert: str
    message: str


class FrozenOnRanks:
    """Packs what this rank has noticed into numbers that add up over ranks, and reads their sum.

    Args:
        whole: the parameters of the whole model.
        group_names: the parameter group of each, [parameters of all pipeline stages].
        n_own: how many of them this rank holds, from `whole.first` on.
        n_ranks: ranks that windows are summed over.
        n_stages: ranks of the pipeline, or 1. As many ranks hold each stage's parameters, or a part of each.
        device: where the sums live.
    """

    def __init__(
        self,
        whole: ModelParameters,
        group_names: Sequence[str],
        *,
        n_own: int,
        n_ranks: int,
        n_stages: int,
        device: torch.device,
    ) -> None:
        self._names, self._group_names = list(whole.names), list(group_names)
        self._first, self._n_own, self._device = whole.first, n_own, device
        self._n_holding = max(1, n_ranks // n_stages)
        """Ranks that hold each parameter, or a part of it."""
        self._bits = n_ranks.bit_length()
        # A rank adds 0 or 1 to each count, so its largest number has (each − 1) · bits + 1 bits.
        self._each = min(_MOST_EACH, 1 + (exact_bits(device, n_ranks) - 1) // self._bits)
        self._counts = [0] * len(self._names)
        """Ranks that no longer train each parameter, [parameters]."""
        self._packed: Tensor | None = None
        """These counts as they arrived last."""
        self._gone: frozenset[int] = frozenset()
        self._without_moves = self._vector(frozenset(), [0.0] * _N_MOVES)

    @property
    def frozen(self) -> list[str]:
        """Names of the parameters that no rank trains any more, as far as windows have arrived."""
        return [name for name, n in zip(self._names, self._counts, strict=True) if n >= self._n_holding]

    def restore(self, frozen: Collection[str]) -> frozenset[int]:
        """Go on after a state was loaded.

        Args:
            frozen: names of all parameters that were no longer trained.

        Returns:
            Which of this rank's parameters these are.
        """
        are_gone = [name in frozen for name in self._names]
        self._counts = [self._n_holding * is_gone for is_gone in are_gone]
        self._packed = None
        return frozenset(i for i in range(self._n_own) if are_gone[self._first + i])

    # On the way to the other ranks.

    def numbers(self, gone: frozenset[int], began: Sequence[int], number: int) -> Tensor:
        """What this rank adds to the sum of a window, 1-D and equally long on all ranks.

        Args:
            gone: which of this rank's parameters are no longer trained.
            began: for each change since the measured window before, the first window that was seen with it.
            number: of the window.
        """
        if gone != self._gone:
            self._gone = gone
            self._without_moves = self._vector(gone, [0.0] * _N_MOVES)
        if not began:
            return self._without_moves
        ages = [float(number - first) for first in began]
        return self._vector(gone, [len(began), sum(ages), sum(age * age for age in ages)])

    def _vector(self, gone: Collection[int], moves: Sequence[float]) -> Tensor:
        counts = [0] * -(-len(self._names) // self._each)
        for i in gone:
            place, turn = divmod(self._first + i, self._each)
            counts[place] += 1 << self._bits * turn
        return as_vector([*moves, *map(float, counts)], self._device)

    # On the way back.

    def arrived(self, numbers: Tensor, number: int) -> list[TrainedChange]:
        """What has changed on any rank.

        Args:
            numbers: of a window, summed over ranks, on the CPU; windows in order.
            number: of the window.
        """
        moves, packed = numbers[:_N_MOVES], numbers[_N_MOVES:]
        has_moves = bool(moves[0])
        if not has_moves and self._packed is not None and torch.equal(packed, self._packed):
            return []
        before, self._counts, self._packed = self._counts, self._unpacked(packed), packed.clone()
        more = [i for i, (old, new) in enumerate(zip(before, self._counts, strict=True)) if new > old]
        fewer = [i for i, (old, new) in enumerate(zip(before, self._counts, strict=True)) if new < old]
        n_moves, ages, sq_ages = map(round, moves.tolist())
        # n Σ x² = (Σ x)² holds for equal numbers alone. Changes that began at different windows count from this one.
        first = number - (ages // n_moves if has_moves and n_moves * sq_ages == ages**2 else 0)
        changes = [
            self._change(alert, moved, first) for alert, moved in (("frozen", more), ("unfrozen", fewer)) if moved
        ]
        return [self._hidden_change(first)] if has_moves and not changes else changes

    def _unpacked(self, packed: Tensor) -> list[int]:
        mask = (1 << self._bits) - 1
        numbers = [round(value) for value in packed.tolist()]
        counts = [value >> self._bits * turn & mask for value in numbers for turn in range(self._each)]
        return counts[: len(self._names)]

    def _groups_of(self, indices: Iterable[int]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The groups that parameters are in, and those of them in which no parameter is trained now, on any rank."""
        groups = tuple(dict.fromkeys(self._group_names[i] for i in indices))
        alive = {g for g, n in zip(self._group_names, self._counts, strict=True) if n < self._n_holding}
        return groups, tuple(name for name in groups if name not in alive)

    def _change(self, alert: str, indices: Sequence[int], first: int) -> TrainedChange:
        groups, gone = self._groups_of(indices)
        what, how = _IN_WORDS[alert]
        follows = f"the noise scale begins anew {how}"
        if gone:
            follows += f", and {some_of(gone, 4)} {'leaves' if len(gone) == 1 else 'leave'} it"
        some = some_of([self._names[i] for i in indices], 2)
        are = "is" if len(indices) == 1 else "are"
        where = " on some ranks only" if any(0 < self._counts[i] < self._n_holding for i in indices) else ""
        message = f"{plural(len(indices), 'measured parameter')} {are} {what}{where} ({some}): {follows}"
        return TrainedChange(groups, gone, first, alert, message)

    def _hidden_change(self, first: int) -> TrainedChange:
        """A change that the counts do not show: as many ranks as before have a parameter frozen, but not the same."""
        message = (
            "measured parameters were frozen and trained again between two measured windows, or frozen on one rank and "
            "trained again on another: the noise scale begins anew"
        )
        return TrainedChange(*self._groups_of(range(len(self._names))), first, "frozen", message)


_IN_WORDS = {"frozen": ("no longer trained", "without them"), "unfrozen": ("trained again", "with them")}
