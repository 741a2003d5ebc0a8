"""Gradients in DDP's buckets, read by a communication hook before and after the all-reduce.

Before the all-reduce, a bucket holds the gradient that this rank has accumulated. Afterwards, it holds the gradient
that the optimizer gets. So one hook per bucket gives both norms that a noise scale needs, without a hook per parameter.
Each rank's whole window is one piece.

DDP takes a single communication hook and cannot remove it. So one relay is registered per model. The relay reduces as
DDP or the user's own hook does, and lets a tap listen while a tap is attached.
"""

# No `from __future__ import annotations`: DDP compares a hook's annotations with the types themselves.

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # documented, but not in its __all__
from torch.nn.parallel import DistributedDataParallel

from sonde.batch_size.hook_failures import count_failure
from sonde.batch_size.taps.autograd_internals import accumulates, in_backward, inside_another_backward
from sonde.batch_size.taps.left_over import LeftOvers
from sonde.batch_size.taps.metric import GradientTerms, Metrics
from sonde.batch_size.taps.squared_norms import Part
from sonde.batch_size.taps.switched_hooks import SwitchedHooks
from sonde.batch_size.taps.tap import GradientSummary, Number, Problem, RankGradient
from sonde.batch_size.taps.witness import Witness
from sonde.batch_size.window_clock import MEASURING, OwnTime
from sonde.parallel.devices import is_capturing, keep_for_present_stream

CommHook = Callable[[object, GradBucket], "torch.futures.Future[Tensor]"]
AfterReduction = Callable[[Tensor], None]
"""Called with a bucket's reduced buffer."""


def comm_hook_name(model: DistributedDataParallel | None) -> str | None:
    """The name of the user's communication hook, registered with DDP or wrapped by a tap; None without one."""
    for hook, state in getattr(model, "_comm_hooks", None) or []:
        if not isinstance(state, _Relay):
            return hook_label(hook)
        if state.wraps_users_hook:
            return hook_label(state.comm_hook)
    return None


def is_tapped(model: DistributedDataParallel) -> bool:
    """Whether a tap reads this model's buckets now."""
    return any(isinstance(state, _Relay) and state.listener is not None for _, state in model._comm_hooks)


def averages_alike(model: DistributedDataParallel) -> bool:
    """Whether a communication hook can average a bucket with the rounding of DDP's own average.

    With gradient_as_bucket_view, DDP divides a gradient that already lies in its bucket by the number of ranks, and
    multiplies any other by the reciprocal. The hook comes after DDP has moved all gradients into the bucket, and cannot
    see where each of them lay. The two round alike only for powers of 2.
    """
    return not model.gradient_as_bucket_view or _is_power_of_two(model.process_group.size())


def _is_power_of_two(n: int) -> bool:
    """Whether n, a positive number of ranks, is 1, 2, 4, 8, …"""
    return n & (n - 1) == 0


def hook_label(hook: object) -> str:
    """The name of a communication hook, for people."""
    return getattr(hook, "__name__", type(hook).__name__)


@dataclass(frozen=True)
class _BucketSummary:
    """The part of one bucket that is kept: its parameters' parts in each metric, and the witness's elements."""

    parts: list[list[Part]]
    witness: dict[int, Tensor]


class DDPBucketTap:
    """Reads every bucket before and after DDP's all-reduce.

    Args:
        model: the wrapped model; must have no communication hook yet, except the relay of an earlier probe.
        parameters: its trainable parameters, in the order in which results are given.
        witness: elements to copy besides the norms.
        metrics: in which gradients are measured.
        comm_hook: the user's own hook, which does the reduction; None for DDP's average.
        comm_state: the state that the user's hook is called with.
        on_backward_end: called when a backward outside `begin_piece` … `end_piece` has ended, and is a piece.

    Raises:
        ValueError: when the user's own communication hook is registered, another tap reads the buckets, or a hook
            cannot average as DDP does.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        parameters: Sequence[Tensor],
        witness: Witness,
        metrics: Metrics,
        *,
        comm_hook: CommHook | None = None,
        comm_state: object = None,
        on_backward_end: Callable[[], None],
        own: OwnTime,
    ) -> None:
        if is_tapped(model):
            raise ValueError("another probe reads the buckets of this DDP model already: close it first")
        if comm_hook is None and comm_hook_name(model) is None and not averages_alike(model):
            raise ValueError(
                "tap='comm_hook' cannot round as DDP does with gradient_as_bucket_view=True on "
                f"{model.process_group.size()} ranks, so the weights would differ in their last bits: use tap='leaf', "
                "gradient_as_bucket_view=False, or 2, 4, 8, … ranks"
            )
        self._relay = _relay_of(model)
        if comm_hook is not None:
            self._relay.wrap(comm_hook, comm_state)
        self.name = "DDP's communication hook"
        self._spent = own.spent
        self._witness, self._metrics = witness, metrics
        self._index = {id(p): i for i, p in enumerate(parameters)}
        self._device = parameters[0].device
        self._size = len(parameters)
        self._problems = [0] * len(Problem)
        self._on_backward_end = on_backward_end
        self.only_declared = False
        self._explicit = self._has_backward = False
        self._backward: int | None = None
        """Autograd's number of the running backward, if it is outside declared pieces."""
        self._left_overs = LeftOvers(parameters, witness)
        self._start_window()
        watched = self._left_overs.watched
        self._hooks = SwitchedHooks(watched.values(), map(self._hook, watched))
        self._relay.listener, self._relay.is_paused = self._listen, False

    def begin_piece(self, *, is_first: bool) -> None:
        """From here until `end_piece` all backwards are one piece. Later backwards must not run outside pieces."""
        self._explicit = self.only_declared = True
        self._has_backward = False

    def end_piece(self) -> None:
        """Note whether a backward ran. The buckets show only backwards that DDP reduced."""
        self._problems[Problem.EMPTY_PIECE] += not self._has_backward
        self._explicit = self._has_backward = False

    def begin_pieces(self, n: int) -> None:
        """Not for pipelines.

        Raises:
            RuntimeError: always, since DDP's buckets do not show single pieces.
        """
        raise RuntimeError("tap='comm_hook' cannot read the pieces of a pipeline schedule: use tap='leaf'")

    def end_pieces(self) -> list[GradientSummary]:
        """Not for pipelines; see `begin_pieces`."""
        raise RuntimeError("tap='comm_hook' cannot read the pieces of a pipeline schedule: use tap='leaf'")

    def discard_piece(self) -> None:
        """Count the interruption. The buckets keep the interrupted piece's part."""
        self._problems[Problem.INTERRUPTED_IN_BUCKETS] += self._has_backward
        self._explicit = self._has_backward = False

    def leave_out_backward(self) -> None:
        """Count the backward outside pieces that has just ended. The buckets keep its part."""
        self._problems[Problem.OUTSIDE_PIECES] += 1
        self._explicit = self._has_backward = False

    def _hook(self, index: int) -> Callable[[Tensor | None], None]:
        """A hook for one of a few parameters: notices backwards, and gradients that were left over in `.grad`."""
        parameter, left_overs = self._left_overs.watched[index], self._left_overs

        def hook(grad: Tensor | None) -> None:
            try:
                if grad is None or not accumulates(parameter) or self._runs_in_graph(grad):
                    return
                # At the window's first backward, `.grad` must be empty or 0: DDP reduces all that `.grad` holds.
                if index in left_overs.unseen:
                    left_overs.look(index)
                self._saw_backward(grad)
            except Exception as error:  # a bug, or no memory left: the user's backward goes on
                count_failure(self._problems, error)

        return hook

    def _runs_in_graph(self, grad: Tensor) -> bool:
        """Whether the device records this backward into a graph, where nothing may be launched."""
        is_recorded = is_capturing(grad.device)
        self._problems[Problem.IN_CUDA_GRAPH] += is_recorded
        return is_recorded

    def _saw_backward(self, grad: Tensor) -> None:
        self._has_backward = True
        # With declared pieces, every backward must run inside a piece.
        if self.only_declared:
            self._problems[Problem.OUTSIDE_PIECES] += not self._explicit
            return
        # Without declared pieces, each backward is a piece. Autograd's number of the backward shows a new one. There is
        # no number where DDP reduces after the backward itself has ended.
        backward = torch._C._current_graph_task_id()
        if backward == self._backward or not in_backward():
            return
        if inside_another_backward(grad):
            self._problems[Problem.REENTRANT] += 1
            return
        if self._backward is not None:  # the previous backward failed half-way: its end was never reported
            self._problems[Problem.INTERRUPTED_IN_BUCKETS] += 1
        self._backward = backward
        Variable._execution_engine.queue_callback(self._close_backward)

    def _close_backward(self) -> None:
        self._backward = None
        try:
            self._on_backward_end()
        except Exception as error:
            count_failure(self._problems, error)

    def _start_window(self) -> None:
        self._left_overs.new_window()
        # One entry per bucket: callbacks of different buckets may run at the same time, each on its own stream.
        self._before: dict[int, _BucketSummary] = {}
        self._after: dict[int, _BucketSummary] = {}

    def end_window(self) -> RankGradient:
        """This rank's gradient as one piece, and the reduced gradient, since the last call."""
        gradient = RankGradient(local=self._assemble(self._before), reduced=self._assemble(self._after))
        self._start_window()
        return gradient

    def take_problems(self) -> list[Number]:
        """Counts per `Problem` since the last call, some of them on the device; the counts start again from 0."""
        problems: list[Number] = [*self._problems]
        self._problems = [0] * len(Problem)
        problems[Problem.LEFT_OVER] = self._left_overs.take()
        return problems

    def pause(self) -> None:
        """Let the relay only reduce until `resume`; between windows."""
        self._hooks.lift()
        self._relay.is_paused = True

    def resume(self) -> None:
        """Read again."""
        self._hooks.put_back()
        self._relay.is_paused = False

    def close(self) -> None:
        """Read no more. DDP cannot remove a communication hook: the relay stays and only reduces."""
        self._hooks.close()
        if self._relay.listener == self._listen:
            self._relay.listener = None
        self._start_window()

    def _listen(self, bucket: GradBucket) -> AfterReduction:
        """Read a bucket before its reduction, which goes on whatever happens here.

        Returns:
            A function to call with the reduced buffer.
        """
        try:
            read_reduced = self._read(bucket)
        except Exception as error:
            count_failure(self._problems, error)
            return lambda _: None

        def read_or_note(buffer: Tensor) -> None:
            try:
                read_reduced(buffer)
            except Exception as error:
                count_failure(self._problems, error)

        return read_or_note

    def _read(self, bucket: GradBucket) -> AfterReduction:
        start = time.perf_counter()
        if self._runs_in_graph(bucket.buffer()):
            return lambda _: None
        if bucket.buffer().is_sparse:
            self._problems[Problem.SPARSE_IN_BUCKETS] += 1
            return lambda _: None
        self._saw_backward(bucket.buffer())  # the hooks miss a backward that reaches no watched parameter
        number = bucket.index()
        if number in self._before:
            self._problems[Problem.SEVERAL_REDUCTIONS] += 1
        # Parameters that were frozen after DDP was made are still in its buckets, but are not measured.
        measured = [
            (self._index[id(p)], g)
            for p, g in zip(bucket.parameters(), bucket.gradients(), strict=True)
            if id(p) in self._index
        ]
        indices, grads = [i for i, _ in measured], [g for _, g in measured]
        # The reduction may return another buffer of the same layout: remember where each gradient lies in it.
        base = bucket.buffer().storage_offset()
        layouts = [(g.shape, g.stride(), g.storage_offset() - base) for g in grads]
        # The local gradients must be read now: the reduction writes to this buffer.
        self._before[number] = self._reduce(indices, grads)
        self._spent[MEASURING] += time.perf_counter() - start

        def read_reduced(buffer: Tensor) -> None:
            start = time.perf_counter()
            views = [buffer.as_strided(shape, stride, buffer.storage_offset() + at) for shape, stride, at in layouts]
            self._after[number] = self._reduce(indices, views)
            self._spent[MEASURING] += time.perf_counter() - start

        return read_reduced

    def _reduce(self, indices: list[int], grads: list[Tensor]) -> _BucketSummary:
        return _BucketSummary(
            parts=[metric.parts(indices, grads) for metric in self._metrics.all],
            witness={
                i: self._witness.read(i, g).clone() for i, g in zip(indices, grads, strict=True) if i in self._witness
            },
        )

    def _assemble(self, buckets: dict[int, _BucketSummary]) -> GradientSummary:
        """The buckets' results in the parameters' order, zeros for parameters that no bucket held."""
        terms = GradientTerms(self._metrics, self._size, self._device)
        witness: dict[int, Tensor] = {}
        for bucket in buckets.values():
            witness |= bucket.witness
            for result in (*terms.add(bucket.parts), *bucket.witness.values()):
                keep_for_present_stream(result)  # on a GPU, a callback's results belong to the stream it ran on
        return GradientSummary(terms.sum(), self._witness.join(witness, self._device))


class _Relay:
    """The state of DDP's one communication hook: reduces each bucket, and lets a tap read it before and after.

    A copy of a model, by pickle or deepcopy, gets a new reducer without communication hooks. A copied relay is
    therefore `stale`, and is replaced by a new one.
    """

    def __init__(self, model: DistributedDataParallel | None = None) -> None:
        self.stale = model is None
        self.comm_hook: CommHook = _Average(model) if model is not None else _refuse
        self.comm_state: object = None
        self.wraps_users_hook = False
        self.listener: Callable[[GradBucket], AfterReduction] | None = None
        self.is_paused = False

    def wrap(self, comm_hook: CommHook, comm_state: object) -> None:
        """Reduce by the user's hook from now on."""
        self.comm_hook, self.comm_state, self.wraps_users_hook = comm_hook, comm_state, True

    def __reduce__(self) -> "tuple[type[_Relay], tuple[()]]":
        return _Relay, ()


def _relay_of(model: DistributedDataParallel) -> _Relay:
    """The relay of this model; registered now if the model has none.

    Raises:
        ValueError: when the user's own hook is registered.
    """
    hooks = model._comm_hooks
    hooks[:] = [(hook, state) for hook, state in hooks if not (isinstance(state, _Relay) and state.stale)]
    for hook, state in hooks:
        if not isinstance(state, _Relay):
            raise ValueError(
                f"tap='comm_hook' needs DDP's only communication hook, and {hook_label(hook)!r} is registered already: "
                "pass it to attach(comm_hook=..., comm_state=...) instead of registering it, or use tap='leaf'"
            )
        return state
    relay = _Relay(model)
    model.register_comm_hook(relay, _relay_bucket)
    return relay


def _relay_bucket(relay: _Relay, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """The function that is registered with DDP; at module level, so that a model can be pickled whole."""
    if relay.listener is None or relay.is_paused:
        return relay.comm_hook(relay.comm_state, bucket)
    read_reduced = relay.listener(bucket)

    def pass_on(reduced: torch.futures.Future[Tensor]) -> Tensor:
        value = reduced.value()
        buffer: Tensor = value[0] if isinstance(value, (list, tuple)) else value
        read_reduced(buffer)
        return buffer

    return relay.comm_hook(relay.comm_state, bucket).then(pass_on)


def _refuse(_: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    raise AssertionError("a stale relay is registered with no reducer")


class _Average:
    """DDP's own reduction as a communication hook, with the same rounding wherever `averages_alike` holds."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self._group = model.process_group

    def __call__(self, _: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        buffer, n_ranks = bucket.buffer(), self._group.size()
        # DDP multiplies dense gradients by the rounded reciprocal, and divides sparse ones. The two round differently
        # unless the number of ranks is a power of 2.
        if buffer.is_sparse:
            buffer.div_(n_ranks)
        else:
            buffer.mul_(1.0 / n_ranks)
        work = dist.all_reduce(buffer, group=self._group, async_op=True)
        assert work is not None
        averaged: torch.futures.Future[Tensor] = work.get_future().then(_first)
        return averaged


def _first(future: torch.futures.Future[list[Tensor]]) -> Tensor:
    return future.value()[0]
