"""The squared norm of every micro-batch's own gradient, read by leaf hooks while backward runs.

A hook that `Tensor.register_hook` puts on a leaf parameter is called with the gradient that this backward adds: local
to the rank and not yet accumulated, with or without DDP, and on DDP's synchronising step too. So no gradient is stored
between micro-batches or subtracted afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from sonde.batch_size.taps.ddp_buckets import CommHook, DDPBucketTap
from sonde.batch_size.taps.metric import ROW, GradientMetric, GradientTerms
from sonde.batch_size.taps.problems import Problem
from sonde.batch_size.taps.shared_pieces import ContextPiece, CutGradients
from sonde.batch_size.taps.tap import GradientSummary, Tap
from sonde.batch_size.taps.witness import Witness
from sonde.batch_size.window_clock import OwnTime
from sonde.parallel.devices import keep_for_present_stream, stream_of
from sonde.parallel.wrappers import Wrapper

TapName = Literal["leaf", "comm_hook"]
STAGED_NUMEL = 2**22
STAGED_NUMEL_ON_CPU = ROW
"""Gradients up to this many elements wait for shared kernels; larger ones are reduced at once.

Inside a backward, every operator costs a kernel launch or runs on cold caches, so gradients share operators. A gradient
that waits is still referenced, so autograd clones it instead of taking it over as `.grad`. On a CPU only the clone of a
small gradient is cheap. A GPU clones a few million elements in about the time that the host takes for one launch.
"""


class LeafHookTap(Tap):
    """Leaf hooks on parameters that reduce each piece's gradient to its squared norms.

    Args:
        leaves: leaf tensors that require a gradient, each once.
        witness: elements to copy besides the norms.
        metrics: in which gradients are measured.
        parameters: whose `.grad` the optimizer reads, [leaves]; by default the leaves. Under FSDP2, leaves are gathered
            parameters, and these are the sharded ones.
        cut: what this rank counts of a gradient that it shares with other ranks; None if every rank has its own pieces.
        context: reads pieces whose gradients are means over ranks that share sequences; None without.
        on_backward_end: called when a backward outside `begin_piece` … `end_piece` has ended, and is a piece.
        own: the probe's time.
        staging_bytes: bound of the memory for gradients that wait.
        staged_numel: gradients up to this many elements wait; by default as `STAGED_NUMEL` says.
    """

    name = "leaf hooks"

    def __init__(
        self,
        leaves: Sequence[Tensor],
        witness: Witness,
        metrics: Sequence[GradientMetric],
        *,
        parameters: Sequence[Tensor] | None = None,
        cut: CutGradients | None = None,
        context: ContextPiece | None = None,
        on_backward_end: Callable[[], None],
        own: OwnTime | None = None,
        staging_bytes: int = 8 * 2**20,
        staged_numel: int | None = None,
    ) -> None:
        stepped = leaves if parameters is None else parameters
        super().__init__(
            leaves, range(len(leaves)), stepped, witness, on_backward_end=on_backward_end, own=own or OwnTime()
        )
        self.metrics, self.cut, self.staging_bytes, self.device = metrics, cut, staging_bytes, leaves[0].device
        default = STAGED_NUMEL_ON_CPU if self.device.type == "cpu" else STAGED_NUMEL
        self.staged_numel = default if staged_numel is None else staged_numel
        self.one_device = all(leaf.device == self.device for leaf in leaves)
        """Whether all leaves were on one device at attach."""
        self.summed: set[int] = set()
        """Leaves whose gradients are copied and wait until the piece ends, since several backwards of a piece have
        reached them."""
        self.summed_bytes = 0
        """Of their gradients."""
        self.copies = False
        """Whether all gradients that wait are copied, since torch has refused to read one."""
        self._context, self._shares_sequences = context, context is not None
        self._turns: list[int] = []
        self.forget_piece()

    def forget_piece(self) -> None:
        """Forget the present piece, or the pieces of a schedule."""
        super().forget_piece()
        if self._context is not None:
            self._context.begin()
        piece = self._context or PieceGradient(self, self.staging_bytes)
        self._pieces: Sequence[PieceGradient | ContextPiece] = [piece]
        self.take = piece.take

    def begin_piece(self, n: int | None = None) -> None:
        """From here until `end_piece` all backwards are one piece, or the n pieces of a pipeline's schedule.

        A stage runs the pieces' backwards in their order, whatever runs between them. So the k-th gradient of each
        parameter is of the k-th piece.
        """
        super().begin_piece(n)
        if n is not None:
            # Zero-bubble schedules add to gradients that autograd leaves alone since somebody holds them: copies wait.
            self._pieces = [PieceGradient(self, self.staging_bytes // n, clones=True) for _ in range(n)]
            self._turns = [0] * len(self.leaves)
            self.take = self._take_turn

    def end_piece(self) -> list[GradientSummary]:
        """The gradients of the pieces that end here, in their order; parameters that they did not reach count as 0."""
        summaries = [piece.summary() for piece in self._pieces]
        if self.is_scheduled:  # a parameter that took part in some pieces only does not tell in which
            self.problems[Problem.NOT_IN_EVERY_PIECE] += any(n not in (0, len(summaries)) for n in self._turns)
        super().end_piece()
        return summaries

    def _take_turn(self, index: int, grad: Tensor) -> Problem | None:
        """Add a gradient to the piece of a schedule whose turn it is."""
        turn = self._turns[index]
        self._turns[index] += 1
        return self._pieces[turn].take(index, grad) if turn < len(self._pieces) else None


class PieceGradient:
    """Takes the gradients of one piece, and reduces them.

    Args:
        tap: says how gradients are read.
        staging_bytes: bound of the memory for gradients that wait.
        clones: copy gradients that wait.
    """

    def __init__(self, tap: LeafHookTap, staging_bytes: int, *, clones: bool = False) -> None:
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


def choose_tap(
    wrapper: Wrapper,
    witness: Witness,
    metrics: Sequence[GradientMetric],
    *,
    name: TapName,
    comm_hook: CommHook | None,
    comm_state: object,
    staging_bytes: int,
    on_backward: Callable[[], None],
    own: OwnTime,
) -> Tap:
    """The tap of this name, with its hooks in place. Arguments as for `LeafHookTap` and `DDPBucketTap`.

    Raises:
        ValueError: when the tap does not fit the model.
    """
    if name == "comm_hook":
        return DDPBucketTap(
            wrapper,
            witness,
            metrics,
            comm_hook=comm_hook,
            comm_state=comm_state,
            on_backward_end=on_backward,
            own=own,
        )
    leaves, data = wrapper.leaves, wrapper.data
    context = cut = None
    if (group := wrapper.sequence_group) is not None:
        context = ContextPiece(leaves, group, witness, metrics, staging_bytes=staging_bytes)
    if data.n_sharing > 1 or wrapper.experts or wrapper.has_cut_leaves:
        cut = CutGradients(leaves, data.first_sharing)
    return LeafHookTap(
        leaves,
        witness,
        metrics,
        parameters=list(wrapper.parameters.values()),
        cut=cut,
        context=context,
        on_backward_end=on_backward,
        own=own,
        staging_bytes=staging_bytes,
    )
