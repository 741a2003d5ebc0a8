"""Watches a process of the script: which optimizers it makes, which module it calls first, and when they step."""

from __future__ import annotations

import atexit
import contextlib
import functools
import multiprocessing
import multiprocessing.util
import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from sonde.batch_size.setup import NOT_ON_ALL_RANKS
from sonde.batch_size.taps.autograd_internals import in_backward
from sonde.commands.run_script.found_models import ModelOfOptimizers, stepped_by, why_not_reduced
from sonde.commands.run_script.measured_model import MeasuredModel
from sonde.commands.run_script.measured_trainer import MeasuredTrainer
from sonde.commands.run_script.messages import remember_rank, say
from sonde.commands.run_script.model_search import ModelSearch
from sonde.commands.run_script.settings import Settings
from sonde.commands.run_script.words import say_in_words_of_run
from sonde.parallel.optimizers import parameters_of

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

P = ParamSpec("P")
T = TypeVar("T")


def watcher_of_process() -> ScriptWatcher:
    """The watcher of this process, by the settings in its environment."""
    return ScriptWatcher(Settings.of_environment(os.environ))


def _never_raising(
    method: Callable[Concatenate[ScriptWatcher, P], T],
) -> Callable[Concatenate[ScriptWatcher, P], T | None]:
    """A method whose errors are said once and end the measuring: the script goes on without.

    One thread of the script at a time runs any of them.
    """

    @functools.wraps(method)
    def guarded(self: ScriptWatcher, *args: P.args, **kwargs: P.kwargs) -> T | None:
        if os.getpid() != self.pid:
            if method.__name__ == "before_step":  # workers of a data loader call modules too
                self._say_that_a_fork_is_not_measured()
            return None
        with self._lock:
            if not self.is_on:
                return None
            try:
                return method(self, *args, **kwargs)
            except Exception as error:
                self.fail(error)
                return None

    return cast("Callable[Concatenate[ScriptWatcher, P], T | None]", guarded)


class ScriptWatcher:
    """Attaches a probe to each model of a script, before the model's first forward if an optimizer is there by then.

    Args:
        settings: of `sonde run`.
    """

    def __init__(self, settings: Settings) -> None:
        self.is_on, self.pid = True, os.getpid()
        self._lock = threading.RLock()
        self._has_said_fork = False
        self._threads: set[int] = set()
        """Threads of the script that train."""
        self._settings = settings
        self._search = ModelSearch(self.before_forward, self._attach, self._refuse, self._why_not_reduced)
        self._all: list[MeasuredModel | MeasuredTrainer] = []
        """All that was measured, in the order in which it began."""
        self._models: list[MeasuredModel] = []
        """Models whose optimizers may still step."""
        self._n_steps = 0
        """Steps of these models so far."""
        self._trainings: list[MeasuredTrainer | None] = []
        """Trainings of trainers that go on now, one inside the other: optimizers that step there are theirs."""
        self._refused: weakref.WeakSet[Any] = weakref.WeakSet()
        """Optimizers whose model is not measured."""
        self._has_refused = False
        self._models_of: weakref.WeakKeyDictionary[Any, tuple[MeasuredModel, ...]] = weakref.WeakKeyDictionary()
        """Models that hold parameters of an optimizer or a module; forgotten when a model is added."""
        register_optimizer_step_pre_hook(torch.compiler.disable(self.before_step))
        _call_before_zeroing(self.before_zeroing)
        atexit.register(self.script_ends)
        if multiprocessing.parent_process() is not None:
            # A child that was forked runs no exit handlers, but those of its own library.
            multiprocessing.util.Finalize(None, self.script_ends, exitpriority=0)
        say_in_words_of_run(sys.__stderr__ or sys.stderr)  # the script may have put something else in its place

    def _say_that_a_fork_is_not_measured(self) -> None:
        """Say it once in each process that the script has forked and that trains."""
        if not self._has_said_fork:
            self._has_said_fork = True
            say(
                "a process that the script forked after it had made an optimizer is not measured: fork before, or spawn"
            )

    # What the script does.

    @_never_raising
    def optimizer_made(self, optimizer: Any) -> None:
        """An optimizer was made: look for its model in the calls that follow."""
        for model in (models := self._models_with(optimizer)):
            model.is_stepped_by(optimizer)
        if not models:
            self._search.add(optimizer)

    def before_forward(self, module: nn.Module) -> None:
        """A module is called: attach to it if it is the model of an optimizer."""
        self._close_ended()
        self._look_in(module)

    @_never_raising
    def _look_in(self, module: nn.Module) -> None:
        if torch.is_grad_enabled() and not (self._trainings or torch.is_inference_mode_enabled()):
            self._search.look_in(module)

    @_never_raising
    def before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """An optimizer steps: end the window of its model.

        Returns:
            Other arguments for the step, if it gets a closure, which runs the backward. None to leave them.
        """
        self._threads.add(threading.get_ident())
        self._search.any_stepped()
        if callable(closure := kwargs.get("closure")):
            return args, kwargs | {"closure": self._followed(closure, optimizer)}
        if len(args) > 1 and callable(args[1]):
            return (args[0], self._followed(args[1], optimizer), *args[2:]), kwargs
        self._window_ends(optimizer)
        return None

    def _followed(self, closure: Callable[[], T], optimizer: Any) -> Callable[[], T]:
        """A closure, after whose first run the window is ended. If it runs again, the probe notices that."""
        has_run = False

        def closure_and_end() -> T:
            nonlocal has_run
            result = closure()
            if not has_run:
                has_run = True
                self._window_ends(optimizer)
            return result

        return closure_and_end

    @_never_raising
    def _window_ends(self, optimizer: Any) -> None:
        if models := self._models_with(optimizer):
            self._n_steps += 1
            for model in models:
                model.before_step(optimizer, is_alone=self._trains_alone(model), n_steps=self._n_steps)
                if model.is_stopped:
                    self._search.watch()  # to close it at the next call of a module
        elif not self._trainings and optimizer not in self._refused and stepped_by(optimizer):
            self._search.stepped_unseen(optimizer)

    def _trains_alone(self, model: MeasuredModel) -> bool:
        """Whether the script trains no other model beside it. One of an earlier fold that is done is none."""
        others = (other for other in self._models if other is not model)
        return not self._search.pending() and all(other.was_done_before(model) for other in others)

    def before_zeroing(self, owner: Any) -> None:
        """An optimizer or a module zeroes its gradients: backwards since the last step no longer count."""
        self._close_ended()
        self._zeroed(owner)

    @_never_raising
    def _zeroed(self, owner: Any) -> None:
        for model in self._models_with(owner):
            model.zeroed()

    @_never_raising
    def clipped(self, tensors: Sequence[Tensor], norm: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Gradients were clipped by `torch.nn.utils.clip_grad_norm_`."""
        given = dict(zip(("max_norm", "norm_type"), args, strict=False)) | kwargs
        if self._models and float(given.get("norm_type", 2.0)) == 2.0:
            held = dict.fromkeys(map(id, tensors))
            for model in self._models:
                if model.is_held_by(held):
                    model.clipped(norm, float(given["max_norm"]))

    @_never_raising
    def trainer_begins(self, trainer: Any) -> None:
        """transformers' Trainer begins to train: its batches are known better than by the calls of its model."""
        self._trainings.append(None)
        try:
            training = MeasuredTrainer(trainer, self._settings)
        except ValueError as error:
            say(f"not measured: {error}. The script runs on")
            return
        self._trainings[-1] = training
        self._all.append(training)

    @_never_raising
    def trainer_ends(self) -> None:
        """The last training that began has ended, or has raised: its optimizers are done."""
        if (training := self._trainings.pop()) is not None:
            training.training_ended()
        own = self._search.pending()
        self._refused.update(own)
        self._search.done_with(own)

    @_never_raising
    def process_group_ends(self) -> None:
        """The script destroys its process group. A collective of ours that is under way then could end the process."""
        remember_rank()
        for each in self._all:
            each.close("the script ended")

    def script_ends(self) -> None:
        """The script has ended, has raised or was interrupted: complete the logs."""
        if os.getpid() != self.pid:
            return
        kind = getattr(sys, "last_type", None)
        with contextlib.suppress(BaseException):  # a second Ctrl-C, too: the exit status is the script's
            self._search.stop()
            reason = "the script ended" if kind is None else f"the script was stopped by {kind.__name__}"
            if self.is_on and not (self._all or self._has_refused or self._settings.has_log):
                say("nothing was measured: the script made an optimizer, and took no step with a model that it called")
            for each in self._all:
                each.close(reason)
            self._say_ends()
        # Python ends by SIGINT if KeyboardInterrupt ended the last text that it has executed. The report executes some.
        with contextlib.suppress(KeyboardInterrupt):
            exec("raise KeyboardInterrupt" if kind is KeyboardInterrupt else "")

    # What is measured.

    def _say_ends(self) -> None:
        """Say the readings of all models and trainings.

        Those that took no step were given up. They are passed over, unless none took any: then the last is named.
        """
        told = [each for each in self._all if each.has_stepped] or self._all[-1:]
        for number, each in enumerate(told, 1):
            each.say_end(number if len(told) > 1 else None)

    def _models_with(self, owner: Any) -> tuple[MeasuredModel, ...]:
        """The measured models that hold parameters of an optimizer or a module."""
        if not self._models:
            return ()
        if (known := self._models_of.get(owner)) is None:
            tensors = owner.parameters() if isinstance(owner, nn.Module) else parameters_of(owner)
            held = dict.fromkeys(map(id, tensors))
            self._models_of[owner] = known = tuple(model for model in self._models if model.holds(held))
        return known

    def _why_not_reduced(self, model: nn.Module) -> str:
        return why_not_reduced(model, by_hand=self._settings.reduced_by_hand)

    def _others_train(self) -> bool:
        """Whether another thread may be in a step now: torch goes through its hooks, of which none may come or go."""
        alive = {thread.ident for thread in threading.enumerate()}
        return not self._threads.isdisjoint(alive - {threading.get_ident()})

    def _attach(self, found: ModelOfOptimizers) -> None:
        others_train = self._others_train()
        self._threads.add(threading.get_ident())
        if others_train:
            self._refuse(found.optimizers, "another thread of the script trains or has trained, and one is measured")
            return
        try:
            model = MeasuredModel(found, self._settings, n_steps=self._n_steps)
        except (ValueError, RuntimeError, OSError) as error:
            is_alone = NOT_ON_ALL_RANKS in getattr(error, "__notes__", ())
            self._refuse(found.optimizers, f"{error}", is_alone=is_alone)
            return
        self._all.append(model)
        self._models.append(model)
        self._models_of.clear()
        atexit.unregister(self.script_ends)
        atexit.register(self.script_ends)  # the last one comes first: before the probe closes itself

    def _refuse(self, optimizers: Sequence[Any], why: str, *, is_alone: bool = False) -> None:
        """Leave these optimizers alone, and say why; on each rank if it `is_alone` with this reason."""
        self._refused.update(optimizers)
        self._has_refused = True
        say(f"not measured: {why}. The script runs on", on_every_rank=is_alone)

    def _close_ended(self) -> None:
        """Close models whose training is over, or that are measured no more.

        This is not done in the hook of a step, where no hook may be removed; nor may it inside a backward.
        """
        if not any(model.is_over or model.is_stopped for model in self._models):
            return
        if os.getpid() != self.pid or in_backward() or self._others_train():
            return
        with self._lock:
            for model in self._models:
                if model.is_over:
                    model.close("the script was done with its optimizers")
                elif model.is_stopped:
                    model.close()
            self._models = [model for model in self._models if not model.is_over]
            self._models_of.clear()
            if not self._search.pending():
                self._search.stop()

    def fail(self, error: Exception) -> None:
        """Measure no more, after an error of sonde's own."""
        self.is_on = False
        say(f"measuring stops, since sonde failed ({type(error).__name__}: {error}). The script goes on")
        for model in self._models:
            model.stop("sonde failed")
        self._search.watch()  # to close them at the next call of a module


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

    torch.optim.Optimizer.zero_grad = torch.compiler.disable(zero_grad_of_optimizer)  # type: ignore[method-assign]
    nn.Module.zero_grad = zero_grad_of_module  # type: ignore[method-assign]
