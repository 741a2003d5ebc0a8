"""Reads the gradients of each window: its pieces by a tap, its final gradient from `.grad` or DDP's buckets."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from sonde.batch_size.measuring_cost import WindowCosts
from sonde.batch_size.taps.expert_pieces import ExpertPieces
from sonde.batch_size.taps.final_gradient import FinalGradient
from sonde.batch_size.taps.further_metrics import FurtherMetrics
from sonde.batch_size.taps.further_sums import FurtherSums
from sonde.batch_size.taps.metric import GradientMetric
from sonde.batch_size.taps.tap import (
    ExamplesOfWindow,
    ExpertsOfWindow,
    GradientSummary,
    Number,
    Problem,
    RankGradient,
    Tap,
)
from sonde.batch_size.taps.window_sums import PieceCounts, Window, WindowSums
from sonde.batch_size.taps.witness import Witness
from sonde.gradient_norm.global_norm import GlobalNorm
from sonde.parallel.devices import is_capturing, runs_beside_host, widened
from sonde.parallel.process_groups import start_reduce
from sonde.parallel.wrappers import Wrapper


class Examples(Protocol):
    """Reads the gradients of a piece's single examples, where another part of the probe has chosen to."""

    @property
    def is_open(self) -> bool:
        """Whether examples are read now."""

    @property
    def seconds(self) -> float:
        """Host time spent reading so far."""

    def begin_piece(self) -> None:
        """From here until `end_piece` all backwards are one piece: those before it, outside pieces, do not count."""

    def end_piece(self, counts: PieceCounts, unscale: Tensor | None) -> None:
        """Add the examples of the piece that ends here; `unscale` undoes a GradScaler's scale."""

    def discard_piece(self) -> None:
        """Forget the present piece."""

    def end_window(self, sums: WindowSums, sq_norms_big: Tensor | None) -> ExamplesOfWindow:
        """The numbers of the window; starts the next one.

        Args:
            sums: of the window's pieces, not packed yet.
            sq_norms_big: |F|² per parameter, of a sharded model this rank's share of it, [parameters]; None if examples
                were not read.
        """


class WindowReader:
    """Reads the gradients of pieces and windows, and starts the sum over ranks: one collective per window.

    Args:
        wrapper: the model.
        group_names: the parameter group of each parameter of the whole model, [parameters of all pipeline stages].
        first: where this rank's parameters begin in that list.
        n_further_units: how many further units pieces are counted in.
        examples: reads single examples besides pieces; None where that is not possible or not wanted.
        metric: how gradients are squared.
        witness: which elements are compared.
        tap: reads the pieces.
        grad_scaler: the enabled GradScaler; a piece is divided by the scale that it was taken at.
        further: metrics beside `metric`; None without.
    """

    def __init__(
        self,
        wrapper: Wrapper,
        group_names: Sequence[str],
        metric: GradientMetric,
        witness: Witness,
        tap: Tap,
        *,
        grad_scaler: torch.amp.GradScaler | None,
        first: int = 0,
        further: FurtherMetrics | None = None,
        n_further_units: int = 0,
        examples: Examples | None = None,
    ) -> None:
        self.parameters = list(wrapper.parameters.values())
        self.device = wrapper.leaves[0].device
        self.groups = tuple(dict.fromkeys(group_names))
        self._wrapper, self._metric, self._witness = wrapper, metric, witness
        self._tap, self._grad_scaler, self._examples, self._further = tap, grad_scaler, examples, further
        self._seconds = 0.0
        own = group_names[first : first + len(self.parameters)]
        place = {name: i for i, name in enumerate(self.groups)}
        self._group_index = [place[name] for name in own]
        self._sums = WindowSums(
            self._group_index,
            n_groups=len(self.groups),
            n_witness=witness.size,
            device=self.device,
            data=wrapper.data,
            has_loss_scale=grad_scaler is not None,
            further=FurtherSums(further, self._group_index, n_groups=len(self.groups), device=self.device)
            if further is not None
            else None,
            n_further_units=n_further_units,
        )
        self._experts: ExpertPieces | None = None
        if wrapper.experts is not None:
            self._experts = ExpertPieces(
                wrapper.experts,
                self._group_index,
                n_groups=len(self.groups),
                witness=witness,
                counts_pieces=wrapper.data.counts_pieces,
                n_further=0 if further is None else len(further.metrics),
                device=self.device,
            )
        self._may_be_recorded = runs_beside_host(self.device)
        self._saw_recording = self._lost_in_graph = False
        self._outside: Counter[Problem] = Counter()
        self.final = FinalGradient(wrapper, self.groups, self._group_index, metric, witness, self._sums, further)
        """Reads the gradient at the end of a window."""

    @property
    def n_pieces(self) -> int:
        """Pieces of the present window on this rank so far."""
        return self._sums.n_pieces

    @property
    def seconds(self) -> float:
        """Host time spent reading so far, without the norm of a clip."""
        of_examples = self._examples.seconds if self._examples is not None else 0.0
        return self._seconds - self.final.seconds_of_clip + self._tap.seconds + of_examples

    @property
    def tap_name(self) -> str:
        """Where gradients are read now."""
        return self._tap.name + (" and single examples" if self._reads_examples else "")

    @property
    def _reads_examples(self) -> bool:
        return self._examples is not None and self._examples.is_open

    def is_recorded(self) -> bool:
        """Whether the device records a CUDA graph now. Nothing may be launched then.

        A replay would write results to memory that others use by then. From now on, windows without a backward are
        explained by the graph.
        """
        if not self._may_be_recorded:
            return False
        is_recorded = is_capturing(self.device)
        self._saw_recording |= is_recorded
        return is_recorded

    def saw_recording(self) -> None:
        """Note that forwards were recorded into a CUDA graph."""
        self._saw_recording = True

    # Pieces.

    def begin_piece(self) -> None:
        """From here until `end_piece` all backwards are one piece. Later backwards outside pieces never count."""
        self._tap.begin_piece(is_first=self._sums.n_pieces == 0)
        if self._examples is not None:
            self._examples.begin_piece()

    def discard_piece(self) -> None:
        """Forget the present piece."""
        self._tap.discard_piece()
        if self._examples is not None:
            self._examples.discard_piece()

    def leave_out_backward(self, problem: Problem) -> None:
        """Forget the backward outside pieces that has just ended, since it is no piece; `problem` says why."""
        self._outside[problem] += 1
        self._tap.leave_out_backward()
        if self._examples is not None:
            self._examples.discard_piece()

    def end_piece(self, counts: PieceCounts, *, is_declared: bool = True) -> None:
        """Add the piece that ends here to the window.

        Args:
            counts: of the piece.
            is_declared: whether it is no backward outside `begin_piece` … `end_piece`.
        """
        self._outside[Problem.NOT_ALL_DECLARED] += not is_declared
        start = time.perf_counter()
        gradient = self._tap.end_piece()
        if gradient is None:  # the tap sees whole windows: end_window gets the gradient
            self._sums.count(counts)
        else:
            gradient = self._unscaled(gradient)
            if self._experts is not None:
                gradient = self._experts.take_from(gradient, counts)
            self._sums.add(gradient, counts)
        self._seconds += time.perf_counter() - start
        if self._examples is not None and self._examples.is_open:
            self._examples.end_piece(counts, self._unscale())

    def begin_pieces(self, n: int) -> None:
        """From here until `end_pieces` the backwards of a pipeline schedule are n pieces."""
        self._tap.begin_pieces(n)

    def end_pieces(self, counts: Sequence[PieceCounts]) -> None:
        """Add the pieces that end here to the window."""
        start = time.perf_counter()
        for gradient, of_piece in zip(self._tap.end_pieces(), counts, strict=True):
            self._sums.add(self._unscaled(gradient), of_piece)
        self._seconds += time.perf_counter() - start

    def _unscaled(self, gradient: GradientSummary) -> GradientSummary:
        """The gradient divided by the GradScaler's present scale, which stays on the device."""
        unscale = self._unscale()
        return gradient if unscale is None else gradient.scaled(unscale)

    def _unscale(self) -> Tensor | None:
        """The factor that undoes the GradScaler's present scale; it stays on the device."""
        if self._grad_scaler is None:
            return None
        scale = self._grad_scaler.scale(torch.ones((), device=self.device))
        return widened(scale).reciprocal()

    # Windows.

    def end_window(
        self,
        *,
        reads_grad: bool,
        problems: Collection[Problem] = (),
        costs: WindowCosts | None = None,
        frozen: Tensor | None = None,
    ) -> tuple[Window, GlobalNorm | None]:
        """Read the gradient at the end of the window and start the sum over ranks.

        A rank without pieces takes part too: only all ranks together know whether a window was ended twice.

        Args:
            reads_grad: read `.grad` itself, as a clip needs it, even where DDP's buckets gave its norm.
            problems: those of the window that no tap can see.
            costs: what this rank has spent since the window before; rides along in the sum over ranks.
            frozen: what this rank knows of frozen parameters; rides along too. 1-D, equally long on all ranks.

        Returns:
            The window; and the plain norm of its gradient, including parameters given to `clip_also`, if `reads_grad`.
        """
        start = time.perf_counter()
        self._sums.costs = costs or WindowCosts()
        if frozen is not None:
            self._sums.frozen = frozen
        grads = [p.grad for p in self.parameters]
        rank_gradient = self._tap.end_window()
        if rank_gradient is not None and self._sums.n_pieces:
            self._sums.merge(self._unscaled(rank_gradient.local))
        if self._wrapper.mesh is not None:
            window, norm = self._end_window_of_shards(grads, problems, reads_grad=reads_grad)
        else:
            window, norm = self._end_window_of_whole(grads, rank_gradient, problems, reads_grad=reads_grad)
        self._witness.move()  # once per window on every rank, so that all ranks compare the same elements
        self._seconds += time.perf_counter() - start
        n_frozen = len(self._sums.frozen)
        return replace(window, n_further_units=self._sums.n_further_units, n_frozen=n_frozen), norm

    def _end_window_of_whole(
        self,
        grads: Sequence[Tensor | None],
        rank_gradient: RankGradient | None,
        problems: Collection[Problem],
        *,
        reads_grad: bool,
    ) -> tuple[Window, GlobalNorm | None]:
        """Every rank holds the whole gradient: only the pieces are summed over ranks."""
        witness = self.final.witness(grads)
        # |F|² comes from the cheapest source: DDP's buckets, the norm that a clip needs anyway, or a read of `.grad`.
        norm = self.final.norm_of_clip() if reads_grad else None
        sq_norms = self.final.sq_norms(grads) if self._reads_examples else None
        if sq_norms is None and rank_gradient is not None and norm is None:
            sq_norm_big = self.final.scaled_since_reduction(rank_gradient, witness)
        elif norm is not None and self._metric.is_plain:
            sq_norm_big = self.final.squared(norm)
        else:
            sq_norm_big = self._sums.per_group(self.final.sq_norms(grads) if sq_norms is None else sq_norms)
        examples = self._examples.end_window(self._sums, sq_norms) if self._examples is not None else None
        big = self.final.further(grads, rank_gradient, witness)
        packed, sizes = self._pack(problems), dict(self._witness.sizes)
        riding = [] if examples is None else [examples.vector]
        riding += [] if self._sums.further is None else [self._sums.further.pack()]
        vector = torch.cat([packed, *riding]) if riding else packed
        work = start_reduce(vector, self._wrapper.group)
        packed, *riding = vector.split([len(packed), *map(len, riding)])
        further = None if big is None else (riding[-1], big)
        return Window(packed, sq_norm_big, witness, sizes, work, _summed(examples, riding), further=further), norm

    def _end_window_of_shards(
        self, grads: Sequence[Tensor | None], problems: Collection[Problem], *, reads_grad: bool
    ) -> tuple[Window, GlobalNorm | None]:
        """Each rank holds a part of the gradient: its elements and squares are summed over ranks with the pieces.

        One collective does it all. A clip waits for that collective, as it has to.
        """
        witness = self.final.witness_of_shards(grads)
        shares = self.final.sq_norms(self.final.counted_shards(grads)) if self._reads_examples else None
        examples = self._examples.end_window(self._sums, shares) if self._examples is not None else None
        further = self.final.further_of_shards(grads, self._experts)
        if self._experts is not None:
            own = witness * self._experts.own_elements
            of_experts, differ = self._experts.pack()
            parts = [self._pack(problems, {Problem.EXPERTS_DIFFER: differ}), own, of_experts, witness - own, *further]
        else:
            parts = [self._pack(problems), witness, *([] if examples is None else [examples.vector]), *further]
        lengths = list(map(len, parts))
        if reads_grad:
            vector = torch.cat(parts)
            norm = self.final.norm_of_clip(riding=vector)
            squares, work = self.final.squared(norm), None
        else:
            norm = None
            squares = self.final.own_squares()
            vector = torch.cat([*parts, squares])
            work = start_reduce(vector, self._wrapper.group)
            squares = vector[-len(squares) :]
        summed = vector[: sum(lengths)].split(lengths)
        return self._window_of_shards(summed, squares, examples, has_further=bool(further), work=work), norm

    def _window_of_shards(
        self,
        summed: Sequence[Tensor],
        squares: Tensor,
        examples: ExamplesOfWindow | None,
        *,
        has_further: bool,
        work: dist.Work | None,
    ) -> Window:
        """The window from its parts, while `work` may still be summing them."""
        packed, witness, *more = summed
        experts = None
        if self._experts is not None:
            vector, witness_of_experts, *more = more
            further_big = more.pop() if has_further else vector.new_zeros(0)
            experts = ExpertsOfWindow(vector, squares[len(self.groups) :], witness_of_experts, further_big)
        sizes = dict(self._witness.sizes)
        further = (more[-2], more[-1]) if has_further else None
        of_groups = squares[: len(self.groups)]
        return Window(packed, of_groups, witness, sizes, work, _summed(examples, more), experts, further)

    def _pack(self, problems: Collection[Problem], more: Mapping[Problem, Number] | None = None) -> Tensor:
        """This rank's sums. They are packed after all reading, since the metric may have met problems too."""
        counts = self._take_problems()
        for problem in problems:
            counts[problem] += 1
        for problem, count in (more or {}).items():
            counts[problem] += count
        return self._sums.pack(counts, declares=self._tap.only_declared)

    def forget_window(self) -> None:
        """Forget the pieces since the last window ended."""
        if self.is_recorded():
            self._lost_in_graph = True  # the sums stay as they are, and the window that holds them is dropped
            return
        if self._examples is not None:
            self._examples.end_window(self._sums, None)
        if self._experts is not None:
            self._experts.forget()
        self._sums.pack(self._take_problems())
        if self._sums.further is not None:
            self._sums.further.pack()
        self._tap.end_window()

    def _take_problems(self) -> list[Number]:
        problems = self._tap.take_problems()
        self._saw_recording |= bool(problems[Problem.IN_CUDA_GRAPH])  # a number of the host
        if self._lost_in_graph or (self._saw_recording and (not self._sums.n_pieces or problems[Problem.EMPTY_PIECE])):
            problems[Problem.IN_CUDA_GRAPH] += 1
        self._lost_in_graph = False
        for problem in self._metric.take_problems():
            problems[problem] += 1
        for problem, n in self._outside.items():
            problems[problem] += n
        self._outside.clear()
        return problems


def _summed(examples: ExamplesOfWindow | None, vectors: Sequence[Tensor]) -> ExamplesOfWindow | None:
    """The examples with their vector as the collective sums it, if there is one."""
    return replace(examples, vector=vectors[0]) if examples is not None else None
