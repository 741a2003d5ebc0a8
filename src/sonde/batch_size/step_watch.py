"""Notices windows that are not ended before the optimizer steps on them, whichever optimizer that is."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from sonde.batch_size.taps.autograd_internals import in_backward
from sonde.batch_size.taps.window_reader import WindowReader
from sonde.parallel.wrappers import unwrap_optimizer

Alert = Callable[[str, str], None]
"""Takes the name of an alert and its message."""

_PASSED_OVER_AFTER = 3
"""Windows without a step, after which another optimizer that steps the same parameters takes the place."""
_UNSEEN_AFTER = 20
"""Windows without any step that could be seen, after which the check is said to be blind."""


class StepWatch:
    """Listens to the steps of the model's optimizer: every window must be ended before its step.

    The optimizer is the given one. Where none was given, or the given one no longer steps, it is the only optimizer
    that steps the measured parameters. The check says so if it finds no such optimizer, or several. Steps with a
    closure are not judged.

    Args:
        optimizer: the optimizer of the loop; None to find it by its steps.
        parameters: measured parameters.
        reader: the reader of the window, which is forgotten when the optimizer steps before the window was ended.
        alert: called with "never_called" when it is certain that a window was not ended, not even late; with
            "steps_unwatched" when the check is blind; with "optimizer_replaced" when it follows another optimizer.
    """

    def __init__(self, optimizer: Any, parameters: Collection[Tensor], reader: WindowReader, *, alert: Alert) -> None:
        self._reader, self._alert = reader, alert
        self._parameters = {id(p) for p in parameters}
        self._holds_measured: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        self._given = unwrap_optimizer(optimizer) if optimizer is not None else None
        self._watched = self._given
        self._others: weakref.WeakSet[Any] = weakref.WeakSet()
        """Other optimizers of these parameters that have stepped since the watched one did."""
        self._windows_unstepped = 0
        self._stepped_unended = self._ended_since_step = self._stepped_in_backward = False
        self._handles: list[Any] = []
        if self._given is not None:
            # Besides the hook for all optimizers: one of another library may call no hooks but its own.
            self._handles.append(self._given.register_step_pre_hook(_while_alive(self._before_step)))
        self._handles.append(register_optimizer_step_pre_hook(_while_alive(self._before_any_step)))

    def window_ends(self) -> bool:
        """Note that a window is being ended.

        Returns:
            Whether the window is ended late: the optimizer has stepped already.
        """
        is_late = self._stepped_unended and self._reader.n_pieces == 0
        if not is_late:
            self.alert_if_due()
        self._stepped_unended, self._ended_since_step = False, not is_late
        self._windows_unstepped += 1
        self._find_optimizer()
        return is_late

    def take_stepped_in_backward(self) -> bool:
        """Whether an optimizer has stepped inside a backward since the last call."""
        stepped, self._stepped_in_backward = self._stepped_in_backward, False
        return stepped

    def alert_if_due(self) -> None:
        """Report a window that was not ended, once it can no longer be ended late."""
        if self._stepped_unended:
            self._alert(
                "never_called",
                "optimizer.step() ran, but the window was not ended: "
                "call probe.step() or probe.clip_grad_norm_() before it",
            )

    def close(self) -> None:
        """Stop listening."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _find_optimizer(self) -> None:
        """Follow another optimizer if the present one does not step; say it if there is none to follow."""
        others = list(self._others)
        if self._windows_unstepped > _PASSED_OVER_AFTER and len(others) == 1:
            if self._given is not None:
                self._alert(
                    "optimizer_replaced",
                    f"another optimizer ({type(others[0]).__name__}) than the one given to attach steps these "
                    "parameters, and windows are checked against its steps from now on: attach again with it if "
                    "metric='adam'",
                )
            self._watched, self._windows_unstepped = others[0], 0
            self._others.clear()
        elif self._windows_unstepped > _PASSED_OVER_AFTER and others:
            self._say_blind(f"{len(others)} optimizers step these parameters, and none of them was given to attach")
        elif self._windows_unstepped > _UNSEEN_AFTER and self._watched is not None:
            self._say_blind(f"the optimizer has not stepped in {_UNSEEN_AFTER} windows")

    def _say_blind(self, why: str) -> None:
        self._alert(
            "steps_unwatched",
            f"{why}, so it cannot be checked that each window is ended before its step: "
            "pass the optimizer that ends a window to attach as optimizer=",
        )

    def _before_any_step(self, optimizer: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if optimizer is not self._given and self._is_of_these(optimizer):
            self._before_step(optimizer, args, kwargs)

    def _is_of_these(self, optimizer: Any) -> bool:
        """Whether the optimizer holds measured parameters."""
        if optimizer not in self._holds_measured:
            held = (id(p) for group in optimizer.param_groups for p in group["params"])
            self._holds_measured[optimizer] = not self._parameters.isdisjoint(held)
        return self._holds_measured[optimizer]

    def _before_step(self, optimizer: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        # With a closure, backward runs inside the step, and the window may be ended there: it cannot be judged here.
        has_closure = kwargs.get("closure") is not None or any(map(callable, args[1:]))
        if in_backward():
            self._stepped_in_backward = True
        elif optimizer is not self._watched:
            self._others.add(optimizer)
        elif self._is_of_these(optimizer) or not self._others:  # another model's gives way to one of this model
            self._windows_unstepped = 0
            self._others.clear()
            if self._reader.n_pieces and not self._ended_since_step and not has_closure:
                self.alert_if_due()
                self._stepped_unended = True
                self._reader.forget_window()
            self._ended_since_step = False


def _while_alive(method: Callable[..., None]) -> Callable[..., None]:
    """The method as a hook that does not keep its object alive: a hook for all optimizers outlives every model."""
    reference = weakref.WeakMethod(method)

    def hook(*args: Any) -> None:
        if (alive := reference()) is not None:
            alive(*args)

    return hook
