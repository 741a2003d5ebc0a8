"""The tap reads the gradients of pieces while backward runs, by hooks on leaves: which backwards make a piece."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from sonde.batch_size.hooks import accumulates, inside_another_backward, log_failure
from sonde.batch_size.taps.leaf_hooks import STAGED_NUMEL, STAGED_NUMEL_ON_CPU, GradientSummary, PieceGradient
from sonde.batch_size.taps.metric import GradientMetric
from sonde.batch_size.taps.problems import Problem
from sonde.batch_size.taps.shared_pieces import ContextPiece, CutGradients
from sonde.batch_size.taps.witness import Witness
from sonde.batch_size.units import Number
from sonde.batch_size.window_clock import MEASURING, OwnTime
from sonde.parallel.devices import is_capturing, to_device
from sonde.parallel.model_state import is_in_own_pass
from sonde.parallel.placements import local_tensor, spec_of
from sonde.parallel.wrappers import Wrapper

Hook = Callable[[Tensor | None], None]


class SwitchedHooks:
    """Hooks on leaves that can be lifted for a while and put back, as `Tensor.register_hook` puts them.

    A leaf whose last hook is removed keeps an empty dictionary of hooks, which costs 0.3 to 1 µs in each later
    backward. So the dictionary is taken off too. A leaf that is frozen meanwhile has its hook when it is trained again.

    Args:
        hooked: each leaf with its hook.
    """

    def __init__(self, hooked: Sequence[tuple[Tensor, Hook]]) -> None:
        self._hooked = hooked
        self._key = RemovableHandle(OrderedDict()).id  # that no other hook has
        self.put_back()

    def put_back(self) -> None:
        """Put the hooks on again."""
        for leaf, hook in self._hooked:
            if leaf._backward_hooks is None:
                leaf._backward_hooks = OrderedDict()
            leaf._backward_hooks[self._key] = hook

    def lift(self) -> None:
        """Take the hooks off."""
        for leaf, _ in self._hooked:
            if leaf._backward_hooks is not None:
                leaf._backward_hooks.pop(self._key, None)
                if not leaf._backward_hooks:  # otherwise hooks of others are in it
                    leaf._backward_hooks = None


class Tap:
    """Hooks on the leaves of a model that reduce each piece's gradient to its squared norms, and never change it.

    The hooks tell which backwards make a piece. The tap also looks at `.grad` of a few parameters when a backward
    begins to add to it. Before the first backward of a window nothing may be there, and before a later one the
    gradients of earlier pieces must still be.

    Args:
        wrapper: the model. Under FSDP2, its leaves are gathered parameters; the optimizer reads the `.grad` of others.
        witness: which parameters are looked at, and which of their elements are copied besides the norms.
        metrics: in which gradients are measured.
        staging_bytes: bound of the memory for gradients that wait.
        on_backward_end: called when a backward outside `begin_piece` … `end_piece` has ended, and is a piece.
        own: the probe's time.
    """

    name = "leaf hooks"
    """The place where gradients are read, for people."""
    take: Callable[[int, Tensor], Problem | None]
    """Takes the gradient that a backward of the present piece adds to a leaf, by index; returns why the piece is lost,
    if it is."""

    def __init__(
        self,
        wrapper: Wrapper,
        witness: Witness,
        metrics: Sequence[GradientMetric],
        *,
        staging_bytes: int,
        on_backward_end: Callable[[], None],
        own: OwnTime,
    ) -> None:
        self.leaves = leaves = wrapper.leaves
        self.witness, self.metrics, self.staging_bytes, self.device = witness, metrics, staging_bytes, leaves[0].device
        self.spent, self._on_backward_end = own.spent, on_backward_end
        self.only_declared = False
        """Whether declared pieces alone count: this rank has declared one, or has learnt that another rank has. Before,
        each backward is a piece."""
        self.problems: Counter[Problem] = Counter()
        parameters = list(wrapper.parameters.values())
        self._watched: Mapping[int, Tensor] = {i: parameters[i] for i in witness.fixed}
        # FSDP2's sharded parameters get their `.grad` only when a backward reduces it.
        self._leaves_have_grad = bool(self._watched) and all(leaves[i] is p for i, p in self._watched.items())
        self._is_first, self._left_over = True, list[Tensor]()
        self._is_recorded = False
        self._asked_at: int | None = None
        self.staged_numel = STAGED_NUMEL_ON_CPU if self.device.type == "cpu" else STAGED_NUMEL
        """Gradients up to this many elements wait."""
        self.one_device = all(leaf.device == self.device for leaf in leaves)
        """Whether all leaves were on one device at attach."""
        self.summed: set[int] = set()
        """Leaves whose gradients are copied and wait until the piece ends, since several backwards of a piece have
        reached them."""
        self.summed_bytes = 0
        """Of their gradients."""
        self.copies = False
        """Whether all gradients that wait are copied, since torch has refused to read one."""
        self.cut: CutGradients | None = None
        """What this rank counts of a gradient that it shares with other ranks; None if every rank has its own pieces.
        """
        if wrapper.data.n_sharing > 1 or wrapper.experts or wrapper.has_cut_leaves:
            self.cut = CutGradients(leaves, wrapper.data.first_sharing)
        self._context: ContextPiece | None = None
        """Reads pieces whose gradients are means over ranks that share sequences."""
        if (group := wrapper.sequence_group) is not None:
            self._context = ContextPiece(leaves, group, witness, metrics, staging_bytes=staging_bytes)
        self.forget_piece()
        self._hooks = SwitchedHooks([(leaf, self._hook(i)) for i, leaf in enumerate(leaves)])

    def forget_piece(self) -> None:
        """Forget the present piece, or the pieces of a schedule."""
        self.backwards: set[int] = set()
        """Autograd's numbers of the present piece's backwards."""
        self._explicit = self.is_scheduled = False
        if self._context is not None:
            self._context.begin()
        piece = self._context or PieceGradient(self, self.staging_bytes)
        self._pieces: Sequence[PieceGradient | ContextPiece] = [piece]
        self.take = piece.take

    def begin_piece(self, n: int | None = None) -> None:
        """From here until `end_piece` all backwards are one piece, or the n pieces of a pipeline's schedule.

        Later backwards outside pieces never count. A stage runs the pieces' backwards in their order, whatever runs
        between them. So the k-th gradient of each parameter is of the k-th piece.
        """
        if self.backwards:
            self.forget_piece()
        self._explicit = self.only_declared = True
        self.is_scheduled = n is not None
        if n is not None:
            # Zero-bubble schedules add to gradients that autograd leaves alone since somebody holds them: copies wait.
            self._pieces = [PieceGradient(self, self.staging_bytes // n, clones=True) for _ in range(n)]
            self._turns = [0] * len(self.leaves)
            self.take = self._take_turn

    def _take_turn(self, index: int, grad: Tensor) -> Problem | None:
        """Add a gradient to the piece of a schedule whose turn it is."""
        turn = self._turns[index]
        self._turns[index] += 1
        return self._pieces[turn].take(index, grad) if turn < len(self._pieces) else None

    def end_piece(self) -> list[GradientSummary]:
        """The gradients of the pieces that end here, in their order; parameters that they did not reach count as 0."""
        summaries = [piece.summary() for piece in self._pieces]
        if self.is_scheduled:  # a parameter that took part in some pieces only does not tell in which
            self.problems[Problem.NOT_IN_EVERY_PIECE] += any(n not in (0, len(summaries)) for n in self._turns)
        # A stage that was frozen whole has no gradients. Its zeros are right, and the other stages' pieces count.
        may_be_empty = self.is_scheduled and not any(leaf.requires_grad for leaf in self.leaves)
        self.problems[Problem.EMPTY_PIECE] += not (self.backwards or may_be_empty)
        self.forget_piece()
        return summaries

    def discard_piece(self) -> None:
        """Forget the present piece. Whatever its backward has added to `.grad` stays there."""
        self.problems[Problem.INTERRUPTED] += bool(self.backwards)
        self.forget_piece()

    def end_window(self) -> None:
        """Begin the next window."""
        self._is_first = True

    def take_problems(self) -> dict[Problem, Number]:
        """Counts since the last call, some of them on the device; the counts start again from 0."""
        problems: dict[Problem, Number] = {**self.problems}
        self.problems.clear()
        found, self._left_over = self._left_over, []
        if found:
            problems[Problem.NOT_ZEROED] = torch.stack([to_device(n, found[0].device) for n in found]).sum()
        return problems

    def pause(self) -> None:
        """Read nothing until `resume`, and cost nothing in a backward; between windows."""
        self._hooks.lift()

    def resume(self) -> None:
        """Read again from the next window on."""
        self._hooks.put_back()

    def close(self) -> None:
        """Remove every hook."""
        self._hooks.lift()
        self.forget_piece()

    def _hook(self, index: int) -> Hook:
        spent = self.spent

        # Caches are cold between two kernels of a backward, so every line of Python costs: keep them few.
        def hook(grad: Tensor | None) -> None:
            if grad is None:  # a custom Function may return None for a leaf
                return
            start = time.perf_counter()
            try:
                if torch._C._current_graph_task_id() in self.backwards or self._opens_backward(index, grad):
                    if torch.is_grad_enabled():  # create_graph: the measurement must stay out of the user's graph
                        with torch.no_grad():
                            problem = self.take(index, grad)
                    else:
                        problem = self.take(index, grad)
                    if problem is not None:
                        self.problems[problem] += 1
            except Exception as error:  # a bug, or no memory left: the user's backward goes on
                self.failed(error)
            spent[MEASURING] += time.perf_counter() - start

        return hook

    def _opens_backward(self, index: int, grad: Tensor) -> bool:
        """Whether a backward that is met for the first time counts; if so, add it to a piece and watch for its end."""
        leaf = self.leaves[index]
        # Neither torch.autograd.grad nor a pass of sonde's own counts. (Pipelines that split a backward call
        # torch.autograd.grad, and add to `.grad` themselves.)
        if not self.is_scheduled and (is_in_own_pass(leaf) or not accumulates(leaf)):
            return False
        if self.runs_in_graph(grad):
            return False
        if self._is_first:
            self._look_at_first()
        elif self._leaves_have_grad and not self.is_scheduled:
            for p in self._watched.values():
                if p.grad is not None:
                    break
            else:
                self.problems[Problem.ZEROED] += 1
        # Once pieces are declared, a backward outside them does not count. If it only fills up, its own part is 0, but
        # DDP and FSDP2 may have reduced the gradient of other ranks into `.grad`.
        if self.only_declared and not self._explicit:
            return False
        if self._context is None:
            # torch's `context_parallel` replaces the attention while it is in force.
            where = getattr(functional.scaled_dot_product_attention, "__module__", None) or ""
            self.problems[Problem.CONTEXT_PARALLEL] += where.startswith("torch.distributed.tensor.experimental")
        if not self._explicit:
            nested = inside_another_backward(grad)
            if self.backwards and not nested:
                self.discard_piece()  # the previous backward failed half-way: its end was never reported
            if not self.backwards:
                self.problems[Problem.REENTRANT] += nested
                # Private: PyTorch has no public way to learn that a backward has ended. A test guards it.
                Variable._execution_engine.queue_callback(self._close_backward)
        self.backwards.add(torch._C._current_graph_task_id())
        return True

    def _look_at_first(self) -> None:
        """Look at what is in `.grad` before a window's first backward adds to it. The answer stays on the device."""
        self._is_first = False
        for i, p in self._watched.items():
            if (grad := p.grad) is not None and not grad.is_sparse:
                grad = grad.detach()
                self._left_over.append(self.witness.read(i, local_tensor(grad), spec_of(grad)).any())

    def failed(self, error: Exception) -> None:
        """Log an error that is being handled, and drop the window by it."""
        self.problems[Problem.FAILED] += 1
        log_failure(error)

    def runs_in_graph(self, grad: Tensor) -> bool:
        """Whether the device records this backward into a graph, where nothing may be launched. Asked once for each."""
        number = torch._C._current_graph_task_id()
        if number != self._asked_at:
            self._asked_at, self._is_recorded = number, is_capturing(grad.device)
            self.problems[Problem.IN_CUDA_GRAPH] += self._is_recorded
        return self._is_recorded

    def _close_backward(self) -> None:
        try:
            if self.backwards:
                self._on_backward_end()
        except Exception as error:
            self.failed(error)
