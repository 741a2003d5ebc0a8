"""The squared norm of every micro-batch's own gradient, read by leaf hooks while backward runs.

`Tensor.register_hook` on a leaf parameter is called with the gradient that this backward adds, local to the rank and
not yet accumulated, with or without DDP and on its synchronising step too. So nothing needs to be stored between
micro-batches or subtracted afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd import Variable

from sonde.batch_size.taps.autograd_internals import accumulates, inside_another_backward
from sonde.batch_size.taps.metric import Metric
from sonde.batch_size.taps.squared_norms import ROW, Part, add_squares
from sonde.batch_size.taps.tap import GradientSummary, Number, Problem
from sonde.batch_size.taps.witness import Witness
from sonde.parallel.devices import to_device

STAGED_NUMEL = 16_384
STAGED_NUMEL_ON_CPU = ROW
"""Gradients up to this many elements wait for shared kernels; larger ones are reduced at once.

Inside a backward every operator costs: a launch, or cold caches. But a gradient that waits is referenced, so autograd
clones it rather than take it over as `.grad`: cheap only if small.
"""


class LeafHookTap:
    """Leaf hooks on parameters that reduce each piece's gradient to its squared norms.

    Args:
        parameters: leaf tensors that require a gradient, each once.
        witness: elements to copy besides the norms.
        metric: how gradients are squared.
        on_backward_end: called when a backward outside `begin_piece` … `end_piece` has ended.
        n_collectives: how many collectives the ranks have issued so far, by which `.grad` may have been reduced.
        staging_bytes: bound of the memory for gradients that wait.
        staged_numel: gradients up to this many elements wait; by default as `STAGED_NUMEL` says.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        witness: Witness,
        metric: Metric,
        *,
        on_backward_end: Callable[[], None],
        n_collectives: Callable[[], int] = lambda: 0,
        staging_bytes: int = 8 * 2**20,
        staged_numel: int | None = None,
    ) -> None:
        self.name = "leaf hooks"
        self.seconds = 0.0
        self._parameters = list(parameters)
        self._witness, self._metric = witness, metric
        self._on_backward_end, self._n_collectives = on_backward_end, n_collectives
        self._staging_bytes = staging_bytes
        self._n_bytes = sum(p.numel() * p.element_size() for p in parameters)
        self._device = parameters[0].device
        self._one_device = all(p.device == self._device for p in parameters)
        default = STAGED_NUMEL_ON_CPU if self._device.type == "cpu" else STAGED_NUMEL
        self._staged_numel = default if staged_numel is None else staged_numel
        self._sums_backwards = False
        self._problems = [0] * len(Problem)
        self._explicit = self._only_explicit = False
        self._reset()
        self._handles = [p.register_hook(self._hook(i)) for i, p in enumerate(self._parameters)]

    def _reset(self) -> None:
        self._parts: list[Part] = []
        self._cross: list[tuple[int, Tensor]] = []
        self._witnessed: dict[int, Tensor] = {}
        # Gradients that wait, by stream: kernels on one stream must not read what another still writes.
        self._staged: dict[torch.cuda.Stream | None, dict[int, Tensor]] = {None: {}}
        self._staged_bytes = 0
        self._made_on: list[tuple[torch.cuda.Stream, list[Tensor]]] = []
        self._fired = bytearray(len(self._parameters))
        self._backwards: set[int] = set()
        self._grad_is_piece = False
        self._n_open = 0

    def begin_piece(self, *, is_first: bool) -> None:
        """From here until `end_piece`, all backwards are one piece; from now on, none outside such a piece counts.

        Args:
            is_first: whether it is the first of its window on this rank, so that `.grad` holds nothing else.
        """
        self._reset()
        self._explicit = self._only_explicit = True
        self._grad_is_piece = is_first

    def end_piece(self) -> GradientSummary:
        """The gradient of the piece that ends here; parameters it did not reach count as 0."""
        self._problems[Problem.EMPTY_PIECE] += not self._backwards
        with torch.no_grad():
            self._flush()
            self._take_over()
            sq_norms = add_squares(len(self._parameters), self._parts, self._device)
            for index, twice_the_product in self._cross:
                sq_norms[index] += to_device(twice_the_product, self._device)
            witness = self._witness.join(self._witnessed, self._device)
        piece = GradientSummary(sq_norms, witness, n_backwards=len(self._backwards))
        self._reset()
        self._explicit = False
        return piece

    def discard_piece(self) -> None:
        """Forget what was seen of the current piece; what its backward has added to `.grad` stays there."""
        self._problems[Problem.INTERRUPTED] += bool(self._backwards)
        self._reset()
        self._explicit = False

    def end_window(self) -> None:
        """Nothing: `end_piece` has given the gradient of every piece."""

    def take_problems(self) -> list[Number]:
        """Counts per `Problem` since the last call; the counts start again from 0."""
        problems, self._problems = self._problems, [0] * len(Problem)
        return [*problems]

    def close(self) -> None:
        """Remove every hook."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._reset()

    def _hook(self, index: int) -> Callable[[Tensor | None], None]:
        # Between two kernels of a backward, caches are cold and every line of Python costs: few are run.
        def hook(grad: Tensor | None) -> None:
            if grad is None:  # what a custom Function may return for a leaf
                return
            start = time.perf_counter()
            if torch._C._current_graph_task_id() in self._backwards or self._opens_backward(index, grad):
                if torch.is_grad_enabled():  # create_graph: what is measured must not be part of the user's graph
                    with torch.no_grad():
                        self._take(index, grad)
                else:
                    self._take(index, grad)
            self.seconds += time.perf_counter() - start

        return hook

    def _opens_backward(self, index: int, grad: Tensor) -> bool:
        """Whether a backward not met before counts; if so, find its piece and arrange to hear of its end."""
        if (self._only_explicit and not self._explicit) or not accumulates(self._parameters[index]):
            return False
        if not self._explicit:
            nested = inside_another_backward(grad)
            if self._backwards and not nested:
                self.discard_piece()  # the backward before this one failed half-way
            if not self._backwards:
                self._problems[Problem.REENTRANT] += nested
                # Private, as there is no public way to learn that a backward has ended; a test fails when it goes.
                Variable._execution_engine.queue_callback(self._close_backward)
        elif self._grad_is_piece:
            if self._n_open == 0:
                self._collectives_before = self._n_collectives()
            self._n_open += 1
            Variable._execution_engine.queue_callback(self._close_backward)
        self._backwards.add(torch._C._current_graph_task_id())
        return True

    def _close_backward(self) -> None:
        if self._explicit:
            self._n_open -= 1
            # What was issued while backward ran may have reduced `.grad`, which then holds more than this piece.
            self._grad_is_piece &= self._n_collectives() == self._collectives_before
        elif self._backwards:
            self._on_backward_end()

    def _take(self, index: int, grad: Tensor) -> None:
        if self._fired[index]:
            self._take_again(index, grad)
            return
        self._fired[index] = 1
        if grad.is_sparse and not grad.is_cpu:
            self._problems[Problem.SPARSE_ON_GPU] += 1
        elif self._sums_backwards or (not grad.is_sparse and grad.numel() <= self._staged_numel):
            self._stage(index, grad)
        else:
            self._keep((index,), (grad,), self._metric.roots(index, grad))

    def _take_again(self, index: int, grad: Tensor) -> None:
        """A second gradient for the same parameter in one piece: |h₁ + h₂|² needs both at hand."""
        staged = self._staged.get(_stream(grad), {})
        if index in staged:
            staged[index] = staged[index] + grad
            return
        so_far = self._parameters[index].grad
        if self._grad_is_piece and so_far is not None and not (grad.is_sparse or so_far.is_sparse):
            # `.grad` is this piece's gradient up to here: |h₁ + h₂|² = |h₁|² + |h₂|² + 2⟨h₁, h₂⟩.
            self._cross.append((index, 2 * self._metric.dot(index, so_far, grad)))
            self._keep((index,), (grad,), self._metric.roots(index, grad))
            return
        self._sums_backwards = self._n_bytes <= self._staging_bytes
        self._problems[Problem.SEVERAL_BACKWARDS if self._sums_backwards else Problem.TOO_LARGE_TO_SUM] += 1

    def _stage(self, index: int, grad: Tensor) -> None:
        self._staged.setdefault(_stream(grad), {})[index] = grad
        self._staged_bytes += grad.numel() * grad.element_size()
        if self._staged_bytes > self._staging_bytes and not self._sums_backwards:
            self._flush()

    def _flush(self) -> None:
        """Reduce what waits, on the stream that it was made on."""
        for stream, staged in self._staged.items():
            if not staged:
                continue
            if stream is None:
                self._reduce(staged)
                continue
            with torch.cuda.stream(stream):
                self._reduce(staged)
            torch.cuda.current_stream(stream.device).wait_stream(stream)
        self._staged = {None: {}}
        self._staged_bytes = 0

    def _reduce(self, grads: dict[int, Tensor]) -> None:
        small = {i: g for i, g in grads.items() if g.numel() <= self._staged_numel and not g.is_sparse}
        if small:
            self._keep(tuple(small), tuple(small.values()), self._metric.norms(tuple(small), tuple(small.values())))
        for index, grad in grads.items():
            if index not in small:
                self._keep((index,), (grad,), self._metric.roots(index, grad))

    def _keep(self, indices: tuple[int, ...], grads: Sequence[Tensor], roots: Tensor) -> None:
        self._parts.append((indices, roots))
        made = [roots]
        for index, grad in zip(indices, grads, strict=True):
            if index in self._witness:
                read = self._witness.read(index, grad)
                self._witnessed[index] = self._witnessed[index] + read if index in self._witnessed else read.clone()
                made.append(self._witnessed[index])
        if (stream := _stream(roots)) is not None:
            self._made_on.append((stream, made))

    def _take_over(self) -> None:
        """Before what hooks have made is read: where it lies, and on which stream it was made."""
        strays = [r.device for _, r in self._parts[:1] if self._one_device and r.device != self._device]
        if strays:
            raise RuntimeError(
                f"the model was on {self._device} when the probe was attached and is on {strays[0]} now: "
                "attach after moving it"
            )
        for stream, made in self._made_on:
            if stream != (here := torch.cuda.current_stream(stream.device)):
                for tensor in made:
                    tensor.record_stream(here)  # its memory must outlive the read on this stream


def _stream(grad: Tensor) -> torch.cuda.Stream | None:
    return torch.cuda.current_stream(grad.device) if grad.is_cuda else None
