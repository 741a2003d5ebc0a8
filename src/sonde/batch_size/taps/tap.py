"""A tap reads the gradients of pieces while backward runs: what every tap does, and the problems that it can meet."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, unique
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

Number = float | Tensor
"""A Python number, or a 0-dim tensor that is never read on the host."""


@dataclass(frozen=True)
class GradientSummary:
    """The part of one gradient that is kept.

    Attributes:
        terms: what adds up over parameters in each metric, squares before norms, 0 for a parameter without gradient;
            [metrics, parameters].
        witness: the witness's elements, [witness.size].
        witness_squares: squares of the parts that were added up to the witness's elements, which rounding is relative
            to, [witness.size]; None for the squares of the elements themselves.
        problem: why the gradient could not be read, if so.
    """

    terms: Tensor
    witness: Tensor
    witness_squares: Tensor | None = None
    problem: Problem | None = None

    def scaled(self, factor: Tensor, n_squares: int) -> GradientSummary:
        """The summary of `factor` times the gradient; factor: 0-dim. The first `n_squares` metrics add squares."""
        square = factor.square()
        terms = torch.cat([self.terms[:n_squares] * square, self.terms[n_squares:] * factor.abs()])
        squares = None if self.witness_squares is None else self.witness_squares * square
        return GradientSummary(terms, self.witness * factor, squares)


class RankGradient(NamedTuple):
    """One rank's gradient of a whole window, from a tap that cannot see single pieces: before and after reduction."""

    local: GradientSummary
    reduced: GradientSummary


class Tap(Protocol):
    """Reads the gradients of pieces and never changes them. A new way to read gradients is a new class of this kind."""

    name: str
    """The place where gradients are read, for people."""
    only_declared: bool
    """Whether declared pieces alone count: this rank has declared one, or has learnt that another rank has. Before,
    each backward is a piece."""

    def begin_piece(self, *, is_first: bool) -> None:
        """From here until `end_piece` all backwards are one piece. Later backwards outside pieces never count.

        Args:
            is_first: whether the piece is the first of its window on this rank, so that `.grad` holds nothing else.
        """

    def end_piece(self) -> GradientSummary | None:
        """The gradient of the piece that ends here; None from a tap that sees only whole windows."""

    def begin_pieces(self, n: int) -> None:
        """From here until `end_pieces` the backwards of a pipeline schedule are n pieces."""

    def end_pieces(self) -> list[GradientSummary]:
        """The gradients of the pieces that end here, in their order."""

    def discard_piece(self) -> None:
        """Forget the present piece, or pieces. Their backward may have changed `.grad` already."""

    def leave_out_backward(self) -> None:
        """Forget the backward outside pieces that has just ended, since it is no piece. It has added to `.grad`."""

    def end_window(self) -> RankGradient | None:
        """This rank's whole window; None from a tap that has given the gradient of each piece."""

    def take_problems(self) -> list[Number]:
        """Counts per `Problem` since the last call, some of them on the device; the counts start again from 0."""

    def pause(self) -> None:
        """Read nothing until `resume`, and cost nothing in a backward; between windows."""

    def resume(self) -> None:
        """Read again from the next window on."""

    def close(self) -> None:
        """Remove every hook."""


@unique
class Problem(IntEnum):
    """Why the pieces of a window cannot be used. Each rank counts its own problems; the counts are summed over ranks.

    The order of the lines is that of causes: the first of several problems in a window causes the others, and is
    reported.
    """

    FAILED = 35
    CUT_LATE = 29
    WRAPPED_LATE = 30
    REPLACED = 26
    IN_CUDA_GRAPH = 27
    EVALUATED_AGAIN = 34
    NOT_ALL_DECLARED = 31
    UNITS_UNKNOWN = 32
    NOT_COUNTED = 36
    UNITS_ASKED = 25
    FORWARD_ALONE = 0
    STEP_ALONE = 38
    OUTSIDE_SCHEDULE = 33
    NO_SECOND_MOMENT = 1
    BAD_COUNTS = 2
    LOSS_SCALE = 3
    NOT_FINITE = 4
    OVERFLOW = 5
    ZEROED = 37
    INTERRUPTED = 6
    NOT_ZEROED = 7
    STEPPED_IN_BACKWARD = 8
    TAKEN_IN_BACKWARD = 9
    EMPTY_PIECE = 10
    REENTRANT = 11
    MORE_BACKWARDS = 12
    OVERWRITTEN = 28
    TOO_LARGE_TO_SUM = 14
    SEVERAL_BACKWARDS = 13
    SPARSE_ON_GPU = 15
    SPARSE_IN_BUCKETS = 16
    SEVERAL_REDUCTIONS = 17
    LEFT_OVER = 18
    OUTSIDE_PIECES = 19
    INTERRUPTED_IN_BUCKETS = 20
    NOT_IN_EVERY_PIECE = 21
    EXPERTS_DIFFER = 22
    CONTEXT_PARALLEL = 23
    OTHER_ORDER = 24

    @property
    def only_explains(self) -> bool:
        """Whether the window may be sound all the same. The problem only explains a gradient that turns out changed."""
        return self in (Problem.INTERRUPTED, Problem.ZEROED)

    def applies(self, *, are_declared: bool) -> bool:
        """Whether what was counted is a problem. It depends on all ranks for backwards outside declared pieces.

        Args:
            are_declared: whether any rank declares pieces.
        """
        if self in (Problem.FORWARD_ALONE, Problem.STEP_ALONE):  # where no rank had a piece, they tell the cause
            return False
        if self is Problem.NOT_ALL_DECLARED:
            return are_declared
        # Beside declared pieces such backwards fill up, and do not count: they need no number of units.
        return not (are_declared and self in _OUTSIDE_PIECES)

    @property
    def message(self) -> str:
        """The cause, and what to do about it."""
        return _MESSAGES[self]


_OUTSIDE_PIECES = (
    Problem.UNITS_UNKNOWN,
    Problem.NOT_COUNTED,
    Problem.UNITS_ASKED,
    Problem.OUTSIDE_SCHEDULE,
)
"""Backwards that need no number of units where pieces are declared."""

HOW_TO_COUNT = (
    "Pass units_per_piece= a number, or a function that is called as the model is and returns the number of units, or "
    "enter 'with probe.piece(units=…):' around each backward"
)
"""What to do where rows cannot be counted."""
_MESSAGES = {
    Problem.FAILED: (
        "sonde failed while it read a gradient: the logger 'sonde' has shown the error with its traceback"
    ),
    Problem.CUT_LATE: (
        "the model was cut over ranks after attach, by fully_shard or parallelize_module, and its new parameters are "
        "not measured: attach after the model is cut"
    ),
    Problem.WRAPPED_LATE: (
        "the model was wrapped after attach, and the wrapper (DistributedDataParallel or the like) averages its "
        "gradients over ranks: wrap it first, and attach to the wrapped model"
    ),
    Problem.REPLACED: (
        "measured parameters are no longer in the model, and others that are not measured are in their place: attach "
        "after the model is wrapped, cut or changed"
    ),
    Problem.IN_CUDA_GRAPH: (
        "backwards ran inside a CUDA graph, and a graph that is replayed runs no hook: keep backward outside, by "
        "torch.cuda.make_graphed_callables before attach or torch.compile(mode='reduce-overhead'), or use sonde.measure"
    ),
    Problem.EVALUATED_AGAIN: (
        "the optimizer evaluates its closure several times a step, as LBFGS does, so that a step has no single "
        "gradient: measure a run with another optimizer"
    ),
    Problem.NOT_ALL_DECLARED: (
        "a rank had backwards outside piece(), each counted as a piece of units_per_piece, while it or another rank "
        "declares its pieces. A few windows later all ranks know this, and such backwards no longer count. If it goes "
        "on, as where ranks that share pieces never declare any, pass units_per_piece=None to attach"
    ),
    Problem.UNITS_UNKNOWN: (
        "the number of units in a piece is not known: pass units_per_piece= to attach, or enter "
        "'with probe.piece(units=…):' around the backward of each micro-batch"
    ),
    Problem.NOT_COUNTED: (
        "units_per_piece= could not count a piece, here or on another rank: the logger 'sonde' has shown the error"
    ),
    Problem.UNITS_ASKED: "the units of a piece are not clear: probe.alerts['units'] says why, and what to do",
    Problem.OUTSIDE_SCHEDULE: (
        "a pipeline schedule ran outside pieces(), so its micro-batches cannot be told apart: run each step in "
        "'with probe.pieces(n_microbatches):'"
    ),
    Problem.NO_SECOND_MOMENT: (
        "metric='adam' weighs gradients by the optimizer's second moment, which exists only after its first step"
        ", and has to be cut as they are"
    ),
    Problem.BAD_COUNTS: (
        "a piece had a weight or a number of units that was not finite and positive, or that could not be counted"
    ),
    Problem.LOSS_SCALE: (
        "a piece's gradient, multiplied by the loss scale, was not finite or its squares overflow fp32: the GradScaler "
        "lowers its scale after an overflow. If that does not help, the gradient itself is not finite"
    ),
    Problem.NOT_FINITE: "a piece had a gradient that was not finite: it held NaN or infinity",
    Problem.OVERFLOW: (
        "a piece's gradient was so large (above 1e19) that its squares overflow fp32, or infinite: scale the loss down"
    ),
    Problem.ZEROED: (
        "gradients were zeroed between the pieces of the window: where the loop zeroes them without a step, call "
        "probe.discard() on every rank"
    ),
    Problem.INTERRUPTED: (
        "a piece was interrupted in or after its backward, and part of its gradient may still be in .grad: "
        "zero the gradients after an error that you catch"
    ),
    Problem.NOT_ZEROED: (
        "gradients from before the window's first backward were still in .grad: call zero_grad() after every "
        "optimizer.step(), on the model where the optimizer does not hold all its parameters, put every backward into "
        "a piece, and end a window before each optimizer.step() only, not after each micro-batch"
    ),
    Problem.STEPPED_IN_BACKWARD: (
        "the optimizer stepped inside backward, so a window's pieces saw different weights and its gradient was gone "
        "before it ended: step after the last backward while you measure"
    ),
    Problem.TAKEN_IN_BACKWARD: (
        "no parameter had a gradient at the end of the window, and parameters have post-accumulate-grad hooks: if they "
        "step inside backward, step after the last backward while you measure"
    ),
    Problem.EMPTY_PIECE: (
        "no backward reached the parameters in a piece: leave out skipped micro-batches, and run each backward inside "
        "its own 'with probe.piece():'; gradients set by hand or returned by torch.autograd.grad cannot be seen"
    ),
    Problem.REENTRANT: (
        "reentrant checkpointing runs backward inside backward, so pieces cannot be separated: wrap each micro-batch "
        "in 'with probe.piece():' or use checkpoint(..., use_reentrant=False)"
    ),
    Problem.MORE_BACKWARDS: (
        "backward ran more often than the model's forward, so several pieces came from one batch: put all backwards of "
        "one batch into one 'with probe.piece():', and run backward once on each graph"
    ),
    Problem.OVERWRITTEN: (
        "a later backward of a piece wrote to the memory of an earlier one's gradients, as CUDA graphs do; from the "
        "next window on, gradients of such pieces are copied"
    ),
    Problem.SEVERAL_BACKWARDS: (
        "a piece had several backwards; from the next window on, their gradients are summed before they are squared"
    ),
    Problem.TOO_LARGE_TO_SUM: (
        "a piece had several backwards, and their gradients are too large for the staging area: add the losses and "
        "call backward once, raise staging_mib, or under DDP run all but the last backward in model.no_sync()"
    ),
    Problem.SPARSE_ON_GPU: (
        "a sparse gradient on a GPU cannot be squared without waiting for the device: use Embedding(sparse=False)"
    ),
    Problem.SPARSE_IN_BUCKETS: (
        "DDP does not put a sparse gradient into a bucket that can be read: use tap='leaf', or Embedding(sparse=False)"
    ),
    Problem.SEVERAL_REDUCTIONS: (
        "DDP reduced more than once in a window, so its buckets no longer hold one rank's gradient: "
        "accumulate under model.no_sync(), or use tap='leaf'; where the loop zeroes gradients without a step, call "
        "probe.discard()"
    ),
    Problem.LEFT_OVER: (
        "gradients from before the window's first backward were still in .grad, and DDP's buckets hold them too: "
        "zero them after every step, or use tap='leaf'"
    ),
    Problem.INTERRUPTED_IN_BUCKETS: (
        "a piece was interrupted in or after its backward, and part of its gradient may be in DDP's buckets: "
        "zero the gradients after an error that you catch"
    ),
    Problem.NOT_IN_EVERY_PIECE: (
        "a parameter of a pipeline stage had another number of gradients than the schedule has micro-batches: enter "
        "'with probe.pieces(n_microbatches):' around schedule.step(), and use every parameter in every micro-batch"
    ),
    Problem.CONTEXT_PARALLEL: (
        "torch's context_parallel was in force, so each rank's gradient is of a part of its sequences: pass cp_mesh= "
        "to attach, the mesh axis of the ranks that share sequences"
    ),
    Problem.OTHER_ORDER: (
        "the gradients of ranks that share sequences came in another order than expected, and too many had to wait for "
        "the sum over these ranks. If this happens after the first window, raise staging_mib"
    ),
    Problem.EXPERTS_DIFFER: (
        "ranks that feed the same experts had different numbers of pieces in the window, or more than 256: enter "
        "'with probe.piece():' around the backward of each micro-batch on all of these ranks"
    ),
    Problem.OUTSIDE_PIECES: (
        "a backward outside piece() added to the gradients, and DDP's buckets hold its part too: "
        "put that backward into a piece, or zero the gradients after it"
    ),
}
