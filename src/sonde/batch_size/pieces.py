"""The pieces of a window, as the user declares them or as each backward outside `piece()` makes one."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sonde.batch_size.batch_dim import UnclearUnitsError
from sonde.batch_size.forward_units import CountsOfForward, ForwardUnits
from sonde.batch_size.loop_watch import LoopWatch
from sonde.batch_size.pacing import Pacing
from sonde.batch_size.taps.tap import Problem
from sonde.batch_size.taps.window_reader import WindowReader
from sonde.batch_size.taps.window_sums import PieceCounts, check_counts, piece_counts
from sonde.batch_size.units import counted_in
from sonde.record_values import whole_number

Units = float | Tensor | Mapping[str, float | Tensor] | None
"""Of one piece: a number, or one by each unit's name."""
UnitsOfPieces = float | Sequence[float | Tensor] | Mapping[str, float | Sequence[float | Tensor]] | None
"""Of several pieces: likewise, each one number for all or [pieces]."""
logger = logging.getLogger("sonde")

_MANY = 2**53
"""Whole numbers of units below it are floats without rounding."""


class DeclaredPiece:
    """A context around the backwards of one piece. No generator: every micro-batch enters it, measured or not.

    Args:
        pieces: of the window.
        units: see `NoiseScaleProbe.piece`, as for the others.
        weight: in the loss.
        unit_weights: within the piece.
        start: when the user called for it, of `time.perf_counter`.
    """

    __slots__ = ("_counts", "_given", "_is_usual", "_pieces")

    def __init__(
        self,
        pieces: Pieces,
        units: Units | NotCounted,
        weight: float | Tensor,
        unit_weights: Sequence[float] | Tensor | None,
        start: float,
    ) -> None:
        self._pieces, self._given = pieces, (units, weight, unit_weights)
        has_units = pieces.knows_units if units is None else type(units) is int and 0 < units < _MANY
        self._is_usual = has_units and unit_weights is None and type(weight) is float and 0 < weight < math.inf
        pieces.seconds += time.perf_counter() - start

    def __enter__(self) -> None:
        start, pieces = time.perf_counter(), self._pieces
        if self._is_usual and pieces.is_quiet and not pieces.is_open:  # nearly all pieces, so this is short
            self._counts = None
            pieces.loop.n_passed_pieces += 1
            pieces.seconds += time.perf_counter() - start
            pieces.is_open = True  # last: if Ctrl-C comes before this line, __exit__ never runs
        else:
            self._counts = pieces.begin(*self._given)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._counts is None:
            start, pieces = time.perf_counter(), self._pieces
            pieces.is_open = False
            pieces.seconds += time.perf_counter() - start
        else:
            self._pieces.end(self._counts, failed=kind is not None)


@dataclass(frozen=True)
class CountedByForward:
    """A declared piece whose units its forward will show; `weight` is its weight in the loss."""

    weight: float | Tensor


@dataclass(frozen=True)
class NotCounted:
    """A declared piece whose units are not known: its window is left out."""


NOT_COUNTED = NotCounted()


class Pieces:
    """Begins and ends pieces, and knows how many units each has.

    Args:
        names: of the units, the independent sample first.
        units_per_piece: units in a piece whose number the user does not give; None if it is not known.
        forwards: counts the units of such a piece in its forward, in place of `units_per_piece`; None if it does not.
        reader: of the pieces.
        loop: counts pieces of windows that are not measured.
        pacing: says whether a window is measured.
        in_pipeline: whether the model is a pipeline's stage, so that a backward alone is no piece.
        has_peers: whether other ranks sum with this one. They would wait for a rank that raises alone, so a window
            with backwards that are no pieces is dropped instead, unless a rank declares pieces.
    """

    def __init__(
        self,
        names: Sequence[str],
        units_per_piece: float | Mapping[str, float] | None,
        forwards: ForwardUnits | None = None,
        *,
        reader: WindowReader,
        loop: LoopWatch,
        pacing: Pacing,
        in_pipeline: bool = False,
        has_peers: bool = False,
    ) -> None:
        self._names, self._units_per_piece, self._forwards = tuple(names), units_per_piece, forwards
        self._reader, self.loop, self._pacing = reader, loop, pacing
        self.is_open = False
        """Whether a declared piece has begun, and not ended."""
        self.is_quiet = False
        """Whether the present window is not measured, and a piece's number of units alone says its size."""
        self.knows_units = units_per_piece is not None or forwards is not None
        """Whether the number of units need not be given for each piece."""
        self.seconds = 0.0
        """Host time spent so far on declared pieces in all windows, in measured ones without their reading."""
        self._in_pipeline, self._has_peers = in_pipeline, has_peers
        self._has_run = False
        """Whether a piece has ended in the present window, or a backward that was none."""
        self._question = ""
        self.why_not_another: Callable[[], str] = str
        """Asked at a second backward outside `piece()`: why it is no micro-batch; empty if it is one."""
        self.is_doubted = False
        """Whether a further backward of the present window is no micro-batch."""
        self._error: Exception | None = None
        self._has_logged = False
        """Whether an error of `units_per_piece` was logged. Its text may be another one for each piece."""
        self._units_unknown = self._ran_outside = False
        """Errors that are raised from the user's own call, not inside autograd."""

    def begin(
        self, units: Units | NotCounted, weight: float | Tensor, unit_weights: Sequence[float] | Tensor | None
    ) -> PieceCounts | CountedByForward | NotCounted | None:
        """Begin a declared piece; see `NoiseScaleProbe.piece`. NOT_COUNTED as its units stands for unknown ones.

        Returns:
            Its counts; None in a window that is not measured, and while a CUDA graph is recorded.
        """
        start = time.perf_counter()
        self._check_closed("piece()")
        is_counted_later = self._forwards is not None and units is None and unit_weights is None
        is_counted = units is not NOT_COUNTED
        if not self._pacing.is_measured or self._reader.is_recorded():
            if is_counted and not is_counted_later:
                first, further = self._counted(units, has_weights=unit_weights is not None)
                check_counts(first, weight, unit_weights, further)
            self.loop.piece_begins(is_measured=self._pacing.is_measured)
            self._pacing.spent_idle(start)
            self.is_open = True
            return None
        counts: PieceCounts | CountedByForward | NotCounted
        if self._forwards is not None:
            self._forwards.forget()  # of before the piece
            if is_counted_later:
                self._forwards.open()
            else:  # whoever counts pieces pays for no hook
                self._forwards.close()
        if not is_counted:
            counts = NOT_COUNTED
        elif is_counted_later:
            check_counts(1.0, weight, None)
            counts = CountedByForward(weight)
        else:
            first, further = self._counted(units, has_weights=unit_weights is not None)
            counts = piece_counts(first, weight, unit_weights, further)
        self._units_unknown = False
        self.loop.piece_begins(is_measured=True)
        self._reader.begin_piece()
        self._pacing.spent(start)
        self.is_open = True
        return counts

    def begin_window(self, *, is_measured: bool) -> None:
        """Note whether the window that begins is measured."""
        self.is_quiet = not is_measured and len(self._names) == 1
        self._has_run = self.is_doubted = False
        if self._forwards is not None:
            self._forwards.begin_window(is_measured=is_measured)

    def discard(self) -> bool:
        """Forget what was wrong with the pieces of the present window, whose gradients were zeroed without a step.

        Returns:
            Whether there are any to forget: none where nothing is measured.
        """
        has_run, self._has_run = self._has_run and not self.is_open, False
        if has_run:
            self._error, self._units_unknown, self._ran_outside = None, False, False
            self._question, self.is_doubted = "", False
        return has_run

    def end(self, counts: PieceCounts | CountedByForward | NotCounted, *, failed: bool) -> None:
        """End a declared piece of a measured window.

        Args:
            counts: what `begin` has returned.
            failed: whether an exception ended it.
        """
        self.is_open, self._has_run = False, True
        if failed or self._reader.is_recorded():
            self._reader.discard_piece()
            return
        if isinstance(counts, NotCounted):
            self._reader.leave_out_backward(Problem.BAD_COUNTS)
            return
        if isinstance(counts, CountedByForward):
            by_forward = self._counted_by_forward(counts.weight)
            if isinstance(by_forward, Problem):
                self._reader.leave_out_backward(Problem.BAD_COUNTS)
                return
            counts = by_forward
        self._reader.end_piece(counts)

    def _counted_by_forward(self, weight: float | Tensor | None) -> PieceCounts | Problem:
        """The counts of a piece that is ending, by its forward, or why its forward does not show them.

        Args:
            weight: in the loss; None where the forward may show that too.
        """
        assert self._forwards is not None
        try:
            units = self._forwards.take()
            counts = units if isinstance(units, CountsOfForward) else CountsOfForward(units)
            first, further = counted_in(self._names, counts.units)
            if weight is None:
                by_units = 1.0 if first is None else first
                weight = by_units if counts.weight is None else counts.weight
            return piece_counts(first, weight, counts.unit_weights, further)
        except UnclearUnitsError as question:
            self._question = f"{question}. {question.remedy}"
            return Problem.UNITS_ASKED
        except Exception as error:  # of the user's function, or a number that cannot be
            if self._has_peers:  # they would wait for a rank that raises: the window is dropped
                if not self._has_logged:
                    logger.error("sonde: units_per_piece= could not count a piece: %s: %s", type(error).__name__, error)
                self._has_logged = True
            else:
                self._error = error  # raised when the window ends
            return Problem.NOT_COUNTED

    @contextmanager
    def scheduled(
        self,
        n: int,
        units: UnitsOfPieces | NotCounted,
        weights: float | Sequence[float | Tensor] = 1.0,
        unit_weights: Sequence[Sequence[float] | Tensor] | None = None,
    ) -> Iterator[None]:
        """A context around a pipeline schedule's step; see `NoiseScaleProbe.pieces`."""
        start = time.perf_counter()
        counts = None if isinstance(units, NotCounted) else self._counts_of(n, units, weights, unit_weights)
        self._check_closed("pieces()")
        self.is_open, self._units_unknown = True, False
        is_measured = self._pacing.is_measured and not self._reader.is_recorded()
        if is_measured:
            self._reader.begin_pieces(n)
        else:
            self.loop.n_passed_pieces += not self._pacing.is_measured
        (self._pacing.spent if is_measured else self._pacing.spent_idle)(start)
        try:
            yield
        except BaseException:
            if is_measured:
                self._reader.discard_piece()
            raise
        finally:
            self.is_open = False
        if is_measured and self._reader.is_recorded():
            self._reader.discard_piece()
        elif is_measured and counts is not None:
            self._reader.end_pieces(counts)
        elif is_measured:
            self._reader.discard_piece()
            self._reader.leave_out_backward(Problem.BAD_COUNTS)

    def _counts_of(
        self,
        n: int,
        units: UnitsOfPieces,
        weights: float | Sequence[float | Tensor],
        unit_weights: Sequence[Sequence[float] | Tensor] | None,
    ) -> list[PieceCounts]:
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
        first, further = counted_in(self._names, self._known_units() if units is None else units)
        if first is None and not has_weights:
            raise ValueError(f"units must be counted in {self._names[0]} too, got {units!r:.60}")
        return first, further

    def _check_closed(self, called: str) -> None:
        if self.is_open:
            raise RuntimeError(
                f"{called} was entered inside another piece: open one 'with probe.piece():' per micro-batch, or one "
                "'with probe.pieces(n):' per step of a pipeline schedule"
            )

    def backward_ended(self) -> None:
        """End the piece that was a backward outside `piece()`."""
        self._has_run = True
        self.loop.backward_ended()
        if self._reader.n_pieces and (why_not := self.why_not_another()):
            self._question, self.is_doubted = why_not, True
        if self._in_pipeline:
            self._reader.leave_out_backward(Problem.OUTSIDE_SCHEDULE)
            self._ran_outside = not self._has_peers
        elif self._forwards is not None:
            counts = self._counted_by_forward(None)
            if isinstance(counts, Problem):
                self._reader.leave_out_backward(counts)
            else:
                self._reader.end_piece(counts, is_declared=False)
        elif self._units_per_piece is None:
            self._reader.leave_out_backward(Problem.UNITS_UNKNOWN)
            self._units_unknown = not self._has_peers
        else:
            first, further = self._counted(None, has_weights=False)
            self._reader.end_piece(piece_counts(first, 1.0, None, further), is_declared=False)

    def check_ended(self) -> None:
        """Refuse to end a window that cannot end here.

        Raises:
            RuntimeError: inside a piece; in one process, also when the number of units is not known.
        """
        if self.is_open:
            raise RuntimeError("the window was ended inside a piece: leave 'with probe.piece():' first")
        if self._ran_outside:
            self._ran_outside = False
            raise RuntimeError(Problem.OUTSIDE_SCHEDULE.message)
        if self._units_unknown:
            self._known_units()
        if (error := self._error) is not None:
            self._error = None
            raise RuntimeError(
                f"the units of a piece could not be counted by units_per_piece= ({type(error).__name__}: {error}): it "
                "is called as the model is, and must return a number of units > 0"
            ) from error

    def take_question(self) -> str:
        """What was seen in a forward since the last call that does not show its units; empty if all did."""
        question, self._question = self._question, ""
        return question

    @property
    def counted_in(self) -> str:
        """The tensor whose rows were counted first, in words; empty where no rows are counted."""
        return "" if self._forwards is None else self._forwards.counted_in

    @property
    def seconds_in_all_windows(self) -> float:
        """Host time spent on pieces and in hooks of forwards so far, measured or not; see `seconds`."""
        return self.seconds + (self._forwards.seconds if self._forwards is not None else 0.0)

    def close(self) -> None:
        """Remove the hook of forwards."""
        if self._forwards is not None:
            self._forwards.close()

    def _known_units(self) -> float | Mapping[str, float]:
        if self._units_per_piece is None:
            raise RuntimeError(
                "the number of units in a piece is not known: pass units_per_piece= to attach, or units= to piece()"
            )
        return self._units_per_piece
