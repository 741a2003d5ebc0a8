"""Notices parameters of this rank that are no longer trained, and parameters that are trained again."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

_OFF_FOR = 3
"""Windows in a row after which `requires_grad` counts as changed. A loop that alternates is left alone."""
_ABSENT_FOR = 20
"""Windows looked at in a row, after which a parameter without a gradient counts as no longer trained."""
_SHARE_PRESENT = 0.9
"""Share of the windows before, at least as many, in which it had one. Experts that rest now and then have less."""


@dataclass(frozen=True)
class Move:
    """Parameters of this rank that have stopped, or have started, to be trained.

    Attributes:
        n_parameters: how many they are.
        first: number of the first window that was seen with the change.
    """

    n_parameters: int
    first: int


class FrozenWatch:
    """Looks at the end of each measured window which parameters are trained.

    Where `requires_grad` seems to have changed, it looks at the windows that follow too, measured or not: in a loop
    that alternates, several measured windows in a row may lack the same parameters by chance.

    What it notices concerns all ranks; `FrozenOnRanks` tells them.

    Args:
        parameters: measured parameters of this rank.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = list(parameters)
        self._n_windows = 0
        self._off: dict[int, _Spell] = {}
        self._absent: dict[int, _Spell] = {}
        self._back: dict[int, _Spell] = {}
        self._absences = [0] * len(self._parameters)
        self._gone: set[int] = set()
        self._moves: list[Move] = []

    @property
    def gone(self) -> frozenset[int]:
        """Positions of the parameters that are no longer trained."""
        return frozenset(self._gone)

    def restore(self, gone: Collection[int]) -> None:
        """Go on after a state was loaded.

        Args:
            gone: positions of the parameters that were no longer trained.
        """
        self._gone = set(gone)
        self._off, self._absent, self._back, self._moves = {}, {}, {}, []

    def take_moves(self) -> list[Move]:
        """What has changed since the last call."""
        moves, self._moves = self._moves, []
        return moves

    @property
    def is_undecided(self) -> bool:
        """Whether `requires_grad` may have changed, so that the next window is looked at even if it is not measured."""
        if not (self._off or self._back):
            return False
        off = any(i not in self._gone and spell.length < _OFF_FOR for i, spell in self._off.items())
        return off or any(spell.length < _OFF_FOR for spell in self._back.values())

    def window_ends(self, number: int) -> None:
        """Look at a window that ends, before the gradients are zeroed.

        Args:
            number: of the window.
        """
        self._n_windows += 1
        idle = [i for i, p in enumerate(self._parameters) if p.grad is None or not p.requires_grad]
        if not (idle or self._off or self._absent or self._gone):
            return
        off = [i for i in idle if not self._parameters[i].requires_grad]
        absent = [i for i in idle if self._parameters[i].requires_grad]
        self._off = _extended(self._off, off, number)
        self._absent = _extended(self._absent, absent, number)
        for i in absent:
            self._absences[i] += 1
        self._back = _extended(self._back, self._gone.difference(idle), number)
        gone = {i for i, spell in self._off.items() if spell.length >= _OFF_FOR}
        gone |= {i for i, s in self._absent.items() if s.length >= _ABSENT_FOR and self._was_present(i, s.length)}
        if new := gone - self._gone:
            self._gone |= new
            self._note(new)
        if returned := {i for i, spell in self._back.items() if spell.length >= _OFF_FOR}:
            self._gone -= returned
            self._note(returned)

    def _was_present(self, index: int, absent_for: int) -> bool:
        before = self._n_windows - absent_for
        present = before - (self._absences[index] - absent_for)
        return before >= _ABSENT_FOR and present >= _SHARE_PRESENT * before

    def _note(self, indices: Collection[int]) -> None:
        spells = (self._off, self._absent, self._back)
        first = min(of_kind[i].first for of_kind in spells for i in indices if i in of_kind)
        self._moves.append(Move(len(indices), first))


@dataclass(frozen=True)
class _Spell:
    """Windows in a row: the number of the first, and how many were looked at."""

    first: int
    length: int


def _extended(spells: Mapping[int, _Spell], indices: Iterable[int], number: int) -> dict[int, _Spell]:
    """The spells of some parameters with one more window, and no others."""
    before = {i: spells.get(i, _Spell(number, 0)) for i in indices}
    return {i: _Spell(spell.first, spell.length + 1) for i, spell in before.items()}
