"""Reads the gradients of each window: its pieces by a tap, its final gradient from `.grad` or DDP's buckets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from sonde.batch_size.measuring_cost import WindowCosts
from sonde.batch_size.taps.expert_pieces import ExpertPieces
from sonde.batch_size.taps.final_gradient import FinalGradient
from sonde.batch_size.taps.metric import Metrics
from sonde.batch_size.taps.named import Shapes, named, packed, under
from sonde.batch_size.taps.tap import GradientSummary, Number, Problem, Tap
from sonde.batch_size.taps.window_sums import PieceCounts, WindowSums
from sonde.batch_size.taps.witness import Witness
from sonde.batch_size.window_clock import MEASURING, OwnTime
from sonde.gradient_norm.global_norm import GlobalNorm
from sonde.parallel.devices import is_capturing, runs_beside_host, widened
from sonde.parallel.process_groups import start_reduce
from sonde.parallel.wrappers import Wrapper


@dataclass(frozen=True)
class Window:
    """The numbers of one window on the device, on their way to the host.

    Attributes:
        sums: those that are summed over ranks, in one vector; a collective may still be adding other ranks'.
        shapes: of each of them, by name.
        own: the others, by name: this rank's, or the same on every rank. A name may take the place of one of the sums.
        witness_sizes: elements that the witness read of each parameter, in order, by index.
        work: the collective; None with a single rank.
    """

    sums: Tensor
    shapes: Shapes
    own: Mapping[str, Tensor]
    witness_sizes: Mapping[int, int]
    work: dist.Work | None


class Examples(Protocol):
    """Reads the gradients of a piece's single examples, where another part of the probe has chosen to."""

    @property
    def is_open(self) -> bool:
        """Whether examples are read now."""

    def begin_piece(self) -> None:
        """From here until `end_piece` all backwards are one piece: those before it, outside pieces, do not count."""

    def end_piece(self, counts: PieceCounts, unscale: Tensor | None) -> None:
        """Add the examples of the piece that ends here; `unscale` undoes a GradScaler's scale."""

    def discard_piece(self) -> None:
        """Forget the present piece."""

    def end_window(self, sums: WindowSums, sq_norms_big: Tensor | None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The numbers of the window by name, those to be summed over ranks and this rank's; starts the next window.

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
        metrics: in which gradients are measured.
        witness: which elements are compared.
        tap: reads the pieces.
        own: the probe's time. Whoever ends a window counts that.
        grad_scaler: the enabled GradScaler; a piece is divided by the scale that it was taken at.
    """

    def __init__(
        self,
        wrapper: Wrapper,
        group_names: Sequence[str],
        metrics: Metrics,
        witness: Witness,
        tap: Tap,
        own: OwnTime,
        *,
        grad_scaler: torch.amp.GradScaler | None,
        first: int = 0,
        n_further_units: int = 0,
        examples: Examples | None = None,
    ) -> None:
        self.parameters = list(wrapper.parameters.values())
        self.device = wrapper.leaves[0].device
        self.groups = tuple(dict.fromkeys(group_names))
        self._wrapper, self._metrics, self._witness = wrapper, metrics, witness
        self._tap, self._grad_scaler, self._examples, self._own = tap, grad_scaler, examples, own
        place = {name: i for i, name in enumerate(self.groups)}
        group_index = [place[name] for name in group_names[first : first + len(self.parameters)]]
        self._sums = WindowSums(
            group_index,
            n_groups=len(self.groups),
            n_witness=witness.size,
            metrics=metrics,
            device=self.device,
            data=wrapper.data,
            has_loss_scale=grad_scaler is not None,
            n_further_units=n_further_units,
        )
        self._apart: dict[str, ExpertPieces] = {}
        if wrapper.experts is not None:
            self._apart["experts"] = ExpertPieces(
                wrapper.experts,
                self._sums,
                witness,
                n_parameters=len(group_index),
                n_metrics=len(metrics.all),
                counts_pieces=wrapper.data.counts_pieces,
                device=self.device,
            )
        self._may_be_recorded = runs_beside_host(self.device)
        self._saw_recording = self._lost_in_graph = False
        self._outside: Counter[Problem] = Counter()
        of_classes = {name: pieces.indices for name, pieces in self._apart.items()}
        self.final = FinalGradient(wrapper, self.groups, group_index, metrics, witness, of_classes, own)
        """Reads the gradient at the end of a window."""

    @property
    def n_pieces(self) -> int:
        """Pieces of the present window on this rank so far."""
        return self._sums.n_pieces

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
        with self._own.on(MEASURING):
            gradient = self._tap.end_piece()
            if gradient is None:  # the tap sees whole windows: end_window gets the gradient
                self._sums.count(counts)
            else:
                gradient = self._unscaled(gradient)
                for pieces in self._apart.values():
                    gradient = pieces.take_from(gradient, counts)
                self._sums.add(gradient, counts)
            if self._examples is not None and self._examples.is_open:
                self._examples.end_piece(counts, self._unscale())

    def begin_pieces(self, n: int) -> None:
        """From here until `end_pieces` the backwards of a pipeline schedule are n pieces."""
        self._tap.begin_pieces(n)

    def end_pieces(self, counts: Sequence[PieceCounts]) -> None:
        """Add the pieces that end here to the window."""
        with self._own.on(MEASURING):
            for gradient, of_piece in zip(self._tap.end_pieces(), counts, strict=True):
                self._sums.add(self._unscaled(gradient), of_piece)

    def _unscaled(self, gradient: GradientSummary) -> GradientSummary:
        """The gradient divided by the GradScaler's present scale, which stays on the device."""
        unscale = self._unscale()
        return gradient if unscale is None else gradient.scaled(unscale, self._metrics.n_squares)

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
            reads_grad: measure the norm of `.grad` that a clip needs.
            problems: those of the window that no tap can see.
            costs: what this rank has spent since the window before; rides along in the sum over ranks.
            frozen: what this rank knows of frozen parameters; rides along too. 1-D, equally long on all ranks.

        Returns:
            The window; and the plain norm of its gradient, including parameters given to `clip_also`, if `reads_grad`.
        """
        grads = [p.grad for p in self.parameters]
        rank_gradient = self._tap.end_window()
        if rank_gradient is not None and self._sums.n_pieces:
            self._sums.merge(self._unscaled(rank_gradient.local))
        is_cut = self._wrapper.mesh is not None
        norm = self.final.norm_of_clip() if reads_grad and not is_cut else None
        witness = self.final.witness(grads)
        # |F|² comes from the cheapest source: DDP's buckets, the norm that a clip needs anyway, or a read of `.grad`.
        has_norm = reads_grad and self._metrics.is_plain and not (self._reads_examples or rank_gradient)
        if rank_gradient is not None:
            terms = self.final.since_reduction(rank_gradient, witness)
        else:
            terms = self.final.terms(grads, self._metrics.without_first() if has_norm else self._metrics)
        final = self._of_final(witness, terms)
        sums, own = self._of_pieces(problems, terms, costs or WindowCosts())
        sums["frozen"] = terms.new_zeros(0) if frozen is None else frozen
        # Where ranks hold parts of the gradient, the sum over ranks takes in its squares and elements.
        (sums if is_cut else own).update(final)
        vector, shapes = packed(sums)
        work = None
        if is_cut and reads_grad:
            norm = self.final.norm_of_clip(riding=vector)
        else:
            work = start_reduce(vector, self._wrapper.group)
        if has_norm:
            assert norm is not None
            others = named(vector, shapes) if is_cut else final
            names = ["big", *(f"{name}/big" for name in self._apart)]
            for name, squares in zip(names, self.final.squares(norm), strict=True):
                own[name] = torch.cat([squares[None], others[name]])
        sizes = dict(self._witness.sizes)
        self._witness.move()  # once per window on every rank, so that all ranks compare the same elements
        return Window(vector, shapes, own, sizes, work), norm

    def _of_pieces(
        self, problems: Collection[Problem], terms: Tensor, costs: WindowCosts
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The numbers of the window's pieces by name: those that are summed over ranks, and this rank's own."""
        sums: dict[str, Tensor] = {}
        own: dict[str, Tensor] = {}
        if self._examples is not None:
            sums, own = self._examples.end_window(self._sums, terms[0] if self._reads_examples else None)
            sums, own = under("examples", sums), under("examples", own)
        counts = self._take_problems(problems)
        for name, pieces in self._apart.items():
            class_sums, found = pieces.take()
            sums |= under(name, class_sums)
            for problem, n in found.items():
                counts[problem] += n
        return self._sums.take(counts, costs.numbers(), declares=self._tap.only_declared) | sums, own

    def _of_final(self, witness: Tensor, terms: Tensor) -> dict[str, Tensor]:
        """The elements and the squares of the final gradient by name, and those of classes apart."""
        final: dict[str, Tensor] = {}
        for name, pieces in self._apart.items():
            elements, own = witness * pieces.own_elements, terms * pieces.is_own
            # Multiplied by 0, not left out: what is not finite stays so, and drops the window.
            class_big = self._sums.per_group(terms * (1.0 - pieces.is_own))
            final |= under(name, {"witness_final": witness - elements, "big": class_big})
            witness, terms = elements, own
        return {"witness_final": witness, "big": self._sums.per_group(terms)} | final

    def forget_window(self) -> None:
        """Forget the pieces since the last window ended."""
        if self.is_recorded():
            self._lost_in_graph = True  # the sums stay as they are, and the window that holds them is dropped
            return
        if self._examples is not None:
            self._examples.end_window(self._sums, None)
        for pieces in self._apart.values():
            pieces.forget()
        self._sums.take(self._take_problems())
        self._tap.end_window()

    def _take_problems(self, of_window: Collection[Problem] = ()) -> list[Number]:
        problems = self._tap.take_problems()
        self._saw_recording |= bool(problems[Problem.IN_CUDA_GRAPH])  # a number of the host
        if self._lost_in_graph or (self._saw_recording and (not self._sums.n_pieces or problems[Problem.EMPTY_PIECE])):
            problems[Problem.IN_CUDA_GRAPH] += 1
        self._lost_in_graph = False
        for problem, n in (self._outside + Counter(of_window)).items():
            problems[problem] += n
        self._outside.clear()
        return problems
