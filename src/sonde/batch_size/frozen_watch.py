"""Notices parameters of this rank that are no longer trained, and parameters that are trained again."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import Tensor

_OFF_FOR = 3
"""Windows in a row after which `requires_grad` counts as changed. A loop that alternates is left alone."""
_ABSENT_FOR = 20
"""Windows looked at in a row, after which a parameter without a gradient counts as no longer trained."""
_SHARE_PRESENT = 0.9
"""Share of the windows before, at least as many, in which it had one. Experts that rest now and then have less."""


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
        self._spells: dict[int, _Spell] = {}
        """Of the parameters that are not trained, and of those that are again, by position."""
        self._absences = [0] * len(self._parameters)
        self._gone: set[int] = set()
        self._moves: list[int] = []
        self.is_undecided = False
        """Whether `requires_grad` may have changed, so that the next window is looked at even if it is not measured."""

    @property
    def gone(self) -> frozenset[int]:
        """Positions of the parameters that are no longer trained."""
        return frozenset(self._gone)

    def restore(self, gone: Collection[int]) -> None:
        """Go on after a state was loaded.

        Args:
            gone: positions of the parameters that were no longer trained.
        """
        self._gone, self._spells, self._moves, self.is_undecided = set(gone), {}, [], False

    def take_moves(self) -> list[int]:
        """For each change since the last call, the number of the first window that was seen with it."""
        moves, self._moves = self._moves, []
        return moves

    def window_ends(self, number: int) -> None:
        """Look at a window that ends, before the gradients are zeroed.

        Args:
            number: of the window.
        """
        self._n_windows += 1
        kinds = {i: "absent" for i, p in enumerate(self._parameters) if p.grad is None or not p.requires_grad}
        if not (kinds or self._spells or self._gone):
            return
        for i in kinds:
            if self._parameters[i].requires_grad:
                self._absences[i] += 1
            else:
                kinds[i] = "off"
        kinds |= dict.fromkeys(self._gone.difference(kinds), "back")
        self._spells = {i: self._extended(i, kind, number) for i, kind in kinds.items()}
        if gone := [i for i in self._spells if i not in self._gone and self._is_over(i)]:
            self._gone.update(gone)
            self._note(gone)
        if returned := [i for i, s in self._spells.items() if s.kind == "back" and s.length >= _OFF_FOR]:
            self._gone.difference_update(returned)
            self._note(returned)
        self.is_undecided = any(
            s.kind != "absent" and s.length < _OFF_FOR and (s.kind == "back" or i not in self._gone)
            for i, s in self._spells.items()
        )

    def _extended(self, index: int, kind: str, number: int) -> _Spell:
        """A parameter's spell with one more window; a new one if it was in another state, or in none."""
        before = self._spells.get(index)
        if before is None or before.kind != kind:
            return _Spell(kind, number, 1)
        return _Spell(kind, before.first, before.length + 1)

    def _is_over(self, index: int) -> bool:
        """Whether a parameter counts as no longer trained."""
        spell = self._spells[index]
        if spell.kind == "off":
            return spell.length >= _OFF_FOR
        before = self._n_windows - spell.length
        n_present = before - (self._absences[index] - spell.length)
        return spell.length >= _ABSENT_FOR <= before and n_present >= _SHARE_PRESENT * before

    def _note(self, indices: Collection[int]) -> None:
        self._moves.append(min(self._spells[i].first for i in indices))


@dataclass(frozen=True)
class _Spell:
    """Windows in a row in which a parameter was frozen, had no gradient, or is trained again.

    Attributes:
        kind: "off", "absent" or "back".
        first: number of the first of them.
        length: how many were looked at.
    """

    kind: str
    first: int
    length: int
