"""Notices windows that are not ended before the optimizer steps on them, whichever optimizer that is."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from typing_extensions import TypeIs

from sonde.batch_size.hook_failures import log_failure
from sonde.batch_size.taps.autograd_internals import in_backward
from sonde.batch_size.taps.window_reader import WindowReader
from sonde.parallel.optimizers import Optimizers, given_optimizers
from sonde.parallel.wrappers import Wrapper
from sonde.wording import plural, some_of

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
T = TypeVar("T")
Alert = Callable[[str, str], None]
"""Takes the name of an alert and its message."""

_PASSED_OVER_AFTER = 3
"""Windows without a step, after which another optimizer that steps the same parameters takes the place."""
_UNSEEN_AFTER = 20
"""Windows without any step that could be seen, after which the check is said to be blind."""
_OFTEN_AFTER = 5
"""Steps in a row that ended several windows each, after which the windows are certainly ended too often. A GradScaler
that finds its scale may leave out a few steps."""
_UNENDED_AFTER = 2
"""Steps after a forward pass, without the end of a window between them, after which a window that is not measured was
certainly not ended. Two optimizers that share a model's parameters may step once each."""


class StepWatch:
    """Listens to the steps of the model's optimizers: every window must be ended before the first of its steps.

    The optimizer is the given one. Where none was given, or the given one no longer steps, it is the one that steps the
    measured parameters, or those that share them out. The check says so if several step the same parameters, if the
    given one does not step, or if none was given and parameters change without a step. Steps with a closure are not
    judged. No optimizer is kept alive: a script may be done with its model before the probe is closed.

    Args:
        optimizer: the optimizer of the loop, or several in a list; None to find them by their steps.
        wrapper: of the model. Optimizers that step what is not measured join its own.
        reader: the reader of the window, which is forgotten when the optimizer steps before the window was ended.
        n_runs: counts the forward passes and the declared pieces of the present window. Where nothing is measured, they
            show that gradients are new.
        alert: called with "never_called" when it is certain that a window was not ended, not even late; with
            "steps_unwatched" when the check is blind; with "optimizer_replaced" when it follows another optimizer; with
            "not_stepped" when measured parameters are in no optimizer that steps.
    """

    def __init__(
        self,
        optimizer: Optimizers,
        wrapper: Wrapper,
        reader: WindowReader,
        *,
        n_runs: Callable[[], int],
        alert: Alert,
    ) -> None:
        self._reader, self._n_runs, self._alert = reader, n_runs, alert
        self.seconds = 0.0
        """Host time spent in hooks of optimizers so far."""
        self.is_measured = True
        """Whether the present window is measured."""
        self._n_runs_stepped = self._n_unended = self._n_often = 0
        self._parameters, self._optimizers = wrapper.parameters, wrapper.optimizers
        self._left_out = frozenset(id(p) for p in wrapper.frozen.values() if p.requires_grad)
        self._ids = self._left_out.union(id(p) for p in self._parameters.values())
        self._versions = [p._version for p in self._parameters.values()]
        self._n_ended = 0
        self._held: weakref.WeakKeyDictionary[Any, tuple[int, frozenset[int]]] = weakref.WeakKeyDictionary()
        """By optimizer that has stepped: how many parameters it has, and the model's among them."""
        self._handles: list[Any] = []
        given = [each for each in given_optimizers(optimizer) if self._has_hooks(each)]
        self._given: weakref.WeakSet[Any] = weakref.WeakSet(given)
        self._watched: weakref.WeakSet[Any] = weakref.WeakSet(given)
        self._has_given = self._has_watched = bool(given)
        self._watches_one_given = len(given) == 1
        self._others: weakref.WeakSet[Any] = weakref.WeakSet()
        """Other optimizers of these parameters that have stepped since one of the watched did."""
        self._windows_unstepped = 0
        self._n_writes = self._written()
        self._windows_written = 0
        """Windows in which parameters changed, while no optimizer is watched."""
        self.has_evaluated_again = False
        """Whether an optimizer of the model has ever evaluated its closure several times in one step."""
        self._stepped_unended = self._ended_since_step = self._stepped_in_backward = False
        self._stepping: list[Any] = []
        """Optimizers inside whose step we are, the outermost first."""
        self._handles.append(register_optimizer_step_pre_hook(self._while_alive(StepWatch._before_any_step)))
        self._handles.append(register_optimizer_step_post_hook(self._while_alive(StepWatch._after_any_step)))

    def _has_hooks(self, given: Any) -> bool:
        """Put a hook on a given optimizer, if it can have any.

        Besides the hook for all optimizers: one of another library may call no hooks but its own. One whose class skips
        `super().__init__()` has none, and is followed by the steps of those inside it.
        """
        try:
            self._handles.append(given.register_step_pre_hook(self._while_alive(StepWatch._before_given_step)))
        except AttributeError:
            return False
        return True

    @property
    def rate(self) -> float | Tensor | None:
        """The largest learning rate of the watched optimizers: on the device if one of them is; None if none is known.

        A compiled or capturable optimizer may keep it as a tensor, which a scheduler fills with other values.
        """
        rates = [group.get("lr") for optimizer in self._watched for group in optimizer.param_groups]
        on_device = [rate.detach().reshape(()).float() for rate in rates if _is_on_device(rate)]
        on_host = [float(rate) for rate in rates if isinstance(rate, int | float | Tensor) and not _is_on_device(rate)]
        if not rates or len(on_device) + len(on_host) < len(rates):
            return None
        if not on_device:
            return max(on_host)
        largest = torch.stack(on_device).amax()
        return largest.clamp(min=max(on_host)) if on_host else largest

    def window_ends(self) -> bool:
        """Note that a measured window is being ended.

        Returns:
            Whether the window is ended late: the optimizer has stepped already.
        """
        self._stepping.clear()  # a step that raised an exception has no end
        is_late = self._stepped_unended and self._reader.n_pieces == 0
        if not is_late:
            self.alert_if_due()
        self._stepped_unended, self._ended_since_step = False, not is_late
        self._windows_unstepped += 1
        self._n_ended += 1
        self._find_optimizer()
        if self._n_ended == _UNSEEN_AFTER:
            self._alert_not_stepped()
        return is_late

    def window_passes(self) -> None:
        """Note that a window is being ended that was not measured."""
        self._stepping.clear()
        self._stepped_unended, self._stepped_in_backward = False, False
        self._ended_since_step = self._n_unended == 0  # otherwise it is ended late
        self._n_runs_stepped = self._n_unended = 0
        self._windows_unstepped += 1
        if self._windows_unstepped > _PASSED_OVER_AFTER and (self._watched or self._others):
            self._find_optimizer()

    def take_stepped_in_backward(self) -> bool:
        """Whether an optimizer has stepped inside a backward since the last call."""
        stepped, self._stepped_in_backward = self._stepped_in_backward, False
        return stepped

    def alert_if_due(self) -> None:
        """Report a window that was not ended, once it can no longer be ended late."""
        if self._stepped_unended:
            self._alert_never_called()

    def _alert_never_called(self) -> None:
        self._alert(
            "never_called",
            "optimizer.step() ran, but the window was not ended: "
            "call probe.step() or probe.clip_grad_norm_() before it",
        )

    def _alert_not_stepped(self) -> None:
        """Report measured parameters that no optimizer holds, while others are stepped."""
        stepped = frozenset().union(*(held for _, held in self._held.values()))
        still = (name for (name, p), n in zip(self._parameters.items(), self._versions, strict=True) if p._version == n)
        if stepped and (names := [name for name in still if id(self._parameters[name]) not in stepped]):
            self._alert(
                "not_stepped",
                f"{plural(len(names), 'measured parameter')} ({some_of(names)}) are in no optimizer that steps, and do "
                "not change, so the noise scale is not that of the steps: pass the optimizers that step to attach as "
                "optimizer=, or freeze them by requires_grad_(False)",
            )

    def close(self) -> None:
        """Stop listening."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _find_optimizer(self) -> None:
        """Follow another optimizer if the present one does not step; say it if there is none to follow."""
        others = sorted(self._others, key=lambda optimizer: type(optimizer).__name__)
        if self._windows_unstepped > _PASSED_OVER_AFTER and others:
            if self._share_out(others):
                self._follow(others)
            else:
                self._say_blind(
                    f"{len(others)} optimizers step the same parameters, and none of them was given to attach"
                )
        elif self._has_watched:
            if self._windows_unstepped > _UNSEEN_AFTER:
                self._say_blind(f"the optimizer has not stepped in {_UNSEEN_AFTER} windows")
        elif self._written_unseen():
            self._say_blind("no optimizer was given, and the parameters change without a step that can be seen")

    def _written(self) -> int:
        """How often the parameters were written to. Not counted: writes through `.data`, and by foreign kernels."""
        return sum(p._version for p in self._parameters.values())

    def _written_unseen(self) -> bool:
        """Whether parameters have changed in so many windows that someone must step them."""
        n_before, self._n_writes = self._n_writes, self._written()
        self._windows_written += self._n_writes != n_before
        return self._windows_written > _UNSEEN_AFTER

    def _follow(self, others: list[Any]) -> None:
        """Watch other optimizers beside those whose parameters they leave alone, or in their place."""
        is_of_these = any(map(self._held_by, self._watched))
        if is_of_these and self._share_out([*self._watched, *others]):
            self._watched.update(others)
        else:
            if self._has_given:
                self._alert(
                    "optimizer_replaced",
                    f"{', '.join(type(o).__name__ for o in others)} steps these parameters, not the optimizer given to "
                    "attach. Windows are checked against its steps from now on. With metric='adam', attach again with "
                    "it",
                )
            self._watched = weakref.WeakSet(others)
        self._watches_one_given, self._has_watched = False, True
        self._windows_unstepped = 0
        self._others.clear()

    def _share_out(self, optimizers: Sequence[Any]) -> bool:
        """Whether no measured parameter is in two of the optimizers."""
        held = [self._held_by(optimizer) for optimizer in optimizers]
        return len(frozenset().union(*held)) == sum(map(len, held))

    def _say_blind(self, why: str) -> None:
        self._alert(
            "steps_unwatched",
            f"{why}. So it cannot be checked that each window is ended before its step: pass the optimizer to attach "
            "as optimizer=",
        )

    def _before_any_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        self._stepping.append(optimizer)
        followed = self._followed(optimizer, args, kwargs)
        if optimizer in self._given:  # it has a hook of its own
            return followed
        start = time.perf_counter()
        # An optimizer that wraps another (ZeroRedundancyOptimizer) steps it inside its own step.
        is_inner = any(map(self._held_by, self._stepping[:-1]))
        if self._held_by(optimizer) and not is_inner:
            self._before_step(optimizer, args, kwargs)
        self.seconds += time.perf_counter() - start
        return followed

    def _followed(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """The arguments of a step of the model's optimizer, whose closure notes how often it runs; None without one."""
        closure = kwargs.get("closure") or next(iter(args[1:]), None)
        if not callable(closure) or isinstance(closure, nn.Module) or not self._held_by(optimizer):
            return None
        counted = self._counted(closure)
        return (
            (args, {**kwargs, "closure": counted}) if "closure" in kwargs else ((args[0], counted, *args[2:]), kwargs)
        )

    def _counted(self, closure: Callable[..., Any]) -> Callable[..., Any]:
        n = 0

        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal n
            n += 1
            self.has_evaluated_again |= n > 1
            return closure(*args, **kwargs)

        return counted

    def _before_given_step(self, optimizer: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        start = time.perf_counter()
        is_usual = self._ended_since_step and not self._others and self._watches_one_given
        if is_usual and not in_backward():  # nearly all steps, so this is short
            if self._windows_unstepped > 1 or self._n_often:
                self._count_windows()
            self._windows_unstepped, self._ended_since_step = 0, False
        else:
            self._before_step(optimizer, args, kwargs)
        self.seconds += time.perf_counter() - start

    def _after_any_step(self, optimizer: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if self._stepping and self._stepping[-1] is optimizer:
            self._stepping.pop()

    def _held_by(self, optimizer: Any) -> frozenset[int]:
        """The model's parameters that an optimizer holds, by id."""
        n = 0
        for group in optimizer.param_groups:  # more after `add_param_group`
            n += len(group["params"])
        known = self._held.get(optimizer)
        if known is None or known[0] != n:
            held = (id(p) for group in optimizer.param_groups for p in group["params"])
            self._held[optimizer] = known = n, self._ids.intersection(held)
            if not known[1].isdisjoint(self._left_out):
                self._optimizers.add(optimizer)
        return known[1]

    def _before_step(self, optimizer: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        # With a closure, backward runs inside the step, and the window may be ended there: it cannot be judged here.
        has_closure = kwargs.get("closure") is not None or any(map(callable, args[1:]))
        if in_backward():
            self._stepped_in_backward, self._windows_written = True, 0
        elif optimizer not in self._watched:
            self._others.add(optimizer)
        elif self._held_by(optimizer) or not self._others:  # another model's gives way to one of this model
            if self._windows_unstepped:  # not at the step of the second of several optimizers
                self._count_windows()
            self._windows_unstepped = 0
            self._others.clear()
            if not (self._ended_since_step or has_closure):
                self._step_was_not_announced()
            self._ended_since_step = False

    def _count_windows(self) -> None:
        """Notice that a window is ended with each micro-batch: several windows before each step."""
        self._n_often = self._n_often + 1 if self._windows_unstepped > 1 else 0
        if self._n_often == _OFTEN_AFTER:
            self._alert(
                "called_often",
                f"probe.step() was called {self._windows_unstepped} times between optimizer steps, {_OFTEN_AFTER} "
                "steps in a row: call it once, after the last backward and before optimizer.step()",
            )

    def _while_alive(self, method: Callable[..., T]) -> Callable[..., T | None]:
        """A method as a hook that does not keep its object alive: a hook for all optimizers outlives every model."""
        reference, pid = weakref.ref(self), os.getpid()

        def hook(*args: Any) -> T | None:
            # In a process that was forked, the loop may be another one.
            if (alive := reference()) is not None and os.getpid() == pid:
                try:
                    return method(alive, *args)
                except Exception as error:  # a bug: the user's step goes on
                    log_failure(error)
            return None

        return hook

    def _step_was_not_announced(self) -> None:
        """Note a step without the end of a window since the step before."""
        if self._reader.n_pieces:
            self.alert_if_due()
            self._stepped_unended = True
            self._reader.forget_window()
        elif not self.is_measured and (n := self._n_runs()) > self._n_runs_stepped:
            self._n_runs_stepped, self._n_unended = n, self._n_unended + 1
            if self._n_unended >= _UNENDED_AFTER:
                self._alert_never_called()


def _is_on_device(rate: Any) -> TypeIs[Tensor]:
    """Whether reading a learning rate would wait for a device."""
    return isinstance(rate, Tensor) and rate.device.type != "cpu"
