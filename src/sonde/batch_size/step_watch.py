"""Ends the window when the model's optimizer steps, unless the loop has ended it by itself."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from typing_extensions import TypeIs

from sonde.batch_size.hooks import in_backward, log_failure
from sonde.batch_size.pace import Pace
from sonde.batch_size.taps.problems import Problem
from sonde.batch_size.taps.window_reader import WindowReader
from sonde.batch_size.window_clock import ALWAYS, OwnTime
from sonde.parallel.devices import runs_beside_host
from sonde.parallel.unwrap import Optimizers, given_optimizers
from sonde.parallel.wrappers import Wrapper
from sonde.wording import plural, some_of

_Arguments = tuple[tuple[Any, ...], dict[str, Any]]
T = TypeVar("T")
Alert = Callable[[str, str], None]
"""Takes the name of an alert and its message."""

_RECENT = 3
"""Windows for which an optimizer that has stepped is one of the model's now."""
_SETTLED_AFTER = 20
"""Windows after which measured parameters that never change are reported."""


class StepWatch:
    """Ends each window at the first step of an optimizer that uses its gradients.

    Any optimizer of torch that holds measured parameters does, given or not. A loop may end its windows by itself,
    before the step; a call that comes right after the step ends nothing. Optimizers that step the same window one after
    another (Muon and AdamW), or one inside the other's step (ZeroRedundancyOptimizer), end one window. In a step with a
    closure, the window ends after the closure's first run. No optimizer is kept alive: a script may be done with its
    model before the probe is closed.

    Args:
        optimizer: the optimizer of the loop, or several in a list; None to find them by their steps.
        wrapper: of the model. Optimizers that step what is not measured join its own.
        reader: the reader of the window.
        pace: says whether a window is measured.
        own: the probe's time.
        has_peers: whether other ranks sum with this one. Then each step ends a window, since they may have pieces.
        end_window: ends the present window.
        alert: called with "stepped_in_backward" when an optimizer steps there; with "optimizer_replaced" when another
            optimizer than those given steps the parameters; with "not_stepped" when measured parameters are in no
            optimizer that steps.
    """

    def __init__(
        self,
        optimizer: Optimizers,
        wrapper: Wrapper,
        reader: WindowReader,
        pace: Pace,
        own: OwnTime,
        *,
        has_peers: bool,
        end_window: Callable[[], None],
        alert: Alert,
    ) -> None:
        self._reader, self._pace, self._has_peers = reader, pace, has_peers
        self._end_window, self._alert = end_window, alert
        self._spent = own.spent
        self.n_runs = 0
        """Forward passes of the present window, as far as they are watched, and backwards outside pieces; if it is not
        measured, also its declared pieces."""
        self.may_be_recorded = runs_beside_host(reader.device)
        """Whether the device records CUDA graphs."""
        self._parameters, self._optimizers = wrapper.parameters, wrapper.optimizers
        self.ids = frozenset(id(p) for p in self._parameters.values())
        """Of the measured parameters."""
        self._left_out = frozenset(id(p) for p in wrapper.frozen.values() if p.requires_grad)
        self._versions = [p._version for p in self._parameters.values()]
        self.rate_factor: Callable[[], float] = lambda: 1.0
        """Steps are taken at so many times the learning rate that the optimizers show."""
        self._n_ended = 0
        """Windows ended so far."""
        self._is_ended_by_loop = False
        """Whether the loop has ended a window since the last step."""
        self._is_ending = self._is_ended_by_step = False
        self._problems: set[Problem] = set()
        """What steps have shown since the last measured window ended."""
        self._last_step = -1
        """How many windows had ended when an optimizer of the model stepped last."""
        self._last_steps: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        """Likewise, by optimizer."""
        self._held: weakref.WeakKeyDictionary[Any, tuple[int, frozenset[int]]] = weakref.WeakKeyDictionary()
        """By optimizer that has stepped: how many parameters it has, and the model's among them."""
        self._handles: list[Any] = []
        given = [each for each in given_optimizers(optimizer) if self._has_hooks(each)]
        self._given: weakref.WeakSet[Any] = weakref.WeakSet(given)
        self._has_given = bool(given)
        self._handles.append(register_optimizer_step_pre_hook(self._while_alive(StepWatch._before_any_step)))

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
        """The largest rate at which the model's optimizers step: on the device if one is there; None if none is known.

        A compiled or capturable optimizer may keep it as a tensor, which a scheduler fills with other values.
        """
        recent = [o for o, n in self._last_steps.items() if self._n_ended - n <= _RECENT] or list(self._given)
        rates = [group.get("lr") for optimizer in recent for group in optimizer.param_groups]
        on_device = [rate.detach().reshape(()).float() for rate in rates if _is_on_device(rate)]
        on_host = [float(rate) for rate in rates if isinstance(rate, int | float) or getattr(rate, "is_cpu", False)]
        if not rates or len(on_device) + len(on_host) < len(rates):
            return None
        if not on_device:
            return self.rate_factor() * max(on_host)
        largest = torch.stack(on_device).amax()
        return self.rate_factor() * (largest.clamp(min=max(on_host)) if on_host else largest)

    def is_ended_already(self) -> bool:
        """Whether the call by which the loop ends a window comes right after the step that has ended it."""
        was_ended, self._is_ended_by_step = self._is_ended_by_step, False
        return was_ended and not self._has_run()

    def _has_run(self) -> bool:
        return self._reader.n_pieces > 0 or self.n_runs > 0

    def note_recording(self) -> None:
        """Have the reader notice whether a forward is recorded into a CUDA graph."""
        self._reader.is_recorded()

    def window_ended(self) -> None:
        """Note that a window is being ended, measured or not."""
        self.n_runs = 0
        self._n_ended += 1
        if not self._is_ending:
            self._is_ended_by_step = False
            self._is_ended_by_loop = True
        if self._n_ended == _SETTLED_AFTER:
            self._alert_not_stepped()

    def take_problems(self) -> set[Problem]:
        """Why the pieces of a measured window that is being ended cannot be used, as its forwards and steps show it."""
        problems, self._problems = self._problems, set()
        if self.n_runs and not self._reader.n_pieces:
            problems.add(Problem.FORWARD_ALONE)
        if self._is_ending and not self._has_run():
            problems.add(Problem.STEP_ALONE)
        return problems

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

    def _before_any_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments | None:
        """End the window of a step, or have its closure end it; called for all optimizers of torch."""
        if (closure := _closure_in(args, kwargs)) is not None and self._held_by(optimizer):
            ending = self._ending(optimizer, closure)
            if "closure" in kwargs:
                return args, kwargs | {"closure": ending}
            return (args[0], ending, *args[2:]), kwargs
        if optimizer not in self._given:  # which has a hook of its own
            self._before_step(optimizer)
        return None

    def _before_given_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if _closure_in(args, kwargs) is None:
            self._before_step(optimizer)

    def _ending(self, optimizer: Any, closure: Callable[..., Any]) -> Callable[..., Any]:
        """A closure that ends the window after its first run, and notices others."""
        n, gradients_are_ready = 0, self._while_alive(StepWatch._before_step)

        def ending(*args: Any, **kwargs: Any) -> Any:
            nonlocal n
            n += 1
            loss = closure(*args, **kwargs)
            if n == 1:
                gradients_are_ready(optimizer)
            else:
                self._problems.add(Problem.EVALUATED_AGAIN)
            return loss

        return ending

    def _held_by(self, optimizer: Any) -> frozenset[int]:
        """The measured parameters that an optimizer holds, by id."""
        n = 0
        for group in optimizer.param_groups:  # more after `add_param_group`
            n += len(group["params"])
        known = self._held.get(optimizer)
        if known is None or known[0] != n:
            held = frozenset(id(p) for group in optimizer.param_groups for p in group["params"])
            self._held[optimizer] = known = n, self.ids & held
            if not self._left_out.isdisjoint(held):
                self._optimizers.add(optimizer)
        return known[1]

    def _before_step(self, optimizer: Any) -> None:
        """End the window whose gradients an optimizer is about to use, unless that was done."""
        start = time.perf_counter()
        if not self._held_by(optimizer):
            return
        if in_backward():
            self._note_step_in_backward()
            return
        is_due = not self._is_ended_by_loop and self._has_window(optimizer)
        self._is_ended_by_loop = False
        self._spent[ALWAYS] += time.perf_counter() - start
        if is_due:
            self._is_ending = True
            try:
                self._end_window()
            finally:
                self._is_ending = False
            self._is_ended_by_step = True
        self._last_step = self._last_steps[optimizer] = self._n_ended
        if self._has_given and optimizer not in self._given:
            self._notice_replaced(optimizer)

    def _note_step_in_backward(self) -> None:
        """Say it at once, since a loop whose steps are all inside backward ends no window."""
        self._problems.add(Problem.STEPPED_IN_BACKWARD)
        self._alert(
            "stepped_in_backward",
            "an optimizer steps inside backward, so a window's gradient is gone before its pieces can be compared with "
            "it: step after the last backward while you measure",
        )

    def _has_window(self, optimizer: Any) -> bool:
        """Whether an optimizer steps on gradients of a window that was not ended."""
        is_measured = self._pace.is_measured
        if self._last_step == self._n_ended != self._last_steps.get(optimizer):
            # Another one of the same window, or of the next.
            return self._reader.n_pieces > 0 or (not is_measured and self.n_runs > 0)
        return self._has_peers or not is_measured or self._has_run()

    def _notice_replaced(self, optimizer: Any) -> None:
        """Notice that other optimizers step the parameters, and the given ones no longer do."""
        last = max((self._last_steps.get(given, 0) for given in self._given), default=0)
        if self._n_ended - last > _RECENT:
            self._alert(
                "optimizer_replaced",
                f"{type(optimizer).__name__} steps these parameters, not the optimizer given to attach. With "
                "metric='adam', attach again with it",
            )

    def _while_alive(self, method: Callable[..., T]) -> Callable[..., T | None]:
        """A method as a hook that does not keep its object alive: a hook for all optimizers outlives every model.

        A step that is compiled calls it outside its graph.
        """
        reference, pid = weakref.ref(self), os.getpid()

        def hook(*args: Any) -> T | None:
            # In a process that was forked, the loop may be another one.
            if (alive := reference()) is not None and os.getpid() == pid:
                try:
                    return method(alive, *args)
                except Exception as error:  # a bug: the user's step goes on
                    log_failure(error)
            return None

        outside_graphs: Callable[..., T | None] = torch.compiler.disable(hook)
        return outside_graphs


def _closure_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[..., Any] | None:
    """The closure that a step is called with. Some optimizers are called with the model instead."""
    closure = kwargs.get("closure") or next(iter(args[1:]), None)
    return closure if callable(closure) and not isinstance(closure, nn.Module) else None


def _is_on_device(rate: Any) -> TypeIs[Tensor]:
    """Whether reading a learning rate would wait for a device."""
    return isinstance(rate, Tensor) and rate.device.type != "cpu"
