"""Where DDP hides the gradients: its buckets, seen by a communication hook before and after the all-reduce.

Before it, a bucket holds what this rank has accumulated; after it, what the optimizer gets. So one hook per bucket
gives both norms that a noise scale needs, each rank's whole window being one piece, with no hook per parameter. DDP
takes a single communication hook and never lets it go: a user's own is wrapped, and after `close()` the hook only
passes on.
"""

# No `from __future__ import annotations`: DDP checks a hook's annotations, as objects.

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from sonde.measure.gradients import GradientSummary
from sonde.measure.metric import Metric
from sonde.measure.microbatch import Problem
from sonde.measure.norms import accumulation_dtype
from sonde.measure.witness import Witness

CommHook = Callable[[object, GradBucket], "torch.futures.Future[Tensor]"]


def comm_hook_name(model: DistributedDataParallel | None) -> str | None:
    """The name of the communication hook registered with DDP, or None."""
    hooks = getattr(model, "_comm_hooks", None) or []
    return hook_label(hooks[0][0]) if hooks else None


def hook_label(hook: object) -> str:
    """What to call a communication hook."""
    return getattr(hook, "__name__", type(hook).__name__)


class BucketTap:
    """Reads every bucket before and after DDP's all-reduce.

    Args:
        model: the wrapped model; must have no communication hook yet.
        parameters: its trainable parameters, in the order in which results are given.
        witness: elements to copy besides the norms.
        metric: how gradients are squared.
        comm_hook: the user's own hook, which then does the reduction; None for DDP's average.
        comm_state: the state that the user's hook is called with.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        parameters: Sequence[Tensor],
        witness: Witness,
        metric: Metric,
        *,
        comm_hook: CommHook | None = None,
        comm_state: object = None,
    ) -> None:
        if (taken := comm_hook_name(model)) is not None:
            raise ValueError(
                f"tap='comm_hook' needs DDP's only communication hook, and {taken!r} is registered already: "
                "pass it to attach(comm_hook=..., comm_state=...) in place of registering it, or use tap='leaf'"
            )
        self.name = "DDP's communication hook"
        self.seconds = 0.0
        self._witness, self._metric = witness, metric
        self._index = {id(p): i for i, p in enumerate(parameters)}
        self._device = parameters[0].device
        self._dtype = accumulation_dtype(self._device)
        self._size = len(parameters)
        self._closed = False
        self._places: dict[tuple[int, ...], Tensor] = {}
        self._average = _Average(model)
        self._comm_hook, self._comm_state = comm_hook or self._average, comm_state
        self._problems = [0] * len(Problem)
        self._start_window()
        model.register_comm_hook(None, self._hook)

    def _start_window(self) -> None:
        # One entry a bucket: callbacks of different buckets may run at the same time, on streams of their own.
        self._before: dict[int, tuple[list[int], GradientSummary]] = {}
        self._after: dict[int, tuple[list[int], GradientSummary]] = {}

    def take(self) -> tuple[GradientSummary, GradientSummary]:
        """This rank's gradient as one piece, and the reduced gradient, since the last call."""
        both = self._assemble(self._before), self._assemble(self._after)
        self._start_window()
        return both

    def take_problems(self) -> list[int]:
        """Counts per `Problem` since the last call, and forget them."""
        problems, self._problems = self._problems, [0] * len(Problem)
        return problems

    def close(self) -> None:
        """Read no more. DDP cannot remove a communication hook: it stays and passes on."""
        self._closed = True
        self._start_window()

    def _hook(self, _: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        if self._closed:
            return self._comm_hook(self._comm_state, bucket)
        start = time.perf_counter()
        number = bucket.index()
        if number in self._before:
            self._problems[Problem.SEVERAL_REDUCTIONS] += 1
        # Parameters frozen after DDP was made are in its buckets still, and not among those measured.
        measured = [
            (self._index[id(p)], g)
            for p, g in zip(bucket.parameters(), bucket.gradients(), strict=True)
            if id(p) in self._index
        ]
        indices, grads = [i for i, _ in measured], [g for _, g in measured]
        base = bucket.buffer().storage_offset()
        layouts = [(g.shape, g.stride(), g.storage_offset() - base) for g in grads]
        self._before[number] = indices, self._reduce(indices, grads)
        self.seconds += time.perf_counter() - start

        def after(reduced: torch.futures.Future[Tensor]) -> Tensor:
            start = time.perf_counter()
            value = reduced.value()
            buffer = value[0] if isinstance(value, (list, tuple)) else value
            views = [buffer.as_strided(shape, stride, buffer.storage_offset() + at) for shape, stride, at in layouts]
            self._after[number] = indices, self._reduce(indices, views)
            self.seconds += time.perf_counter() - start
            return buffer

        return self._comm_hook(self._comm_state, bucket).then(after)

    def _reduce(self, indices: list[int], grads: list[Tensor]) -> GradientSummary:
        if not indices:
            nothing = torch.zeros(0, dtype=self._dtype, device=self._device)
            return GradientSummary(sq_norms=nothing, witness=nothing)
        read = [
            self._witness.read(i, g, self._dtype) for i, g in zip(indices, grads, strict=True) if i in self._witness
        ]
        return GradientSummary(
            sq_norms=torch.stack(self._metric.sq_norms(indices, grads)).to(self._dtype),
            witness=torch.cat(read) if read else torch.zeros(0, dtype=self._dtype, device=self._device),
        )

    def _assemble(self, buckets: dict[int, tuple[list[int], GradientSummary]]) -> GradientSummary:
        """The buckets' results in the parameters' order, zeros for parameters that no bucket held."""
        order: list[int] = []
        sq_norms: list[Tensor] = []
        witnessed: dict[int, Tensor] = {}
        for indices, piece in buckets.values():
            order += indices
            sq_norms.append(piece.sq_norms)
            mine = [i for i in indices if i in self._witness]
            witnessed |= dict(zip(mine, piece.witness.split([self._witness.sizes[i] for i in mine]), strict=True))
            for made in (piece.sq_norms, piece.witness):
                if made.is_cuda:  # made on the stream of a callback: its memory must outlive the read on this one
                    made.record_stream(torch.cuda.current_stream(made.device))
        missing = self._size - len(order)
        sq_norms.append(torch.zeros(missing, dtype=self._dtype, device=self._device))
        parts = [
            witnessed.get(i, torch.zeros(n, dtype=self._dtype, device=self._device))
            for i, n in self._witness.sizes.items()
        ]
        return GradientSummary(sq_norms=torch.cat(sq_norms)[self._place(tuple(order))], witness=torch.cat(parts))

    def _place(self, order: tuple[int, ...]) -> Tensor:
        """Where each parameter's value stands in a list in this order, parameters not in it last."""
        if order not in self._places:  # DDP changes its buckets once, after the first window
            listed = set(order)
            full = [*order, *(i for i in range(self._size) if i not in listed)]
            place = [0] * self._size
            for at, index in enumerate(full):
                place[index] = at
            self._places[order] = torch.tensor(place, device=self._device)
        return self._places[order]


class _Average:
    """DDP's own reduction as a communication hook, with the same rounding."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self._group = model.process_group
        # DDP multiplies by the rounded reciprocal, which differs from dividing unless the size is a power of two.
        self._share = 1.0 / self._group.size()

    def __call__(self, _: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer().mul_(self._share)
        work = dist.all_reduce(buffer, group=self._group, async_op=True)
        assert work is not None
        averaged: torch.futures.Future[Tensor] = work.get_future().then(_first)
        return averaged


def _first(future: torch.futures.Future[list[Tensor]]) -> Tensor:
    return future.value()[0]
