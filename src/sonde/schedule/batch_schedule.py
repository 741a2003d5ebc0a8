"""A batch that follows the noise scale, for any loop that asks how many micro-batches its next window has."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, ClassVar

from sonde.batch_size.probe import NoiseScaleProbe
from sonde.batch_size.stats.window_row import SolvedWindow
from sonde.console import tell
from sonde.decision.rate import parsed_rule
from sonde.parallel.process_groups import gather_objects, n_summed
from sonde.parallel.unwrap import unwrap_optimizer
from sonde.probe import ReportSection
from sonde.record_values import spacing, whole_number
from sonde.schedule.scaled_rate import RateAt, ScaledRate, usual_rule_of
from sonde.schedule.stats.batch_rule import BatchRule, BatchState, Decision, NoiseScaleNow, metrics_of, next_batch
from sonde.stats.columns import Metric
from sonde.stats.sealed_state import check_identity, sealed, unsealed
from sonde.wording import number, plural

_MOST_UNLIKE = 5
"""Measured windows in a row of another size than the schedule says that are refused. The last one of an epoch may be
short, and where one window in many is measured, several of those may come in a row."""
_UNLIKE = 1.4
"""Times that a window is larger or smaller: units of micro-batches differ, and allowed counts usually double."""
_COUNTS_STEPS = (
    "a schedule of the learning rate may count optimizer steps, of which a growing batch takes fewer, so its end would "
    "move: pass it as scale_lr(optimizer, lr_scheduler), and call schedule.step_lr(lr_scheduler) in place of "
    "lr_scheduler.step(), which keeps its end at the same number of {unit}"
)


class BatchSchedule:
    """Grows the batch as the noise scale grows: it says how many micro-batches the next window has.

    This is the one part of sonde that changes training. It grows the batch where the lower end of the noise scale's
    interval says so, to one allowed count after another; `docs/batch-schedule.md` has the rule. Read `micro_batches` at
    the beginning of each window, on all ranks. Every few windows that takes a reading, which waits for the device, and
    one small collective: all ranks decide by the reading of the first.

    Each decision is written to the log of the probe's run, with what it rests on.

    Args:
        probe: attached to the model.
        largest: most micro-batches of a window on each rank. It has powers of two times `smallest`.
        smallest: micro-batches of the first windows, those that the optimizer's own rate is right for.
        ratio: batch over B_simple that is aimed at. Larger ones save more steps, and cost more units.
        pause: measured windows after a change before the next.
        rule: how the rate follows the batch: "sqrt", "linear", "none", "sgd=120". By default "sqrt"; for SGD
            "sgd=N", with N the lower end of the noise scale when the batch last changed.
        every: windows between two decisions; more in long runs, and where fewer windows are measured.
        on_change: called with the `Decision` whenever the batch changes, to set what `scale_lr` does not.
        verbose: print each change on standard error, on the first rank.

    Raises:
        ValueError: for arguments out of their range, or that differ over ranks; for what is no probe, and one that
            measures at fixed weights.

    Example:
        >>> import sonde, torch
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with sonde.attach(model, optimizer, unit="rows", verbose=False) as probe:
        ...     schedule = sonde.BatchSchedule(probe, smallest=2, largest=16)
        ...     schedule.scale_lr(optimizer)
        ...     for _ in range(20):
        ...         for _ in range(schedule.micro_batches):
        ...             loss = model(torch.randn(8, 4)).square().mean() / schedule.micro_batches
        ...             loss.backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
    """

    METRICS: Mapping[str, Metric] = {
        "schedule/micro_batches": Metric("micro-batches", "micro-batches of a window on each rank, from here on"),
        "schedule/batch": Metric("{unit}", "batch size from here on"),
        "schedule/b_simple": Metric("{unit}", "B_simple, where both ends of its interval were known"),
        "schedule/b_simple_low": Metric("{unit}", "lower end of its interval, by which the batch grows"),
        "schedule/b_simple_high": Metric("{unit}", "upper end of its interval"),
        "schedule/average_low": Metric("{unit}", "lower end of the run's average, where both of its ends were known"),
        "schedule/units_per_micro_batch": Metric("{unit}", "units of a micro-batch of all ranks together"),
        "schedule/measured_windows": Metric("windows", "windows that were measured so far, and could be used"),
        "schedule/rate_factor": Metric("", "rate of steps over the one that the optimizer shows, from here on"),
    }
    SECTION: ClassVar[ReportSection] = ReportSection(
        "Batch schedule",
        "The batch that was trained with, and the ends of the interval of B_simple that decided on it.",
        ("schedule/batch", "schedule/b_simple_low", "schedule/b_simple_high"),
    )

    def __init__(
        self,
        probe: NoiseScaleProbe,
        *,
        largest: int,
        smallest: int = 1,
        ratio: float = 0.5,
        pause: int = 8,
        rule: str | None = None,
        every: int = 10,
        on_change: Callable[[Decision], object] | None = None,
        verbose: bool = True,
    ) -> None:
        if not isinstance(probe, NoiseScaleProbe) or (reading := probe.reading()).n_steps is None:
            raise ValueError(
                f"probe must be that of a training, as sonde.attach has returned it, got {probe!r:.60}: attach first, "
                "and not at fixed weights, which have no windows whose batch could follow"
            )
        self._probe, self._rate_rule, self._on_change, self._verbose = probe, rule, on_change, verbose

        def checked() -> tuple[BatchRule, int, str | None]:
            if rule is not None:
                parsed_rule(rule)
            whole_number("every must be a whole number of windows", every)
            first, last = (whole_number("micro-batches must be a whole number", n) for n in (smallest, largest))
            return BatchRule(first, last, ratio, pause), every, rule

        of_ranks = gather_objects(probe.ranks, checked)
        _check_same(of_ranks)
        self.batch_rule = of_ranks[0][0]
        """What is decided by."""
        self._state, self._every = BatchState(self.batch_rule.smallest), every
        self._units_per_micro_batch: float | None = None
        self._due_at: int | None = None
        """The window of the next decision; None before the first window, since checkpoints may still be loaded."""
        self._seen: SolvedWindow | None = None
        """The last window whose size was compared with the schedule's."""
        self._n_unlike: int | None = None
        """Windows in a row that were unlike it; None once one was like it."""
        self._stepped = probe.n_windows
        """The last window for which a schedule of the rate was stepped."""
        self._steps_lr: list[Any] = []
        """Schedules of the rate that `step_lr` steps."""
        self._by_loop: dict[Any, tuple[int, int] | None] = {}
        """The others that `scale_lr` was given: the first window, and the steps that they had then."""
        self._rates: list[ScaledRate] = []
        self.last: Decision | None = None
        """The last decision; None before the first."""
        probe.note_rate_factor(lambda: self.rate_factor)
        self._unit = reading.unit
        self.METRICS = {k: Metric(m.unit.replace("{unit}", self._unit), m.meaning) for k, m in self.METRICS.items()}

    @property
    def micro_batches(self) -> int:
        """How many micro-batches the next window has, on each rank. Read it at the beginning of a window.

        Raises:
            ValueError: on all ranks, when these disagree; for a schedule of the rate whose end would move.
        """
        n_windows = self._probe.n_windows
        if self._due_at is None:
            self._due_at, self._stepped = n_windows + self._every, n_windows
        for scheduler, began in self._by_loop.items():
            self._by_loop[scheduler] = began or (n_windows, scheduler.last_epoch)
        is_due = n_windows >= self._due_at
        if is_due or self._n_unlike is not None:
            self._check_size()
        if is_due:
            self._decide()
        return self._state.micro_batches

    def _check_size(self) -> None:
        """Refuse a loop whose windows keep having another size than the schedule says: their rate would be wrong.

        After a change, each window is looked at until one has the size. All ranks see the same sums.

        Raises:
            ValueError: with both sizes.
        """
        window, said, each = self._probe.window(), self._state.micro_batches, self._units_per_micro_batch
        if window is None or window is self._seen or each is None:
            return
        self._seen, n = window, window.effective_units / each
        self._n_unlike = None if 1 / _UNLIKE < n / said < _UNLIKE else (self._n_unlike or 0) + 1
        if (self._n_unlike or 0) >= _MOST_UNLIKE:
            raise ValueError(
                f"windows must have the {said} micro-batches of {number(each)} {self._unit} that the schedule "
                f"says, and the last {_MOST_UNLIKE} measured ones had not; the last one had "
                f"{number(window.effective_units)} {self._unit}: read schedule.micro_batches at the beginning of each "
                "window, and take as many. If an epoch has fewer, lower largest=; if a micro-batch has another size "
                "than in the checkpoint, make a new schedule"
            )

    def _decide(self) -> None:
        of_ranks = gather_objects(self._probe.ranks, self._of_rank)
        _check_same([same for same, _, _ in of_ranks])
        _, now, every = of_ranks[0]
        self._due_at = self._probe.n_windows + every
        if now is None:
            return
        self._units_per_micro_batch = now.units_per_micro_batch
        self.last = decision = next_batch(self.batch_rule, self._state, now)
        self._state = decision.state
        self._probe.run_log.measure(self, self._probe.n_windows)
        if not decision.changed:
            return
        self._seen, self._n_unlike = self._probe.window(), 0
        if self._verbose and self._probe.run_log.is_first_rank:
            tell(f"{decision.reason} {self._unit}, {self._state.micro_batches} micro-batches a window")
        if self._on_change is not None:
            self._on_change(decision)

    def _of_rank(self) -> tuple[tuple[BatchRule, BatchState, int], NoiseScaleNow | None, int]:
        """What must be the same on all ranks, the noise scale if it is known, and windows until the next decision."""
        for scheduler, began in self._by_loop.items():
            if began and 2 * (scheduler.last_epoch - began[1]) > self._probe.n_windows - began[0]:
                raise ValueError(_COUNTS_STEPS.format(unit=self._unit))
        reading, n_windows = self._probe.reading(with_groups=False), self._probe.n_windows
        same = (self.batch_rule, self._state, n_windows)
        # One window in so many is measured: a decision before the next would learn nothing.
        every = max(spacing(self._every, n_windows), round(reading.every))
        if (batch := reading.effective_units or reading.units_per_window) is None:
            return same, None, every
        # Learnt before the batch changes: averages of units lag behind a change.
        per_micro_batch = self._units_per_micro_batch or batch / self._state.micro_batches
        high = None if reading.status == "lower_bound" else reading.high
        average_low = reading.average.low if reading.average and reading.average.ratio is not None else None
        now = NoiseScaleNow(reading.b_simple, reading.low, high, average_low, per_micro_batch, reading.windows)
        return same, now, every

    def metrics(self) -> Mapping[str, float | None]:
        """The last decision and what it rests on, by metric name."""
        if self.last is None:
            return {}
        n, now = self._state.micro_batches, self.last.now
        metrics = {"schedule/micro_batches": n, "schedule/batch": n * now.units_per_micro_batch} | metrics_of(now)
        return metrics | {"schedule/rate_factor": self.rate_factor if self._rates else None}

    def step(self) -> None:
        """Nothing: decisions are made when `micro_batches` is read."""

    # The learning rate.

    def scale_lr(self, optimizer: Any, lr_scheduler: Any = None) -> None:
        """Take every step of an optimizer at the rate of the present batch, from here on; a second call does nothing.

        Between steps the optimizer shows its own rate, so any schedule of the rate composes with it.

        Args:
            optimizer: of the loop, at the rate that is right for `smallest`.
            lr_scheduler: the schedule of its rate, if there is one. Step it by `step_lr`; one that counts epochs, by
                itself.

        Raises:
            ValueError: for an optimizer without hooks or without a rate, and a schedule of the rate that was not
                passed.
        """
        optimizer = unwrap_optimizer(optimizer)
        if any(rate.optimizer is optimizer for rate in self._rates):
            return
        scheduler = getattr(lr_scheduler, "scheduler", lr_scheduler)  # inside Accelerate's
        if scheduler is None and hasattr(getattr(optimizer, "step", None), "_wrapped_by_lr_sched"):
            raise ValueError(_COUNTS_STEPS.format(unit=self._unit))
        rule = usual_rule_of([optimizer]) if self._rate_rule is None else self._rate_rule

        def at() -> RateAt:
            """In units, as the noise scale of a rule is."""
            each = self._units_per_micro_batch or 1.0
            is_capped = self._rate_rule is None and rule == "linear" and self._state.noise_scale
            now = f"sgd={self._state.noise_scale}" if is_capped else rule
            return now, each * self._state.micro_batches, each * self.batch_rule.smallest

        self._rates.append(ScaledRate(optimizer, at))
        if hasattr(scheduler, "last_epoch") and not _follows_loss(scheduler):
            self._by_loop[scheduler] = None

    @property
    def rate_factor(self) -> float:
        """The rate of steps now, over the one that the first optimizer given to `scale_lr` shows; 1 without one."""
        return self._rates[0].factor if self._rates else 1.0

    def step_lr(self, *lr_schedulers: Any) -> None:
        """Step all schedules of the rate, in place of their `step()`, so that their ends stay where they were in units.

        A window of twice the smallest batch is two of their steps. Nothing happens before a window has ended.

        Args:
            *lr_schedulers: the same in every call.

        Raises:
            ValueError: for others than in the first call, and one that follows a loss. A second call after a window has
                no steps left to take.
        """
        given = [getattr(each, "scheduler", each) for each in lr_schedulers]
        self._steps_lr = self._steps_lr or given
        if given != self._steps_lr or any(map(_follows_loss, given)):
            raise ValueError(
                "step_lr takes all schedules of the rate in one call, and the same in every call: "
                "schedule.step_lr(first, second). Step those that follow a loss, as ReduceLROnPlateau, by yourself"
            )
        self._by_loop = {each: began for each, began in self._by_loop.items() if each not in given}
        n_windows, self._stepped = self._probe.n_windows - self._stepped, self._probe.n_windows
        for _ in range(n_windows * self._state.micro_batches // self.batch_rule.smallest):
            for each in lr_schedulers:
                each.step()

    def close(self) -> None:
        """Leave optimizers as they were: their steps are taken at their own rates."""
        for rate in self._rates:
            rate.close()
        self._rates = []

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """Where the schedule stands, for a checkpoint beside the probe's own state; the same on every rank."""
        return sealed(
            {
                "what": self._identity(),
                "state": asdict(self._state),
                "of_rank": self._units_per_micro_batch and self._units_per_micro_batch / n_summed(self._probe.ranks),
                "counts": [self._probe.n_windows, self._due_at, self._stepped],
            }
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another run stopped. Load the probe's state first, on every rank.

        Raises:
            ValueError: when it is damaged, or of a schedule by another rule; nothing is changed then.
        """
        of_ranks = gather_objects(self._probe.ranks, lambda: self._checked(state))
        _check_same(of_ranks)
        contents = of_ranks[0]
        self._state = BatchState(**contents["state"])
        # A micro-batch of all ranks together has as many times the units as there are times the ranks.
        self._units_per_micro_batch = contents["of_rank"] and contents["of_rank"] * n_summed(self._probe.ranks)
        _, self._due_at, self._stepped = contents["counts"]
        self._seen, self._n_unlike = self._probe.window(), 0

    def _checked(self, state: Mapping[str, Any]) -> dict[str, Any]:
        contents = unsealed("batch schedule's state", state)
        check_identity(contents["what"], self._identity())
        if (n_windows := contents["counts"][0]) != self._probe.n_windows:
            raise ValueError(
                f"the schedule's state was saved after {plural(n_windows, 'window')}, and the probe has seen "
                f"{self._probe.n_windows:,}: load the probe's state of the same checkpoint first"
            )
        return contents

    def _identity(self) -> dict[str, object]:
        return {"probe": type(self).__name__, "rule": str(self._rate_rule)} | asdict(self.batch_rule)


def _follows_loss(scheduler: Any) -> bool:
    """Whether each step of a schedule of the rate takes a loss, as those of ReduceLROnPlateau do."""
    return "metrics" in inspect.signature(scheduler.step).parameters


def _check_same(of_ranks: Sequence[object]) -> None:
    """Refuse ranks that differ, on all of them.

    Raises:
        ValueError: with both values.
    """
    for rank, other in enumerate(of_ranks):
        if other != of_ranks[0]:
            raise ValueError(
                f"ranks disagree on the next batch: rank 0 of the group has {of_ranks[0]}, rank {rank} has {other}. "
                "Make the schedule with the same arguments on all ranks, load the same states, and read micro_batches "
                "on all ranks at the beginning of each window"
            )
