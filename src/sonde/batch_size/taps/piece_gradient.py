"""One piece's gradient, parameter by parameter as backward makes it: squared norms, and the witness's elements."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sonde.batch_size.taps.cut_gradients import CutGradients
from sonde.batch_size.taps.graph_memory import is_output_of_graph, is_same_memory, says_overwritten
from sonde.batch_size.taps.metric import GradientTerms, Metrics
from sonde.batch_size.taps.squared_norms import ROW
from sonde.batch_size.taps.tap import GradientSummary, Problem
from sonde.batch_size.taps.witness import Witness
from sonde.parallel.devices import keep_for_present_stream, stream_of

STAGED_NUMEL = 2**22
STAGED_NUMEL_ON_CPU = ROW
"""Gradients up to this many elements wait for shared kernels; larger ones are reduced at once.

Inside a backward, every operator costs a kernel launch or runs on cold caches, so gradients share operators. A gradient
that waits is still referenced, so autograd clones it instead of taking it over as `.grad`. On a CPU only the clone of a
small gradient is cheap. A GPU clones a few million elements in about the time that the host takes for one launch.
"""


@dataclass
class Reading:
    """How the gradients of pieces are read.

    Attributes:
        leaves: the tensors that backward makes gradients for.
        witness: elements to copy besides the norms.
        metrics: in which gradients are measured.
        cut: what this rank counts of a gradient that it shares with other ranks; None if every rank has its own pieces.
        staged_numel: gradients up to this many elements wait for shared kernels.
        staging_bytes: bound of the memory for gradients that wait.
        device: where the sums are made.
        one_device: whether all leaves were there at attach.
        summed: leaves whose gradients wait until the piece ends, since several backwards of a piece have reached them.
        summed_bytes: of their gradients.
        copies: whether gradients that wait are copied, since the pieces' backwards write to the same memory.
    """

    leaves: Sequence[Tensor]
    witness: Witness
    metrics: Metrics
    cut: CutGradients | None
    staged_numel: int
    staging_bytes: int
    device: torch.device
    one_device: bool
    summed: set[int] = field(default_factory=set)
    summed_bytes: int = 0
    copies: bool = False


class PieceGradient:
    """Takes the gradients of one piece, and reduces them.

    Args:
        reading: how gradients are read.
        staging_bytes: bound of the memory for gradients that wait; by default that of `reading`.
        clones: copy gradients that wait. autograd leaves a gradient alone that somebody holds. Zero-bubble schedules
            add to it.
    """

    def __init__(self, reading: Reading, staging_bytes: int | None = None, *, clones: bool = False) -> None:
        self._reading, self._device, self._clones = reading, reading.device, clones
        self._staging_bytes = reading.staging_bytes if staging_bytes is None else staging_bytes
        self._terms = GradientTerms(reading.metrics, len(reading.leaves), reading.device)
        self._witnessed: dict[int, Tensor] = {}
        # Gradients that wait, by stream: a kernel on one stream must not read a tensor that another still writes.
        self._staged: dict[torch.Stream | None, dict[int, Tensor]] = {None: {}}
        self._staged_bytes = 0
        self._results: list[tuple[torch.Stream, list[Tensor]]] = []
        self._fired = bytearray(len(reading.leaves))
        self._partial: dict[int, Tensor] = {}

    def take(self, index: int, grad: Tensor, *, grad_is_sum: bool = False) -> Problem | None:
        """Let a gradient wait for a shared kernel, or reduce it at once.

        Args:
            index: of the leaf.
            grad: its gradient, as a hook sees it.
            grad_is_sum: whether `.grad` of that leaf is the sum of this piece's earlier gradients, as far as is known:
                a hook that runs after accumulation may have averaged it over any ranks.

        Returns:
            Why the piece is lost, if it is.
        """
        reading = self._reading
        try:
            if reading.cut is not None:
                part = reading.cut.take(index, grad, self._partial)
                if part is None:
                    return None
                grad, grad_is_sum = part, False
            if self._fired[index]:
                leaf = reading.leaves[index]
                is_sum = grad_is_sum and not leaf._post_accumulate_grad_hooks
                return self._take_again(index, grad, leaf.grad if is_sum else None)
            self._fired[index] = 1
            if grad.is_sparse and not grad.is_cpu:
                return Problem.SPARSE_ON_GPU
            if index in reading.summed or (not grad.is_sparse and grad.numel() <= reading.staged_numel):
                self._stage(index, grad)
            else:
                self._keep({index: grad})
        except RuntimeError as error:
            return self._cannot_read(error)
        return None

    def _take_again(self, index: int, grad: Tensor, so_far: Tensor | None) -> Problem | None:
        """Take a second gradient h₂ of the same parameter in one piece: |h₁ + h₂|² needs both gradients at once."""
        # h₁ may still wait for its kernel.
        staged = self._staged.get(stream_of(grad), {})
        if index in staged:
            if is_same_memory(staged[index], grad):
                return self._was_overwritten(index)
            staged[index] = staged[index] + grad
            return None
        if so_far is not None and is_same_memory(so_far, grad):
            return self._was_overwritten(index)
        if so_far is not None and not (grad.is_sparse or so_far.is_sparse):
            # h₁ has been squared, but `.grad` still holds it.
            self._keep({index: grad}, self._terms.take_again(index, so_far, grad))
            return None
        return Problem.SEVERAL_BACKWARDS if self._sums_from_now_on(index) else Problem.TOO_LARGE_TO_SUM

    def _was_overwritten(self, index: int) -> Problem:
        """The memory of h₁ holds h₂: a CUDA graph writes its gradients to the same place each time."""
        self._reading.copies = True
        return Problem.OVERWRITTEN if self._sums_from_now_on(index) else Problem.TOO_LARGE_TO_SUM

    def _cannot_read(self, error: RuntimeError) -> Problem:
        """A compiled graph's later run may write to what its first runs returned: torch refuses to read that."""
        if not says_overwritten(error):
            raise error
        self._reading.copies = True
        return Problem.OVERWRITTEN

    def _sums_from_now_on(self, index: int) -> bool:
        """After h₁ and so this window are lost: later pieces keep this leaf's gradient until they end, if it fits."""
        reading, leaf = self._reading, self._reading.leaves[index]
        n_bytes = leaf.numel() * leaf.element_size()
        if index not in reading.summed and reading.summed_bytes + n_bytes <= self._staging_bytes:
            reading.summed.add(index)
            reading.summed_bytes += n_bytes
        return index in reading.summed

    @torch.no_grad()
    def summary(self) -> GradientSummary:
        """The part of the piece's gradient that is kept; parameters that it did not reach count as 0."""
        reading = self._reading
        if reading.cut is not None:
            for index, part in reading.cut.sum_partial(self._partial).items():
                self._keep({index: part})
        problem = None
        try:  # gradients that still wait come first: they add to the parts and to the witness
            self._flush()
        except RuntimeError as error:
            problem = self._cannot_read(error)
        self._adopt_results()
        witness = reading.witness.join(self._witnessed, self._device)
        return GradientSummary(self._terms.sum(), witness, problem=problem)

    def _stage(self, index: int, grad: Tensor) -> None:
        copies = self._clones or self._reading.copies or (not grad.is_cpu and is_output_of_graph(grad))
        stream = None if grad.is_cpu else stream_of(grad)
        self._staged.setdefault(stream, {})[index] = grad.clone() if copies else grad
        if index not in self._reading.summed:
            self._staged_bytes += grad.numel() * grad.element_size()
            if self._staged_bytes + self._reading.summed_bytes > self._staging_bytes:
                self._flush(self._reading.summed)

    def _flush(self, but: Collection[int] = ()) -> None:
        """Reduce the gradients that wait, each on the stream that wrote it, but those of some leaves."""
        self._staged_bytes = 0
        for stream, gradients in self._staged.items():
            staged = {i: gradients.pop(i) for i in list(gradients) if i not in but}
            if not staged:
                continue
            if stream is None:
                self._keep(staged)
                continue
            with stream:
                self._keep(staged)
            present = torch.accelerator.current_stream(stream.device)
            present.wait_stream(stream)  # the results are read on the present stream

    def _keep(self, grads: Mapping[int, Tensor], results: list[Tensor] | None = None) -> None:
        """Keep the terms of some gradients, by index, and the witness's elements of them."""
        if results is None:
            results = self._terms.take(tuple(grads), tuple(grads.values()))
        witness, cut = self._reading.witness, self._reading.cut
        for index, grad in grads.items():
            if index in witness:
                spec = None if cut is None else cut.specs[index]
                elements = witness.read(index, grad) if spec is None else witness.read_shard(index, grad, spec)
                # Cloned: the elements are a view of the gradient, which autograd may write to once the hook returns.
                sum_of_elements = self._witnessed[index] + elements if index in self._witnessed else elements.clone()
                self._witnessed[index] = sum_of_elements
                results.append(sum_of_elements)
        if (stream := stream_of(results[0])) is not None:
            self._results.append((stream, results))

    def _adopt_results(self) -> None:
        """Check the device of the hooks' results and keep them alive on this stream."""
        if self._reading.one_device and (device := self._terms.device) not in (None, self._device):
            raise RuntimeError(
                f"the model was on {self._device} when the probe was attached and is on {device} now: "
                "attach after moving it"
            )
        # Autograd may run a hook on another stream. The allocator must not reuse the memory of the hook's results
        # before the present stream has read them.
        for stream, results in self._results:
            if stream != torch.accelerator.current_stream(stream.device):
                for result in results:
                    keep_for_present_stream(result)
