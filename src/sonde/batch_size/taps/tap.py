"""What is kept of a gradient: its squared norm per parameter, and the witness's elements."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from torch import Tensor


@dataclass(frozen=True)
class GradientSummary:
    """What is kept of one gradient.

    Attributes:
        sq_norms: squared norm per parameter in some `Metric`, 0 where it has none; [parameters].
        witness: the witness's elements, [witness.size].
    """

    sq_norms: Tensor
    witness: Tensor

    def scaled(self, factor: Tensor) -> GradientSummary:
        """The summary of `factor` times the gradient; factor: 0-dim."""
        return GradientSummary(sq_norms=self.sq_norms * factor.square(), witness=self.witness * factor)


class Problem(IntEnum):
    """Why the pieces of a window cannot be used; each rank counts its own and the counts are summed over ranks.

    In the order in which they are told: the first is the cause of those after it.
    """

    ENDED_LATE = 0
    NO_SECOND_MOMENT = 1
    NOT_FINITE = 2
    INTERRUPTED = 3
    EMPTY_PIECE = 4
    REENTRANT = 5
    SEVERAL_BACKWARDS = 6
    TOO_LARGE_TO_SUM = 7
    SPARSE_ON_GPU = 8
    SPARSE_IN_BUCKETS = 9
    SEVERAL_REDUCTIONS = 10
    LEFT_OVER = 11
    OUTSIDE_PIECES = 12
    INTERRUPTED_IN_BUCKETS = 13

    @property
    def only_explains(self) -> bool:
        """Whether the window may be sound all the same: it is the cause only if the gradient was changed."""
        return self is Problem.INTERRUPTED

    @property
    def message(self) -> str:
        """The cause and the way out."""
        return _MESSAGES[self]


_MESSAGES = {
    Problem.ENDED_LATE: (
        "the window was ended after optimizer.step(): call probe.step() or probe.clip_grad_norm_() before it"
    ),
    Problem.NO_SECOND_MOMENT: (
        "the optimizer had no second moment yet, by which metric='adam' weighs gradients: it has after its first step"
    ),
    Problem.NOT_FINITE: (
        "a piece had a gradient, weight or number of units that is not finite and positive, or a loss scale so large "
        "that squares of the scaled gradient overflow"
    ),
    Problem.INTERRUPTED: (
        "a piece was interrupted in or after its backward, and what that had added to the gradients may be there "
        "still: zero them after an error that you catch"
    ),
    Problem.EMPTY_PIECE: (
        "in a piece no backward reached the parameters: leave out micro-batches that are skipped, and run each "
        "backward inside its own 'with probe.piece():'; gradients set by hand, or got from torch.autograd.grad, cannot "
        "be seen"
    ),
    Problem.REENTRANT: (
        "reentrant checkpointing runs backward inside backward, so pieces cannot be told apart: wrap each micro-batch "
        "in 'with probe.piece():' or use checkpoint(..., use_reentrant=False)"
    ),
    Problem.SEVERAL_BACKWARDS: (
        "a piece was found to have several backwards; "
        "from the next window on their gradients are summed before they are squared"
    ),
    Problem.TOO_LARGE_TO_SUM: (
        "a piece with several backwards needs its gradients summed, and they exceed the staging area: add the losses "
        "and call backward once, raise staging_mib, or, under DDP, run all but the last backward in model.no_sync()"
    ),
    Problem.SPARSE_ON_GPU: (
        "a sparse gradient on a GPU cannot be squared without waiting for the device: use Embedding(sparse=False)"
    ),
    Problem.SPARSE_IN_BUCKETS: (
        "DDP reduces a sparse gradient in no bucket that can be read: use tap='leaf', or Embedding(sparse=False)"
    ),
    Problem.SEVERAL_REDUCTIONS: (
        "DDP reduced more than once in a window, so its buckets no longer hold one rank's gradient: "
        "accumulate under model.no_sync(), or use tap='leaf'"
    ),
    Problem.LEFT_OVER: (
        "gradients were there before the window's first backward, and DDP's buckets hold them too: "
        "zero them after every step, or use tap='leaf'"
    ),
    Problem.INTERRUPTED_IN_BUCKETS: (
        "a piece was interrupted in or after its backward, and what that had added to the gradients may be in DDP's "
        "buckets: zero them after an error that you catch"
    ),
    Problem.OUTSIDE_PIECES: (
        "a backward outside piece() added to the gradients, and DDP's buckets hold that too: "
        "put it into a piece, or zero the gradients after it"
    ),
}
