"""Places for a run's records, and a guard around each: a full disk or a tracker that is down must end no training."""

from __future__ import annotations

import copy
import importlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

logger = logging.getLogger("sonde")

TRACKERS = ("wandb", "mlflow", "trackio", "tensorboard")
"""Names that a user may give in place of a tracker's run."""
_MOST_REFUSED = 3
"""Records in a row that a sink may refuse. Then it gets no more."""


class Sink(Protocol):
    """A place for records. Called on rank 0 only, when a window ends; it should return soon.

    If SIGTERM has arrived, a sink with a method `write_report()` has it called after the `end` record.

    What a sink raises is logged, and training goes on without that sink. If a sink has `must_begin = True`, what it
    raises at the first record of a probe is raised where the probe is attached: the user sees it before training.

    A signal handler writes records too, and may interrupt a call of `write`. A sink with `is_reentrant = True` is then
    called again at once. Any other sink gets these records when the interrupted call has returned: it may hold a lock.
    """

    def write(self, record: Mapping[str, object]) -> None:
        """Take one record; its values are JSON values."""

    def close(self) -> None:
        """No record follows."""


def sinks_for(given: object, folder: Path) -> tuple[Sink, ...]:
    """`sonde.runs.trackers.sinks_for`, imported when needed: those sinks stand on a higher floor, and write reports."""
    trackers = importlib.import_module("sonde.runs.trackers")
    sinks: tuple[Sink, ...] = trackers.sinks_for(given, folder)
    return sinks


class GuardedSink:
    """A sink whose errors are logged and end nothing. A sink that fails gets no more records.

    A `ValueError` refuses one record. A sink that refuses several records in a row has failed too.

    Args:
        sink: the sink.
        alerts: messages by name, to which this sink's failures are added.
    """

    def __init__(self, sink: Sink, alerts: dict[str, str]) -> None:
        self._sink, self._alerts, self._name = sink, alerts, type(sink).__name__
        self.is_open = True
        """Whether the sink takes records."""
        self._has_failed = self._has_refused = False
        self._n_refused = 0
        """Records in a row that were refused last."""
        self._is_inside = False
        """Whether a call of the sink's `write` has not returned yet."""
        self._is_unwinding = False
        """Whether a signal handler has raised within that call, so that the error is not the sink's."""
        self._waiting: list[Mapping[str, object]] = []
        """Records that came meanwhile."""
        self._wants_report = False
        """Whether a report was asked for meanwhile."""

    @property
    def _must_wait(self) -> bool:
        """Whether a call of the sink is interrupted, and another call could wait for it for ever."""
        return self._is_inside and not getattr(self._sink, "is_reentrant", False)

    def write(self, record: Mapping[str, object], *, raises: bool = False) -> None:
        """Hand over one record.

        Args:
            record: to be written.
            raises: raise what a sink raises that must begin.
        """
        raises = raises and getattr(self._sink, "must_begin", False)
        if not self.is_open:
            return
        if self._must_wait:
            self._waiting.append(record)
            return
        is_outermost, self._is_inside = not self._is_inside, True
        try:
            self._hand_over(record, raises=raises)
        finally:
            if is_outermost:
                self._catch_up()

    def note_error_of_handler(self) -> None:
        """A signal handler raises. If it has interrupted `write`, its error goes on to the training loop."""
        self._is_unwinding = self._is_inside

    def _catch_up(self) -> None:
        """Do what a signal handler wanted while it had interrupted `write`."""
        self._is_unwinding = False
        while self._waiting:
            self._hand_over(self._waiting.pop(0), raises=False)
        self._is_inside = False
        if not self.is_open:
            self._close_sink()
        if self._wants_report:
            self._wants_report = False
            self.write_report()

    def _hand_over(self, record: Mapping[str, object], *, raises: bool) -> None:
        try:
            # The other sinks get the same record: one of the user's own might write into it.
            is_ours = type(self._sink).__module__.startswith("sonde.")
            self._sink.write(record if is_ours else copy.deepcopy(record))
            self._n_refused = 0
        except Exception as error:
            if raises or self._is_unwinding:
                raise
            if isinstance(error, ValueError):
                self._note_refusal(record, error)
            else:
                own_words = isinstance(error, OSError)  # of others, the text alone may be a key or nothing
                self._fail((str(error) if own_words else f"{type(error).__name__}: {error}").removesuffix("."))

    def _note_refusal(self, record: Mapping[str, object], error: ValueError) -> None:
        """This record cannot be written. The next ones perhaps can."""
        self._n_refused += 1
        if self._n_refused >= _MOST_REFUSED:
            self._fail(f"it refused {_MOST_REFUSED} records in a row, the last one with: {error}")
        elif not self._has_refused:
            self._has_refused = True
            logger.error("sonde: %s refuses a %r record: %s", self._name, record["kind"], error)
            self._alert("log_refused", f"{self._name} refused a {record['kind']!r} record, which it lacks now: {error}")

    def _fail(self, why: str) -> None:
        logger.error("sonde: %s writes no more: %s", self._name, why)
        self._alert("log_stopped", f"{self._name} writes no more: {why}. Training goes on without that log.")
        self._has_failed = True
        self._waiting.clear()
        self.close()

    def _alert(self, what: str, message: str) -> None:
        name = f"{what}_{self._name}"
        n_before = sum(alert.startswith(name) for alert in self._alerts)
        self._alerts[f"{name}_{n_before + 1}" if n_before else name] = message

    def write_report(self) -> None:
        """Let a sink that can write a report do so; if a call of its `write` is interrupted, then after that."""
        if self._has_failed or (write_report := getattr(self._sink, "write_report", None)) is None:
            return
        if self._must_wait:
            self._wants_report = True
            return
        try:
            write_report()
        except Exception as error:  # the process ends: the log is what counts, and it is written
            logger.error("sonde: %s could not write a report: %s", self._name, error)

    def close(self) -> None:
        """Close the sink; if a call of its `write` has not returned, then after that. A second call does nothing."""
        if self.is_open:
            self.is_open = False
            if not self._is_inside:
                self._close_sink()

    def _close_sink(self) -> None:
        try:
            self._sink.close()
        except Exception as error:  # the others must be closed too; what was written stays
            logger.error("sonde: %s could not be closed: %s", self._name, error)
