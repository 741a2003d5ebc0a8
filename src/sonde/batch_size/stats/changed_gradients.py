"""Can averages be trusted after gradients were found changed by more than a scale?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from sonde.batch_size.stats.scale_witness import ScaleReading
from sonde.stats.sealed_state import Stateful

_ACCIDENTS = 1.5
"""Changed windows, weighted by age, that are taken for accidents and raise no doubt."""
_SHARE_OF_ACCIDENTS = 0.02
"""Share of changed windows in the average that is taken for accidents and raises no doubt."""
_ABSENCES = 3
"""Checks in a row without a gradient, after which a parameter counts as no longer used."""


@dataclass
class _Pending:
    """A parameter that was changed when it was last compared.

    Attributes:
        times: how often in a row.
        since: windows averaged since the first of them.
        absences: checks in a row that found no gradient of it.
    """

    times: int = 0
    since: int = 0
    absences: int = 0


class ChangedGradients(Stateful):
    """Remembers changed windows, and changed parameters until they are seen sound again.

    Each window compares few elements of few parameters. A window that is found changed is dropped. Windows before and
    after it, in which the changed parameter was not compared, are already in the averages. So there is doubt while a
    parameter was changed when last compared, and while changed windows (seen, or likely unseen) weigh noticeably in
    the averages. A change that was seen once, and whose parameter is sound at the next comparison, was an accident.

    Args:
        decay: factor by which a window's weight shrinks with each later window.
    """

    STATE = ("_weight", "_changed", "_why")

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self._weight = self._changed = 0.0
        self._why = ""
        self._pending: dict[int, _Pending] = {}

    def update(self, scale: ScaleReading, *, why_changed: str | None, averaged: bool) -> None:
        """Take one window.

        Args:
            scale: how its gradient relates to the sum of its pieces.
            why_changed: why it was dropped, if it was dropped for a changed gradient.
            averaged: whether it was averaged.
        """
        is_first = self._weight == 0.0
        self._weight = self._decay * self._weight + 1.0
        self._changed *= self._decay
        if why_changed is None and not averaged:  # its pieces were unusable, so nothing was compared
            return
        if why_changed is not None:
            self._changed, self._why = self._changed + 1.0, why_changed
            # In the first window `.grad` may hold gradients from before. A lasting change is met again later.
            for index in scale.changed if not is_first else ():
                pending = self._pending.setdefault(index, _Pending())
                pending.times, pending.absences = pending.times + 1, 0
        for index in (*sorted(scale.sound), *sorted(scale.absent)):
            if (seen := self._pending.get(index)) is None:  # clearing one parameter may clear others
                continue
            seen.absences += 1
            if index in scale.sound or seen.absences >= _ABSENCES:
                self._clear(index)
        if averaged:
            for pending in self._pending.values():
                pending.since += 1

    def _clear(self, index: int) -> None:
        """The parameter is sound again, or no longer used."""
        pending = self._pending.pop(index)
        if pending.times > 1:  # no accident: the windows in between were likely changed too, unseen
            self._changed = min(self._changed + pending.since, self._weight)
            return
        # The accident has passed. It also clears the parameters found changed in the same window, whose turn to be
        # compared comes later.
        self._pending = {i: p for i, p in self._pending.items() if (p.times, p.since) != (1, pending.since)}

    def doubt(self) -> str | None:
        """Why the averages cannot be trusted; None when they can."""
        if self._changed > max(_ACCIDENTS, _SHARE_OF_ACCIDENTS * self._weight):
            return (
                f"{self._why}; {self._changed:.0f} of the last windows were changed, and others may have been changed "
                "unseen"
            )
        if self._pending:
            return f"{self._why}; no unchanged gradient of that parameter has been seen since"
        return None

    def state_dict(self) -> dict[str, Any]:
        """Everything that `load_state_dict` needs, as JSON values."""
        return super().state_dict() | {"pending": {str(i): asdict(p) for i, p in self._pending.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        super().load_state_dict(state)
        self._pending = {int(i): _Pending(**counts) for i, counts in state["pending"].items()}
