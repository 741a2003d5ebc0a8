"""Gradients in DDP's buckets, read by a communication hook before the all-reduce.

Before the all-reduce, a bucket holds the gradient that this rank has accumulated. So one hook per bucket gives the
rank's whole window as one piece, without a hook per parameter.

DDP takes a single communication hook and cannot remove it. So one relay is registered per model. The relay reduces as
DDP or the user's own hook does, and lets a tap listen while a tap is attached.
"""

# No `from __future__ import annotations`: DDP compares a hook's annotations with the types themselves.

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # documented, but not in its __all__
from torch.nn.parallel import DistributedDataParallel

from sonde.batch_size.hooks import backward_number, in_backward
from sonde.batch_size.taps.metric import GradientMetric, GradientTerms
from sonde.batch_size.taps.problems import Problem
from sonde.batch_size.taps.tap import GradientSummary, Tap
from sonde.batch_size.taps.witness import Witness
from sonde.batch_size.window_clock import MEASURING, OwnTime
from sonde.parallel.devices import keep_for_present_stream
from sonde.parallel.wrappers import Wrapper

CommHook = Callable[[object, GradBucket], "torch.futures.Future[Tensor]"]


def comm_hook_name(model: DistributedDataParallel | None) -> str | None:
    """The name of the user's communication hook, registered with DDP or wrapped by a tap; None without one."""
    for hook, state in getattr(model, "_comm_hooks", None) or []:
        if not isinstance(state, _Relay):
            return hook_label(hook)
        if not isinstance(state.comm_hook, _Average | None):
            return hook_label(state.comm_hook)
    return None


def averages_alike(model: DistributedDataParallel) -> bool:
    """Whether a communication hook can average a bucket with the rounding of DDP's own average.

    With gradient_as_bucket_view, DDP divides a gradient that already lies in its bucket by the number of ranks, and
    multiplies any other by the reciprocal. The hook comes after DDP has moved all gradients into the bucket, and cannot
    see where each of them lay. The two round alike only for powers of 2.
    """
    return not model.gradient_as_bucket_view or model.process_group.size().bit_count() == 1


def hook_label(hook: object) -> str:
    """The name of a communication hook, for people."""
    return getattr(hook, "__name__", type(hook).__name__)


class DDPBucketTap(Tap):
    """Reads every bucket before DDP's all-reduce. Hooks on a few parameters only notice backwards.

    Args:
        wrapper: the model, in one DDP module without a communication hook, except the relay of an earlier probe.
        witness: elements to copy besides the norms.
        metrics: in which gradients are measured.
        comm_hook: the user's own hook, which does the reduction; None for DDP's average.
        comm_state: the state that the user's hook is called with.
        on_backward_end: called when a backward outside `begin_piece` … `end_piece` has ended, and is a piece.
        own: the probe's time.

    Raises:
        ValueError: when the buckets of one DDP module do not hold the whole gradient, the user's own communication
            hook is registered, another tap reads the buckets, or a hook cannot average as DDP does.
    """

    name = "DDP's communication hook"

    def __init__(
        self,
        wrapper: Wrapper,
        witness: Witness,
        metrics: Sequence[GradientMetric],
        *,
        comm_hook: CommHook | None = None,
        comm_state: object = None,
        on_backward_end: Callable[[], None],
        own: OwnTime,
    ) -> None:
        model, parameters = _ddp_of(wrapper), wrapper.leaves
        if any(isinstance(state, _Relay) and state.listener is not None for _, state in model._comm_hooks):
            raise ValueError("another probe reads the buckets of this DDP model already: close it first")
        if comm_hook is None and comm_hook_name(model) is None and not averages_alike(model):
            raise ValueError(
                "tap='comm_hook' cannot round as DDP does with gradient_as_bucket_view=True on "
                f"{model.process_group.size()} ranks, so the weights would differ in their last bits: use tap='leaf', "
                "gradient_as_bucket_view=False, or 2, 4, 8, … ranks"
            )
        self._relay = _relay_of(model)
        if comm_hook is not None:
            self._relay.comm_hook, self._relay.comm_state = comm_hook, comm_state
        # Buckets keep the part of every backward, whether it was in a piece or not.
        super().__init__(
            parameters,
            witness.fixed,
            parameters,
            witness,
            on_backward_end=on_backward_end,
            own=own,
            stray=Problem.OUTSIDE_PIECES,
        )
        self.take = lambda index, grad: None  # the buckets are read
        self._metrics, self._index = metrics, {id(p): i for i, p in enumerate(parameters)}
        self._forget_window()
        self._is_paused = False
        self._relay.listener = self._listen

    def begin_piece(self, n: int | None = None) -> None:
        """From here until `end_piece` all backwards are one piece. Later backwards must not run outside pieces.

        Raises:
            RuntimeError: for the pieces of a pipeline's schedule, which DDP's buckets do not show.
        """
        if n is not None:
            raise RuntimeError("tap='comm_hook' cannot read the pieces of a pipeline schedule: use tap='leaf'")
        super().begin_piece()

    def _forget_window(self) -> None:
        self._terms = GradientTerms(self._metrics, len(self.leaves), self.leaves[0].device)
        self._witnessed: dict[int, Tensor] = {}
        self._results: list[Tensor] = []
        self._buckets: set[int] = set()

    def end_window(self) -> GradientSummary:
        """This rank's gradient since the last call as one piece, 0 for parameters that no bucket held."""
        super().end_window()
        for result in self._results:
            keep_for_present_stream(result)  # on a GPU, they belong to the stream that the communication hook ran on
        witness = self.witness.join(self._witnessed, self.leaves[0].device)
        summary = GradientSummary(self._terms.sum(), witness)
        self._forget_window()
        return summary

    def pause(self) -> None:
        """Let the relay only reduce until `resume`; between windows."""
        super().pause()
        self._is_paused = True

    def resume(self) -> None:
        """Read again."""
        super().resume()
        self._is_paused = False

    def close(self) -> None:
        """Read no more. DDP cannot remove a communication hook: the relay stays and only reduces."""
        super().close()
        if self._relay.listener == self._listen:
            self._relay.listener = None
        self._forget_window()

    def _listen(self, bucket: GradBucket) -> None:
        """Read a bucket before its reduction, which goes on whatever happens here."""
        if self._is_paused:
            return
        start = time.perf_counter()
        try:
            self._read(bucket)
        except Exception as error:
            self.failed(error)
        self.spent[MEASURING] += time.perf_counter() - start

    def _read(self, bucket: GradBucket) -> None:
        if self.runs_in_graph(bucket.buffer()):
            return
        if bucket.buffer().is_sparse:
            self.problems[Problem.SPARSE_IN_BUCKETS] += 1
            return
        # The hooks miss a backward that reaches no watched parameter. DDP may reduce after the backward has ended.
        if in_backward() and backward_number() not in self.backwards:
            self.counts(bucket.buffer())
        self.problems[Problem.SEVERAL_REDUCTIONS] += bucket.index() in self._buckets
        # Parameters that were frozen after DDP was made are still in its buckets, but are not measured.
        grads = {
            self._index[id(p)]: g
            for p, g in zip(bucket.parameters(), bucket.gradients(), strict=True)
            if id(p) in self._index
        }
        # The reduction writes to this buffer, so elements are copied.
        self._buckets.add(bucket.index())
        elements = {i: self.witness.read(i, g).clone() for i, g in grads.items() if i in self.witness.indices}
        self._witnessed |= elements
        self._results += [*self._terms.take(tuple(grads), tuple(grads.values())), *elements.values()]


def _ddp_of(wrapper: Wrapper) -> DistributedDataParallel:
    """The DDP module whose buckets hold each rank's whole gradient.

    Raises:
        ValueError: when there is none.
    """
    if wrapper.ddp is None or wrapper.mesh is not None:
        raise ValueError(f"tap='comm_hook' reads DDP's buckets, got a model of kind {wrapper.name}: use tap='leaf'")
    if not wrapper.ddp_holds_all:
        raise ValueError(
            "tap='comm_hook' reads the buckets of one DDP module, got a model with trainable parameters outside: "
            "use tap='leaf'"
        )
    if wrapper.n_ranks < 2:
        raise ValueError(
            "tap='comm_hook' takes each rank's whole window for one piece, got 1 rank, whose one piece shows no "
            "noise: use tap='leaf', which reads each micro-batch, or train on 2 or more ranks"
        )
    return wrapper.ddp


class _Relay:
    """The state of DDP's one communication hook: reduces each bucket, and lets a tap read it before.

    A copy of a model, by pickle or deepcopy, gets a new reducer without communication hooks. A copied relay therefore
    has no hook that reduces, and is replaced by a new one.
    """

    def __init__(self, comm_hook: CommHook | None = None) -> None:
        self.comm_hook = comm_hook
        self.comm_state: object = None
        self.listener: Callable[[GradBucket], None] | None = None

    def __reduce__(self) -> "tuple[type[_Relay], tuple[()]]":
        return _Relay, ()


def _relay_of(model: DistributedDataParallel) -> _Relay:
    """The relay of this model; registered now if the model has none.

    Raises:
        ValueError: when the user's own hook is registered.
    """
    hooks = model._comm_hooks
    hooks[:] = [(hook, state) for hook, state in hooks if not (isinstance(state, _Relay) and state.comm_hook is None)]
    for hook, state in hooks:
        if not isinstance(state, _Relay):
            raise ValueError(
                f"tap='comm_hook' needs DDP's only communication hook, and {hook_label(hook)!r} is registered already: "
                "pass it to attach(comm_hook=..., comm_state=...) instead of registering it, or use tap='leaf'"
            )
        return state
    relay = _Relay(_Average(model))
    model.register_comm_hook(relay, _relay_bucket)
    return relay


def _relay_bucket(relay: _Relay, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """The function that is registered with DDP; at module level, so that a model can be pickled whole."""
    if relay.listener is not None:
        relay.listener(bucket)
    assert relay.comm_hook is not None
    return relay.comm_hook(relay.comm_state, bucket)


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
