"""Places for a run's records, with a guard around each: a full disk or a tracker that is down must end no training."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import Protocol

logger = logging.getLogger("sonde")

_MOST_REFUSED = 3
"""Records in a row that a sink may refuse. Then it gets no more."""


class Sink(Protocol):
    """A place for records. Called on rank 0 only, when a window ends; it should return soon.

    What a sink raises is logged, and training goes on without that sink. If a sink has `must_begin = True`, what it
    raises at the first record of a probe is raised where the probe is attached: the user sees it before training.
    """

    def write(self, record: Mapping[str, object]) -> None:
        """Take one record; its values are JSON values."""

    def close(self) -> None:
        """No record follows."""


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
        self._has_refused = False
        self._n_refused = 0
        """Records in a row that were refused last."""

    def write(self, record: Mapping[str, object], *, raises: bool = False) -> None:
        """Hand over one record.

        Args:
            record: to be written.
            raises: raise what a sink raises that must begin.
        """
        if not self.is_open:
            return
        try:
            # The other sinks get the same record: one of the user's own might write into it.
            is_ours = type(self._sink).__module__.startswith("sonde.")
            self._sink.write(record if is_ours else copy.deepcopy(record))
            self._n_refused = 0
        except Exception as error:
            if raises and getattr(self._sink, "must_begin", False):
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
        self.close()

    def _alert(self, what: str, message: str) -> None:
        name = f"{what}_{self._name}"
        n_before = sum(alert.startswith(name) for alert in self._alerts)
        self._alerts[f"{name}_{n_before + 1}" if n_before else name] = message

    def close(self) -> None:
        """Close the sink. A second call does nothing."""
        if not self.is_open:
            return
        self.is_open = False
        try:
            self._sink.close()
        except Exception as error:  # the others must be closed too; what was written stays
            logger.error("sonde: %s could not be closed: %s", self._name, error)
