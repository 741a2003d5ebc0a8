"""Watches what becomes of the model after attach, which no gradient shows: its wrapper, parameters and hooks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sonde.batch_size.frozen_on_ranks import FrozenOnRanks
from sonde.batch_size.frozen_watch import FrozenWatch
from sonde.batch_size.model_checks import BATCH_NORM, STEPS_IN_BACKWARD, n_batch_norms, n_post_accumulate_hooks
from sonde.batch_size.step_watch import Alert
from sonde.batch_size.taps.problems import Problem
from sonde.batch_size.taps.window_reader import WindowReader
from sonde.batch_size.unmeasured_parameters import UnmeasuredParameters
from sonde.parallel.refused_models import wrapper_around
from sonde.parallel.unwrap import unwrap_model
from sonde.parallel.wrappers import Wrapper
from sonde.wording import plural

_MOST_LOOKS = 5
"""A look at every living object takes some hundredths of a second, so a run takes few."""


class ModelWatch:
    """Looks at the model when windows end.

    A model that is wrapped or cut after attach cannot be measured. A cut model has other parameters, which every
    measured window shows. DDP leaves the parameters alone. So its module is looked for among all living objects, where
    a plain model trains in a job of several processes: when the first window ends, and again after windows whose
    gradient was changed.

    Args:
        model: as the user calls it.
        wrapper: what it was wrapped in at attach.
        frozen: tells all ranks which parameters are no longer trained.
        reader: of the windows.
        alert: called with an alert's name and message: "batch_norm" and "not_watched".
        say: takes a sentence for the user.
    """

    def __init__(
        self,
        model: nn.Module,
        wrapper: Wrapper,
        frozen: FrozenOnRanks,
        reader: WindowReader,
        *,
        alert: Alert,
        say: Callable[[str], None],
    ) -> None:
        self._model, self._reader, self._alert, self._say = model, reader, alert, say
        self.unmeasured = UnmeasuredParameters(model, wrapper)
        self._parameters = list(wrapper.parameters.values())
        self._trained, self._frozen = FrozenWatch(self._parameters), frozen
        self._n_hooks = n_post_accumulate_hooks(self._parameters)
        self._n_batch_norms: int | None = n_batch_norms(model)
        """Batch-normalisation layers in train mode at attach; None once the first window has ended."""
        self._may_be_wrapped = wrapper.group is None
        self._looks_for_wrapper, self._n_looks = True, 0
        self._late_wrapper: weakref.ref[nn.Module] | None = None

    def window_passes(self, number: int) -> None:
        """Note that a window is being ended that was not measured.

        Args:
            number: of the window.
        """
        if self._trained.is_undecided:
            self._trained.window_ends(number)

    def window_ends(self, number: int) -> tuple[set[Problem], Tensor]:
        """Look at the model while a measured window is being ended.

        Args:
            number: of the window.

        Returns:
            Why the window's pieces cannot be used; and which parameters are no longer trained on this rank, to be
            summed over ranks.
        """
        if self._n_batch_norms is not None:  # a model may be attached in evaluation mode, as pretrained ones often come
            n_before, self._n_batch_norms = self._n_batch_norms, None
            if (n := n_batch_norms(self._model)) > n_before:
                self._alert("batch_norm", f"{plural(n, 'layer')}, {n_before} of them so at attach: {BATCH_NORM}")
        problems = {Problem.TAKEN_IN_BACKWARD} if self._gradients_were_taken() else set()
        if (change := self.unmeasured.late_change()) is not None:
            problems.add(change)
        elif self._is_wrapped():
            problems.add(Problem.WRAPPED_LATE)
        self._trained.window_ends(number)
        return problems, self._frozen.numbers(self._trained.gone, self._trained.take_moves(), number)

    def _gradients_were_taken(self) -> bool:
        """Whether hooks may have taken the gradients that the window's pieces had."""
        if not self._reader.n_pieces or any(p.grad is not None for p in self._parameters):
            return False
        if not any(p.requires_grad for p in self._parameters):  # a pipeline stage that was frozen has none
            return False
        return n_post_accumulate_hooks(self._parameters) > 0

    def _is_wrapped(self) -> bool:
        """Whether what averages gradients over ranks has come after attach."""
        if self._may_be_wrapped and self._looks_for_wrapper:
            self._looks_for_wrapper, self._n_looks = False, self._n_looks + 1
            wrapper = _averaging_wrapper(self._model)
            self._late_wrapper = weakref.ref(wrapper) if wrapper is not None else None
        return self._late_wrapper is not None and self._late_wrapper() is not None

    def look_again(self) -> None:
        """Look for a wrapper when the next measured window ends: one may be what has changed a gradient."""
        self._looks_for_wrapper = self._n_looks < _MOST_LOOKS

    def tell_news(self) -> None:
        """Say which parameters cannot be measured, and whether hooks have come that may step an optimizer."""
        if unmeasured := self.unmeasured.alert():
            self._alert("not_watched", unmeasured)
        n_before, self._n_hooks = self._n_hooks, n_post_accumulate_hooks(self._parameters)
        if self._n_hooks > n_before:
            n_new = plural(self._n_hooks - n_before, "parameter")
            self._say(f"post-accumulate-grad hooks on {n_new} since attach: {STEPS_IN_BACKWARD}")

    def restore(self, frozen: Collection[str]) -> None:
        """Go on after a state was loaded; see `FrozenOnRanks.restore`."""
        self._trained.restore(self._frozen.restore(frozen))


def _averaging_wrapper(model: nn.Module) -> nn.Module | None:
    """What averages the gradients of a model, or of a part of it, over several ranks; None without a wrapper."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    inside = (m for m in model.modules() if isinstance(m, DistributedDataParallel))
    wrapper = next(inside, None) or wrapper_around(unwrap_model(model))
    is_alone = isinstance(wrapper, DistributedDataParallel) and wrapper.process_group.size() == 1
    return None if is_alone else wrapper
