"""The pieces of a window, as the user declares them or as each backward outside `piece()` makes one."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from sonde.batch_size.batch_dim import UnclearUnitsError
from sonde.batch_size.forward_units import (
    CountsOfForward,
    ForwardUnits,
    SecondBackwardError,
    UnitsPerPiece,
    is_of_forward,
)
from sonde.batch_size.pace import Pace
from sonde.batch_size.step_watch import StepWatch
from sonde.batch_size.taps.problems import Problem
from sonde.batch_size.taps.window_reader import WindowReader
from sonde.batch_size.units import PieceCounts, check_counts, counted_in, piece_counts
from sonde.batch_size.window_clock import ALWAYS, MEASURING, OwnTime
from sonde.record_values import whole_number

Units = float | Tensor | Mapping[str, float | Tensor] | None
"""Of one piece: a number, or one by each unit's name."""
UnitsOfPieces = float | Sequence[float | Tensor] | Mapping[str, float | Sequence[float | Tensor]] | None
"""Of several pieces: likewise, each one number for all or [pieces]."""
logger = logging.getLogger("sonde")

_MANY = 2**53
"""Whole numbers of units below it are floats without rounding."""


class DeclaredPiece:
    """A context around the backwards of one piece, or of the n pieces of a pipeline's schedule.

    No generator: every micro-batch enters it, measured or not.

    Args:
        pieces: of the window.
        units: see `NoiseScaleProbe.piece` and `pieces`, as for the others; NOT_COUNTED where they are not known.
        weight: in the loss.
        unit_weights: within the piece.
        start: when the user called for it, of `time.perf_counter`.
        n: pieces of the schedule; None without a pipeline.
    """

    __slots__ = ("_given", "_is_read", "_is_usual", "_pieces")

    def __init__(
        self, pieces: LoopPieces, units: Any, weight: Any, unit_weights: Any, start: float, n: Any = None
    ) -> None:
        self._pieces, self._given = pieces, (units, weight, unit_weights, n)
        has_units = pieces.knows_units if units is None else type(units) is int and 0 < units < _MANY
        is_plain = unit_weights is None and n is None
        self._is_usual = has_units and is_plain and type(weight) is float and 0 < weight < math.inf
        pieces.spent[ALWAYS] += time.perf_counter() - start

    def __enter__(self) -> None:
        start, pieces = time.perf_counter(), self._pieces
        if self._is_usual and pieces.is_quiet and not pieces.is_open:  # nearly all pieces, so this is short
            self._is_read = False
            pieces.steps.n_runs += 1
            pieces.spent[ALWAYS] += time.perf_counter() - start
            pieces.is_open = True  # last: if Ctrl-C comes before this line, __exit__ never runs
        else:
            self._is_read = pieces.begin(*self._given, is_usual=self._is_usual)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._is_read:
            self._pieces.end(failed=kind is not None)
        else:
            start, pieces = time.perf_counter(), self._pieces
            pieces.is_open = False
            pieces.spent[ALWAYS] += time.perf_counter() - start


NOT_COUNTED = Problem.BAD_COUNTS
"""The units of declared pieces whose units are not known: their window is left out."""
_NOT_KNOWN = "the number of units in a piece is not known: pass units_per_piece= to attach, or units= to piece()"


class LoopPieces:
    """Begins and ends pieces, and knows how many units each has.

    Args:
        names: of the units, the independent sample first.
        units_per_piece: units in a piece whose number the user does not give; None if it is not known.
        forwards: of the model, which count the units of such a piece where `units_per_piece` says so.
        reader: of the pieces.
        steps: count the pieces of windows that are not measured.
        pace: says whether a window is measured.
        own: the probe's time.
        in_pipeline: whether the model is a pipeline's stage, so that a backward alone is no piece.

    A window with backwards that are no pieces is dropped, unless a rank declares pieces. Nothing is raised: other ranks
    would wait for a rank that raises alone.
    """

    def __init__(
        self,
        names: Sequence[str],
        units_per_piece: UnitsPerPiece,
        forwards: ForwardUnits,
        *,
        reader: WindowReader,
        steps: StepWatch,
        pace: Pace,
        own: OwnTime,
        in_pipeline: bool = False,
    ) -> None:
        self._names, self._forwards = tuple(names), forwards
        self._by_forward = is_of_forward(units_per_piece)
        self._units_per_piece: Any = None if self._by_forward else units_per_piece
        self._reader, self.steps, self._pace = reader, steps, pace
        self.is_open = False
        """Whether a declared piece has begun, and not ended."""
        self._is_scheduled = self._gives_counts = False
        """Whether the last declared piece was of a pipeline's schedule; whether its counts were given."""
        self._counts: PieceCounts | list[PieceCounts] | Problem | None = None
        """Of the declared piece, or why there are none; None if its forward shows them."""
        self._weight: float | Tensor = 1.0
        self.is_quiet = False
        """Whether the present window is not measured, and a piece's number of units alone says its size."""
        self.knows_units = units_per_piece is not None
        """Whether the number of units need not be given for each piece."""
        self.spent = own.spent
        """Of the probe's time."""
        self._in_pipeline = in_pipeline
        self._n = 0
        """Pieces of the present window that were read, and backwards that were none."""
        self._question = ""
        self.why_not_another: Callable[[], str] = str
        """Asked at a second backward outside `piece()`: why it is no micro-batch; empty if it is one."""
        self.is_doubted = False
        """Whether a further backward of the present window is no micro-batch."""
        self._has_logged = False
        """Whether an error of `units_per_piece` was logged. Its text may be another one for each piece."""

    def begin(self, units: Any, weight: Any, unit_weights: Any, n: int | None, *, is_usual: bool) -> bool:
        """Begin a declared piece, or n of them; see `DeclaredPiece`.

        Args:
            units: as for the others, see `DeclaredPiece`.
            weight: in the loss.
            unit_weights: within the piece.
            n: pieces of the schedule.
            is_usual: whether units and weight alone were given, as numbers that can be.

        Returns:
            Whether it is read: not in a window that is not measured, nor while a CUDA graph is recorded.
        """
        start = time.perf_counter()
        if self.is_open:
            called = "piece()" if n is None else "pieces()"
            raise RuntimeError(
                f"{called} was entered inside another piece: open one 'with probe.piece():' per micro-batch, or one "
                "'with probe.pieces(n):' per step of a pipeline schedule"
            )
        is_read = self._pace.is_measured and not self._reader.is_recorded()
        by_forward = self._by_forward and n is None and units is None and unit_weights is None
        if by_forward:
            check_counts(1.0, weight, None)
            self._counts, self._weight = None, weight
        elif units is NOT_COUNTED:
            self._counts = NOT_COUNTED
        elif is_usual and type(units) is int and not self._names[1:]:  # nearly all pieces, and they are checked
            self._counts = PieceCounts(weight, float(units), float(units))
        else:
            self._counts = self._given(units, weight, unit_weights, n, is_read=is_read)
        if is_read:
            if by_forward:
                self._forwards.forget()  # of before the piece
            if self._gives_counts == by_forward:  # otherwise than the piece before
                self._forwards.open(counts=by_forward)
            self._is_scheduled, self._gives_counts = n is not None, not by_forward
            self._n += 1
            self._reader.begin_piece(n)
        else:
            self.steps.n_runs += not self._pace.is_measured
        self.spent[MEASURING if is_read else ALWAYS] += time.perf_counter() - start
        self.is_open = True
        return is_read

    def end(self, *, failed: bool) -> None:
        """End a declared piece that is read, or several.

        Args:
            failed: whether an exception ended it.
        """
        self.is_open = False
        if failed or self._reader.is_recorded():
            self._reader.discard_piece()
            return
        counts = self._counted_by_forward(self._weight) if self._counts is None else self._counts
        if not isinstance(counts, Problem):
            self._reader.end_piece(*(counts if isinstance(counts, list) else [counts]))
        else:
            if self._is_scheduled:
                self._reader.discard_piece()
            self._reader.leave_out_backward(Problem.BAD_COUNTS)

    def backward_ended(self) -> None:
        """End the piece that was a backward outside `piece()`."""
        self.steps.n_runs += 1
        self._n += 1
        if self._reader.n_pieces and (why_not := self.why_not_another()):
            self._question, self.is_doubted = why_not, True
        counts = self._counts_outside()
        if isinstance(counts, Problem):
            self._reader.leave_out_backward(counts)
        else:
            self._reader.end_piece(counts, is_declared=False)

    def _counts_outside(self) -> PieceCounts | Problem:
        """The counts of a backward outside `piece()`, or why it is no piece."""
        if self._in_pipeline:
            return Problem.OUTSIDE_SCHEDULE
        if self._by_forward:
            return self._counted_by_forward(None)
        if self._units_per_piece is None:
            return Problem.UNITS_UNKNOWN
        try:
            self._forwards.of_backward()
        except SecondBackwardError:
            return Problem.MORE_BACKWARDS
        first, further = self._counted(None, has_weights=False)
        return piece_counts(first, 1.0, None, further)

    def _counted_by_forward(self, weight: float | Tensor | None) -> PieceCounts | Problem:
        """The counts of a piece that is ending, by its forward, or why its forward does not show them.

        Args:
            weight: in the loss; None where the forward may show that too.
        """
        try:
            units = self._forwards.take()
            counts = units if isinstance(units, CountsOfForward) else CountsOfForward(units)
            first, further = counted_in(self._names, counts.units)
            if weight is None:
                by_units = 1.0 if first is None else first
                weight = by_units if counts.weight is None else counts.weight
            return replace(piece_counts(first, weight, counts.unit_weights, further), dim=self._forwards.dim)
        except UnclearUnitsError as question:
            self._question = f"{question}. {question.remedy}"
            return Problem.UNITS_ASKED
        except Exception as error:  # of the user's function, or a number that cannot be
            if not self._has_logged:
                logger.error("sonde: units_per_piece= could not count a piece: %s: %s", type(error).__name__, error)
                self._has_logged = True
            return Problem.NOT_COUNTED

    def _given(self, units: Any, weight: Any, unit_weights: Any, n: Any, *, is_read: bool) -> Any:
        """The counts of a declared piece or of n; None where one is not read: its numbers are only checked."""
        if n is not None:
            return self._counts_of(n, units, weight, unit_weights)
        first, further = self._counted(units, has_weights=unit_weights is not None)
        if is_read:
            return piece_counts(first, weight, unit_weights, further)
        check_counts(first, weight, unit_weights, further)
        return None

    def _counts_of(self, n: int, units: UnitsOfPieces, weights: Any, unit_weights: Any) -> list[PieceCounts]:
        n = whole_number("n must be the schedule's number of micro-batches", n, ": pass n_microbatches")
        first, further = self._counted(units, has_weights=unit_weights is not None)
        each = [list(v) if isinstance(v, Sequence) else [v] * n for v in (weights, unit_weights, first, *further)]
        for name, values in zip(("weights", "unit_weights", *["units"] * len(self._names)), each, strict=True):
            if len(values) != n:
                raise ValueError(f"{name} must have one number for each of {n} micro-batches, got {len(values)}")
        return [piece_counts(u, w, of_units, others) for w, of_units, u, *others in zip(*each, strict=True)]

    def _counted(self, units: Any, *, has_weights: bool) -> tuple[Any, tuple[Any, ...]]:
        """A piece's count in the first unit, None if its `unit_weights` have it, and in each of the further ones."""
        if units is None and has_weights and len(self._names) == 1:
            return None, ()
        if units is None and (units := self._units_per_piece) is None:
            raise RuntimeError(_NOT_KNOWN)
        first, further = counted_in(self._names, units)
        if first is None and not has_weights:
            raise ValueError(f"units must be counted in {self._names[0]} too, got {units!r:.60}")
        return first, further

    def begin_window(self, *, is_measured: bool) -> None:
        """Note whether the window that begins is measured."""
        self.is_quiet = not is_measured and len(self._names) == 1
        self._n, self.is_doubted = 0, False
        if self._gives_counts and not self.steps.may_be_recorded:  # whoever counts pieces pays for no hook
            self._forwards.close()
        self._forwards.begin_window(is_measured=is_measured)

    def discard(self) -> bool:
        """Forget what was wrong with the pieces of the present window, whose gradients were zeroed without a step.

        Returns:
            Whether there are any to forget: none where nothing is measured.
        """
        has_run, self._n = self._n > 0 and not self.is_open, 0
        self._forwards.discard()
        if has_run:
            self._question, self.is_doubted = "", False
        return has_run

    def take_question(self) -> str:
        """What was seen in a forward since the last call that does not show its units; empty if all did."""
        question, self._question = self._question, ""
        return question
