"""Watches the training loop: when the optimizer steps, how often forward runs, which parameters are trained."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from sonde.batch_size.forward_watch import ForwardWatch
from sonde.batch_size.frozen_on_ranks import FrozenOnRanks
from sonde.batch_size.frozen_watch import FrozenWatch
from sonde.batch_size.model_checks import BATCH_NORM, STEPS_IN_BACKWARD, n_batch_norms, n_post_accumulate_hooks
from sonde.batch_size.step_watch import Alert, StepWatch
from sonde.batch_size.taps.tap import Problem
from sonde.batch_size.taps.window_reader import WindowReader
from sonde.parallel.optimizers import Optimizers
from sonde.parallel.wrappers import Wrapper
from sonde.wording import plural


@dataclass(frozen=True)
class LoopNotes:
    """What the loop did in a window.

    Attributes:
        problems: reasons why the window's pieces cannot be used.
        frozen: which parameters are no longer trained on this rank, to be summed over ranks.
    """

    problems: tuple[Problem, ...]
    frozen: Tensor


class LoopWatch:
    """Everything about a loop that no gradient shows.

    Args:
        model: as the user calls it.
        optimizer: the optimizer of the loop, or several in a list; None to find them by their steps.
        wrapper: of the model.
        frozen: tells all ranks which parameters are no longer trained.
        reader: the reader of the window.
        has_peers: whether other ranks sum with this one.
        end_window: ends the present window, at a step.
        alert: called with an alert's name and message; besides those of `StepWatch` with "batch_norm".
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers,
        wrapper: Wrapper,
        frozen: FrozenOnRanks,
        reader: WindowReader,
        *,
        has_peers: bool,
        end_window: Callable[[], None],
        alert: Alert,
    ) -> None:
        parameters = list(wrapper.parameters.values())
        self._forwards = ForwardWatch(model, reader.device, self)
        self.n_passed_pieces = 0
        """Declared pieces of the present window, if it is not measured."""
        self._steps = StepWatch(
            optimizer,
            wrapper,
            reader,
            has_peers=has_peers,
            n_runs=lambda: self._forwards.n_forwards + self._forwards.n_backwards + self.n_passed_pieces,
            end_window=end_window,
            alert=alert,
        )
        self._trained, self._frozen = FrozenWatch(parameters), frozen
        self._parameters, self._reader = parameters, reader
        self._n_hooks = n_post_accumulate_hooks(parameters)
        self._model, self._alert = model, alert
        self._n_batch_norms: int | None = n_batch_norms(model)
        """Batch-normalisation layers in train mode at attach; None once the first window has ended."""

    def backward_ended(self) -> None:
        """Count a backward outside `piece()`."""
        self._forwards.backward_ended()
        self._steps.piece_begins()

    def piece_begins(self, *, is_measured: bool) -> None:
        """Count a declared piece."""
        self.n_passed_pieces += not is_measured
        self._steps.piece_begins()

    def is_ended_already(self) -> bool:
        """Whether the call by which the loop ends a window comes right after the step that has ended it."""
        return self._steps.is_ended_already()

    def step_has_begun(self, optimizer: Any) -> None:
        """End the window of a step that began before attach, and whose closure has run now."""
        self._steps.step_has_begun(optimizer)

    @property
    def seconds(self) -> float:
        """Host time spent so far in hooks of optimizers and of the model's forward, in all windows."""
        return self._steps.seconds + self._forwards.seconds

    @property
    def rate(self) -> float | Tensor | None:
        """The learning rate now; see `StepWatch.rate`."""
        return self._steps.rate

    def begin_window(self, *, is_measured: bool) -> None:
        """Note whether the window that begins is measured."""
        self._steps.is_measured = is_measured

    def window_passes(self, number: int) -> None:
        """Note that a window is being ended that was not measured.

        Args:
            number: of the window.
        """
        self.window_is_left_out()
        if self._trained.is_undecided:
            self._trained.window_ends(number)

    def window_is_left_out(self) -> None:
        """Note that a step follows whose window is not counted."""
        self.n_passed_pieces = 0
        self._steps.window_ended()
        self._forwards.window_passes()

    def window_ends(self, number: int) -> LoopNotes:
        """Note that a measured window is being ended.

        Args:
            number: of the window.
        """
        self._count_batch_norms_again()
        if self._forwards.were_recorded:
            self._reader.saw_recording()
        has_pieces = self._reader.n_pieces > 0
        self._steps.window_ended()
        found = {
            Problem.FORWARD_ALONE: self._forwards.n_forwards > 0 and not has_pieces,
            Problem.STEP_ALONE: self._steps.is_ending and not (self._forwards.n_forwards or has_pieces),
            Problem.EVALUATED_AGAIN: self._steps.has_evaluated_again,
            Problem.STEPPED_IN_BACKWARD: self._steps.take_stepped_in_backward(),
            Problem.TAKEN_IN_BACKWARD: self._gradients_were_taken(),
            Problem.MORE_BACKWARDS: self._forwards.window_ends(has_pieces=has_pieces),
        }
        self._trained.window_ends(number)
        frozen = self._frozen.numbers(self._trained.gone, self._trained.take_moves(), number)
        return LoopNotes(tuple(p for p, is_found in found.items() if is_found), frozen)

    def _count_batch_norms_again(self) -> None:
        """In the first window. A model may be attached in evaluation mode, as pretrained models often come."""
        if self._n_batch_norms is None:
            return
        n_before, self._n_batch_norms = self._n_batch_norms, None
        if (n := n_batch_norms(self._model)) > n_before:
            self._alert("batch_norm", f"{plural(n, 'layer')}, {n_before} of them so at attach: {BATCH_NORM}")

    def _gradients_were_taken(self) -> bool:
        """Whether hooks may have taken the gradients that the window's pieces had."""
        if not self._reader.n_pieces or any(p.grad is not None for p in self._parameters):
            return False
        if not any(p.requires_grad for p in self._parameters):  # a pipeline stage that was frozen has none
            return False
        return n_post_accumulate_hooks(self._parameters) > 0

    def hooks_in_words(self) -> str:
        """A sentence about post-accumulate-grad hooks that were added since the last call, or since attach."""
        n_before, self._n_hooks = self._n_hooks, n_post_accumulate_hooks(self._parameters)
        if self._n_hooks <= n_before:
            return ""
        n_new = plural(self._n_hooks - n_before, "parameter")
        return f"post-accumulate-grad hooks on {n_new} since attach: {STEPS_IN_BACKWARD}"

    def restore(self, frozen: Collection[str]) -> None:
        """Go on after a state was loaded; see `FrozenOnRanks.restore`."""
        self._trained.restore(self._frozen.restore(frozen))

    def close(self) -> None:
        """Remove every hook."""
        self._steps.close()
        self._forwards.close()
