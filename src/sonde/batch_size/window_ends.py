"""Ends windows: reads those that are measured and puts their numbers on their way, and counts the others."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from sonde.batch_size.arrivals import RATE, Delivery
from sonde.batch_size.log import CLIP_FRACTION, NORM, KnownOfWindow, Scalars
from sonde.batch_size.model_watch import ModelWatch
from sonde.batch_size.pacing import Pacing
from sonde.batch_size.pieces import Pieces
from sonde.batch_size.step_watch import Alert, StepWatch
from sonde.batch_size.taps.problems import Problem
from sonde.batch_size.taps.window_reader import Window, WindowReader
from sonde.batch_size.window_clock import ALWAYS, MEASURING, NO_COST, OwnTime
from sonde.gradient_norm.global_norm import GlobalNorm, global_norm
from sonde.gradient_norm.plan import NormPlan
from sonde.gradient_norm.scaling import Nonfinite, check_options, check_order, clip_measured_

_WINDOWS_HELD = 8
"""Most windows that wait on the device, however rarely a reading is written. `Pace` needs their costs soon."""


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
        clipped: dict[str, float | Tensor] = {CLIP_FRACTION: norm > most}
        return clipped | {NORM: norm} if self.order == 2.0 else clipped


def checked_clip(max_norm: float | None, norm_type: float, *, error_if_nonfinite: bool) -> WindowClip:
    """A clip with the arguments of `clip_grad_norm_`.

    Raises:
        ValueError: when `max_norm` is negative or NaN, or `norm_type` is neither from above 0 to 6 nor infinite.
    """
    nonfinite: Nonfinite = "raise" if error_if_nonfinite else "ignore"
    max_norm, order = check_options(max_norm, nonfinite, None), check_order(norm_type)
    return WindowClip(max_norm, order, nonfinite)


class WindowEnds:
    """Ends the windows of a probe, one after another.

    When window n ends, first the windows before it are sent to the host if a reading is due or 8 of them wait (the
    first one at once), and those that have arrived are taken in. Then window n is read and its collective started. So
    its numbers come with the end of a later window, or with `reading()`.

    Args:
        reader: of the windows.
        steps: of the optimizers; they count the end of each window.
        model: looks at the model at the end of each window.
        pieces: of the windows.
        pacing: chooses the windows that are measured, and adds up what each costs.
        delivery: brings the numbers of windows to the host.
        scalars: the user's own, which travel with a window.
        own: the probe's time.
        ddp: the DDP module around the model; None without DDP.
        log_every: windows from one reading in the log to the next.
        alert: takes an alert's name and message.
    """

    def __init__(
        self,
        reader: WindowReader,
        steps: StepWatch,
        model: ModelWatch,
        pieces: Pieces,
        pacing: Pacing,
        delivery: Delivery,
        scalars: Scalars,
        own: OwnTime,
        *,
        ddp: DistributedDataParallel | None,
        log_every: int,
        alert: Alert,
    ) -> None:
        self._reader, self._steps, self._model, self._pieces, self._pacing = reader, steps, model, pieces, pacing
        self._delivery, self._scalars = delivery, scalars
        self._ddp, self._log_every, self._alert = ddp, log_every, alert
        self.n_windows = 0
        """Windows ended so far, those before a restart included."""
        self._n_quiet = self._n_quiet_begun = 0
        """Quiet windows that are left, of those that were left when the last other window had ended."""
        self._own, self._seconds_put = own, 0.0

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
        self.n_windows += 1
        self._steps.window_ended()
        self._model.window_passes()
        self._own.spent[ALWAYS] += time.perf_counter() - start
        return True

    def end(self, clip: WindowClip | None) -> Tensor | None:
        """End the present window.

        Args:
            clip: to apply to the gradients; None without one.

        Returns:
            The norm before clipping; None without a clip, and while a CUDA graph is recorded.

        Raises:
            RuntimeError: see `NoiseScaleProbe.step` and `clip_grad_norm_`.
        """
        self._pieces.check_ended()
        if self._reader.is_recorded():
            self._refuse_in_graph(clip)
            return None
        with torch.no_grad():
            return self._leave_out(clip) if self._inputs_are_uneven() else self._end_checked(clip)

    def _inputs_are_uneven(self) -> bool:
        """Whether DDP's `join()` is in force: ranks without further batches take part in DDP's collectives alone.

        torch does not take that back when the context ends.
        """
        return self._ddp is not None and self._ddp._join_config.enable

    def _leave_out(self, clip: WindowClip | None) -> Tensor | None:
        """Clip, and end no window. Ranks that go on and ranks that have no more batches must count the same windows."""
        self._alert(
            "uneven_inputs",
            "steps inside model.join() and after it are not measured: ranks that have no more batches take no part in "
            "sonde's sum over ranks. Where all ranks have as many batches, as DistributedSampler gives them, leave out "
            "join(), or pass enable=False to it",
        )
        if self._pacing.is_measured:
            self._pieces.discard()
            self._reader.forget_window()
        self._steps.window_ended()
        return None if clip is None else clip.apply(self._reader.final.plan)

    def _end_checked(self, clip: WindowClip | None) -> Tensor | None:
        self.catch_up()
        with self._own.on(MEASURING):
            self._deliver()
        if clip is not None:
            self._reader.final.clip_also(self._model.not_measured())
        is_measured = self._pacing.is_measured
        with self._own.on(MEASURING if is_measured else ALWAYS):
            norm, failure = self._measure(clip) if is_measured else self._pass(clip)
        self._pacing.window_ended()
        self._pieces.begin_window(is_measured=self._pacing.is_measured)
        if self._delivery.is_empty:
            self._n_quiet = self._n_quiet_begun = self._pacing.pace.n_quiet
        if failure is not None:
            raise failure
        return norm

    def catch_up(self) -> None:
        """Tell the pace and the clock of the quiet windows that have ended since the last call."""
        if n := self._n_quiet_begun - self._n_quiet:
            self._pacing.quiet_windows_ended(n)
        self._n_quiet = self._n_quiet_begun = 0

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

    def _measure(self, clip: WindowClip | None) -> tuple[Tensor | None, RuntimeError | None]:
        """Read the window that ends, clip, and put its numbers on their way.

        Returns:
            The norm, if it was asked for; and an error to raise after the window has ended.
        """
        problems, frozen = self._model.window_ends()
        problems |= self._steps.take_problems() | ({Problem.UNITS_ASKED} if self._pieces.is_doubted else set())
        self._steps.window_ended()
        if question := self._pieces.take_question():
            self._alert("units", question)
        window, measured = self._reader.end_window(
            reads_grad=clip is not None,
            problems=problems,
            costs=self._pacing.take_costs(),
            frozen=frozen,
        )
        norm = failure = None
        clip_scalars: dict[str, float | Tensor] = {}
        if clip is not None:
            norm, failure = self._clipped(clip, self._reader.final.plan, measured)
            if norm is not None:
                clip_scalars = clip.scalars(norm)
        self._put(window, clip_scalars | self._scalars.take())
        return norm, failure

    def _clipped(
        self, clip: WindowClip, plan: NormPlan, measured: GlobalNorm | None = None
    ) -> tuple[Tensor | None, RuntimeError | None]:
        """Clip; or the error that is to be raised after the window has ended. The user asked for it: it is no cost."""
        try:
            with self._own.on(NO_COST):
                return clip.apply(plan, measured), None
        except RuntimeError as error:
            return None, error

    def _pass(self, clip: WindowClip | None) -> tuple[Tensor | None, RuntimeError | None]:
        """End a window that was not measured: only the clip has work to do."""
        self.n_windows += 1
        self._steps.window_ended()
        self._model.window_passes()
        return (None, None) if clip is None else self._clipped(clip, self._reader.final.plan)

    def _put(self, window: Window, scalars: Mapping[str, float | Tensor]) -> None:
        """Put a window's numbers on their way, with what the host knows of it."""
        self.n_windows += 1
        seconds, before = self._pacing.seconds, self._seconds_put
        pace, self._seconds_put = self._pacing.pace, seconds
        known = KnownOfWindow(
            self.n_windows, time.time(), seconds - before, self._reader.tap_name, pace.every, pace.windows + 1
        )
        if (rate := self._steps.rate) is not None:
            scalars = {**scalars, RATE: rate}
        self._delivery.put_window(window, scalars, known)

    def _deliver(self) -> None:
        """Send the windows that are due, and take in those that arrived. The first is sent at once."""
        is_due = self.n_windows % self._log_every == 0 or self.n_windows % _WINDOWS_HELD == 0
        if not self._delivery.is_empty:
            if self._delivery.n_put == 1 or is_due:
                self._delivery.send()
            self._delivery.receive(wait=False)
        if self._pacing.pace.awaits is not None:  # ranks must choose alike, so none may choose before it has come
            self._delivery.receive_all()
