"""Notices parameters that are no longer trained, and parameters that are trained again."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from sonde.wording import plural, some_of

_OFF_FOR = 3
"""Windows in a row after which `requires_grad` counts as changed. A loop that alternates is left alone."""
_ABSENT_FOR = 20
"""Windows looked at in a row, after which a parameter without a gradient counts as no longer trained."""
_SHARE_PRESENT = 0.9
"""Share of the windows before, at least as many, in which it had one. Experts that rest now and then have less."""


@dataclass(frozen=True)
class TrainedChange:
    """Parameters that have stopped or started to be trained.

    Attributes:
        groups: the parameter groups that they are in.
        gone: those of them in which no parameter is trained now.
        first: number of the first window that was seen with the change.
        alert: name of the alert, "frozen" or "unfrozen".
        message: the change and what follows from it.
    """

    groups: tuple[str, ...]
    gone: tuple[str, ...]
    first: int
    alert: str
    message: str


class FrozenWatch:
    """Looks at the end of each measured window which parameters are trained.

    Where `requires_grad` seems to have changed, it looks at the windows that follow too, measured or not: in a loop
    that alternates, several measured windows in a row may lack the same parameters by chance.

    Args:
        parameters: measured parameters.
        names: their names.
        group_names: the parameter group of each.
    """

    def __init__(self, parameters: Sequence[Tensor], names: Sequence[str], group_names: Sequence[str]) -> None:
        self._parameters, self._names, self._group_names = list(parameters), list(names), list(group_names)
        self._n_windows = 0
        self._off: dict[int, _Spell] = {}
        self._absent: dict[int, _Spell] = {}
        self._back: dict[int, _Spell] = {}
        self._absences = [0] * len(self._parameters)
        self._gone: set[int] = set()

    @property
    def frozen(self) -> list[str]:
        """Names of the parameters that are no longer trained."""
        return [self._names[i] for i in sorted(self._gone)]

    def restore(self, gone_groups: Collection[str], frozen: Collection[str] = ()) -> None:
        """Go on after a state was loaded.

        Args:
            gone_groups: groups of which no parameter was trained.
            frozen: names of all parameters that were no longer trained; older states do not have them.
        """
        named = enumerate(zip(self._names, self._group_names, strict=True))
        self._gone = {i for i, (name, group) in named if group in gone_groups or name in frozen}
        self._off, self._absent, self._back = {}, {}, {}

    @property
    def is_undecided(self) -> bool:
        """Whether `requires_grad` may have changed, so that the next window is looked at even if it is not measured."""
        if not (self._off or self._back):
            return False
        off = any(i not in self._gone and spell.length < _OFF_FOR for i, spell in self._off.items())
        return off or any(spell.length < _OFF_FOR for spell in self._back.values())

    def window_ends(self, number: int) -> TrainedChange | None:
        """Look at a window that ends, before the gradients are zeroed.

        Args:
            number: of the window.

        Returns:
            The change, once it has lasted; None without one.
        """
        self._n_windows += 1
        idle = [i for i, p in enumerate(self._parameters) if p.grad is None or not p.requires_grad]
        if not (idle or self._off or self._absent or self._gone):
            return None
        off = [i for i in idle if not self._parameters[i].requires_grad]
        absent = [i for i in idle if self._parameters[i].requires_grad]
        self._off = _extended(self._off, off, number)
        self._absent = _extended(self._absent, absent, number)
        for i in absent:
            self._absences[i] += 1
        self._back = _extended(self._back, self._gone.difference(idle), number)
        gone = {i for i, spell in self._off.items() if spell.length >= _OFF_FOR}
        gone |= {i for i, s in self._absent.items() if s.length >= _ABSENT_FOR and self._was_present(i, s.length)}
        if new := sorted(gone - self._gone):
            self._gone |= gone
            return self._change(new, "frozen", "no longer trained", "without them")
        if returned := sorted(i for i, spell in self._back.items() if spell.length >= _OFF_FOR):
            self._gone -= set(returned)
            return self._change(returned, "unfrozen", "trained again", "with them")
        return None

    def _was_present(self, index: int, absent_for: int) -> bool:
        before = self._n_windows - absent_for
        present = before - (self._absences[index] - absent_for)
        return before >= _ABSENT_FOR and present >= _SHARE_PRESENT * before

    def _change(self, indices: list[int], alert: str, what: str, how: str) -> TrainedChange:
        groups = tuple(dict.fromkeys(self._group_names[i] for i in indices))
        alive = {name for i, name in enumerate(self._group_names) if i not in self._gone}
        spells = (self._off, self._absent, self._back)
        first = min(of_kind[i].first for of_kind in spells for i in indices if i in of_kind)
        some = some_of([self._names[i] for i in indices], 2)
        gone = tuple(name for name in groups if name not in alive)
        again = [name for name in groups if name in alive]
        leave = "leaves" if len(gone) == 1 else "leave"
        follows = [f"{some_of(gone, 4)} {leave} the noise scale, of past windows too"] if gone else []
        if again:
            follows.append(f"the noise scale of the whole model and of {some_of(again, 4)} starts again {how}")
        are = "is" if len(indices) == 1 else "are"
        message = f"{plural(len(indices), 'measured parameter')} {are} {what} ({some}): {', and '.join(follows)}"
        return TrainedChange(groups, gone, first, alert, message)


@dataclass(frozen=True)
class _Spell:
    """Windows in a row: the number of the first, and how many were looked at."""

    first: int
    length: int


def _extended(spells: Mapping[int, _Spell], indices: Iterable[int], number: int) -> dict[int, _Spell]:
    """The spells of some parameters with one more window, and no others."""
    before = {i: spells.get(i, _Spell(number, 0)) for i in indices}
    return {i: _Spell(spell.first, spell.length + 1) for i, spell in before.items()}
