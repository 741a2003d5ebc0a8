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
        self._pending: list[weakref.ref[Any]] = []
        """Optimizers whose model has not been called yet, in the order in which they were made."""
        self._n_steps = 0
        """Steps of any optimizer since the search began."""
        self._n_unseen: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        """Steps of optimizers whose model was not called."""
        self._end_watch: Callable[[], None] | None = None

    def pending(self) -> list[Any]:
        """Optimizers whose model has not been called yet."""
        self._pending = [reference for reference in self._pending if reference() is not None]
        return [optimizer for reference in self._pending if (optimizer := reference()) is not None]

    def add(self, optimizer: Any) -> None:
        """Look for the model of an optimizer."""
        self._pending.append(weakref.ref(optimizer))
        self.watch()

    def watch(self) -> None:
        """Have `before_call` called before each call of a module."""
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
        pending = self.pending()
        if not pending:
            self.stop()
            return
        touched = _touched(called, pending)
        found = models_in(called, touched)
        if not found and reshard(called):
            touched = _touched(called, pending)
            found = models_in(called, touched)
        if self._why_not_reduced(called):
            # One rank alone may call what is not wrapped yet, or what DDP holds, as to show its layers. Attaching takes
            # all ranks, so the call is passed over. If the optimizer steps without another, its model is refused then.
            return
        if touched and not found:  # the script calls a part of a model
            found = self._whole_models(touched)
        for each in found:
            self._attach(each)
        self.done_with([optimizer for each in found for optimizer in each.optimizers])

    def _whole_models(self, touched: Sequence[Any]) -> list[ModelOfOptimizers]:
        found = []
        for optimizer in touched:
            if (model := model_among_living(optimizer)) is not None:
                found.append(ModelOfOptimizers(model, (optimizer,)))
            else:
                self._refuse_homeless(optimizer)
        return found

    def done_with(self, optimizers: Sequence[Any]) -> None:
        """Look no more for the models of these optimizers."""
        done = {id(optimizer) for optimizer in optimizers}
        self._pending = [reference for reference in self._pending if id(reference()) not in done]
        if not self.pending():
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
        n_unseen = self._n_unseen[optimizer] = self._n_unseen.get(optimizer, 0) + 1
        if n_unseen == 1:
            self.done_with([optimizer])
            if (model := model_among_living(optimizer)) is None:
                self._refuse_homeless(optimizer)
            elif why := self._why_not_reduced(model):
                self._refuse([optimizer], why)
            else:
                self.add(optimizer)
        elif n_unseen == _MOST_UNSEEN:
            self.done_with([optimizer])
            self._refuse(
                [optimizer],
                f"the script does not call the model of {type(optimizer).__name__} as a module, model(...), so that no "
                "forward can be seen: attach by sonde.attach",
            )

    def _refuse_homeless(self, optimizer: Any) -> None:
        self.done_with([optimizer])
        self._refuse(
            [optimizer],
            f"no module holds the parameters that {type(optimizer).__name__} steps: put its modules into one "
            "nn.Module, or attach by sonde.attach",
        )


def _touched(called: nn.Module, optimizers: Sequence[Any]) -> list[Any]:
    """The optimizers that step any parameter of a module."""
    held = trainable(called.parameters()).keys()
    return [optimizer for optimizer in optimizers if not held.isdisjoint(stepped_by(optimizer))]
