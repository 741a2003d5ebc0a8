"""Hands the records of one log to its sinks."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence

import torch.distributed as dist

from sonde.sink import GuardedSink, Sink


class RecordWriter:
    """Writes on rank 0 alone, and never in a child that this process forks.

    Args:
        sinks: where records go.
    """

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self.alerts: dict[str, str] = {}
        """Sinks that write no more, or have refused a record: a message by name."""
        self._sinks = tuple(GuardedSink(sink, self.alerts) for sink in sinks)
        self._is_first_rank: bool | None = None
        self._pid: int | None = None
        """Of the process in which the log began."""

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
        """Write the first record.

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

    def describe(self, probe: Mapping[str, object], *, raises: bool) -> None:
        """Write the record of a further probe; see `begin`."""
        self._hand_over(probe, raises=raises)

    def write(self, kind: str, **content: object) -> None:
        """Write a record. What a sink raises is logged."""
        self._hand_over({"kind": kind, "time": time.time(), **content})

    def _hand_over(self, record: Mapping[str, object], *, raises: bool = False) -> None:
        if self._may_write:
            for sink in self._sinks:
                sink.write(record, raises=raises)

    def end(self, reason: str, *, window: int) -> None:
        """Write the `end` record, and close the sinks."""
        self.write("end", window=window, reason=reason)
        self.close()

    def close(self) -> None:
        """Close the sinks."""
        if self._may_write:
            for sink in self._sinks:
                sink.close()
