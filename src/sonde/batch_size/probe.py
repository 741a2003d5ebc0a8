"""Is my batch size right? The gradient noise scale of a run, while it runs.

The story of a measured window: each backward is a piece, which `LoopPieces` counts, by its forward or by `piece`. The
optimizer's step, `step` or `clip_grad_norm_` has `WindowEnds` end the window and put its numbers on their way.
`Arrivals` gets them some windows later, and gives them to the tracker and the log.
"""

from __future__ import annotations

import functools
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from sonde.batch_size.arrivals import Arrivals, Delivery, MetricTrackers
from sonde.batch_size.forward_units import ForwardUnits, is_of_forward
from sonde.batch_size.found_model import ONE_PROCESS, RanksOfModel, find_model, raised_on_all_ranks
from sonde.batch_size.log import NoiseScaleLog, Scalars
from sonde.batch_size.mechanism import Mechanism
from sonde.batch_size.model_watch import FrozenWatch, ModelWatch, rounding_tolerance
from sonde.batch_size.pace import Cost, Pace
from sonde.batch_size.pieces import NOT_COUNTED, DeclaredPiece, LoopPieces, Units, UnitsOfPieces
from sonde.batch_size.setup import (
    NoiseScaleOptions,
    check_partners,
    describe,
    describe_context_axis,
)
from sonde.batch_size.stats.averages import FixedWeights
from sonde.batch_size.stats.columns import METRICS
from sonde.batch_size.stats.reading import NoiseScaleReading
from sonde.batch_size.stats.tracker import NoiseScaleTracker
from sonde.batch_size.stats.window_row import SolvedWindow
from sonde.batch_size.step_watch import StepWatch
from sonde.batch_size.taps.metric import LEAST_SQ_NORM
from sonde.batch_size.taps.window_reader import WindowReader
from sonde.batch_size.window_clock import OwnTime
from sonde.batch_size.window_ends import WindowClip, WindowEnds
from sonde.console import tell
from sonde.gradient_norm.scaling import Nonfinite, check_options, check_order
from sonde.log.sinks import BRANCH_LOSS
from sonde.parallel.placements import is_partial, local_tensor
from sonde.parallel.process_groups import holds_on_all, n_summed
from sonde.parallel.unwrap import Optimizers, kind_of
from sonde.records import LogOrPlaces, RunLog, log_of
from sonde.stats.columns import Columns
from sonde.stats.intervals import LEVEL
from sonde.stats.sealed_state import check_identity, parameters_digest, sealed, unsealed

PLAIN_LOOP = "plain loop"
"""The trainer, where a script has its own loop."""
_MANY_RUNS = 16
"""Forwards and backwards without any step, after which this is certainly no accident."""


class NoiseScaleProbe:
    """Measures the gradient noise scale B_simple = tr Σ/|G|² of a model while it trains, however it is cut over ranks.

    Training does not change: gradients are read as backward makes them. One small vector per window (all pieces of one
    optimizer step) is summed over ranks, asynchronously. Nothing waits for the device between attach and `reading()`,
    `state_dict()` or `close()`. Attach on every rank, since every rank takes part in the sum.

    Not every window is measured: `NoiseScaleOptions` says how many, by `budget` and `every`. In the others, no hook
    runs in backward and nothing is summed, and `clip_grad_norm_` still clips. With several ranks, a rank on which the
    costs of a window are still missing 15 windows later waits for them, since all ranks must choose the same windows.

    Args:
        model: plain, compiled, wrapped in DDP, or cut by FSDP2, tensor or sequence parallelism; on any devices, with
            its final `requires_grad`.
        optimizer: whose steps end the windows, or several in a list that step the model together, as Muon and AdamW do.
            What they hold is measured, and nothing else. The probe warns about windows that are not measured, or
            measured twice. Without it, all trainable parameters are measured, and the probe looks for the optimizers
            that step them.
        options: how to measure.
        grad_scaler: the `torch.amp.GradScaler` in use; a piece is divided by the scale that it was taken at.
        ranks: of the model, as far as it does not show them; see `attach`.
        log: of the run; give the same log to every probe of the run. Or what `RunLog` takes, for a log of its own.
        trainer: that runs the loop, for `sonde advise`.
        verbose: print the setup that was found, on rank 0.
        fixed_weights: averages the windows of a model that does not train: `sonde.measure` passes it.

    Raises:
        ValueError: for an argument outside its range, a model without trainable parameters or one that hides its
            gradients; on all ranks, when they were attached with other options or hold other parameters.

    Reference:
        McCandlish et al. 2018, arXiv:1812.06162.
    """

    METRICS: ClassVar[Columns] = METRICS

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers,
        options: NoiseScaleOptions,
        *,
        grad_scaler: torch.amp.GradScaler | None = None,
        ranks: RanksOfModel = ONE_PROCESS,
        log: LogOrPlaces = None,
        trainer: str = PLAIN_LOOP,
        verbose: bool = True,
        fixed_weights: FixedWeights | None = None,
    ) -> None:
        log = log_of(log)
        with raised_on_all_ranks(model, ranks):
            check_partners(options, optimizer=optimizer, grad_scaler=grad_scaler)
        self._found = found = find_model(model, optimizer, options, ranks)
        self._wrapper, self._options = (wrapper := found.wrapper), (options := found.options)
        self._grad_scaler = grad_scaler if grad_scaler is not None and grad_scaler.is_enabled() else None
        self._rounding = functools.partial(rounding_tolerance, wrapper)
        new_tracker = functools.partial(self._new_tracker, fixed_weights)
        self._metrics = MetricTrackers(options.metrics, [metric.name for metric in found.metrics], new_tracker)
        self._tracker = self._metrics.headline
        self._own = OwnTime()
        self._mechanism = Mechanism(model, found, self._own)
        self._scalars = Scalars(log)
        self.is_closed = False
        """Whether nothing is measured any more."""
        self.is_verbose, self._trainer = verbose and log.is_first_rank, trainer
        self.run_log, self.ranks = log, wrapper.group
        """The log of the run; the ranks that windows are summed over, None for this process alone."""
        self._log_every = log.every
        # These install hooks, so they come after everything that may refuse the model.
        self._read_gradients()
        self._follow_the_loop(model, optimizer)
        try:
            self._log = self._begun_log(log)
        except BaseException:  # leave no hook behind
            self._remove_hooks()
            raise
        self._arrivals = Arrivals(
            self._metrics,
            self._log,
            self._rounding,
            frozen=self._frozen,
            mechanism=self._mechanism,
            pace=self._pace,
            reader=self._reader,
            counted_in=lambda: self._forwards.counted_in,
            say=self._say,
        )
        self._mechanism.begin_window(is_measured=True)
        self._say(describe(self._setup(), self._tracker.unit, self._tracker.groups))
        if found.sequences_axis is not None:
            self._alert("context_axis", describe_context_axis(found.sequences_axis))

    def _read_gradients(self) -> None:
        """Make what reads gradients, and brings their numbers to the host."""
        self._reader = WindowReader(
            self._found,
            self._own,
            grad_scaler=self._grad_scaler,
            examples=self._mechanism.examples,
            on_backward_end=lambda: self._pieces.backward_ended(),
        )
        adds = [metric.adds for metric in self._found.metrics]
        self._delivery = Delivery(lambda window: self._arrivals.take(window), self._reader.device, adds, self._own)
        self._alone = self._delivery.alone

    def _follow_the_loop(self, model: nn.Module, optimizer: Optimizers) -> None:
        """Make what follows the user's loop: its forwards, pieces and steps, and what becomes of the model."""
        wrapper, options, reader, own = self._wrapper, self._options, self._reader, self._own
        n_ranks, n_stages = n_summed(wrapper.group), 1 if wrapper.pp_mesh is None else wrapper.pp_mesh.size()
        self._pace = pace = Pace(
            every=options.every, budget=options.budget, allowance=options.allowance, n_ranks=n_ranks
        )
        self._frozen = FrozenWatch(wrapper.parameters, n_ranks=n_ranks, n_stages=n_stages, device=reader.device)
        self._model = ModelWatch(model, wrapper, self._frozen, alert=self._alert)
        self._steps = StepWatch(
            optimizer,
            wrapper,
            reader,
            pace,
            own,
            has_peers=n_ranks > 1,
            end_window=self._end_at_step,
            alert=self._alert,
        )
        units = options.units_per_piece
        self._forwards = ForwardUnits(model, units if is_of_forward(units) else None, own, self._steps)
        self._pieces = LoopPieces(
            options.units,
            units,
            self._forwards,
            reader=reader,
            steps=self._steps,
            pace=pace,
            own=own,
            in_pipeline=wrapper.pp_mesh is not None,
        )
        self._ends = WindowEnds(
            reader,
            self._steps,
            self._model,
            self._pieces,
            pace,
            self._mechanism,
            self._delivery,
            self._scalars,
            own,
            log_every=self._log_every,
            alert=self._alert,
        )

    def _begun_log(self, log: RunLog) -> NoiseScaleLog:
        """The log of all that is measured, begun. If one rank cannot begin it, none measures, so that none waits."""
        setup, further, pace = self._setup(), self._metrics.further, self._pace
        on_all = functools.partial(holds_on_all, self._wrapper.group, self._wrapper.leaves[0].device)
        try:
            begun = NoiseScaleLog(self._tracker, log, setup, lambda: pace.cost, further)
        except Exception:
            on_all(here=False)
            raise
        if not on_all(here=True):
            log.leave("reading", "the log could not be begun on another rank", window=0)
            raise RuntimeError(
                "the log of the run could not be begun on another rank, whose error says why: no rank measures"
            )
        return begun

    def _new_tracker(self, fixed_weights: FixedWeights | None, metric: str) -> NoiseScaleTracker:
        found = self._found
        # A GradScaler and other metrics change the size of squares: the limit for plain squares is not theirs.
        has_plain_squares = metric == "euclidean" and self._grad_scaler is None
        return NoiseScaleTracker(
            unit=found.options.units[0],
            further_units=found.options.units[1:],
            groups=found.groups,
            n_ranks=found.wrapper.n_ranks,
            least_sq_norm=LEAST_SQ_NORM * found.whole.numel if has_plain_squares else 0.0,
            rounding=self._rounding(),
            fixed_weights=fixed_weights,
            optimizer=functools.partial(kind_of, found.wrapper.optimizers),
        )

    # What the user calls.

    def piece(
        self,
        *,
        units: Units = None,
        weight: float | Tensor = 1.0,
        unit_weights: Sequence[float] | Tensor | None = None,
    ) -> AbstractContextManager[None]:
        """A context around the backward, or backwards, of one micro-batch.

        Args:
            units: units in the piece, > 0; by default the number of `unit_weights`, or `units_per_piece`. If it is
                counted in several: {"sequences": 8, "tokens": 4096}.
            weight: the piece's weight in the loss, > 0: 1 where micro-losses are averaged or added as they are, the
                number of loss tokens where the loss is normalised by the tokens of the whole window.
            unit_weights: the weight of each unit within the piece, [units]; unequal weights give a smaller effective
                number of units (Kish).

        Tensors must be 0-dim (1-dim for `unit_weights`) and are not waited for; a bad value in one drops the window.

        Raises:
            ValueError: for units or weights that are not positive and finite.
            RuntimeError: inside another piece, or when the number of units is not known.
        """
        start = time.perf_counter()
        if self.is_closed:
            self._check_open()
        return DeclaredPiece(self._pieces, units, weight, unit_weights, start)

    def pieces(
        self,
        n: int,
        *,
        units: UnitsOfPieces = None,
        weights: float | Sequence[float | Tensor] = 1.0,
        unit_weights: Sequence[Sequence[float] | Tensor] | None = None,
    ) -> AbstractContextManager[None]:
        """A context around the step of a pipeline schedule, which runs the backwards of several micro-batches.

        Every rank of the pipeline enters it, with the same numbers.

        Args:
            n: the schedule's micro-batches; each is a piece.
            units: units in each of them, > 0, one number for all or [n], by name if there are several; by default
                `units_per_piece`.
            weights: the weight of each in the loss, > 0, one number for all or [n].
            unit_weights: for each of them, the weight of each unit within it, [n] of [units].

        Raises:
            ValueError: for numbers that are not positive and finite, or not n of them.
            RuntimeError: inside another piece, without a pipeline, or when the number of units is not known.
        """
        start = time.perf_counter()
        self._check_open()
        if self._wrapper.pp_mesh is None or self._wrapper.sequence_group is not None:
            raise RuntimeError(
                "pieces(n) goes around the step of a pipeline schedule, and the probe knows of none: pass pp_mesh= to "
                "attach, the axis of the mesh along which stages lie, or enter 'with probe.piece():' around each "
                "micro-batch; ranks that share sequences are measured without a pipeline"
            )
        return DeclaredPiece(self._pieces, units, weights, unit_weights, start, n)

    def uncounted(self, n: int | None = None) -> AbstractContextManager[None]:
        """A context like `piece()`, for a micro-batch whose units could not be counted.

        Its window is left out on all ranks, with that reason. Without it, the backward would be a gradient that no
        piece explains, and windows with such a gradient cast doubt on others.

        Args:
            n: micro-batches of a pipeline schedule, as for `pieces(n)`; None without a pipeline.

        Raises:
            RuntimeError: inside another piece.
        """
        start = time.perf_counter()
        self._check_open()
        return DeclaredPiece(self._pieces, NOT_COUNTED, 1.0, None, start, n)

    def step(self) -> None:
        """End the window by hand, after the last backward and before the optimizer's step, which ends it otherwise.

        Call it for a window that no optimizer of torch ends, and on several ranks where a rank may leave out a step
        that others take. Right after a step that has ended the window it does nothing. Gradients may have been
        unscaled, divided or clipped by norm before. If they were clipped by value, the window is dropped.

        Raises:
            RuntimeError: inside a piece.

        While a CUDA graph is recorded, it does nothing but say so, since a graph that is replayed calls nothing.
        """
        start = time.perf_counter()
        with self._alone:
            if self.is_closed:
                self._check_open()
            if not (self._steps.is_ended_already() or self._ends.pass_quiet(start)):
                self._ends.end(None)

    def _end_at_step(self) -> None:
        """End the window at the optimizer's step, which goes on whatever is wrong with the window."""
        start = time.perf_counter()
        with self._alone:
            if self._ends.pass_quiet(start):
                return
            try:
                self._ends.end(None)
            except RuntimeError as error:
                self._alert("not_ended", f"a window could not be ended at optimizer.step(): {error}")
                self.discard()

    def judge_further_backwards(self, why_not: Callable[[], str]) -> None:
        """Have it said at a second backward of a window, outside `piece()`, whether it is a micro-batch.

        Losses of several kinds, as of real and of generated images, may each have a backward. Then they are none.

        Args:
            why_not: returns why it is none, and what to do, so that the window is left out; empty if it is one. All
                ranks must say the same.
        """
        self._pieces.why_not_another = why_not

    def discard(self) -> None:
        """Forget the pieces of the present window, when its gradients were zeroed without a step.

        Call it on all ranks, as they all leave out the step. Nothing happens in a window that has no pieces.
        """
        with self._alone:
            if not self.is_closed and self._pieces.discard():
                self._reader.forget_window()

    def clip_grad_norm_(
        self, max_norm: float | None, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> Tensor:
        """End the window as `step()` does, and clip the gradients by their joint norm.

        All that the given optimizers hold is clipped, also what is not the model's; without an optimizer, all of the
        model. What another optimizer is seen to step is clipped from its second step on.

        Args:
            max_norm: the largest norm allowed, ≥ 0; None or `math.inf` only measures.
            norm_type: as for `sonde.clip_grad_norm_`. The log has the norm for p = 2 alone.
            error_if_nonfinite: raise when the norm is not finite; waits for the device.

        Returns:
            The norm before clipping, as `torch.nn.utils.clip_grad_norm_`, on every rank: a 0-dim tensor.

        Raises:
            ValueError: when `max_norm` is negative or NaN, or `norm_type` is neither from above 0 to 6 nor infinite.
            RuntimeError: as `step()`; for a norm that is not finite, with `error_if_nonfinite`; and while a CUDA graph
                is recorded.
        """
        nonfinite: Nonfinite = "raise" if error_if_nonfinite else "ignore"
        clip = WindowClip(check_options(max_norm, nonfinite), check_order(norm_type), nonfinite)
        with self._alone:
            self._check_open()
            norm = self._ends.end(clip)
        assert norm is not None
        return norm

    def takes_all(self, tensors: Sequence[Tensor]) -> bool:
        """Whether a norm of these is that of the present window's gradient, if the window is measured.

        Args:
            tensors: all parameters, or all gradients that this rank has; `to_local()` makes new tensors of them.
        """
        if not self.measures_now:
            return False
        parameters = self._wrapper.parameters.values()
        if {id(p) for p in parameters} <= {id(t) for t in tensors}:
            return True
        here = {t.data_ptr() for p in parameters if p.grad is not None and (t := local_tensor(p.grad)).numel()}
        return bool(here) and here <= {local_tensor(t).data_ptr() for t in tensors}

    def note_clip(self, norm: Tensor, max_norm: float | None) -> None:
        """Note a clip by the loop itself, for the log: call it before `step()`, after the clip.

        Where the model is cut over ranks, the norm is compared with the true one. A DTensor that is partial stands for
        the norm that `item()` and `to_local()` give, although the clip by it is right.

        Args:
            norm: 2-norm of all gradients before the clip, 0-dim; it is not waited for.
            max_norm: the largest norm allowed; None where the norm was only taken, so that it is not in the log.
        """
        if self.is_closed or not self._pace.is_measured:
            return
        self._reader.final.note_own_norm(norm, max_norm)
        if max_norm is not None and not is_partial(norm):
            norm = local_tensor(norm)
            for name, value in WindowClip(max_norm, 2.0, "ignore").scalars(norm).items():
                self._scalars.note(name, value)

    def log(self, **scalars: float | Tensor) -> None:
        """Give scalars of the present window (a loss, a learning rate) to be written beside the reading.

        A scalar that is given several times between two readings is averaged. Those of rank 0 are written: average
        over ranks first if they differ.

        Args:
            **scalars: numbers or 0-dim tensors; tensors are not waited for.

        Raises:
            ValueError: for a tensor of more than one element, another type, a name that sonde itself writes, or a name
                that some trackers refuse.
        """
        self._check_open()
        if self._reader.is_recorded() and any(isinstance(value, Tensor) for value in scalars.values()):
            raise RuntimeError(
                "probe.log() was given a tensor while a CUDA graph is recorded, and its replays would run without "
                "sonde: log the tensor after each replay"
            )
        for name, value in scalars.items():
            self._scalars.add(name, value)
        loss = os.environ.get(BRANCH_LOSS, "")
        if loss in scalars:
            since_start = int(self._ends.n_windows - self._pace.windows_before)
            self._log.write_at_once(since_start, loss, float(scalars[loss]))

    def reading(self, metric: str | None = None, *, with_groups: bool = True) -> NoiseScaleReading:
        """The present reading, including the window that ended last. Waits for the device.

        Another thread may call it while this one trains.

        Args:
            metric: one that is measured; by default the first.
            with_groups: also read each group of parameters.

        Raises:
            ValueError: for a metric that is not measured.
        """
        with self._alone:
            self._delivery.receive_all()
            return self._metrics.of(metric).reading(with_groups=with_groups)

    def window(self, metric: str | None = None) -> SolvedWindow | None:
        """The last measured window's own tr Σ and |G|², unbiased and noisy. Waits for the device.

        None if it was dropped.

        Args:
            metric: as for `reading`.

        Raises:
            ValueError: for a metric that is not measured.
        """
        with self._alone:
            self._delivery.receive_all()
            return self._metrics.of(metric).last

    def metrics(self) -> Mapping[str, float | None]:
        """The first metric's reading by name; None for what is not known or not bounded. Waits for the device."""
        return self.reading(with_groups=False).metrics()

    @property
    def n_pieces(self) -> int:
        """Pieces of the present window on this rank so far; 0 in windows that are not measured."""
        return self._reader.n_pieces

    @property
    def n_windows(self) -> int:
        """Windows that have ended so far, measured or not."""
        return self._ends.n_windows

    @property
    def measures_now(self) -> bool:
        """Whether the present window is measured. In the others, `piece()` makes no use of its numbers."""
        return self._pace.is_measured

    def note_rate_factor(self, factor: Callable[[], float]) -> None:
        """Note that steps are taken at so many times the learning rate that the optimizers show, asked at each."""
        self._steps.rate_factor = factor
        self._metrics.follow_rate(factor)

    def cost(self) -> Cost:
        """How many windows are measured now, and the part of the run's time that it takes. Waits for the device."""
        with self._alone:
            self._delivery.receive_all()
            return self._pace.cost

    @property
    def alerts(self) -> Mapping[str, str]:
        """The alerts so far: the last message of each name."""
        return dict(self._log.alerts)

    def known_of(self, reading: NoiseScaleReading) -> dict[str, Any]:
        """What is known when a reading is taken: its numbers and the set-up, by the names that the log has.

        Args:
            reading: of this probe.
        """
        return {
            "metrics": reading.metrics(),
            "setup": self._setup(),
            "unit": reading.unit,
            "now": reading.now,
            "window": self._tracker.n_seen,
            "pieces": self._tracker.n_pieces,
            "optimizer_changed": reading.optimizer != self._found.record.get("optimizer_kind"),
            "batch_changed": reading.batch_changed,
            "reason": reading.reason,
            "wait": reading.advice,
        }

    def state_dict(self) -> dict[str, Any]:
        """The averages so far, from which a restart continues: a version and a text. Waits for the device.

        The same on every rank. Any checkpoint takes it: `torch.save`, JSON, and `torch.distributed.checkpoint` with the
        probe itself as one of its entries.
        """
        with self._alone:
            self._delivery.receive_all()
            return sealed(
                {
                    "what": self._identity(),
                    "averages": self._metrics.state_dict(),
                    "frozen": self._frozen.of_all,
                    "run": self._log.state_dict(),
                    "windows": self._ends.n_windows,
                    "covered": self._arrivals.n_covered,
                    "spent": self._pace.spent,
                }
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the result of `state_dict`.

        Load it on every rank, before the first window; the run that saved it may have had another number of ranks.

        Raises:
            ValueError: when it is damaged, or of another version, unit, metric, of other parameters or groups;
                nothing is changed then.
        """
        contents = unsealed("noise-scale probe state", state)
        check_identity(contents["what"], self._identity())
        with self._alone:
            self._delivery.receive_all()  # windows still on their way belong to the time before
            self._metrics.load_state_dict(contents["averages"])
            self._frozen.restore(contents["frozen"])
            self._log.load_state_dict(contents["run"])
            self._ends.n_windows = contents["windows"]
            self._arrivals.n_covered = contents["covered"]
            self._pace.windows_before, self._pace.spent_before = contents["windows"], contents["spent"]

    def _identity(self) -> dict[str, object]:
        """What is measured. Averages of something else must not be continued."""
        whole = self._found.whole
        return {
            "probe": NoiseScaleProbe.__name__,
            "unit": self._tracker.unit,
            "metric": ", ".join(self._options.metrics),
            "parameters": parameters_digest(whole.names, whole.shapes),
            "groups": list(self._tracker.groups),
        }

    def close(self, reason: str = "closed", *, patience: float = math.inf) -> None:
        """Remove every hook, write what is left and end this probe's part of the log. A second call does nothing.

        Args:
            reason: how the run ended, for its log.
            patience: seconds in which other ranks may still sum the last windows with this one. Then these windows are
                left out: a rank that has failed would never join. All ranks are waited for by default.
        """
        with self._alone:
            if not self.is_closed:
                self.is_closed = True
                self._end(reason, patience=patience)

    def _end(self, reason: str, *, patience: float) -> None:
        if self.n_windows == 0 and self._steps.n_runs >= _MANY_RUNS:
            self._alert(
                "no_step",
                "no optimizer of torch has stepped what is measured, so no window has ended: attach after fully_shard "
                "and all else that replaces parameters, or call probe.step() before each step",
            )
        if abandon_unfinished := patience < math.inf:
            self._delivery.wait_for_ranks(patience)
        try:
            try:
                self._delivery.send(abandon_unfinished=abandon_unfinished)
            finally:  # also of a run whose peers failed: take what has arrived
                self._delivery.receive(wait=not abandon_unfinished)
                if not abandon_unfinished:
                    self._log.passed(self._ends.n_windows, {name: float(v) for name, v in self._scalars.take().items()})
        finally:
            self._remove_hooks()
            self._log.end(reason)

    def _remove_hooks(self) -> None:
        self._mechanism.close()
        self._forwards.close()
        self._reader.tap.close()
        self._steps.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        # After an exception, peers may never join a collective that is under way: it is not waited for.
        reason = "closed" if kind is None else f"stopped by {kind.__name__}"
        self.close(reason, patience=math.inf if kind is None else 0.0)

    def _check_open(self) -> None:
        if self.is_closed:
            raise RuntimeError("the probe is closed: attach a new one, or clip with sonde.clip_grad_norm_")

    def _alert(self, name: str, message: str) -> None:
        self._log.alert(name, message)

    def _setup(self) -> dict[str, object]:
        """The setup that was found, for the log and for people."""
        return self._found.record | {
            "tap": self._reader.tap_name,
            "fixed_weights": self._tracker.at_fixed_weights,
            "log_every": self._log_every,
            "grad_scaler": self._grad_scaler is not None,
            "level": LEVEL,
            "trainer": self._trainer,
        }

    def _say(self, text: str) -> None:
        if self.is_verbose:
            tell(text)
