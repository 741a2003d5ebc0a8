"""Reads the gradients of each window: its pieces by a tap, and the final gradient."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from sonde.batch_size.pace import WindowCosts
from sonde.batch_size.taps.metric import GradientMetric, GradientTerms
from sonde.batch_size.taps.problems import Problem
from sonde.batch_size.taps.shared_pieces import CutGradients, PieceClass
from sonde.batch_size.taps.tap import Tap
from sonde.batch_size.taps.update import UpdateSample
from sonde.batch_size.taps.window_sums import Shapes, WindowSums, packed, prefixed
from sonde.batch_size.taps.witness import Witness
from sonde.batch_size.units import Number, PieceCounts
from sonde.batch_size.window_clock import OwnTime
from sonde.gradient_norm.global_norm import GlobalNorm, global_norm
from sonde.gradient_norm.plan import NormPlan
from sonde.gradient_norm.power_sums import power_sum
from sonde.parallel.devices import is_capturing, runs_beside_host, to_device, widened, zero_sums
from sonde.parallel.placements import is_partial, local_tensor, spec_of
from sonde.parallel.process_groups import start_reduce
from sonde.parallel.shares import share_of
from sonde.parallel.wrappers import Wrapper

if TYPE_CHECKING:
    from sonde.batch_size.found_model import FoundModel
    from sonde.batch_size.per_example.example_window import ExampleWindow


@dataclass(frozen=True)
class Window:
    """The numbers of one window on the device, on their way to the host.

    Attributes:
        sums: those that are summed over ranks, in one vector; a collective may still be adding other ranks'.
        shapes: of each of them, by name.
        own: the others, by name: this rank's, or the same on every rank.
        witness_sizes: elements that the witness read of each parameter, in order, by index.
        classes: of parameters that are solved apart from the rest.
        work: the collective; None with a single rank.
    """

    sums: Tensor
    shapes: Shapes
    own: Mapping[str, Tensor]
    witness_sizes: Mapping[int, int]
    classes: Sequence[PieceClass]
    work: dist.Work | None


class FinalGradient:
    """Reads `.grad`, whole or cut over ranks, after the last piece of a window.

    Args:
        wrapper: the model.
        metrics: in which gradients are measured.
        witness: which elements are compared.
        own: the probe's time.
    """

    def __init__(self, wrapper: Wrapper, metrics: Sequence[GradientMetric], witness: Witness, own: OwnTime) -> None:
        self._wrapper, self._metrics, self._witness = wrapper, metrics, witness
        self._device = wrapper.leaves[0].device
        self._unmeasured: list[int] | None = None
        self._own = own
        self.clip_also({})
        self._first_rank = min(self.plan.in_stage, default=0)
        self._cut = CutGradients(parameters := list(wrapper.parameters.values()), self._first_rank)
        self._own_norm: Tensor | None = None
        """The loop's own norm, |F|² of what this rank counts, and of what it holds, when that was taken; [3]."""
        self._partial_now: list[int] = []
        """Parameters whose gradients were partial at the end of the window."""
        self.update = UpdateSample(parameters, None if wrapper.mesh is None else self._first_rank, self._device)
        """Reads how far a step moves the parameters."""
        n_stages = 1 if wrapper.pp_mesh is None else wrapper.pp_mesh.size()
        self.n_parts = n_stages * max((share_of(spec_of(p)).n_shards for p in parameters), default=1)
        """Stages and shards that the model is cut into."""
        self.n_ranks = 1 if wrapper.mesh is None else wrapper.mesh.size()
        """Ranks that hold the model."""

    def clip_also(self, unmeasured: Mapping[str, Tensor]) -> None:
        """Include parameters that are not measured, by name, in the norm of a clip."""
        ids = [id(p) for p in unmeasured.values()]
        if self._unmeasured == ids:
            return
        self._unmeasured = ids
        clipped = {**self._wrapper.parameters, **unmeasured}
        self.plan = NormPlan(
            [*clipped.values()],
            [*clipped],
            mesh=self._wrapper.mesh,
            pp_mesh=self._wrapper.pp_mesh,
        )

    def note_own_norm(self, norm: Tensor, max_norm: float | None) -> None:
        """Note the loop's own 2-norm of this window, where ranks hold parts of the gradient; the last one counts.

        What this rank holds of the gradient is read now: it may be scaled before the window ends. Partial gradients,
        which only a collective would sum, are read then, in relation to the others.

        Args:
            norm: on this rank, before the clip. A DTensor that is partial stands for this rank's part: its whole, by
                which a clip scales, is the true norm.
            max_norm: of the clip by this norm; None where another one clips, or none.
        """
        if self._wrapper.mesh is None:
            return
        spec = spec_of(norm) if is_partial(norm) else None
        norm = to_device(widened(local_tensor(norm.detach())), self._device).reshape(())
        if spec is not None:
            axes = zip(spec.mesh.shape, spec.placements, strict=True)
            n_parts = math.prod(n for n, placement in axes if placement.is_partial())
            square = norm.square()
            self._own_norm = torch.stack([norm, square * n_parts / self.n_ranks, square])
            return
        coefficient = 1.0 if max_norm is None else (max_norm / (norm + 1e-6)).clamp(max=1.0)  # torch's
        grads = [p.grad for p in self._wrapper.parameters.values()]
        held = self._sq_norm([local_tensor(g) for g in grads if g is not None])
        counted = self._sq_norm([*self._parts_now(grads, {}).values()])
        before_clip = torch.stack([counted, held]) / coefficient**2
        self._own_norm = torch.cat([norm[None].clone(), before_clip])

    def _sq_norm(self, tensors: Sequence[Tensor]) -> Tensor:
        by_device: dict[torch.device, list[Tensor]] = {}
        for tensor in tensors:
            by_device.setdefault(tensor.device, []).append(tensor)
        total = zero_sums(device=self._device)
        for on_device in by_device.values():
            total += to_device(power_sum(on_device, 2.0), self._device)
        return total

    def take_own_norm(self, terms: Tensor) -> tuple[Tensor, Tensor]:
        """The loop's own norm and what this rank holds, [2]; and its part of what `OwnNorm` sums over ranks, [5].

        Args:
            terms: |F|² of what this rank counts of each gradient, after the clip; [parameters].
        """
        noted, self._own_norm = self._own_norm, None
        if noted is None:
            return terms.new_zeros(2), terms.new_zeros(5)
        partial = terms[self._partial_now].sum()
        return noted[[0, 2]], torch.cat([torch.ones_like(noted[:1]), noted[1:], partial[None], terms.sum()[None]])

    def norm_of_clip(self, riding: Tensor | None = None) -> GlobalNorm:
        """The norm as a clip takes it, waiting for all ranks; `riding` is summed over them besides."""
        with self._own.no_cost:  # a clip needs it in any window
            return global_norm(self.plan, 2.0, riding=riding)

    def witness(self, grads: Sequence[Tensor | None]) -> Tensor:
        """The elements that are compared; where ranks hold parts, those that this rank is the first to hold, and 0.

        Returns:
            [elements]
        """
        elements: dict[int, Tensor] = {}
        for i in self._witness.indices:
            if (grad := grads[i]) is None:
                continue
            if self._wrapper.mesh is None:
                elements[i] = self._witness.read(i, grad)
            elif share_of(spec := spec_of(grad)).is_first_copy(self._first_rank):
                elements[i] = self._witness.read(i, local_tensor(grad), spec)
        return self._witness.join(elements, self._device)

    def terms(self, grads: Sequence[Tensor | None]) -> Tensor:
        """The terms of what this rank counts of the gradient; [metrics, parameters].

        In fp32, at half the cost of a clip's norm: |F|² is only compared with the pieces, which are squared alike.
        """
        by_device: dict[torch.device, dict[int, Tensor]] = {}
        for i, grad in self._counted(grads).items():
            by_device.setdefault(grad.device, {})[i] = grad
        terms = GradientTerms(self._metrics, len(grads), self._device)
        for on_device in by_device.values():
            terms.take(tuple(on_device), tuple(on_device.values()))
        return terms.sum()

    def _counted(self, grads: Sequence[Tensor | None]) -> dict[int, Tensor]:
        """What this rank counts of each gradient, by index: all, or a part, so that every element counts once."""
        partial: dict[int, Tensor] = {}
        parts = self._parts_now(grads, partial)
        self._partial_now = sorted(partial)
        return parts if self._wrapper.mesh is None else parts | self._cut.sum_partial(partial)

    def _parts_now(self, grads: Sequence[Tensor | None], partial: dict[int, Tensor]) -> dict[int, Tensor]:
        """What this rank counts of gradients that are summed over ranks already; the others are put into `partial`."""
        parts: dict[int, Tensor] = {}
        is_whole = self._wrapper.mesh is None
        for i, grad in enumerate(grads):
            if grad is not None and (part := grad if is_whole else self._cut.part(i, grad, partial)) is not None:
                parts[i] = part
        return parts


class WindowReader:
    """Reads the gradients of pieces and windows, and starts the sum over ranks: one collective per window.

    Args:
        found: the model, and how it is measured.
        own: the probe's time. Whoever ends a window counts that.
        grad_scaler: the enabled GradScaler; a piece is divided by the scale that it was taken at.
        examples: reads single examples besides pieces; None where that is not possible or not wanted.
        on_backward_end: called when a backward outside `begin_piece` … `end_piece` has ended, and is a piece.
    """

    def __init__(
        self,
        found: FoundModel,
        own: OwnTime,
        *,
        grad_scaler: torch.amp.GradScaler | None,
        examples: ExampleWindow | None,
        on_backward_end: Callable[[], None],
    ) -> None:
        wrapper, metrics, classes, whole = found.wrapper, found.metrics, found.classes, found.whole
        self.parameters = list(wrapper.parameters.values())
        self.device = wrapper.leaves[0].device
        self.wrapper, self._metrics, self._classes = wrapper, metrics, classes
        self._grad_scaler, self._examples, self._own = grad_scaler, examples, own
        self._witness = witness = Witness(
            whole.shapes, whole.first, len(self.parameters), [each.indices for each in classes]
        )
        self.tap = Tap(
            wrapper,
            witness,
            metrics,
            staging_bytes=found.options.staging_bytes(self.device),
            on_backward_end=on_backward_end,
            own=own,
        )
        """Reads the pieces."""
        place = {name: i for i, name in enumerate(found.groups)}
        class_of = {i: k for k, each in enumerate(classes, 1) for i in each.indices}
        columns = [class_of.get(i, 0) * len(place) + place[name] for i, name in enumerate(found.group_names)]
        self._sums = WindowSums(
            columns[whole.first : whole.first + len(self.parameters)],
            n_groups=len(place),
            metrics=metrics,
            witness=witness,
            device=self.device,
            data=wrapper.data,
            classes=classes,
            has_loss_scale=grad_scaler is not None,
            n_further_units=len(found.options.units) - 1,
        )
        self._may_be_recorded, self._saw_recording = runs_beside_host(self.device), False
        self._outside: Counter[Problem] = Counter()
        self.final = FinalGradient(wrapper, metrics, witness, own)
        """Reads the gradient at the end of a window."""

    @property
    def n_pieces(self) -> int:
        """Pieces of the present window on this rank so far."""
        return self._sums.n_pieces

    @property
    def tap_name(self) -> str:
        """Where gradients are read now."""
        return self.tap.name + (" and single examples" if self._reads_examples else "")

    @property
    def _reads_examples(self) -> bool:
        return self._examples is not None and self._examples.norms.is_open

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

    def begin_piece(self, n: int | None = None) -> None:
        """From here until `end_piece` all backwards are one piece, or the n pieces of a pipeline's schedule.

        Later backwards outside pieces never count.
        """
        self.tap.begin_piece(n)
        if self._examples is not None and self._examples.norms.is_open:
            self._examples.norms.forget_backwards()

    def discard_piece(self) -> None:
        """Forget the present piece."""
        self.tap.discard_piece()
        if self._examples is not None:
            self._examples.norms.discard()

    def leave_out_backward(self, problem: Problem) -> None:
        """Forget the backward outside pieces that has just ended, since it is no piece; `problem` says why."""
        self._outside[problem] += 1
        self.tap.forget_piece()
        if self._examples is not None:
            self._examples.norms.discard()

    def end_piece(self, *counts: PieceCounts, is_declared: bool = True) -> None:
        """Add the piece that ends here to the window, or the pieces of a pipeline's schedule.

        Args:
            counts: of each.
            is_declared: whether it is no backward outside `begin_piece` … `end_piece`.
        """
        self._outside[Problem.NOT_ALL_DECLARED] += not is_declared
        with self._own.measuring:
            unscale = None if self._grad_scaler is None else self._unscale(self._grad_scaler)
            for gradient, of_piece in zip(self.tap.end_piece(), counts, strict=True):
                self._sums.add(gradient if unscale is None else gradient.scaled(unscale, self._metrics), of_piece)
            if self._examples is not None and self._examples.norms.is_open:  # no pipeline's
                self._examples.end_piece(counts[0], unscale)

    def _unscale(self, grad_scaler: torch.amp.GradScaler) -> Tensor:
        """The factor that undoes the GradScaler's present scale; it stays on the device."""
        return widened(grad_scaler.scale(torch.ones((), device=self.device))).reciprocal()

    # Windows.

    def end_window(
        self,
        *,
        reads_grad: bool,
        problems: Collection[Problem],
        costs: WindowCosts,
        frozen: Tensor,
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
        self.tap.end_window()
        grads = [p.grad for p in self.parameters]
        terms = self.final.terms(grads)
        final = {"witness_final": self.final.witness(grads), "sq_norm_big": self._sums.per_group(terms)}
        final["sq_norm_update"] = self.final.update.take()
        sums, own = self._of_pieces(problems, terms, costs)
        sums["frozen"] = frozen
        # Where ranks hold parts of the gradient, the sum over ranks takes in its squares and elements.
        is_cut = self.wrapper.mesh is not None
        (sums if is_cut else own).update(final)
        if is_cut:
            own["own_norm"], sums["own_norm_squares"] = self.final.take_own_norm(terms[0])
        vector, shapes = packed(sums)
        rides = is_cut and reads_grad
        norm = self.final.norm_of_clip(riding=vector if rides else None) if reads_grad else None
        work = None if rides else start_reduce(vector, self.wrapper.group)
        sizes = dict(self._witness.sizes)
        self._witness.move()  # once per window on every rank, so that all ranks compare the same elements
        return Window(vector, shapes, own, sizes, self._classes, work), norm

    def _of_pieces(
        self, problems: Collection[Problem], terms: Tensor, costs: WindowCosts
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The numbers of the window's pieces by name: to be summed over ranks, and this rank's own."""
        sums: dict[str, Tensor] = {}
        own: dict[str, Tensor] = {}
        if self._examples is not None:
            sums, own = self._examples.end_window(self._sums, terms[0] if self._reads_examples else None)
            sums, own = prefixed("examples", sums), prefixed("examples", own)
        met = self._take_problems(problems)
        return self._sums.end_window(met, costs.numbers(), declares=self.tap.only_declared) | sums, own

    def forget_window(self) -> None:
        """Forget the pieces since the last window ended."""
        if self.is_recorded():  # the sums stay as they are, and the window that holds them is dropped
            self._outside[Problem.IN_CUDA_GRAPH] += 1
            return
        if self._examples is not None:
            self._examples.end_window(self._sums, None)
        self._take_problems()
        self._sums.forget()
        self.tap.end_window()

    def _take_problems(self, of_window: Collection[Problem] = ()) -> dict[Problem, Number]:
        problems = self.tap.take_problems()
        self._saw_recording |= bool(problems.get(Problem.IN_CUDA_GRAPH))
        if self._saw_recording and (not self._sums.n_pieces or problems.get(Problem.EMPTY_PIECE)):
            self._outside[Problem.IN_CUDA_GRAPH] += 1
        for problem, n in (self._outside + Counter(of_window)).items():
            problems[problem] = problems.get(problem, 0) + n
        self._outside.clear()
        return problems
