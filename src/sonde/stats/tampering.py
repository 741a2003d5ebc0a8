"""Can averages be trusted after gradients were found changed by more than a scale?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sonde.stats.scale_witness import ScaleReading
from sonde.stats.state import check_count, check_keys, check_number

_BY_CHANCE, _SHARE_BY_CHANCE = 1.5, 0.02
"""Changed windows, and their share of the average, up to which they are accidents that taint nothing."""


class Tampering:
    """Remembers windows whose gradient was changed, and parameters that were, until they are seen sound again.

    Few elements of few parameters are compared in a window. A window that is found changed is dropped; those before and
    after it, in which the changed parameter was not compared, are in the averages. So there is doubt while a parameter
    was last seen changed, and while changed windows, seen or likely unseen, weigh noticeably.

    Args:
        decay: by which a window's weight shrinks with each later one.
    """

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self._weight = 0.0
        self._changed = 0.0
        self._why = ""
        self._suspects: dict[int, tuple[int, int]] = {}  # how often in a row found changed; windows averaged since

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
        if why_changed is not None:
            self._changed, self._why = self._changed + 1.0, why_changed
            # In the first window gradients may have been there already; what goes on being changed is met again.
            for index in scale.changed if not is_first else ():
                times, since = self._suspects.get(index, (0, 0))
                self._suspects[index] = (times + 1, since)
        for index in scale.sound & self._suspects.keys():
            times, since = self._suspects.pop(index)
            if times > 1:  # it was no accident: likely changed in between too
                self._changed = min(self._changed + since, self._weight)
        if averaged:
            self._suspects = {index: (times, since + 1) for index, (times, since) in self._suspects.items()}

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
        suspects = {str(index): list(counts) for index, counts in self._suspects.items()}
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
        suspects: dict[int, tuple[int, int]] = {}
        if not isinstance(state["suspects"], Mapping):
            raise ValueError(f"{what}: 'suspects' must map parameters to counts, got {state['suspects']!r:.60}")
        for index, counts in state["suspects"].items():
            if not (str(index).isdigit() and isinstance(counts, list) and len(counts) == 2):
                raise ValueError(f"{what}: suspect {index!r:.60} must have two counts, got {counts!r:.60}")
            for k in range(2):
                check_count(f"{what}, suspect {index}", {"count": counts[k]}, "count")
            suspects[int(index)] = (counts[0], counts[1])
        self._weight, self._changed, self._why = float(state["weight"]), float(state["changed"]), str(state["why"])
        self._suspects = suspects
