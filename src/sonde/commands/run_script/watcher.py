"""Watches a process of the script: which optimizers it makes, which module it calls first, and when they step."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from sonde.commands.run_script import first_forward
from sonde.commands.run_script.found_models import (
    ModelOfOptimizers,
    model_among_living,
    models_in,
    parameters_of,
    reshard,
    stepped_by,
    trainable,
)
from sonde.commands.run_script.measured_model import MeasuredModel
from sonde.commands.run_script.measured_trainer import MeasuredTrainer
from sonde.commands.run_script.messages import say
from sonde.commands.run_script.settings import Settings

_MOST_STEPS = 100
"""Steps after which models are no longer looked for in forwards. An optimizer that begins later loses a window."""

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

P = ParamSpec("P")
T = TypeVar("T")


def watcher_of_process() -> ScriptWatcher:
    """The watcher of this process, by the settings in its environment."""
    return ScriptWatcher(Settings.of_environment(os.environ))


def _never_raising(
    method: Callable[Concatenate[ScriptWatcher, P], T],
) -> Callable[Concatenate[ScriptWatcher, P], T | None]:
    """A method whose errors are said once and end the watch: the script goes on without."""

    @functools.wraps(method)
    def guarded(self: ScriptWatcher, *args: P.args, **kwargs: P.kwargs) -> T | None:
        if not self.is_on or os.getpid() != self.pid:  # a child that the script forks is not measured
            return None
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            self.is_on = False
            self.stop()
            say(f"measuring stops, since sonde failed ({type(error).__name__}: {error}). The script goes on")
            return None

    return cast("Callable[Concatenate[ScriptWatcher, P], T | None]", guarded)


class ScriptWatcher:
    """Attaches a probe to each model of a script, before the model's first forward if an optimizer is there by then.

    Args:
        settings: of `sonde run`.
    """

    def __init__(self, settings: Settings) -> None:
        self.is_on, self.pid = True, os.getpid()
        self._settings = settings
        self._pending: list[weakref.ref[Any]] = []
        """Optimizers whose model has not been called yet, in the order in which they were made."""
        self._models: list[MeasuredModel] = []
        self._trainers: list[MeasuredTrainer] = []
        self._n_trainings = 0
        """Trainings of trainers that go on now, one inside the other: optimizers that step there are theirs."""
        self._refused: weakref.WeakSet[Any] = weakref.WeakSet()
        """Optimizers whose model cannot be measured."""
        self._measured_in: weakref.WeakKeyDictionary[Any, tuple[MeasuredModel, ...]] = weakref.WeakKeyDictionary()
        """Models that hold parameters of an optimizer or a module; forgotten when a model is added."""
        self._n_folders = self._n_steps = 0
        self._end_watch: Callable[[], None] | None = None
        register_optimizer_step_pre_hook(self.before_step)
        _call_before_zeroing(self.zeroed)
        atexit.register(self.script_ends)

    # What the script does.

    @_never_raising
    def optimizer_made(self, optimizer: Any) -> None:
        """An optimizer was made: look for its model in the calls that follow."""
        self._pending.append(weakref.ref(optimizer))
        if self._end_watch is None and self._n_steps < _MOST_STEPS:
            with contextlib.suppress(RuntimeError):  # then its model is found at its first step
                self._end_watch = first_forward.watch(self.before_forward)

    @_never_raising
    def before_forward(self, module: nn.Module) -> None:
        """A module is called: attach to it if it is the model of an optimizer."""
        if self._n_trainings or not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            return
        pending = self._living_pending()
        if not pending:
            self._stop_looking()
            return
        held = trainable(module.parameters()).keys()
        touched = [o for o in pending if not held.isdisjoint(stepped_by(o))]
        if not touched and reshard(module):
            held = trainable(module.parameters()).keys()
            touched = [o for o in pending if not held.isdisjoint(stepped_by(o))]
        if touched:
            self._attach_to_called(module, touched)

    @_never_raising
    def before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """An optimizer steps: end the window of its model.

        Returns:
            Other arguments for the step, if it gets a closure, which runs the backward. None to leave them.
        """
        self._n_steps += 1
        if self._n_steps == _MOST_STEPS:
            self._stop_looking()
        if callable(closure := kwargs.get("closure")):
            return args, kwargs | {"closure": self._followed(closure, optimizer)}
        if len(args) > 1 and callable(args[1]):
            return (args[0], self._followed(args[1], optimizer), *args[2:]), kwargs
        self._window_ends(optimizer)
        return None

    def _followed(self, closure: Callable[[], T], optimizer: Any) -> Callable[[], T]:
        """A closure, after which the window is ended."""
        n_runs = 0

        def closure_and_end() -> T:
            nonlocal n_runs
            result = closure()
            n_runs += 1
            if n_runs == 1:
                self._window_ends(optimizer)
            elif n_runs == 2:
                self._closure_ran_again(optimizer)
            return result

        return closure_and_end

    @_never_raising
    def _window_ends(self, optimizer: Any) -> None:
        if models := self._models_with(optimizer):
            models[0].before_step(optimizer)
        elif not self._n_trainings and optimizer not in self._refused and stepped_by(optimizer):
            self._attach_late(optimizer)

    @_never_raising
    def _closure_ran_again(self, optimizer: Any) -> None:
        for model in self._models_with(optimizer):
            model.closure_ran_again()

    @_never_raising
    def zeroed(self, owner: Any) -> None:
        """An optimizer or a module zeroes its gradients: backwards since the last step no longer count."""
        for model in self._models_with(owner):
            model.zeroed()

    @_never_raising
    def clipped(self, tensors: Sequence[Tensor], norm: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Gradients were clipped by `torch.nn.utils.clip_grad_norm_`."""
        if not self._models:
            return
        given = dict(zip(("max_norm", "norm_type"), args, strict=False)) | kwargs
        if float(given.get("norm_type", 2.0)) == 2.0:
            held = dict.fromkeys(map(id, tensors))
            for model in self._models:
                if model.is_held_by(held):
                    model.clipped(norm, float(given["max_norm"]))

    @_never_raising
    def trainer_begins(self, trainer: Any) -> None:
        """transformers' Trainer begins to train: its batches are known better than by the calls of its model."""
        self._n_trainings += 1
        try:
            self._trainers.append(MeasuredTrainer(trainer, self._settings, self._next_folder()))
        except ValueError as error:
            say(f"not measured: {error}")

    @_never_raising
    def trainer_ends(self) -> None:
        """The training has ended, or has raised: its optimizers are done."""
        self._n_trainings -= 1
        self._refused.update(self._living_pending())
        self._pending = []
        self._stop_looking()

    @_never_raising
    def process_group_ends(self) -> None:
        """The script destroys its process group. A collective of ours that is under way then could end the process."""
        for each in self._all_measured():
            each.close("the script ended")

    def script_ends(self) -> None:
        """The script has ended, has raised or was interrupted: complete the logs."""
        if os.getpid() != self.pid:
            return
        with contextlib.suppress(BaseException):  # a second Ctrl-C, too: the exit status is the script's
            self._stop_looking()
            kind = getattr(sys, "last_type", None)
            reason = "the script ended" if kind is None else f"the script was stopped by {kind.__name__}"
            if self.is_on and not (self._models or self._trainers or self._refused):
                say("nothing was measured: the script made an optimizer, and never took a step with it")
            for each in self._all_measured():
                each.end(reason, report=self._settings.report)

    def stop(self) -> None:
        """Measure no more, after an error of sonde's own."""
        with contextlib.suppress(Exception):
            self._stop_looking()
            for each in self._all_measured():
                each.close("measuring stopped: sonde failed")

    def _all_measured(self) -> list[MeasuredModel | MeasuredTrainer]:
        return [*self._models, *self._trainers]

    # How models are found.

    def _models_with(self, owner: Any) -> tuple[MeasuredModel, ...]:
        """The measured models that hold parameters of an optimizer or a module."""
        if not self._models:
            return ()
        if (known := self._measured_in.get(owner)) is None:
            tensors = owner.parameters() if isinstance(owner, nn.Module) else parameters_of(owner)
            held = dict.fromkeys(map(id, tensors))
            self._measured_in[owner] = known = tuple(model for model in self._models if model.holds(held))
        return known

    def _living_pending(self) -> list[Any]:
        self._pending = [reference for reference in self._pending if reference() is not None]
        return [optimizer for reference in self._pending if (optimizer := reference()) is not None]

    def _stop_looking(self) -> None:
        if self._end_watch is not None:
            self._end_watch()
            self._end_watch = None

    def _attach_to_called(self, called: nn.Module, touched: Sequence[Any]) -> None:
        found = models_in(called, touched)
        if not found:  # the script calls a part of the model: look for the whole
            for optimizer in touched:
                if (whole := model_among_living(optimizer)) is not None:
                    found = [*found, ModelOfOptimizers(whole, (optimizer,))]
                    break
        for each in found:
            self._attach(each)
        self._done_with([o for each in found for o in each.optimizers])

    def _done_with(self, optimizers: Sequence[Any]) -> None:
        done = {id(optimizer) for optimizer in optimizers}
        self._pending = [ref for ref in self._pending if id(ref()) not in done]
        if not self._living_pending():
            self._stop_looking()

    def _attach_late(self, optimizer: Any) -> None:
        """At an optimizer's step, without a call of its model before: this window is lost."""
        self._done_with([optimizer])
        model = model_among_living(optimizer)
        if model is None:
            self._refuse(
                [optimizer],
                f"no module holds the parameters that {type(optimizer).__name__} steps: put its modules into one "
                "nn.Module, or attach by sonde.attach",
            )
        elif (measured := self._attach(ModelOfOptimizers(model, (optimizer,)))) is not None:
            measured.stepped_late(optimizer)

    def _next_folder(self) -> Path:
        self._n_folders += 1
        return Path(self._settings.folder + (f"-{self._n_folders}" if self._n_folders > 1 else ""))

    def _attach(self, found: ModelOfOptimizers) -> MeasuredModel | None:
        try:
            measured = MeasuredModel(found, self._settings, self._next_folder())
        except (ValueError, RuntimeError, OSError) as error:
            self._refuse(found.optimizers, f"{error}")
            return None
        self._models.append(measured)
        self._measured_in.clear()
        atexit.unregister(self.script_ends)
        atexit.register(self.script_ends)  # the last one comes first: before the probe closes itself
        return measured

    def _refuse(self, optimizers: Sequence[Any], why: str) -> None:
        self._refused.update(optimizers)
        say(f"not measured: {why}. The script runs on")


def _call_before_zeroing(callback: Callable[[Any], None]) -> None:
    """Call a function before each `zero_grad()`, with the optimizer or the module."""
    of_optimizer, of_module = torch.optim.Optimizer.zero_grad, nn.Module.zero_grad

    @functools.wraps(of_optimizer)
    def zero_grad_of_optimizer(self: Any, *args: Any, **kwargs: Any) -> None:
        callback(self)
        of_optimizer(self, *args, **kwargs)

    @functools.wraps(of_module)
    def zero_grad_of_module(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            callback(self)
        of_module(self, *args, **kwargs)

    torch.optim.Optimizer.zero_grad = zero_grad_of_optimizer  # type: ignore[method-assign]
    nn.Module.zero_grad = zero_grad_of_module  # type: ignore[method-assign]
