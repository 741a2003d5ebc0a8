"""Looks for the models of a script's optimizers in the modules that the script calls."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from sonde.commands.run_script import first_forward
from sonde.commands.run_script.found_models import (
    ModelOfOptimizers,
    model_among_living,
    models_in,
    reshard,
    stepped_by,
    trainable,
)

_MOST_STEPS = 100
"""Steps of other optimizers after which a model is no longer looked for. Its optimizer's first step begins it again."""
_MOST_UNSEEN = 3
"""Steps of an optimizer, after which its model is certainly not called as a module."""
_HOMELESS = (
    "no module holds the parameters that {} steps: put its modules into one nn.Module, or attach by sonde.attach"
)
_NOT_CALLED = (
    "the script does not call the model of {} as a module, model(...), so that no forward can be seen: attach by "
    "sonde.attach"
)


class ModelSearch:
    """Looks for the model of each optimizer, from when it is made until its model is called.

    Args:
        before_call: called before each call of a module while the search goes on.
        attach: called with a model that was found.
        refuse: called with optimizers without a model, and why.
        why_not_reduced: says of a model why it cannot be measured in a job of several processes; empty if it can.
    """

    def __init__(
        self,
        before_call: Callable[[nn.Module], None],
        attach: Callable[[ModelOfOptimizers], None],
        refuse: Callable[[Sequence[Any], str], None],
        why_not_reduced: Callable[[nn.Module], str],
    ) -> None:
        self._before_call, self._attach, self._refuse = before_call, attach, refuse
        self._why_not_reduced = why_not_reduced
        self._steps: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        """Steps of optimizers whose model has not been called yet, in the order in which they were made."""
        self._n_steps = 0
        """Steps of any optimizer since the search began."""
        self._end_watch: Callable[[], None] | None = None

    def pending(self) -> list[Any]:
        """Optimizers whose model has not been called yet."""
        return list(self._steps)

    def add(self, optimizer: Any, n_steps: int = 0) -> None:
        """Look for the model of an optimizer that has taken so many steps."""
        self._steps[optimizer] = n_steps
        self._n_steps = 0
        if self._end_watch is None:
            with contextlib.suppress(RuntimeError):  # another tool has replaced the calls of modules
                self._end_watch = first_forward.watch(self._before_call)

    def stop(self) -> None:
        """Look no more, until an optimizer is made or steps whose model is not known."""
        if self._end_watch is not None:
            self._end_watch()
            self._end_watch = None

    def look_in(self, called: nn.Module) -> None:
        """Attach to the models of optimizers whose parameters a module holds, before the module is called."""
        if not self._steps:  # the script has let go of them
            self.stop()
            return
        touched = self._touched(called)
        found = models_in(called, touched)
        if not found and reshard(called):
            touched = self._touched(called)
            found = models_in(called, touched)
        if self._why_not_reduced(called):
            # One rank alone may call what is not wrapped yet, or what DDP holds, as to show its layers. Attaching takes
            # all ranks, so the call is passed over. If the optimizer steps without another, its model is refused then.
            return
        if not found:  # the script may call a part of a model
            for optimizer in touched:
                if (model := model_among_living(optimizer)) is not None:
                    found.append(ModelOfOptimizers(model, (optimizer,)))
                else:
                    self._give_up(optimizer, _HOMELESS)
        for each in found:
            self._attach(each)
        self.done_with([optimizer for each in found for optimizer in each.optimizers])

    def _touched(self, called: nn.Module) -> list[Any]:
        """The optimizers that step any parameter of a module."""
        held = trainable(called.parameters()).keys()
        return [optimizer for optimizer in self._steps if not held.isdisjoint(stepped_by(optimizer))]

    def done_with(self, optimizers: Sequence[Any]) -> None:
        """Look no more for the models of these optimizers."""
        for optimizer in optimizers:
            self._steps.pop(optimizer, None)
        if not self._steps:
            self.stop()

    def any_stepped(self) -> None:
        """Count a step of any optimizer: the search must not go on for ever."""
        self._n_steps += 1
        if self._n_steps == _MOST_STEPS:
            self.stop()

    def stepped_unseen(self, optimizer: Any) -> None:
        """An optimizer steps whose model is not known. Its window is lost, and its model is looked for in later calls.

        Nothing can be attached here: torch goes through the hooks of steps, and another hook would be an error.
        """
        n_steps = self._steps.get(optimizer, 0) + 1
        if n_steps == _MOST_UNSEEN:
            self._give_up(optimizer, _NOT_CALLED)
        elif n_steps > 1:
            self._steps[optimizer] = n_steps
        elif (model := model_among_living(optimizer)) is None:
            self._give_up(optimizer, _HOMELESS)
        elif why := self._why_not_reduced(model):
            self._give_up(optimizer, why)
        else:
            self.add(optimizer, n_steps)

    def _give_up(self, optimizer: Any, why: str) -> None:
        self.done_with([optimizer])
        self._refuse([optimizer], why.format(type(optimizer).__name__))
