"""Can averages be trusted after gradients were found changed by more than a scale?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from sonde.batch_size.stats.scale_witness import ScaleReading
from sonde.stats.state import check_count, check_keys, check_number

_BY_CHANCE, _SHARE_BY_CHANCE = 1.5, 0.02
"""Changed windows, and their share of the average, up to which they are accidents that taint nothing."""
_ABSENCES = 3
"""Looks in a row that find no gradient, after which a parameter is taken to be used no more."""


@dataclass(frozen=True)
class _Suspect:
    """A parameter that was last seen changed.

    Attributes:
        times: how often in a row.
        since: windows averaged since the first of them.
        absences: looks in a row that found no gradient of it.
    """

    times: int = 0
    since: int = 0
    absences: int = 0


class ChangedGradients:
    """Remembers windows whose gradient was changed, and parameters that were, until they are seen sound again.

    Few elements of few parameters are compared in a window. A window that is found changed is dropped; those before and
    after it, in which the changed parameter was not compared, are in the averages. So there is doubt while a parameter
    was last seen changed, and while changed windows, seen or likely unseen, weigh noticeably. What was found changed
    once, together with something that is sound soon after, was an accident.

    Args:
        decay: by which a window's weight shrinks with each later one.
    """

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self._weight = 0.0
        self._changed = 0.0
        self._why = ""
        self._suspects: dict[int, _Suspect] = {}

    def update(self, scale: ScaleReading, *, why_changed: str | None, averaged: bool) -> None:
        """Take one window.

        Args:
            scale: what its witness says.
            why_changed: why it was dropped, if it was for a changed gradient.
            averaged: whether it was averaged.
        """
        is_first = self._weight == 0.0
        self._weight = self._decay * self._weight + 1.0
        self._changed *= self._decay
        if why_changed is None and not averaged:  # its pieces were of no use: nothing was compared
            return
        if why_changed is not None:
            self._changed, self._why = self._changed + 1.0, why_changed
            # In the first window gradients may have been there already; what goes on being changed is met again.
            for index in scale.changed if not is_first else ():
                before = self._suspects.get(index, _Suspect())
                self._suspects[index] = replace(before, times=before.times + 1, absences=0)
        for index in sorted(scale.sound & self._suspects.keys()):
            if index in self._suspects:
                self._acquit(index)
        for index in sorted(scale.absent & self._suspects.keys()):
            if (suspect := self._suspects.get(index)) is None:
                continue
            self._suspects[index] = replace(suspect, absences=suspect.absences + 1)
            if suspect.absences + 1 >= _ABSENCES:
                self._acquit(index)
        if averaged:
            self._suspects = {index: replace(s, since=s.since + 1) for index, s in self._suspects.items()}

    def _acquit(self, index: int) -> None:
        suspect = self._suspects.pop(index)
        if suspect.times > 1:  # it was no accident: likely changed in between too
            self._changed = min(self._changed + suspect.since, self._weight)
            return
        # Whatever it was has passed, for those too that were found with it and come round later.
        self._suspects = {i: s for i, s in self._suspects.items() if (s.times, s.since) != (1, suspect.since)}

    def doubt(self) -> str | None:
        """Why the averages are not to be trusted; None when they are."""
        if self._changed > max(_BY_CHANCE, _SHARE_BY_CHANCE * self._weight):
            return (
                f"{self._why}; where {self._changed:.0f} of the last windows were changed, others may have been "
                "without its being seen"
            )
        if self._suspects:
            return f"{self._why}; what was changed has not been seen sound since"
        return None

    def state_dict(self) -> dict[str, Any]:
        """Everything that `load_state_dict` needs."""
        suspects = {str(index): asdict(suspect) for index, suspect in self._suspects.items()}
        return {"weight": self._weight, "changed": self._changed, "why": self._why, "suspects": suspects}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            ValueError: when keys are unknown or missing, or a value cannot be what its name says; nothing is changed
                then.
        """
        what = "state of changed gradients"
        check_keys(what, state, {"weight", "changed", "why", "suspects"})
        for name in ("weight", "changed"):
            check_number(what, state, name, low=0)
        if not isinstance(state["why"], str):
            raise ValueError(f"{what}: 'why' must be text, got {state['why']!r:.60}: is it damaged?")
        suspects: dict[int, _Suspect] = {}
        if not isinstance(state["suspects"], Mapping):
            raise ValueError(f"{what}: 'suspects' must map parameters to counts, got {state['suspects']!r:.60}")
        for index, counts in state["suspects"].items():
            if not str(index).isdigit():
                raise ValueError(f"{what}: a suspect must be a parameter's index, got {index!r:.60}: is it damaged?")
            check_keys(f"{what}, suspect {index}", counts, {"times", "since", "absences"})
            for name in counts:
                check_count(f"{what}, suspect {index}", counts, name)
            suspects[int(index)] = _Suspect(**counts)
        self._weight, self._changed, self._why = float(state["weight"]), float(state["changed"]), state["why"]
        self._suspects = suspects
