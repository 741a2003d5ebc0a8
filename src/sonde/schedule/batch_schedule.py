"""A batch that follows the noise scale, for any loop that asks how many micro-batches its next window has."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, ClassVar, Literal

from sonde.batch_size.probe import NoiseScaleProbe
from sonde.batch_size.stats.rate_rules import parsed_rule
from sonde.console import tell
from sonde.evidence.rates import RateRule, usual_rule_of
from sonde.parallel.process_groups import gather_objects, n_summed
from sonde.parallel.unwrap import unwrap_optimizer
from sonde.probe import Metric, ReportSection
from sonde.record_values import spacing, whole_number
from sonde.schedule.scaled_rate import ScaledRate
from sonde.schedule.stats.batch_rule import (
    POWERS_OF_TWO,
    BatchRule,
    BatchState,
    Decision,
    NoiseScaleNow,
    metrics_of,
    next_batch,
)
from sonde.stats.sealed_state import check_identity, sealed, unsealed
from sonde.wording import plural

_COUNTS_STEPS = (
    "the schedule of the learning rate counts optimizer steps, and a growing batch takes fewer of them, so its end "
    "would move: call schedule.step_lr(lr_scheduler) in place of lr_scheduler.step(), which keeps it at the same "
    "number of {unit}, or take a rate that is constant"
)

_NOT_PASSED = (
    "a schedule of the learning rate follows this optimizer, and may count its steps, of which a growing batch takes "
    "fewer: pass it as scale_lr(optimizer, lr_scheduler), and step it by schedule.step_lr(lr_scheduler)"
)


_METRICS = {
    "schedule/micro_batches": Metric("micro-batches", "micro-batches of a window on each rank, from here on"),
    "schedule/batch": Metric("{unit}", "batch size from here on"),
    "schedule/b_simple": Metric("{unit}", "B_simple, where both ends of its interval were known"),
    "schedule/b_simple_low": Metric("{unit}", "lower end of its interval, by which the batch grows"),
    "schedule/b_simple_high": Metric("{unit}", "upper end of its interval"),
    "schedule/average_low": Metric("{unit}", "lower end of the run's average, where both of its ends were known"),
    "schedule/units_per_micro_batch": Metric("{unit}", "units of a micro-batch of all ranks together"),
    "schedule/measured_windows": Metric("windows", "windows that were measured so far, and could be used"),
}


class BatchSchedule:
    """Grows the batch as the noise scale grows: it says how many micro-batches the next window has.

    This is the one part of sonde that changes training. It grows the batch where the lower end of the noise scale's
    interval says so, to one allowed count after another; `docs/batch-schedule.md` has the rule. Read `micro_batches` at
    the beginning of each window, on all ranks. Every few windows that takes a reading, which waits for the device, and
    one small collective: all ranks decide by the reading of the first.

    Each decision is written to the log of the probe's run, with what it rests on.

    Args:
        probe: attached to the model.
        largest: most micro-batches of a window on each rank.
        smallest: micro-batches of the first windows, those that the optimizer's own rate is right for.
        ratio: batch over B_simple that is aimed at. Larger ones save more steps, and cost more units.
        hysteresis: an end of the interval must pass the next batch by this factor, from 1 up.
        counts: "powers of two" times `smallest`, or all numbers of micro-batches that are allowed.
        pause: measured windows after a change before the next.
        monotone: never shrink the batch.
        rule: how the rate follows the batch, as `rate_rule` of `sonde.branch`: "sqrt", "linear", "adam", "none",
            "sgd=120", or multiples by micro-batches of a window. By default "linear" for SGD, else "sqrt".
        every: windows between two decisions; more in long runs, and where fewer windows are measured.
        on_change: called with the `Decision` whenever the batch changes, to set what `scale_lr` does not.
        verbose: print each change on standard error, on the first rank.

    Raises:
        ValueError: for arguments out of their range, or that differ over ranks; for a measurement at fixed weights.

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

    METRICS: Mapping[str, Metric] = _METRICS
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
        hysteresis: float = 1.1,
        counts: Literal["powers of two"] | Sequence[int] = POWERS_OF_TWO,
        pause: int = 8,
        monotone: bool = True,
        rule: RateRule | None = None,
        every: int = 10,
        on_change: Callable[[Decision], object] | None = None,
        verbose: bool = True,
    ) -> None:
        self._probe, self._rate_rule, self._on_change, self._verbose = probe, rule, on_change, verbose

        def checked() -> tuple[BatchRule, int, RateRule | None]:
            reading = probe.reading()
            if reading.n_steps is None:
                raise ValueError(
                    "a probe at fixed weights has no windows of training whose batch could follow it: make the "
                    "schedule with the probe of a training, from sonde.attach"
                )
            if isinstance(rule, str) and rule != "adam":
                parsed_rule(rule, ", adam, or a table of multiples such as {8: 1.4}")
            whole_number("every must be a whole number of windows", every)
            first, last = (whole_number("micro-batches must be a whole number", n) for n in (smallest, largest))
            allowed = counts if isinstance(counts, str) else tuple(counts)
            return BatchRule(first, last, ratio, hysteresis, allowed, pause, monotone), every, rule

        of_ranks = gather_objects(probe.ranks, checked)
        _check_same(of_ranks)
        self.batch_rule = of_ranks[0][0]
        """What is decided by."""
        self._state, self._every = BatchState(self.batch_rule.smallest), every
        self._units_per_micro_batch: float | None = None
        self._due_at: int | None = None
        """The window of the next decision; None before the first window, since checkpoints may still be loaded."""
        self._stepped, self._owed = probe.n_windows, 0
        """The last window for which a schedule of the rate was stepped; micro-batches that make no whole step yet."""
        self._steps_all_lr = False
        """Whether a trainer's integration steps all schedules of the rate by this one."""
        self._steps_lr: list[Any] = []
        """Those that `step_lr` steps."""
        self._rates: list[ScaledRate] = []
        self._lr_schedulers: list[Any] = []
        self._stood_at: dict[Any, tuple[int, int]] = {}
        """The first window of each of these schedules of the rate, and the steps that it had then."""
        self.counted: int | None = None
        """Micro-batches of the window that ends, where a trainer's integration counts them; None: as many as meant."""
        self.last: Decision | None = None
        """The last decision; None before the first."""
        self._unit = unit = probe.reading().unit
        self.METRICS = {
            name: Metric(each.unit.replace("{unit}", unit), each.meaning) for name, each in _METRICS.items()
        }

    @property
    def micro_batches(self) -> int:
        """How many micro-batches the next window has, on each rank. Read it at the beginning of a window.

        Raises:
            ValueError: on all ranks, when these disagree; for a schedule of the rate whose end would move.
        """
        n_windows = self._probe.n_windows
        if self._due_at is None:
            self._due_at, self._stepped = n_windows + self._every, n_windows
        for scheduler in self._lr_schedulers:
            self._stood_at.setdefault(scheduler, (n_windows, scheduler.last_epoch))
        if n_windows >= self._due_at:
            self._decide()
        return self._state.micro_batches

    @property
    def present(self) -> int:
        """How many micro-batches the present window has, on each rank; reading it decides nothing."""
        return self._state.micro_batches

    @property
    def larger(self) -> int:
        """The next larger number of micro-batches that is allowed; at the largest, that."""
        return min((n for n in self.batch_rule.allowed if n > self.present), default=self.batch_rule.largest)

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
        for rate in self._rates[:1]:
            self._probe.note_rate_factor(rate.factor)
        if self._verbose and self._probe.run_log.is_first_rank:
            tell(f"{decision.reason} {self._unit}, {self._state.micro_batches} micro-batches a window")
        if self._on_change is not None:
            self._on_change(decision)

    def _of_rank(self) -> tuple[tuple[BatchRule, BatchState, int], NoiseScaleNow | None, int]:
        """What must be the same on all ranks, the noise scale if it is known, and windows until the next decision."""
        self._check_horizons()
        reading, n_windows, n = self._probe.reading(with_groups=False), self._probe.n_windows, self.present
        same = (self.batch_rule, self._state, n_windows)
        # One window in so many is measured: a decision before the next would learn nothing.
        every = max(spacing(self._every, n_windows), round(reading.every))
        batch = reading.effective_units if reading.effective_units is not None else reading.units_per_window
        if batch is None:
            return same, None, every
        # Learnt before the batch changes: averages of units lag behind a change.
        per_micro_batch = self._units_per_micro_batch or batch / n
        high = None if reading.status == "lower_bound" else reading.high
        average = reading.average
        average_low = average.low if average is not None and average.b_simple is not None else None
        now = NoiseScaleNow(reading.b_simple, reading.low, high, average_low, per_micro_batch, reading.windows)
        return same, now, every

    def metrics(self) -> Mapping[str, float | None]:
        """The last decision and what it rests on, by metric name."""
        if self.last is None:
            return {}
        n, now = self._state.micro_batches, self.last.now
        return {"schedule/micro_batches": n, "schedule/batch": n * now.units_per_micro_batch} | metrics_of(now)

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
            ValueError: for a rule that has no answer for an allowed count, and a schedule of the rate that was not
                passed.
        """
        optimizer = unwrap_optimizer(optimizer)
        if any(rate.optimizer is optimizer for rate in self._rates):
            return
        rule = usual_rule_of([optimizer]) if self._rate_rule is None else self._rate_rule
        scheduler = getattr(lr_scheduler, "scheduler", lr_scheduler)  # inside Accelerate's
        if scheduler is None and hasattr(getattr(optimizer, "step", None), "_wrapped_by_lr_sched"):
            raise ValueError(_NOT_PASSED)
        in_force = functools.partial(self._in_micro_batches, rule)
        self._rates.append(ScaledRate(optimizer, in_force, self.batch_rule.allowed, lambda: self.present))
        if scheduler is not None and hasattr(scheduler, "last_epoch"):
            self._lr_schedulers.append(scheduler)
        self._probe.note_rate_factor(self._rates[0].factor)

    def _in_micro_batches(self, rule: RateRule) -> RateRule:
        """A rule whose noise scale is in micro-batches: it is given in units."""
        if not isinstance(rule, str) or "=" not in rule or self._units_per_micro_batch is None:
            return rule
        name, noise = parsed_rule(rule)
        return f"{name}={noise / self._units_per_micro_batch}"

    def step_lr(self, *lr_schedulers: Any) -> None:
        """Step all schedules of the rate, in place of their `step()`, so that their ends stay where they were in units.

        A window of twice the smallest batch is two of their steps. Nothing happens before a window has ended.

        Args:
            *lr_schedulers: the same in every call.

        Raises:
            ValueError: for others than in the first call. A second call after a window has no steps left to take.
        """
        given = [getattr(each, "scheduler", each) for each in lr_schedulers]
        self._steps_lr = self._steps_lr or given
        if given != self._steps_lr:
            raise ValueError(
                "step_lr takes all schedules of the rate in one call, and the same in every call: "
                "schedule.step_lr(first, second)"
            )
        for _ in range(self._due()):
            for each in lr_schedulers:
                each.step()

    def lr_steps_due(self) -> int:
        """Steps of a schedule of the rate, counted in smallest batches, since this was asked last.

        A short window at the end of an epoch counts as a whole number of smallest batches, as it would at the smallest.
        """
        self._steps_all_lr = True
        return self._due()

    def _due(self) -> int:
        n_windows, self._stepped = self._probe.n_windows - self._stepped, self._probe.n_windows
        if not n_windows:
            return 0
        n = self.present if self.counted is None else self.counted
        due, self._owed = divmod(self._owed + n_windows * n, self.batch_rule.smallest)
        if n < self.present and self._owed:
            due, self._owed = due + 1, 0
        return due

    def _check_horizons(self) -> None:
        """Refuse a schedule of the rate that is stepped with each window, not by `step_lr`.

        Raises:
            ValueError: with what to do.
        """
        for scheduler, (first, stood_at) in self._stood_at.items():
            is_stepped = self._steps_all_lr or any(scheduler is each for each in self._steps_lr)
            if not is_stepped and 2 * (scheduler.last_epoch - stood_at) > self._probe.n_windows - first:
                raise ValueError(_COUNTS_STEPS.format(unit=self._unit))

    def close(self) -> None:
        """Leave optimizers as they were: their steps are taken at their own rates."""
        for rate in self._rates:
            rate.close()
        self._rates = []
        self._probe.note_rate_factor(1.0)

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """Where the schedule stands, for a checkpoint beside the probe's own state; the same on every rank."""
        return sealed(
            {
                "what": self._identity(),
                "state": asdict(self._state),
                "ranks": n_summed(self._probe.ranks),
                "per_micro_batch": self._units_per_micro_batch,
                "counts": [self._probe.n_windows, self._due_at, self._stepped, self._owed],
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
        known, times = contents["per_micro_batch"], n_summed(self._probe.ranks) / contents["ranks"]
        self._units_per_micro_batch = None if known is None else known * times
        _, self._due_at, self._stepped, self._owed = contents["counts"]
        self._stood_at = {}
        for rate in self._rates[:1]:
            self._probe.note_rate_factor(rate.factor)

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
        rule = asdict(self.batch_rule) | {"counts": list(self.batch_rule.allowed)}
        return {"probe": type(self).__name__} | rule


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
