"""Brings the windows of a pair of consecutive steps together, or says why a window is left without a partner."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sonde.batch_size.stats.scale_witness import ScaleReading
from sonde.batch_size.stats.step_pairs import Step, StepProducts, join_steps
from sonde.batch_size.stats.window_row import Drop, WindowRow

_NO_PARTNER = Drop(
    "no_partner",
    "no neighbouring window could be compared with it: a window beside it was ended late or twice or could not be "
    "used, or a restart came in between",
)
_OTHER_SIZES = Drop(
    "other_sizes",
    "two consecutive windows had other weights and other scales, so their gradients cannot be compared: make the loss "
    "a mean over the window, and leave out weight=",
)


@dataclass(frozen=True)
class FirstStep:
    """The first window of a pair, which waits for the second.

    Attributes:
        number: of the window in training.
        every: windows of training for each pair.
        step: its numbers; None if it cannot be used.
        drop: why it cannot be used.
        scale: how its gradient relates to its pieces.
    """

    number: int
    every: float
    step: Step | None
    drop: Drop | None
    scale: ScaleReading

    @property
    def why_dropped(self) -> Drop:
        """Why this window is dropped if no second one follows it."""
        return self.drop or _NO_PARTNER


class StepsInTurn:
    """Holds the first window of a pair until the second has come. A restart begins without one."""

    def __init__(self) -> None:
        self._first: FirstStep | None = None

    def take_lone(self, row: WindowRow, number: int) -> FirstStep | None:
        """The first window that waits, if this window is not its second: then it is left without a partner.

        Args:
            row: of the window that has come.
            number: of that window.
        """
        first = self._first
        if first is None or (_is_second(row.step) and number == first.number + 1):
            return None
        self._first = None
        return first

    def wait(self, row: WindowRow, number: int, every: float, scale: ScaleReading, drop: Drop | None) -> None:
        """Hold the first window of a pair.

        Args:
            row: its numbers.
            number: of the window in training.
            every: windows of training for each pair.
            scale: how its gradient relates to its pieces.
            drop: why it cannot be used; None if it can.
        """
        step = _step(row, scale) if drop is None else None
        self._first = FirstStep(number, every, step, drop, scale)

    def join(self, row: WindowRow, scale: ScaleReading) -> WindowRow | Drop:
        """The row of a second window with its pair, or why there is none.

        Args:
            row: of a second window that can be used.
            scale: how its gradient relates to its pieces.
        """
        first, self._first = self._first, None
        if first is None:
            return _NO_PARTNER
        if first.step is None:
            why = first.why_dropped
            return Drop(why.kind, f"the window before it, with which it makes a pair, could not be used: {why.reason}")
        pair = join_steps(first.step, _step(row, scale))
        return _OTHER_SIZES if pair is None else replace(row, pair=pair)

    def forget(self) -> None:
        """Let the second window, which could not be used, take the first one with it."""
        self._first = None


def is_first(step: StepProducts | None) -> bool:
    """Whether a window is the first of a pair."""
    return step is not None and step.with_first is None


def _is_second(step: StepProducts | None) -> bool:
    return step is not None and step.with_first is not None


def _step(row: WindowRow, scale: ScaleReading) -> Step:
    assert row.step is not None
    assert scale.scale is not None
    return Step(row.sq_norm_big, row.step, scale.scale, effective_units=1 / row.pieces(0.0).v, weight=row.weight)
