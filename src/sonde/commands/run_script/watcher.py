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
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import sonde
from sonde.batch_size.found_model import NOT_ON_ALL_RANKS
from sonde.batch_size.hooks import in_backward
from sonde.commands.run_script.measured import MeasuredModel, why_not_reduced
from sonde.commands.run_script.model_search import ModelOfOptimizers, ModelSearch, stepped_by
from sonde.commands.run_script.settings import Settings
from sonde.commands.run_script.words import rank, say, say_in_words_of_run
from sonde.parallel.placements import is_partial
from sonde.parallel.unwrap import parameters_of

if TYPE_CHECKING:
    from sonde.commands.run_script.measured_trainer import MeasuredTrainer

NOT_MEASURED = "not measured"
"""Is in each sentence that says why a model of the script is not measured."""


class ScriptWatcher:
    """Attaches a probe to each model of a script, before the model's first forward if an optimizer is there by then.

    Args:
        tell: calls a method of this watcher by its name, one thread at a time, and lets no error out.
    """

    def __init__(self, tell: Callable[..., Any]) -> None:
        self.pid, self._settings = os.getpid(), Settings.of_environment(os.environ)
        self._threads: set[int] = set()
        """Threads of the script that train."""
        self._search = ModelSearch(
            functools.partial(tell, "before_forward"),
            self._attach,
            self._refuse,
            functools.partial(why_not_reduced, settings=self._settings),
        )
        self._all: list[MeasuredModel | MeasuredTrainer] = []
        """All that was measured, in the order in which it began."""
        self._models: list[MeasuredModel] = []
        """Models whose optimizers may still step."""
        self._clipped: list[MeasuredModel] = []
        """Models of whose whole gradient the last norm was."""
        self._trainings: list[MeasuredTrainer | None] = []
        """Trainings of trainers that go on now, one inside the other: optimizers that step there are theirs."""
        self._refused: weakref.WeakSet[Any] = weakref.WeakSet()
        """Optimizers whose model is not measured."""
        self._has_refused = self._has_failed = self._has_ended = False
        register_optimizer_step_pre_hook(torch.compiler.disable(functools.partial(tell, "before_step")))
        atexit.register(self.script_ends)
        if multiprocessing.parent_process() is not None:
            # A child that was forked runs no exit handlers, but those of its own library.
            multiprocessing.util.Finalize(None, self.script_ends, exitpriority=0)
        say_in_words_of_run(sys.__stderr__ or sys.stderr)  # the script may have put something else in its place

    # What the script does.

    def optimizer_made(self, optimizer: Any) -> None:
        """An optimizer was made: look for its model in the calls that follow."""
        for model in (models := self._models_with(optimizer)):
            model.optimizers.add(optimizer)
        if not models:
            self._search.add(optimizer)

    def before_forward(self, module: nn.Module) -> None:
        """A module is called: attach to it if it is the model of an optimizer."""
        if torch.is_grad_enabled() and not (self._trainings or torch.is_inference_mode_enabled()):
            self._search.look_in(module)

    def before_step(self, optimizer: Any, *called_with: Any) -> None:
        """An optimizer steps: its model is known by now, or called in its closure. Its probe ends the window by itself.

        A model that is called in the closure alone is measured from the second step on.
        """
        self._threads.add(threading.get_ident())
        self._search.any_stepped()
        is_known = self._trainings or optimizer in self._refused or self._models_with(optimizer)
        if not is_known and stepped_by(optimizer):
            self._search.stepped_unseen(optimizer)

    def zeroes(self, owner: Any) -> None:
        """An optimizer or a module zeroes its gradients: backwards since the last step no longer count."""
        for model in self._models_with(owner):
            model.zeroed()

    def clipped(self, tensors: Sequence[Tensor], norm: Tensor, max_norm: float | None) -> Any:
        """The norm of parameters' gradients, or of gradients, was taken by a function of torch: see `own_norms.Note`.

        Returns:
            A weak reference to the norm, if it is still to be summed over ranks.
        """
        self._clipped = [model for model in self._models if model.note_norm(tensors, norm, max_norm)]
        return weakref.ref(norm) if is_partial(norm) else None

    def reads_part_of(self) -> None:
        """The script reads this rank's part of the last norm, which is still to be summed over ranks."""
        for model in self._clipped:
            model.reads_parts = True

    def trainer_begins(self, trainer: Any) -> None:
        """transformers' Trainer begins to train: its batches are known better than by the calls of its model."""
        from sonde.commands.run_script.measured_trainer import MeasuredTrainer

        self._trainings.append(None)
        try:
            training = MeasuredTrainer(trainer, self._settings)
        except ValueError as error:
            self._refuse([], str(error))
            return
        self._trainings[-1] = training
        self._all.append(training)

    def trainer_ends(self) -> None:
        """The last training that began has ended, or has raised: its optimizers are done."""
        if (training := self._trainings.pop()) is not None:
            training.close()
        own = self._search.pending()
        self._refused.update(own)
        self._search.done_with(own)

    def process_group_ends(self) -> None:
        """The script destroys its process group. A collective of ours that is under way then could end the process."""
        rank()  # which is remembered
        self._close_all("the script ended")

    def fail(self, error: Exception) -> None:
        """Nothing more is measured, after an error of sonde's own."""
        say(f"{NOT_MEASURED} from here on, since sonde failed ({type(error).__name__}: {error}). The script goes on")
        self._has_failed = True

    def script_ends(self) -> None:
        """The script has ended, has raised or was interrupted: complete the logs, and say what was measured."""
        if os.getpid() != self.pid or self._has_ended:
            return
        self._has_ended = True
        kind = getattr(sys, "last_type", None)
        with contextlib.suppress(BaseException):  # a second Ctrl-C, too: the exit status is the script's
            self._search.stop()
            reason = "the script ended" if kind is None else f"the script was stopped by {kind.__name__}"
            if not (self._all or self._has_refused or self._has_failed or self._settings.has_log):
                say(f"{NOT_MEASURED}: the script made an optimizer, and took no step with a model that it called")
            self._close_all(reason)
            # Trainings that took no step were given up. They are passed over, unless none took any.
            told = [each for each in self._all if each.n_windows] or self._all[-1:]
            if self._has_failed:
                told = []
            for number, each in enumerate(told, 1):
                name = f"{number}. {each.name}: " if len(told) > 1 else ""
                _say_end(name, each, writes_report=self._settings.report)
        # Python ends by SIGINT if KeyboardInterrupt ended the last text that it has executed. The report executes some.
        with contextlib.suppress(KeyboardInterrupt):
            exec("raise KeyboardInterrupt" if kind is KeyboardInterrupt else "")

    # What is measured.

    def _models_with(self, owner: Any) -> list[MeasuredModel]:
        """The measured models that hold parameters of an optimizer or a module."""
        is_module = isinstance(owner, nn.Module)
        return [m for m in self._models if m.holds_any(owner.parameters() if is_module else parameters_of(owner))]

    def _others_train(self, model: MeasuredModel) -> bool:
        """Whether the script trains another model beside this one. One of an earlier fold that is done is none."""
        others = (other for other in self._models if other is not model)
        return bool(self._search.pending()) or not all(other.was_done_before(model) for other in others)

    def _attach(self, found: ModelOfOptimizers) -> None:
        # Another thread may be in a step now: torch goes through its hooks, of which none may come or go.
        other_threads = self._threads - {threading.get_ident()}
        self._threads.add(threading.get_ident())
        if not other_threads.isdisjoint(thread.ident for thread in threading.enumerate()):
            self._refuse(found.optimizers, "another thread of the script trains or has trained, and one is measured")
            return
        self._close_ended()
        try:
            model = MeasuredModel(found, self._settings, earlier=self._models, others_train=self._others_train)
        except (ValueError, RuntimeError, OSError) as error:
            is_alone = NOT_ON_ALL_RANKS in getattr(error, "__notes__", ())
            self._refuse(found.optimizers, f"{error}", is_alone=is_alone)
            return
        self._all.append(model)
        self._models.append(model)
        atexit.unregister(self.script_ends)
        atexit.register(self.script_ends)  # the last one comes first: before the probe closes itself

    def _close_all(self, reason: str) -> None:
        for each in self._all:
            each.close(reason)
        for model in self._models:
            self._refused.update(model.optimizers)
        self._models = []

    def _close_ended(self) -> None:
        """Close models whose optimizers the script has let go of, where hooks may be removed."""
        if not in_backward():
            for model in self._models:
                if not model.optimizers:
                    model.close("the script was done with its optimizers")
            self._models = [model for model in self._models if model.optimizers]

    def _refuse(self, optimizers: Sequence[Any], why: str, *, is_alone: bool = False) -> None:
        """Leave these optimizers alone, and say why; on each rank if it `is_alone` with this reason."""
        self._refused.update(optimizers)
        self._has_refused = True
        say(f"{NOT_MEASURED}: {why}. The script runs on", on_every_rank=is_alone)


def _say_end(name: str, measured: MeasuredModel | MeasuredTrainer, *, writes_report: bool) -> None:
    """Say what was measured of one model, and where its log and its report lie, which is written now.

    Args:
        name: of the model, where there are several; otherwise empty.
        measured: the model.
        writes_report: whether a report is wanted.
    """
    for line in measured.said_at_end:
        say(name + line)
        name = ""
    if not measured.said_at_end or measured.file is None or (folder := measured.file.folder) is None:
        return
    say(f"log     {folder}")
    if writes_report:
        try:
            say(f"report  {sonde.write_report(folder)}")
        except Exception as error:  # of a log without a reading, without bokeh, on a full disk
            say(f"no report was written: {error}")
