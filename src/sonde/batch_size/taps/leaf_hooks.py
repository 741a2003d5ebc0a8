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

from sonde.batch_size.hook_failures import count_failure
from sonde.batch_size.taps.autograd_internals import accumulates, inside_another_backward
from sonde.batch_size.taps.context_pieces import ContextPieces, is_context_parallel
from sonde.batch_size.taps.cut_gradients import CutGradients
from sonde.batch_size.taps.left_over import LeftOvers
from sonde.batch_size.taps.metric import Metrics
from sonde.batch_size.taps.piece_gradient import STAGED_NUMEL, STAGED_NUMEL_ON_CPU, PieceGradient, Reading
from sonde.batch_size.taps.switched_hooks import SwitchedHooks
from sonde.batch_size.taps.tap import GradientSummary, Number, Problem
from sonde.batch_size.taps.witness import Witness
from sonde.batch_size.window_clock import MEASURING, OwnTime
from sonde.parallel.devices import is_capturing
from sonde.parallel.own_passes import is_in_own_pass


class LeafHookTap:
    """Leaf hooks on parameters that reduce each piece's gradient to its squared norms.

    Args:
        leaves: leaf tensors that require a gradient, each once.
        parameters: whose `.grad` the optimizer reads, [leaves]; by default the leaves. Under FSDP2, leaves are gathered
            parameters, and these are the sharded ones.
        cut: what this rank counts of a gradient that it shares with other ranks; None if every rank has its own pieces.
        context: reads pieces whose gradients are means over ranks that share sequences; None without.
        witness: elements to copy besides the norms.
        metrics: in which gradients are measured.
        on_backward_end: called when a backward outside `begin_piece` … `end_piece` has ended, and is a piece.
        own: the probe's time.
        n_collectives: counts the collectives that the ranks have issued so far; any of them may have reduced `.grad`.
        staging_bytes: bound of the memory for gradients that wait.
        staged_numel: gradients up to this many elements wait; by default as `piece_gradient.STAGED_NUMEL` says.
    """

    def __init__(
        self,
        leaves: Sequence[Tensor],
        witness: Witness,
        metrics: Metrics,
        *,
        parameters: Sequence[Tensor] | None = None,
        cut: CutGradients | None = None,
        context: ContextPieces | None = None,
        on_backward_end: Callable[[], None],
        own: OwnTime | None = None,
        n_collectives: Callable[[], int] = lambda: 0,
        staging_bytes: int = 8 * 2**20,
        staged_numel: int | None = None,
    ) -> None:
        self.name = "leaf hooks"
        self._spent = (own or OwnTime()).spent
        self._on_backward_end, self._n_collectives = on_backward_end, n_collectives
        device = leaves[0].device
        default = STAGED_NUMEL_ON_CPU if device.type == "cpu" else STAGED_NUMEL
        self._reading = Reading(
            list(leaves),
            witness,
            metrics,
            cut,
            staged_numel=default if staged_numel is None else staged_numel,
            staging_bytes=staging_bytes,
            device=device,
            one_device=all(leaf.device == device for leaf in leaves),
        )
        self._context = context
        self._problems = [0] * len(Problem)
        self.only_declared = False
        self._explicit = False
        self._parameters = leaves if parameters is None else parameters
        self._leaves_have_grad = all(p is leaf for p, leaf in zip(self._parameters, leaves, strict=True))
        self._left_overs = LeftOvers(self._parameters, witness)
        self._scheduled: list[PieceGradient] = []
        self._turns: list[int] = []
        self._asked_at: int | None = None
        self._is_recorded = self._has_left_out = False
        self._reset()
        self._hooks = SwitchedHooks(leaves, map(self._hook, range(len(leaves))))

    def _reset(self) -> None:
        self._piece = PieceGradient(self._reading) if self._context is None else self._context.begin()
        self._backwards: set[int] = set()
        self._grad_is_piece = False
        self._n_open = 0

    def begin_piece(self, *, is_first: bool) -> None:
        """From here until `end_piece` all backwards are one piece. Later backwards outside pieces never count.

        Args:
            is_first: whether the piece is the first of its window on this rank, so that `.grad` holds nothing else.
        """
        self._reset()
        self._explicit = self.only_declared = True
        self._grad_is_piece = is_first and not self._has_left_out

    def end_piece(self) -> GradientSummary:
        """The gradient of the piece that ends here; parameters that it did not reach count as 0."""
        self._problems[Problem.EMPTY_PIECE] += not self._backwards
        summary = self._piece.summary()
        if summary.problem is not None:
            self._problems[summary.problem] += 1
        self._reset()
        self._explicit = False
        return summary

    def begin_pieces(self, n: int) -> None:
        """From here until `end_pieces` the backwards of a pipeline schedule are n pieces.

        A stage runs the pieces' backwards in their order, whatever runs between them. So the k-th gradient of each
        parameter is of the k-th piece.
        """
        self._reset()
        self._explicit = self.only_declared = True
        bound = self._reading.staging_bytes // n
        self._scheduled = [PieceGradient(self._reading, bound, clones=True) for _ in range(n)]
        self._turns = [0] * len(self._reading.leaves)

    def end_pieces(self) -> list[GradientSummary]:
        """The gradients of the pieces that end here, in their order."""
        summaries = [piece.summary() for piece in self._scheduled]
        # A stage that was frozen whole has no gradients. Its zeros are right, and the other stages' pieces count.
        is_trained = any(parameter.requires_grad for parameter in self._parameters)
        self._problems[Problem.EMPTY_PIECE] += is_trained and not any(self._turns)
        # A parameter that took part in some pieces only does not tell in which.
        self._problems[Problem.NOT_IN_EVERY_PIECE] += any(turn not in (0, len(summaries)) for turn in self._turns)
        self._scheduled = []
        self._reset()
        self._explicit = False
        return summaries

    def discard_piece(self) -> None:
        """Forget the present piece. Whatever its backward has added to `.grad` stays there."""
        self._problems[Problem.INTERRUPTED] += bool(self._backwards) or (bool(self._scheduled) and any(self._turns))
        self._scheduled = []
        self._reset()
        self._explicit = False

    def leave_out_backward(self) -> None:
        """Forget the backward outside pieces that has just ended. It has added to `.grad`."""
        self._has_left_out = True
        self._reset()

    def end_window(self) -> None:
        """Return nothing: `end_piece` has given the gradient of every piece."""
        self._left_overs.new_window()
        self._has_left_out = False

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
        spent = self._spent

        # Caches are cold between two kernels of a backward, so every line of Python costs: keep them few.
        def hook(grad: Tensor | None) -> None:
            if grad is None:  # a custom Function may return None for a leaf
                return
            start = time.perf_counter()
            try:
                if self._scheduled:
                    if not self._runs_in_graph(grad):
                        with torch.no_grad():
                            self._take_in_turn(index, grad)
                elif torch._C._current_graph_task_id() in self._backwards or self._opens_backward(index, grad):
                    if torch.is_grad_enabled():  # create_graph: the measurement must stay out of the user's graph
                        with torch.no_grad():
                            self._take(index, grad)
                    else:
                        self._take(index, grad)
            except Exception as error:  # a bug, or no memory left: the user's backward goes on
                count_failure(self._problems, error)
            spent[MEASURING] += time.perf_counter() - start

        return hook

    def _opens_backward(self, index: int, grad: Tensor) -> bool:
        """Whether a backward that is met for the first time counts; if so, add it to a piece and watch for its end."""
        # Neither torch.autograd.grad nor a pass of sonde's own counts. Once pieces are declared, a backward outside
        # them does not count either.
        leaf = self._reading.leaves[index]
        if is_in_own_pass(leaf) or not accumulates(leaf):
            return False
        if self.only_declared and not self._explicit:
            self._pass_over(index, grad)
            return False
        if self._runs_in_graph(grad):
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
        # FSDP2's sharded parameters get theirs when a backward reduces it.
        self._problems[Problem.ZEROED] += self._leaves_have_grad and self._left_overs.are_gone()
        self._problems[Problem.CONTEXT_PARALLEL] += self._context is None and is_context_parallel()
        self._backwards.add(torch._C._current_graph_task_id())
        return True

    def _pass_over(self, index: int, grad: Tensor) -> None:
        """Note a backward outside pieces that is none. If it is the window's first, what it finds in `.grad` is old.

        What later backwards find there may be of this one. If it only fills up, its own part is 0, but DDP and FSDP2
        may have reduced the gradient of other ranks into it.
        """
        self._has_left_out = True
        if index in self._left_overs.unseen and not is_capturing(grad.device):
            self._left_overs.look(index)

    def _runs_in_graph(self, grad: Tensor) -> bool:
        """Whether the device records this backward into a graph, where nothing may be launched. Asked once for each."""
        number = torch._C._current_graph_task_id()
        if number != self._asked_at:
            self._asked_at, self._is_recorded = number, is_capturing(grad.device)
            self._problems[Problem.IN_CUDA_GRAPH] += self._is_recorded
        return self._is_recorded

    def _close_backward(self) -> None:
        try:
            if self._explicit:
                self._n_open -= 1
                # A collective issued while backward ran may have reduced `.grad`: it then holds more than this piece.
                self._grad_is_piece &= self._n_collectives() == self._collectives_before
            elif self._backwards:
                self._on_backward_end()
        except Exception as error:
            count_failure(self._problems, error)

    def _take_in_turn(self, index: int, grad: Tensor) -> None:
        """Take a gradient for the piece whose turn it is."""
        if index in self._left_overs.unseen:
            self._left_overs.look(index)
        turn = self._turns[index]
        self._turns[index] += 1
        if turn < len(self._scheduled) and (problem := self._scheduled[turn].take(index, grad)) is not None:
            self._problems[problem] += 1

    def _take(self, index: int, grad: Tensor) -> None:
        if index in self._left_overs.unseen:
            self._left_overs.look(index)
        if (problem := self._piece.take(index, grad, grad_is_sum=self._grad_is_piece)) is not None:
            self._problems[problem] += 1
