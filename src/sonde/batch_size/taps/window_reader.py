"""Reads the gradients of one window after the other, by whichever tap the model and the loop allow."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from sonde.batch_size.stats.window_row import WindowRow
from sonde.batch_size.taps.ddp_buckets import CommHook, DDPBucketTap, comm_hook_name, is_tapped
from sonde.batch_size.taps.leaf_hooks import LeafHookTap
from sonde.batch_size.taps.metric import Euclidean, Metric
from sonde.batch_size.taps.squared_norms import Part, add_squares
from sonde.batch_size.taps.tap import GradientSummary, Problem
from sonde.batch_size.taps.window_sums import Number, PieceCounts, WindowSums
from sonde.batch_size.taps.witness import Witness
from sonde.gradient_norm.global_norm import GlobalNorm, global_norm
from sonde.gradient_norm.plan import NormPlan
from sonde.parallel.devices import to_device
from sonde.parallel.process_groups import start_reduce
from sonde.parallel.wrappers import Wrapper, n_collectives

Tap = Literal["auto", "leaf", "comm_hook"]

_WINDOWS_BEFORE_BUCKETS = 3
_BUCKETS_FAIL = {p.name.lower() for p in (Problem.SEVERAL_REDUCTIONS, Problem.EMPTY_PIECE, Problem.REENTRANT)}
"""What leaf hooks may know better."""


@dataclass(frozen=True)
class Window:
    """What was read of one window; on the device.

    Attributes:
        packed: the pieces' sums, being summed over ranks.
        sq_norm: |F|² of the gradient at its end per parameter group, in the metric; [groups].
        witness: the witness's elements of that gradient.
        norm: its plain norm, that of parameters unfrozen since included; None when `.grad` was not read for it.
        work: the collective that is writing to `packed`; None for one rank.
        witness_sizes: elements that the witness read of each parameter, in order, by index.
    """

    packed: Tensor
    sq_norm: Tensor
    witness: Tensor
    norm: GlobalNorm | None
    work: dist.Work | None
    witness_sizes: Mapping[int, int]


class WindowReader:
    """Counts pieces, reads their gradients and the window's, and sums over ranks: one collective a window.

    Args:
        wrapper: the model.
        group_names: the parameter group of each parameter, [parameters].
        metric: how gradients are squared.
        tap: "leaf", "comm_hook", or "auto": the first until every rank has had one piece a window for a while.
        comm_hook: the user's DDP communication hook, for "comm_hook" to wrap.
        comm_state: the state it is called with.
        grad_scaler: the enabled GradScaler, by whose present scale pieces are divided.
        staging_bytes: bound of the memory for gradients that wait.
        on_backward: called when a backward outside a declared piece has ended: it was a piece.

    Raises:
        ValueError: when the tap does not fit the model.
    """

    def __init__(
        self,
        wrapper: Wrapper,
        group_names: Sequence[str],
        metric: Metric,
        *,
        tap: Tap,
        comm_hook: CommHook | None,
        comm_state: object,
        grad_scaler: torch.amp.GradScaler | None,
        staging_bytes: int,
        on_backward: Callable[[], None],
    ) -> None:
        self.parameters = list(wrapper.parameters.values())
        self.device = self.parameters[0].device
        self.groups = tuple(dict.fromkeys(group_names))
        self._wrapper, self._metric, self._grad_scaler = wrapper, metric, grad_scaler
        self._on_backward = on_backward
        self._seconds = 0.0
        self._witness = Witness(self.parameters)
        self._of_parameters = [self.groups.index(name) for name in group_names]
        self._others: list[int] | None = None
        self.clip_also({})
        self._sums = WindowSums(
            self._of_parameters,
            n_groups=len(self.groups),
            n_witness=self._witness.size,
            device=self.device,
        )
        self._staging_bytes = staging_bytes
        self._is_auto = tap == "auto"
        self._tap: LeafHookTap | DDPBucketTap
        if tap == "comm_hook":
            self._tap = self._bucket_tap(comm_hook, comm_state)
        elif comm_hook is not None:
            raise ValueError(f"comm_hook is wrapped by tap='comm_hook' only, got tap={tap!r}: or register it with DDP")
        else:
            self._tap = self._leaf_tap()
        # Whether DDP divides or multiplies by the reciprocal depends on its options: the same for powers of two.
        self._may_tap_buckets = (
            tap == "auto"
            and wrapper.ddp_holds_all
            and comm_hook_name(wrapper.ddp) is None
            and wrapper.n_ranks >= 2
            and wrapper.n_ranks & (wrapper.n_ranks - 1) == 0
        )
        self._one_piece_windows = 0
        self._buckets_fail = False

    @property
    def tap_name(self) -> str:
        """Where gradients are read now."""
        return self._tap.name

    @property
    def n_pieces(self) -> int:
        """Pieces of the present window on this rank, so far."""
        return self._sums.n_pieces

    @property
    def seconds(self) -> float:
        """Host time spent reading, so far."""
        return self._seconds + self._tap.seconds

    # Pieces.

    def begin_piece(self) -> None:
        """From here until `end_piece` all backwards are one piece; from now on, none outside such a piece counts."""
        if isinstance(self._tap, LeafHookTap):
            self._tap.expect_piece(is_first=self._sums.n_pieces == 0)
        else:
            self._tap.expect_piece()

    def discard_piece(self) -> None:
        """Forget what was seen of the present piece."""
        self._tap.discard_piece()

    def end_piece(self, counts: PieceCounts) -> None:
        """Add the piece that ends here to the window."""
        start = time.perf_counter()
        if isinstance(self._tap, LeafHookTap):
            self._sums.add(self._unscaled(self._tap.end_piece()), counts)
            if self._tap.n_backwards > 1:
                self._may_tap_buckets = False  # each of them may reduce
        else:
            self._tap.end_piece()
            self._sums.count(counts)
        self._seconds += time.perf_counter() - start

    def _unscaled(self, gradient: GradientSummary) -> GradientSummary:
        """The gradient without the GradScaler's present scale, which stays on the device."""
        if self._grad_scaler is None:
            return gradient
        scale = self._grad_scaler.scale(torch.ones((), device=self.device))
        return gradient.scaled(scale.to(gradient.sq_norms.dtype).reciprocal())

    # Windows.

    def end_window(self, *, reads_grad: bool, is_late: bool = False) -> Window:
        """Read the gradient that the window ends with and start the sum over ranks.

        Even with no piece on this rank: whether a window was ended twice is for all ranks together to say.

        Args:
            reads_grad: read `.grad` itself, as a clip needs it, also where DDP's buckets told its norm.
            is_late: the optimizer has stepped, and the window's pieces are forgotten.
        """
        start = time.perf_counter()
        sq_norm, witness, norm = self._take_final(reads_grad=reads_grad)
        problems = self._take_problems()
        problems[Problem.ENDED_LATE] += is_late
        packed = self._sums.pack(problems)
        work = start_reduce(packed, self._wrapper.group)
        window = Window(packed, sq_norm, witness, norm, work, dict(self._witness.sizes))
        self._witness.move()
        self._seconds += time.perf_counter() - start
        return window

    def _take_problems(self) -> list[Number]:
        problems: list[Number] = [*self._tap.take_problems()]
        for problem in self._metric.take_problems():
            problems[problem] += 1
        return problems

    def _take_final(self, *, reads_grad: bool) -> tuple[Tensor, Tensor, GlobalNorm | None]:
        """F: what is in `.grad`, or what DDP's buckets held after their reduction."""
        grads = [p.grad for p in self.parameters]
        read = {i: self._witness.read(i, g) for i in self._witness.indices if (g := grads[i]) is not None}
        witness = self._witness.join(read, self.device)
        if self._may_tap_buckets and any(g is not None and g.is_sparse for g in grads):
            self._may_tap_buckets = False
        if isinstance(self._tap, DDPBucketTap):
            local, reduced = self._tap.take()
            if self._sums.n_pieces:
                self._sums.merge(self._unscaled(local))
            if not reads_grad:
                # What came after the reduction, if no more than a scale, has scaled the witness alike.
                before, now = reduced.witness.square().sum(), witness.square().sum()
                since = torch.where(before > 0, now / before, 1.0)
                return self._sums.per_group(reduced.sq_norms) * since, witness, None
        norm = global_norm(self.plan, 2.0) if reads_grad else None
        if norm is not None and isinstance(self._metric, Euclidean):
            of_groups = to_device(norm.by_part[: len(self.groups)], self.device).to(self._sums.dtype)
            return of_groups.square(), witness, norm
        # What is only compared with the pieces is read as they are: in fp32, at half the cost.
        there = [(i, g) for i, g in enumerate(grads) if g is not None]
        parts: list[Part] = []
        for device in dict.fromkeys(g.device for _, g in there):
            here = [(i, g) for i, g in there if g.device == device]
            parts += self._metric.parts([i for i, _ in here], [g for _, g in here])
        return self._sums.per_group(add_squares(len(grads), parts, self.device)), witness, norm

    def clip_also(self, others: Mapping[str, Tensor]) -> None:
        """Have the plain norm cover parameters that are not measured, by name."""
        if self._others == [id(p) for p in others.values()]:
            return
        self._others = [id(p) for p in others.values()]
        measured = self._wrapper.parameters
        self.plan = NormPlan(
            [*measured.values(), *others.values()],
            [*measured, *others],
            parts=[*self._of_parameters, *[len(self.groups)] * len(others)],
            allow_sparse=True,
        )

    def forget_window(self) -> None:
        """Drop the pieces seen since the last window ended."""
        self._sums.pack(self._take_problems())
        if isinstance(self._tap, DDPBucketTap):
            self._tap.take()

    def row(
        self, packed: Tensor, sq_norm_big: Tensor, witness_final: Tensor, witness_sizes: Mapping[int, int]
    ) -> WindowRow:
        """A window's vectors, all on the CPU and summed over ranks, by name; see `WindowSums.row`."""
        return self._sums.row(packed, sq_norm_big, witness_final, witness_sizes)

    def took(self, row: WindowRow, *, is_sound: bool) -> None:
        """A window's row has been judged: by it, "auto" chooses the tap."""
        is_fit = is_sound and row.n_pieces == self._wrapper.n_ranks
        self._one_piece_windows = self._one_piece_windows + 1 if is_fit else 0
        self._buckets_fail |= any(p.kind in _BUCKETS_FAIL for p in row.problems)

    # Taps.

    def change_tap_if_due(self) -> str:
        """With "auto", once every rank has had one piece a window for a while: read DDP's buckets from now on.

        They tell as much as leaf hooks then, for less. Should the loop come to reduce several times a window, leaf
        hooks read again.

        Returns:
            Why the tap has changed, in words; empty when it has not.
        """
        if self._is_auto and self._buckets_fail and isinstance(self._tap, DDPBucketTap):
            self._change_tap(self._leaf_tap)
            return "several reductions a window: from now on read by leaf hooks"
        if not self._may_tap_buckets or self._one_piece_windows < _WINDOWS_BEFORE_BUCKETS:
            return ""
        self._may_tap_buckets = False
        ddp = self._wrapper.ddp
        assert ddp is not None
        if comm_hook_name(ddp) is not None or is_tapped(ddp):  # since attach
            return ""
        try:
            self._change_tap(lambda: self._bucket_tap(None, None))
        except (RuntimeError, ValueError) as error:  # a hook of torch's own, say, which cannot be asked for
            return f"leaf hooks stay, as DDP takes no communication hook: {error}"
        return "one piece a rank: from now on read in DDP's buckets, by its communication hook"

    def _change_tap(self, make: Callable[[], LeafHookTap | DDPBucketTap]) -> None:
        new = make()
        self._tap.close()
        self._seconds += self._tap.seconds
        self._tap = new

    def _leaf_tap(self) -> LeafHookTap:
        return LeafHookTap(
            self.parameters,
            self._witness,
            self._metric,
            on_backward_end=self._on_backward,
            n_collectives=lambda: n_collectives(self._wrapper.group),
            staging_bytes=self._staging_bytes,
        )

    def _bucket_tap(self, comm_hook: CommHook | None, comm_state: object) -> DDPBucketTap:
        if self._wrapper.ddp is None:
            raise ValueError("tap='comm_hook' reads DDP's buckets, got a plain model: use tap='leaf' or 'auto'")
        if not self._wrapper.ddp_holds_all:
            raise ValueError(
                "tap='comm_hook' reads the buckets of one DDP module, got a model with trainable parameters outside: "
                "use tap='leaf' or 'auto'"
            )
        return DDPBucketTap(
            self._wrapper.ddp,
            self.parameters,
            self._witness,
            self._metric,
            comm_hook=comm_hook,
            comm_state=comm_state,
            on_backward_end=self._on_backward,
        )

    def close(self) -> None:
        """Remove every hook."""
        self._tap.close()
