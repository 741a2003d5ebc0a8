"""The problems that the pieces of a window can meet: for each the cause, and what to do about it."""

from __future__ import annotations

from enum import Enum


class Problem(Enum):
    """Why the pieces of a window cannot be used: the cause, and what to do about it.

    Each rank counts its own problems; the counts are summed over ranks. The order of the lines is that of causes: the
    first of several problems in a window causes the others, and is reported.
    """

    FAILED = "sonde failed while it read a gradient: the logger 'sonde' has shown the error with its traceback"
    REPLACED = (
        "measured parameters are no longer in the model, and others that are not measured are in their place: attach "
        "after the model is wrapped, cut or changed"
    )
    IN_CUDA_GRAPH = (
        "backwards ran inside a CUDA graph, and a graph that is replayed runs no hook: keep backward outside, by "
        "torch.cuda.make_graphed_callables before attach or torch.compile(mode='reduce-overhead'), or use sonde.measure"
    )
    EVALUATED_AGAIN = (
        "the optimizer evaluates its closure several times a step, as LBFGS does, so that a step has no single "
        "gradient: measure a run with another optimizer"
    )
    NOT_ALL_DECLARED = (
        "a rank had backwards outside piece(), each counted as a piece of units_per_piece, while it or another rank "
        "declares its pieces. A few windows later all ranks know this, and such backwards no longer count. If it goes "
        "on, as where ranks that share pieces never declare any, pass units_per_piece=None to attach"
    )
    UNITS_UNKNOWN = (
        "the number of units in a piece is not known: pass units_per_piece= to attach, or enter "
        "'with probe.piece(units=…):' around the backward of each micro-batch"
    )
    NOT_COUNTED = (
        "units_per_piece= could not count a piece, here or on another rank: the logger 'sonde' has shown the error"
    )
    UNITS_ASKED = "the units of a piece are not clear: probe.alerts['units'] says why, and what to do"
    FORWARD_ALONE = "the model's forward ran on a rank that had no piece"
    STEP_ALONE = "an optimizer stepped on a rank that had neither a forward nor a piece"
    OUTSIDE_SCHEDULE = (
        "a pipeline schedule ran outside pieces(), so its micro-batches cannot be told apart: run each step in "
        "'with probe.pieces(n_microbatches):'"
    )
    NO_SECOND_MOMENT = (
        "metric='adam' weighs gradients by the optimizer's second moment, which exists only after its first step, "
        "and has to be cut as they are"
    )
    BAD_COUNTS = (
        "a piece had a weight or a number of units that was not finite and positive, or that could not be counted"
    )
    LOSS_SCALE = (
        "a piece's gradient, multiplied by the loss scale, was not finite or its squares overflow fp32: the GradScaler "
        "lowers its scale after an overflow. If that does not help, the gradient itself is not finite"
    )
    NOT_FINITE = (
        "a piece had a gradient that was not finite, or so large (above 1e19) that its squares overflow fp32: look for "
        "NaN and infinity in the loss, or scale the loss down"
    )
    ZEROED = (
        "gradients were zeroed between the pieces of the window: where the loop zeroes them without a step, call "
        "probe.discard() on every rank"
    )
    INTERRUPTED = (
        "a piece was interrupted in or after its backward, and part of its gradient may still be in .grad: "
        "zero the gradients after an error that you catch"
    )
    NOT_ZEROED = (
        "gradients from before the window's first backward were still in .grad: call zero_grad() after every "
        "optimizer.step(), on the model where the optimizer does not hold all its parameters, put every backward into "
        "a piece, and end a window before each optimizer.step() only, not after each micro-batch"
    )
    STEPPED_IN_BACKWARD = (
        "the optimizer stepped inside backward, so a window's pieces saw different weights and its gradient was gone "
        "before it ended: step after the last backward while you measure"
    )
    EMPTY_PIECE = (
        "no backward reached the parameters in a piece: leave out skipped micro-batches, and run each backward inside "
        "its own 'with probe.piece():'; gradients set by hand or returned by torch.autograd.grad cannot be seen"
    )
    REENTRANT = (
        "reentrant checkpointing runs backward inside backward, so pieces cannot be separated: wrap each micro-batch "
        "in 'with probe.piece():' or use checkpoint(..., use_reentrant=False)"
    )
    MORE_BACKWARDS = (
        "backward ran more often than the model's forward, so several pieces came from one batch: put all backwards of "
        "one batch into one 'with probe.piece():', and run backward once on each graph"
    )
    TOO_LARGE_TO_SUM = (
        "a piece had several backwards, and their gradients are too large for the staging area: add the losses and "
        "call backward once, or raise staging_mib"
    )
    SEVERAL_BACKWARDS = (
        "a piece had several backwards; from the next window on, their gradients are copied, since CUDA graphs write "
        "to the same memory each time, and summed before they are squared"
    )
    SPARSE_ON_GPU = (
        "a sparse gradient on a GPU cannot be squared without waiting for the device: use Embedding(sparse=False)"
    )
    NOT_IN_EVERY_PIECE = (
        "a parameter of a pipeline stage had another number of gradients than the schedule has micro-batches: enter "
        "'with probe.pieces(n_microbatches):' around schedule.step(), and use every parameter in every micro-batch"
    )
    EXPERTS_DIFFER = (
        "ranks that feed the same experts had different numbers of pieces in the window, or more than 256: enter "
        "'with probe.piece():' around the backward of each micro-batch on all of these ranks"
    )
    CONTEXT_PARALLEL = (
        "torch's context_parallel was in force, so each rank's gradient is of a part of its sequences: pass cp_mesh= "
        "to attach, the mesh axis of the ranks that share sequences"
    )
    OTHER_ORDER = (
        "the gradients of ranks that share sequences came in another order than from the last layer to the first, and "
        "too many had to wait for the sum over these ranks: raise staging_mib, or define layers in the order of forward"
    )

    @property
    def message(self) -> str:
        """The cause, and what to do about it."""
        return str(self.value)

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
