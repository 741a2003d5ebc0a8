"""The squared norm of every micro-batch's own gradient, read by leaf hooks while backward runs.

A hook that `Tensor.register_hook` puts on a leaf parameter is called with the gradient that this backward adds: local
to the rank and not yet accumulated, with or without DDP, and on DDP's synchronising step too. So no gradient is stored
between micro-batches or subtracted afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd import Variable

from sonde.batch_size.taps.autograd_internals import accumulates, inside_another_backward
from sonde.batch_size.taps.cut_gradients import CutGradients
from sonde.batch_size.taps.left_over import LeftOvers
from sonde.batch_size.taps.metric import GradientMetric
from sonde.batch_size.taps.squared_norms import ROW, Part, add_squares
from sonde.batch_size.taps.switched_hooks import SwitchedHooks
from sonde.batch_size.taps.tap import GradientSummary, Number, Problem
from sonde.batch_size.taps.witness import Witness
from sonde.parallel.devices import to_device

STAGED_NUMEL = 16_384
STAGED_NUMEL_ON_CPU = ROW
"""Gradients up to this many elements wait for shared kernels; larger ones are reduced at once.

Inside a backward, every operator costs a kernel launch or runs on cold caches, so small gradients share operators. A
gradient that waits is still referenced, so autograd clones it instead of taking it over as `.grad`. Only the clone of a
small gradient is cheap.
"""


class LeafHookTap:
    """Leaf hooks on parameters that reduce each piece's gradient to its squared norms.

    Args:
        leaves: leaf tensors that require a gradient, each once.
        parameters: whose `.grad` the optimizer reads, [leaves]; by default the leaves. Under FSDP2, leaves are gathered
            parameters, and these are the sharded ones.
        cut: what this rank counts of a gradient that it shares with other ranks; None if every rank has its own pieces.
        witness: elements to copy besides the norms.
        metric: how gradients are squared.
        on_backward_end: called when a backward outside `begin_piece` … `end_piece` has ended.
        n_collectives: counts the collectives that the ranks have issued so far; any of them may have reduced `.grad`.
        staging_bytes: bound of the memory for gradients that wait.
        staged_numel: gradients up to this many elements wait; by default as `STAGED_NUMEL` says.
    """

    def __init__(
        self,
        leaves: Sequence[Tensor],
        witness: Witness,
        metric: GradientMetric,
        *,
        parameters: Sequence[Tensor] | None = None,
        cut: CutGradients | None = None,
        on_backward_end: Callable[[], None],
        n_collectives: Callable[[], int] = lambda: 0,
        staging_bytes: int = 8 * 2**20,
        staged_numel: int | None = None,
    ) -> None:
        self.name = "leaf hooks"
        self.seconds = 0.0
        self._leaves, self._cut = list(leaves), cut
        self._witness, self._metric = witness, metric
        self._on_backward_end, self._n_collectives = on_backward_end, n_collectives
        self._staging_bytes = staging_bytes
        self._n_bytes = sum(leaf.numel() * leaf.element_size() for leaf in leaves)
        self._device = leaves[0].device
        self._one_device = all(leaf.device == self._device for leaf in leaves)
        default = STAGED_NUMEL_ON_CPU if self._device.type == "cpu" else STAGED_NUMEL
        self._staged_numel = default if staged_numel is None else staged_numel
        self._sums_backwards = False
        self._problems = [0] * len(Problem)
        self._explicit = self._only_explicit = False
        self._left_overs = LeftOvers(self._leaves if parameters is None else parameters, witness)
        self._reset()
        self._hooks = SwitchedHooks(self._leaves, map(self._hook, range(len(self._leaves))))

    def _reset(self) -> None:
        self._parts: list[Part] = []
        self._cross: list[tuple[int, Tensor]] = []
        self._witnessed: dict[int, Tensor] = {}
        # Gradients that wait, by stream: a kernel on one stream must not read a tensor that another still writes.
        self._staged: dict[torch.cuda.Stream | None, dict[int, Tensor]] = {None: {}}
        self._staged_bytes = 0
        self._results: list[tuple[torch.cuda.Stream, list[Tensor]]] = []
        self._fired = bytearray(len(self._leaves))
        self._backwards: set[int] = set()
        self._grad_is_piece = False
        self._n_open = 0
        if self._cut is not None:
            self._cut.forget()

    def begin_piece(self, *, is_first: bool) -> None:
        """From here until `end_piece` all backwards are one piece. Later backwards outside pieces never count.

        Args:
            is_first: whether the piece is the first of its window on this rank, so that `.grad` holds nothing else.
        """
        self._reset()
        self._explicit = self._only_explicit = True
        self._grad_is_piece = is_first

    def end_piece(self) -> GradientSummary:
        """The gradient of the piece that ends here; parameters that it did not reach count as 0."""
        self._problems[Problem.EMPTY_PIECE] += not self._backwards
        with torch.no_grad():
            # Gradients that still wait come first: they add to the parts and to the witness.
            if self._cut is not None:
                for index, part in self._cut.sum_partial().items():
                    self._keep((index,), (part,), self._metric.roots(index, part))
            self._flush()
            self._adopt_results()
            sq_norms = add_squares(len(self._leaves), self._parts, self._device)
            # Where a piece had several backwards, the parts hold their squares, and these are the cross terms.
            for index, twice_the_product in self._cross:
                sq_norms[index] += to_device(twice_the_product, self._device)
            witness = self._witness.join(self._witnessed, self._device)
        piece = GradientSummary(sq_norms, witness, n_backwards=len(self._backwards))
        self._reset()
        self._explicit = False
        return piece

    def discard_piece(self) -> None:
        """Forget the present piece. Whatever its backward has added to `.grad` stays there."""
        self._problems[Problem.INTERRUPTED] += bool(self._backwards)
        self._reset()
        self._explicit = False

    def end_window(self) -> None:
        """Return nothing: `end_piece` has given the gradient of every piece."""
        self._left_overs.new_window()

    def take_problems(self) -> list[Number]:
        """Counts per `Problem` since the last call, some of them on the device; the counts start again from 0."""
        problems: list[Number] = [*self._problems]
        self._problems = [0] * len(Problem)
        problems[Problem.NOT_ZEROED] = self._left_overs.take()
        return problems

    def pause(self) -> None:
        """Take the hooks off until `resume`; between windows."""
        self._hooks.lift()

    def resume(self) -> None:
        """Put the hooks on again."""
        self._hooks.put_back()

    def close(self) -> None:
        """Remove every hook."""
        self._hooks.close()
        self._reset()

    def _hook(self, index: int) -> Callable[[Tensor | None], None]:
        # Caches are cold between two kernels of a backward, so every line of Python costs: keep them few.
        def hook(grad: Tensor | None) -> None:
            if grad is None:  # a custom Function may return None for a leaf
                return
            start = time.perf_counter()
            if torch._C._current_graph_task_id() in self._backwards or self._opens_backward(index, grad):
                if torch.is_grad_enabled():  # create_graph: the measurement must stay out of the user's graph
                    with torch.no_grad():
                        self._take(index, grad)
                else:
                    self._take(index, grad)
            self.seconds += time.perf_counter() - start

        return hook

    def _opens_backward(self, index: int, grad: Tensor) -> bool:
        """Whether a backward that is met for the first time counts; if so, add it to a piece and watch for its end."""
        # Once pieces are declared, a backward outside them does not count; torch.autograd.grad never counts.
        if (self._only_explicit and not self._explicit) or not accumulates(self._leaves[index]):
            return False
        if not self._explicit:
            nested = inside_another_backward(grad)
            if self._backwards and not nested:
                self.discard_piece()  # the previous backward failed half-way: its end was never reported
            if not self._backwards:
                self._problems[Problem.REENTRANT] += nested
                # Private: PyTorch has no public way to learn that a backward has ended. A test guards it.
                Variable._execution_engine.queue_callback(self._close_backward)
        elif self._grad_is_piece:
            # `.grad` is this piece's sum until a collective writes to it: count collectives while backwards are open.
            if self._n_open == 0:
                self._collectives_before = self._n_collectives()
            self._n_open += 1
            Variable._execution_engine.queue_callback(self._close_backward)
        self._backwards.add(torch._C._current_graph_task_id())
        return True

    def _close_backward(self) -> None:
        if self._explicit:
            self._n_open -= 1
            # A collective issued while backward ran may have reduced `.grad`, which then holds more than this piece.
            self._grad_is_piece &= self._n_collectives() == self._collectives_before
        elif self._backwards:
            self._on_backward_end()

    def _take(self, index: int, grad: Tensor) -> None:
        """Let a gradient wait for a shared kernel, or reduce it at once."""
        if index in self._left_overs.unseen:
            self._left_overs.look(index)
        if self._cut is not None:
            if (part := self._cut.take(index, grad)) is None:
                return
            grad = part
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
        """Take a second gradient h₂ of the same parameter in one piece: |h₁ + h₂|² needs both gradients at once."""
        # h₁ may still wait for its kernel.
        staged = self._staged.get(_stream(grad), {})
        if index in staged:
            staged[index] = staged[index] + grad
            return
        so_far = self._leaves[index].grad if self._cut is None else None
        if self._grad_is_piece and so_far is not None and not (grad.is_sparse or so_far.is_sparse):
            # h₁ has been squared, but `.grad` still holds it: |h₁ + h₂|² = |h₁|² + |h₂|² + 2⟨h₁, h₂⟩.
            self._cross.append((index, 2 * self._metric.dot(index, so_far, grad)))
            self._keep((index,), (grad,), self._metric.roots(index, grad))
            return
        # h₁ is lost, and so is this window. Later pieces keep all gradients until they end, if the staging area can
        # hold them.
        self._sums_backwards = self._n_bytes <= self._staging_bytes
        self._problems[Problem.SEVERAL_BACKWARDS if self._sums_backwards else Problem.TOO_LARGE_TO_SUM] += 1

    def _stage(self, index: int, grad: Tensor) -> None:
        self._staged.setdefault(_stream(grad), {})[index] = grad
        self._staged_bytes += grad.numel() * grad.element_size()
        if self._staged_bytes > self._staging_bytes and not self._sums_backwards:
            self._flush()

    def _flush(self) -> None:
        """Reduce the gradients that wait, each on the stream that wrote it."""
        for stream, staged in self._staged.items():
            if not staged:
                continue
            if stream is None:
                self._reduce(staged)
                continue
            with torch.cuda.stream(stream):
                self._reduce(staged)
            torch.cuda.current_stream(stream.device).wait_stream(stream)  # the results are read on the present stream
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
        """Keep the roots of some gradients, and the witness's elements of them."""
        self._parts.append((indices, roots))
        results = [roots]
        for index, grad in zip(indices, grads, strict=True):
            if index in self._witness:
                spec = self._cut.specs[index] if self._cut is not None else None
                elements = self._witness.read_shard(index, grad, spec)
                # Cloned: the elements are a view of the gradient, which autograd may write to once the hook returns.
                sum_of_elements = self._witnessed[index] + elements if index in self._witnessed else elements.clone()
                self._witnessed[index] = sum_of_elements
                results.append(sum_of_elements)
        if (stream := _stream(roots)) is not None:
            self._results.append((stream, results))

    def _adopt_results(self) -> None:
        """Check the device of the hooks' results and keep them alive on this stream."""
        if self._one_device and self._parts and (device := self._parts[0][1].device) != self._device:
            raise RuntimeError(
                f"the model was on {self._device} when the probe was attached and is on {device} now: "
                "attach after moving it"
            )
        # Autograd may run a hook on another stream. The allocator must not reuse the memory of the hook's results
        # before the present stream has read them.
        for stream, results in self._results:
            present = torch.cuda.current_stream(stream.device)
            if stream != present:
                for result in results:
                    result.record_stream(present)


def _stream(grad: Tensor) -> torch.cuda.Stream | None:
    return torch.cuda.current_stream(grad.device) if grad.is_cuda else None
