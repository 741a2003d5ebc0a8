"""The squared norm of every micro-batch's own gradient, read by leaf hooks while backward runs.

A hook that `Tensor.register_hook` puts on a leaf parameter is called with the gradient that this backward adds: local
to the rank and not yet accumulated, with or without DDP, and on DDP's synchronising step too. So no gradient is stored
between micro-batches or subtracted afterwards.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sonde.batch_size.taps.metric import ROW, GradientMetric, GradientTerms
from sonde.batch_size.taps.problems import Problem
from sonde.parallel.devices import keep_for_present_stream, stream_of

if TYPE_CHECKING:
    from sonde.batch_size.taps.tap import Tap

STAGED_NUMEL = 2**22
STAGED_NUMEL_ON_CPU = ROW
"""Gradients up to this many elements wait for shared kernels; larger ones are reduced at once.

Inside a backward, every operator costs a kernel launch or runs on cold caches, so gradients share operators. A gradient
that waits is still referenced, so autograd clones it instead of taking it over as `.grad`. On a CPU only the clone of a
small gradient is cheap. A GPU clones a few million elements in about the time that the host takes for one launch.
"""


@dataclass(frozen=True)
class GradientSummary:
    """The part of one gradient that is kept.

    Attributes:
        terms: what adds up over parameters in each metric, squares or norms, 0 for a parameter without gradient;
            [metrics, parameters].
        witness: the witness's elements, [witness.size].
        witness_squares: squares of the parts that were added up to the witness's elements, which rounding is relative
            to, [witness.size]; None for the squares of the elements themselves.
    """

    terms: Tensor
    witness: Tensor
    witness_squares: Tensor | None = None

    def scaled(self, factor: Tensor, metrics: Sequence[GradientMetric]) -> GradientSummary:
        """The summary of `factor` times the gradient; factor: 0-dim and positive."""
        square = factor.square()
        of_metrics = torch.stack([square if metric.adds == "squares" else factor for metric in metrics])
        squares = None if self.witness_squares is None else self.witness_squares * square
        return GradientSummary(self.terms * of_metrics[:, None], self.witness * factor, squares)


class PieceGradient:
    """Takes the gradients of one piece, and reduces them.

    Args:
        tap: says how gradients are read.
        staging_bytes: bound of the memory for gradients that wait.
        clones: copy gradients that wait.
    """

    def __init__(self, tap: Tap, staging_bytes: int, *, clones: bool = False) -> None:
        self._tap, self._staging_bytes, self._clones = tap, staging_bytes, clones
        self._terms = GradientTerms(tap.metrics, len(tap.leaves), tap.device)
        self._witnessed: dict[int, Tensor] = {}
        # Gradients that wait, by stream: a kernel on one stream must not read a tensor that another still writes.
        self._staged: dict[torch.Stream | None, dict[int, Tensor]] = {None: {}}
        self._staged_bytes = 0
        self._results: list[tuple[torch.Stream | None, list[Tensor]]] = []
        self._fired = bytearray(len(tap.leaves))
        self._partial: dict[int, Tensor] = {}

    def take(self, index: int, grad: Tensor) -> Problem | None:
        """Let a gradient wait for a shared kernel, or reduce it at once.

        Args:
            index: of the leaf.
            grad: its gradient, as a hook sees it.

        Returns:
            Why the piece is lost, if it is.
        """
        tap = self._tap
        try:
            if tap.cut is not None:
                part = tap.cut.part(index, grad, self._partial)
                if part is None:
                    return None
                grad = part
            if self._fired[index]:
                return self._take_again(index, grad)
            self._fired[index] = 1
            if grad.is_sparse and not grad.is_cpu:
                return Problem.SPARSE_ON_GPU
            if index not in tap.summed and (grad.numel() > tap.staged_numel or grad.is_sparse):
                self._keep({index: grad})
                return None
            copies, stream = self._clones or tap.copies or index in tap.summed, None
            if not grad.is_cpu:
                stream, copies = stream_of(grad), copies or is_output_of_graph(grad)
            self._staged.setdefault(stream, {})[index] = grad.clone() if copies else grad
            if index not in tap.summed:
                self._staged_bytes += grad.numel() * grad.element_size()
                if self._staged_bytes + tap.summed_bytes > self._staging_bytes:
                    self._flush(tap.summed)
        except RuntimeError as error:
            return self._cannot_read(error)
        return None

    def _take_again(self, index: int, grad: Tensor) -> Problem | None:
        """Take a second gradient h₂ of the same parameter in one piece: |h₁ + h₂|² needs both gradients at once."""
        staged = self._staged.get(stream_of(grad), {})
        # h₁ has been squared already, or its memory holds h₂: a CUDA graph writes to the same place each time. No
        # allocator gives out memory that is held.
        if index not in staged or _is_same_memory(staged[index], grad):
            return self._sum_from_now_on(index)
        staged[index] = staged[index] + grad
        return None

    def _cannot_read(self, error: RuntimeError) -> Problem:
        """A compiled graph's later run may write to what its first runs returned: torch refuses to read that."""
        if "has been overwritten by a subsequent run" not in str(error):
            raise error
        self._tap.copies = True
        return Problem.SEVERAL_BACKWARDS

    def _sum_from_now_on(self, index: int) -> Problem:
        """After h₁ and so this window are lost: later pieces keep this leaf's gradient until they end, if it fits."""
        tap, leaf = self._tap, self._tap.leaves[index]
        n_bytes = leaf.numel() * leaf.element_size()
        if index not in tap.summed and tap.summed_bytes + n_bytes <= self._staging_bytes:
            tap.summed.add(index)
            tap.summed_bytes += n_bytes
        return Problem.SEVERAL_BACKWARDS if index in tap.summed else Problem.TOO_LARGE_TO_SUM

    @torch.no_grad()
    def summary(self) -> GradientSummary:
        """The part of the piece's gradient that is kept; parameters that it did not reach count as 0."""
        tap = self._tap
        if tap.cut is not None:
            for index, part in tap.cut.sum_partial(self._partial).items():
                self._keep({index: part})
        try:  # gradients that still wait come first: they add to the parts and to the witness
            self._flush()
        except RuntimeError as error:
            tap.problems[self._cannot_read(error)] += 1
        for stream, results in self._results:
            if tap.one_device and results[0].device != tap.device:
                raise RuntimeError(
                    f"the model was on {tap.device} when the probe was attached and is on {results[0].device} now: "
                    "attach after moving it"
                )
            # Autograd may run a hook on another stream. The allocator must not reuse the memory of the hook's results
            # before the present stream has read them.
            if stream is not None and stream != torch.accelerator.current_stream(stream.device):
                for result in results:
                    keep_for_present_stream(result)
        return GradientSummary(self._terms.sum(), tap.witness.join(self._witnessed, tap.device))

    def _flush(self, but: Collection[int] = ()) -> None:
        """Reduce the gradients that wait, each on the stream that wrote it, but those of some leaves."""
        self._staged_bytes = 0
        for stream, gradients in self._staged.items():
            staged, self._staged[stream] = gradients, {}
            if but:
                self._staged[stream] = {i: grad for i, grad in gradients.items() if i in but}
                staged = {i: grad for i, grad in gradients.items() if i not in but}
            if not staged:
                continue
            if stream is None:
                self._keep(staged)
                continue
            with stream:
                self._keep(staged)
            present = torch.accelerator.current_stream(stream.device)
            present.wait_stream(stream)  # the results are read on the present stream

    def _keep(self, grads: Mapping[int, Tensor]) -> None:
        """Keep the terms of some gradients, by index, and the witness's elements of them."""
        results = self._terms.take(tuple(grads), tuple(grads.values()))
        witness, cut = self._tap.witness, self._tap.cut
        for index in grads.keys() & witness.indices:
            elements = witness.read(index, grads[index], None if cut is None else cut.specs[index])
            # Cloned: they are a view of the gradient, which autograd may write to once the hook returns.
            self._witnessed[index] = elements.clone()
            results.append(self._witnessed[index])
        self._results.append((None if results[0].is_cpu else stream_of(results[0]), results))


def _is_same_memory(earlier: Tensor, later: Tensor) -> bool:
    dense = earlier.layout is later.layout is torch.strided
    return dense and earlier.dtype == later.dtype and earlier.is_set_to(later)


def is_output_of_graph(grad: Tensor) -> bool:
    """Whether `torch.compile(mode="reduce-overhead")` owns a gradient's memory, and takes it back at its next run.

    autograd asks the same before it keeps a gradient as `.grad`.
    """
    # Private: there is no public function. A test guards it.
    return bool(torch._C._is_cached_tensor(grad))  # type: ignore[attr-defined]
