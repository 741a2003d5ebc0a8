"""Ends windows: reads those that are measured and puts their numbers on their way, and counts the others.

Between windows, the tap is switched on or off, as the pace wants it, which learns here what windows cost.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from sonde.batch_size.arrivals import RATE, Delivery
from sonde.batch_size.log import KnownOfWindow, Scalars
from sonde.batch_size.mechanism import Mechanism
from sonde.batch_size.model_watch import ModelWatch
from sonde.batch_size.pace import Pace, WindowCosts
from sonde.batch_size.pieces import LoopPieces
from sonde.batch_size.stats.columns import CLIP_FRACTION, MAX_NORM, NORM
from sonde.batch_size.step_watch import Alert, StepWatch
from sonde.batch_size.taps.problems import Problem
from sonde.batch_size.taps.window_reader import WindowReader
from sonde.batch_size.window_clock import ALWAYS, MEASURING, OwnTime, WindowClock, marks_of
from sonde.gradient_norm.global_norm import GlobalNorm, global_norm
from sonde.gradient_norm.plan import NormPlan
from sonde.gradient_norm.scaling import Nonfinite, clip_measured_

_WINDOWS_HELD = 8
"""Most windows that wait on the device, however rarely a reading is written. `Pace` needs their costs soon."""
_COST_OVER_TIMED = 2.5
"""What calls in windows that are not measured cost, over the time that they see themselves.

They are short, and training has pushed their code out of the caches, so it takes as long again to enter and to leave
them. 2.1 to 2.3 was measured: `python -m benchmarks.idle_calls`.
"""


@dataclass(frozen=True)
class WindowClip:
    """A clip by the joint norm of all gradients.

    Attributes:
        max_norm: the largest norm allowed; None only measures.
        order: p of the p-norm.
        nonfinite: what to do when the norm is not finite.
    """

    max_norm: float | None
    order: float
    nonfinite: Nonfinite

    def apply(self, plan: NormPlan, measured: GlobalNorm | None = None) -> Tensor:
        """Clip.

        Args:
            plan: the gradients.
            measured: their 2-norm, where it has been measured.

        Returns:
            The norm before clipping.

        Raises:
            RuntimeError: when the norm is not finite, if that was asked for.
        """
        if measured is None or self.order != 2.0:
            measured = global_norm(plan, self.order)
        return clip_measured_(plan, measured, self.max_norm, nonfinite=self.nonfinite)

    def scalars(self, norm: Tensor) -> dict[str, float | Tensor]:
        """What the log gets of the clip, by metric name. The log has the norm for p = 2 alone."""
        most = math.inf if self.max_norm is None else self.max_norm
        found: dict[str, float | Tensor] = {CLIP_FRACTION: norm > most}
        if self.order == 2.0:
            found[NORM] = norm
            if math.isfinite(most):
                found[MAX_NORM] = most
        return found


class WindowEnds:
    """Ends the windows of a probe, one after another.

    When window n ends, first the windows before it are sent to the host, if a reading is due or with every eighth (the
    first one at once), and those that have arrived are taken in. Then window n is read and its collective started. So
    its numbers come with the end of a later window, or with `reading()`.

    What measuring costs is host time inside the probe, without what it waits for and without the clip that the user
    asked for. If measured windows turn out to be longer than the others by more than that time, as on a device that
    does extra work, the difference counts.

    Args:
        reader: of the windows; its tap is paused in windows that are not measured.
        steps: of the optimizers; they count the end of each window.
        model: looks at the model at the end of each window.
        pieces: of the windows.
        pace: chooses the windows that are measured.
        mechanism: reads single examples in some of the measured windows.
        delivery: brings the numbers of windows to the host.
        scalars: the user's own, which travel with a window.
        own: the probe's time.
        log_every: windows from one reading in the log to the next.
        alert: takes an alert's name and message.
    """

    def __init__(
        self,
        reader: WindowReader,
        steps: StepWatch,
        model: ModelWatch,
        pieces: LoopPieces,
        pace: Pace,
        mechanism: Mechanism,
        delivery: Delivery,
        scalars: Scalars,
        own: OwnTime,
        *,
        log_every: int,
        alert: Alert,
    ) -> None:
        self._reader, self._steps, self._model, self._pieces = reader, steps, model, pieces
        self._pace, self._mechanism, self._delivery, self._scalars = pace, mechanism, delivery, scalars
        self._own, self._clock = own, WindowClock(marks_of(reader.device))
        self._log_every, self._alert = log_every, alert
        self.n_windows = 0
        """Windows ended so far, those before a restart included."""
        self._n_quiet = self._n_passed = 0
        """Quiet windows that may pass from now on, and those that have, of which nobody else knows yet."""
        self._seconds = self._idle_seconds = 0.0
        """The time spent, as the last measured window reported it."""

    def pass_quiet(self, start: float) -> bool:
        """End the present window if it is a quiet one, as nearly all are: short, since every window pays for it.

        Args:
            start: when the user called, of `time.perf_counter`.

        Returns:
            Whether it was one. If not, `end` ends it.
        """
        if not self._n_quiet or self._pieces.is_open or self._reader.is_recorded() or self._inputs_are_uneven():
            return False
        self._n_quiet -= 1
        self._n_passed += 1
        self._pass()
        self._own.spent[ALWAYS] += time.perf_counter() - start
        return True

    def _pass(self) -> None:
        """Count a window that was not measured."""
        self.n_windows += 1
        self._steps.window_ended()
        self._model.window_passes()

    def end(self, clip: WindowClip | None) -> Tensor | None:
        """End the present window.

        Args:
            clip: to apply to the gradients; None without one.

        Returns:
            The norm before clipping; None without a clip, and while a CUDA graph is recorded.

        Raises:
            RuntimeError: see `NoiseScaleProbe.step` and `clip_grad_norm_`.
        """
        if self._pieces.is_open:
            raise RuntimeError("the window was ended inside a piece: leave 'with probe.piece():' first")
        if self._reader.is_recorded():
            self._refuse_in_graph(clip)
            return None
        with torch.no_grad():
            if self._n_passed:
                self._pace.window_ends(self._n_passed)
                self._n_quiet = self._n_passed = 0
            if self._inputs_are_uneven():
                return self._leave_out(clip)
            with self._own.measuring:
                self._reader.final.update.after()
                self._deliver()
            if clip is not None:
                self._reader.final.clip_also(self._model.not_measured())
            norm = self._measure(clip) if self._pace.is_measured else self._leave_unmeasured(clip)
            self._begin_next()
        if isinstance(norm, RuntimeError):
            raise norm
        return norm

    def _inputs_are_uneven(self) -> bool:
        """Whether DDP's `join()` is in force: ranks without further batches take part in DDP's collectives alone.

        torch does not take that back when the context ends.
        """
        ddp = self._reader.wrapper.ddp
        return ddp is not None and ddp._join_config.enable

    def _leave_out(self, clip: WindowClip | None) -> Tensor | None:
        """Clip, and end no window. Ranks that go on and ranks that have no more batches must count the same windows."""
        self._alert(
            "uneven_inputs",
            "steps inside model.join() and after it are not measured: ranks that have no more batches take no part in "
            "sonde's sum over ranks. Where all ranks have as many batches, as DistributedSampler gives them, leave out "
            "join(), or pass enable=False to it",
        )
        if self._pace.is_measured:
            self._pieces.discard()
            self._reader.forget_window()
        self._steps.window_ended()
        return None if clip is None else clip.apply(self._reader.final.plan)

    def _refuse_in_graph(self, clip: WindowClip | None) -> None:
        """Do nothing while a CUDA graph is recorded, since no step is taken then; a clip cannot be left out, so raise.

        The next window that is ended outside is dropped with the reason.
        """
        if clip is not None:
            raise RuntimeError(
                "probe.clip_grad_norm_() was called while a CUDA graph is recorded, and its replays would run without "
                "sonde: record torch.nn.utils.clip_grad_norm_ instead, or end the graph before the clip and call it "
                "after each replay"
            )
        self._alert("cuda_graph", Problem.IN_CUDA_GRAPH.message)

    def _measure(self, clip: WindowClip | None) -> Tensor | RuntimeError | None:
        """Read the window that ends, clip, and put its numbers on their way.

        Returns:
            The norm, if it was asked for, or an error to raise after the window has ended.
        """
        with self._own.measuring:
            problems, frozen = self._model.window_ends()
            problems |= self._steps.take_problems() | ({Problem.UNITS_ASKED} if self._pieces.is_doubted else set())
            self._steps.window_ended()
            if question := self._pieces.take_question():
                self._alert("units", question)
            costs = self.take_costs()
            window, measured = self._reader.end_window(
                reads_grad=clip is not None, problems=problems, costs=costs, frozen=frozen
            )
            norm: Tensor | RuntimeError | None = None
            scalars = self._scalars.take()
            if clip is not None and isinstance(norm := self._clipped(clip, measured), Tensor):
                scalars = clip.scalars(norm) | scalars
            if (rate := self._steps.rate) is not None:
                scalars[RATE] = rate
            self.n_windows += 1
            pace = self._pace
            known = KnownOfWindow(
                self.n_windows, time.time(), costs.seconds, self._reader.tap_name, pace.every, pace.windows + 1
            )
            self._delivery.put_window(window, scalars, known)
            self._reader.final.update.before()
        return norm

    def _leave_unmeasured(self, clip: WindowClip | None) -> Tensor | RuntimeError | None:
        """End a window that was not measured: only the clip has work to do."""
        with self._own.always:
            self._pass()
            return None if clip is None else self._clipped(clip)

    def _clipped(self, clip: WindowClip, measured: GlobalNorm | None = None) -> Tensor | RuntimeError:
        """Clip; or the error that is to be raised after the window has ended. The user asked for it: it is no cost."""
        try:
            with self._own.no_cost:
                return clip.apply(self._reader.final.plan, measured)
        except RuntimeError as error:
            return error

    def _begin_next(self) -> None:
        """Begin the next window: switch the tap on or off if that window differs from the one that has ended."""
        pace, was_measured = self._pace, self._pace.is_measured
        with self._own.always:
            if not pace.n_quiet:
                self._clock.window_ended(pace.windows + 1, was_measured=was_measured)
            pace.window_ends()
        if was_measured or pace.is_measured:
            with self._own.measuring:
                # The tap's hooks are the first to come and the last to go: nothing of them stays behind then.
                if not was_measured:
                    self._reader.tap.resume()
                self._mechanism.begin_window(is_measured=pace.is_measured)
                if not pace.is_measured:
                    self._reader.tap.pause()
        self._pieces.begin_window(is_measured=pace.is_measured)
        self._n_quiet = pace.n_quiet if self._delivery.is_empty else 0

    def _deliver(self) -> None:
        """Send the windows that are due, and take in those that arrived. The first is sent at once."""
        is_due = self.n_windows % self._log_every == 0 or self.n_windows % _WINDOWS_HELD == 0
        if not self._delivery.is_empty:
            if self._delivery.n_put == 1 or is_due:
                self._delivery.send()
            self._delivery.receive(wait=False)
        if self._pace.awaits is not None:  # ranks must choose alike, so none may choose before it has come
            self._delivery.receive_all()

    def take_costs(self) -> WindowCosts:
        """This rank's costs since the last call, and what it has seen. They ride in the sum over ranks."""
        pace, spent = self._pace, self._own.spent
        idle_before, seconds_before = self._idle_seconds, self._seconds
        # The part that is spent in windows which are not measured, and as much in each that is.
        self._idle_seconds = spent[ALWAYS] * _COST_OVER_TIMED
        self._seconds = spent[MEASURING] + self._idle_seconds
        is_changed, pace.is_changed = pace.is_changed, False
        return WindowCosts(
            seconds=self._seconds - seconds_before,
            idle_seconds=self._idle_seconds - idle_before,
            **self._clock.take(),
            changed=float(is_changed),
            windows_before=pace.windows_before,
            spent_before=pace.spent_before,
        )
