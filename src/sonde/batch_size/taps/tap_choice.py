"""The choice of the tap that reads a model's gradients, and when another tap replaces it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from torch import Tensor

from sonde.batch_size.stats.window_row import WindowRow
from sonde.batch_size.taps.context_pieces import ContextPieces
from sonde.batch_size.taps.cut_gradients import CutGradients
from sonde.batch_size.taps.ddp_buckets import CommHook, DDPBucketTap, comm_hook_name, is_power_of_two, is_tapped
from sonde.batch_size.taps.ddp_division import why_division_differs
from sonde.batch_size.taps.further_metrics import FurtherMetrics
from sonde.batch_size.taps.leaf_hooks import LeafHookTap
from sonde.batch_size.taps.metric import GradientMetric
from sonde.batch_size.taps.tap import CountedBackwards, GradientSummary, Problem, Tap
from sonde.batch_size.taps.witness import Witness
from sonde.parallel.wrappers import Wrapper, n_collectives

TapName = Literal["auto", "leaf", "comm_hook"]

_WINDOWS_BEFORE_BUCKETS = 3
_BUCKET_PROBLEMS = {
    p.name.lower() for p in (Problem.SEVERAL_REDUCTIONS, Problem.EMPTY_PIECE, Problem.REENTRANT, Problem.OUTSIDE_PIECES)
}
"""Problems of DDP's buckets that leaf hooks may not have."""


class TapChoice:
    """Holds the present tap. With "auto", begins with leaf hooks and changes to DDP's buckets where these suffice.

    Args:
        wrapper: the model.
        witness: elements to copy besides the norms.
        metric: how gradients are squared.
        further: metrics beside it; None without.
        name: "leaf", "comm_hook" or "auto".
        comm_hook: the user's DDP communication hook, for "comm_hook" to wrap.
        comm_state: the state that the hook is called with.
        staging_bytes: bound of the memory for gradients that wait.
        on_backward: called when a backward outside a declared piece has ended: that backward was a piece.

    Raises:
        ValueError: when the tap does not fit the model.
    """

    def __init__(
        self,
        wrapper: Wrapper,
        witness: Witness,
        metric: GradientMetric,
        *,
        further: FurtherMetrics | None = None,
        name: TapName,
        comm_hook: CommHook | None,
        comm_state: object,
        staging_bytes: int,
        on_backward: Callable[[], None],
    ) -> None:
        self._wrapper, self._witness, self._metric, self._further = wrapper, witness, metric, further
        self._staging_bytes, self._on_backward = staging_bytes, on_backward
        self._is_auto = name == "auto"
        self.counted = CountedBackwards()
        """Which backwards are pieces."""
        self._shares_pieces = bool(
            wrapper.data.n_sharing > 1 or wrapper.experts or wrapper.has_cut_leaves or wrapper.sequence_group
        )
        self._seconds_before = 0.0
        self._one_piece_windows = 0
        self._buckets_fail = False
        self._reads_buckets = name == "comm_hook"
        self._may_tap_buckets = (
            self._is_auto
            and wrapper.ddp_holds_all
            and wrapper.mesh is None
            and comm_hook_name(wrapper.ddp) is None
            and wrapper.n_ranks >= 2
        )
        # DDP divides by the number of ranks or multiplies by its reciprocal, depending on where a gradient lies. Both
        # round alike for powers of 2. For other numbers DDP shows how it rounds: a change of taps must not change a
        # gradient.
        self._why_not_buckets = ""
        if self._may_tap_buckets and wrapper.ddp is not None and not is_power_of_two(wrapper.n_ranks):
            self._why_not_buckets = why_division_differs(wrapper.ddp, wrapper.leaves)
        self.tap: Tap
        if name == "comm_hook":
            self.tap = self._bucket_tap(comm_hook, comm_state)
        else:
            self.tap = self._leaf_tap()

    @property
    def seconds(self) -> float:
        """Host time spent reading by all taps so far."""
        return self._seconds_before + self.tap.seconds

    def saw_piece(self, gradient: GradientSummary) -> None:
        """Note a piece. If it had several backwards, each may reduce, and then buckets do not hold the piece."""
        if gradient.n_backwards > 1:
            self._may_tap_buckets = False

    def saw_final_gradients(self, grads: Sequence[Tensor | None]) -> None:
        """Note the gradients at the end of a window. Buckets do not show sparse gradients."""
        if self._may_tap_buckets and any(g is not None and g.is_sparse for g in grads):
            self._may_tap_buckets = False

    def saw_row(self, row: WindowRow, *, is_sound: bool) -> None:
        """Note a window whose numbers have come to the host, and whether they can be used."""
        # Numbers come to each rank at a time of its own. Ranks that share pieces sum parts of each, so all of them must
        # take the same backwards for pieces: they learn it together, by the first piece that they declare.
        if row.n_ranks_declaring and not self._shares_pieces:
            self.counted.only_declared = True
        one_piece_per_rank = is_sound and row.n_ranks_with_one_piece == self._wrapper.n_ranks
        self._one_piece_windows = self._one_piece_windows + 1 if one_piece_per_rank else 0
        self._buckets_fail |= any(problem.kind in _BUCKET_PROBLEMS for problem in row.problems)

    def change_if_due(self) -> str:
        """With "auto", change the tap where another is better.

        Once every rank has had one piece in each of a few windows, DDP's buckets show as much as leaf hooks at a lower
        cost. If the buckets later fail, for example since the loop reduces several times per window, leaf hooks return.

        Returns:
            Why the tap has changed, in words; empty when it has not.
        """
        if self._is_auto and self._buckets_fail and self._reads_buckets:
            self._replace(self._leaf_tap, reads_buckets=False)
            return "DDP's buckets no longer hold one piece per rank: leaf hooks read the gradients from now on"
        if not self._may_tap_buckets or self._one_piece_windows < _WINDOWS_BEFORE_BUCKETS:
            return ""
        self._may_tap_buckets = False
        if self._why_not_buckets:
            return (
                f"leaf hooks keep reading the gradients: {self._why_not_buckets}, and a hook cannot see which these are"
            )
        ddp = self._wrapper.ddp
        assert ddp is not None
        if comm_hook_name(ddp) is not None or is_tapped(ddp):  # registered since attach
            return ""
        try:
            self._replace(lambda: self._bucket_tap(None, None), reads_buckets=True)
        except (RuntimeError, ValueError) as error:  # DDP may hold a built-in hook, which it does not list
            return f"leaf hooks keep reading the gradients, since DDP accepts no communication hook: {error}"
        return "each rank has one piece per window: DDP's communication hook reads the gradients from now on"

    def pause(self) -> None:
        """Read nothing until `resume`; between windows."""
        self.tap.pause()

    def resume(self) -> None:
        """Read again from the next window on."""
        self.tap.resume()

    def close(self) -> None:
        """Remove every hook."""
        self.tap.close()

    def _replace(self, make: Callable[[], Tap], *, reads_buckets: bool) -> None:
        new = make()  # before the old tap is closed: it may raise
        self._reads_buckets = reads_buckets
        self.tap.close()
        self._seconds_before += self.tap.seconds
        self.tap = new

    def _leaf_tap(self) -> Tap:
        leaves, data = self._wrapper.leaves, self._wrapper.data
        return LeafHookTap(
            leaves,
            self._witness,
            self._metric,
            parameters=list(self._wrapper.parameters.values()),
            # Adam's second moments are cut as parameters are.
            cut=CutGradients(leaves, data.first_sharing, as_leaves=self._further is not None)
            if data.n_sharing > 1 or self._wrapper.experts or self._wrapper.has_cut_leaves
            else None,
            context=self._context_pieces(),
            further=self._further,
            counted=self.counted,
            on_backward_end=self._on_backward,
            n_collectives=lambda: n_collectives(self._wrapper.group),
            staging_bytes=self._staging_bytes,
        )

    def _context_pieces(self) -> ContextPieces | None:
        group = self._wrapper.sequence_group
        if group is None:
            return None
        leaves, staging = self._wrapper.leaves, self._staging_bytes
        return ContextPieces(leaves, group, self._witness, self._metric, further=self._further, staging_bytes=staging)

    def _bucket_tap(self, comm_hook: CommHook | None, comm_state: object) -> Tap:
        if self._wrapper.ddp is None or self._wrapper.mesh is not None:
            raise ValueError(
                f"tap='comm_hook' reads DDP's buckets, got a model of kind {self._wrapper.name}: use tap='leaf' or "
                "'auto'"
            )
        if not self._wrapper.ddp_holds_all:
            raise ValueError(
                "tap='comm_hook' reads the buckets of one DDP module, got a model with trainable parameters outside: "
                "use tap='leaf' or 'auto'"
            )
        if self._wrapper.n_ranks < 2:
            raise ValueError(
                "tap='comm_hook' takes each rank's whole window for one piece, got 1 rank, whose one piece shows no "
                "noise: use tap='leaf', which reads each micro-batch, or train on 2 or more ranks"
            )
        return DDPBucketTap(
            self._wrapper.ddp,
            self._wrapper.leaves,
            self._witness,
            self._metric,
            further=self._further,
            comm_hook=comm_hook,
            comm_state=comm_state,
            counted=self.counted,
            on_backward_end=self._on_backward,
        )
