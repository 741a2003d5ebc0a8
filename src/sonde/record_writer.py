"""Hands the records of one log to its sinks, and holds them back while the process may be ending."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from sonde.sink import GuardedSink, Sink
from sonde.termination import OnTermination

logger = logging.getLogger("sonde")

TOLD_TO_END = "the process was told to end (SIGTERM)"
"""The reason in the log's `end` record."""

_LONGEST_WAIT = 3.0
"""Seconds to wait for another thread that writes. The thread may itself wait for one that a signal interrupted."""


class RecordWriter:
    """Writes on rank 0 alone, one record at a time, and never in a child that this process forks.

    When SIGTERM arrives, the log gets its last records. Later ones are held until it is known whether the process ends.

    Args:
        sinks: where records go.
        every: windows between two readings of the noise scale.
    """

    def __init__(self, sinks: Sequence[Sink], every: int) -> None:
        self.alerts: dict[str, str] = {}
        """Sinks that write no more, or have refused a record: a message by name."""
        self.write_rest: dict[str, weakref.WeakMethod[Callable[[], None]]] = {}
        """Methods that write what was measured since the last record, by the kind of record."""
        self._sinks = tuple(GuardedSink(sink, self.alerts) for sink in sinks)
        self._every = every
        self._is_first_rank: bool | None = None
        self._pid: int | None = None
        """Of the process in which the log began."""
        self._window = 0
        self._turn = threading.RLock()
        """Held while a record is written: signals arrive in the main thread, and another thread may train."""
        self._termination: OnTermination | None = None
        self._was_told_to_end = self._has_report = False
        """Whether SIGTERM has arrived; whether a report was written since the last record."""
        self._held: list[dict[str, Any]] | None = None
        """Records since the process was told to end; None unless it may be ending."""

    @property
    def has_sinks(self) -> bool:
        """Whether records go anywhere still."""
        return any(sink.is_open for sink in self._sinks)

    @property
    def is_first_rank(self) -> bool:
        """Whether this rank writes. Decided when the log begins: the process group may be gone when it ends."""
        if self._is_first_rank is not None:
            return self._is_first_rank
        return not dist.is_initialized() or dist.get_rank() == 0

    @property
    def _may_write(self) -> bool:
        """Whether this is the process whose log it is: rank 0, and no child that rank 0 has forked."""
        return self.is_first_rank and self._pid in (None, os.getpid())

    def begin(self, header: Mapping[str, object], *, raises: bool) -> None:
        """Write the first record. From then on SIGTERM is listened for.

        Args:
            header: the first record.
            raises: raise what a sink raises that must begin.
        """
        self._is_first_rank, self._pid = self.is_first_rank, os.getpid()
        try:
            self._hand_over(header, raises=raises)
        except Exception:  # a log without its header is no log
            self.close()
            raise
        if self._is_first_rank and self.has_sinks:
            self._termination = OnTermination(self._note_termination, self._note_the_end, self._go_on)
            if not self._termination.in_main_thread:
                logger.warning(
                    "sonde: the log was begun outside the main thread, and only that thread hears signals. SIGTERM "
                    "will leave no end record and no report: make the first probe in the main thread"
                )

    def describe(self, probe: Mapping[str, object], *, raises: bool) -> None:
        """Write the record of a further probe; see `begin`."""
        self._hand_over(probe, raises=raises)

    def write(self, kind: str, **content: object) -> None:
        """Write a record, or hold it while the process may be ending. What a sink raises is logged."""
        if isinstance(window := content.get("window"), int):
            self._window = window
        if not self._may_write:  # asked first: in a forked child, the lock may be held for ever
            return
        record = {"kind": kind, "time": time.time(), **content}
        with self._taking_turns():
            if self._held is None:
                self._hand_over(record)
                return
            # A probe that is closed still writes the windows since its last reading. More windows: the run goes on.
            self._held.append(record)
            windows = [each["window"] for each in self._held if "window" in each]
            is_handling = self._termination is not None and self._termination.is_handling
            if not is_handling and windows and max(windows) - min(windows) > 2 * self._every:
                self._go_on()

    @contextmanager
    def _taking_turns(self) -> Iterator[None]:
        is_ours = self._turn.acquire(timeout=_LONGEST_WAIT)
        try:
            yield
        finally:
            if is_ours:
                self._turn.release()

    def _hand_over(self, record: Mapping[str, object], *, raises: bool = False) -> None:
        if self._may_write:
            self._has_report = False
            for sink in self._sinks:
                sink.write(record, raises=raises)

    # What a signal handler calls; see `OnTermination`.

    def _note_termination(self) -> None:
        """The process was told to end. The log has its last record, unless `_go_on` is called."""
        self._was_told_to_end = True
        if self._held is not None:
            return
        for method in self.write_rest.values():
            try:
                if (write_rest := method()) is not None:
                    write_rest()
            except Exception as error:  # the end record counts more, and so does the user's own handler
                logger.error("sonde: the windows since the last reading could not be written: %s", error)
        with self._taking_turns():
            self.write("end", window=self._window, reason=TOLD_TO_END)
            self._held = []

    def _go_on(self) -> None:
        """The process goes on nevertheless: readers take the records that follow an `end`."""
        with self._taking_turns():
            held, self._held = self._held, None
            for record in held or ():
                self._hand_over(record)

    def _note_the_end(self) -> None:
        """The process ends, or a handler of the user's raises."""
        for sink in self._sinks:
            sink.note_error_of_handler()
        self._write_reports()

    def _write_reports(self) -> None:
        if not self._has_report:
            for sink in self._sinks:
                sink.write_report()
            self._has_report = True

    def end(self, reason: str, *, window: int) -> None:
        """Write the `end` record, unless there is one because the process was told to end, and close the sinks."""
        if self._held is None:
            after = f", after {TOLD_TO_END}" if self._was_told_to_end else ""
            self.write("end", window=window, reason=reason + after)
        self._held = None
        self.close()  # before the report, which takes seconds: a closed sink keeps no successor out
        if self._was_told_to_end and self._may_write:
            self._write_reports()

    def close(self) -> None:
        """Listen no more, and close the sinks."""
        if self._termination is not None:
            self._termination.remove()
        if self._may_write:
            for sink in self._sinks:
                sink.close()
