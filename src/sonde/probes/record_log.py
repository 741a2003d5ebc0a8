"""Records on their way to sinks, of which any may fail without ending the run."""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Mapping, Sequence

import torch

from sonde.records import METRICS, SCHEMA, Sink
from sonde.version import __version__

logger = logging.getLogger("sonde")


class RecordLog:
    """Hands records to sinks. One that fails gets no more of them, and the log says so.

    Args:
        sinks: where records go; empty on other ranks than the first.
    """

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = tuple(sinks)

    def begin(self, *, run: str, unit: str, setup: Mapping[str, object], metadata: Mapping[str, object]) -> None:
        """Write the header.

        Args:
            run: the run's name.
            unit: plural name of one independent sample.
            setup: what was found, for people.
            metadata: the user's own, JSON values.

        Raises:
            Exception: what a sink raises: a run that cannot be logged is better told of before it begins.
        """
        self.write(
            "header",
            schema=SCHEMA,
            run=run,
            unit=unit,
            versions={"sonde": __version__, "torch": str(torch.__version__), "python": platform.python_version()},
            setup=dict(setup),
            metrics={n: {"unit": m.unit.format(unit=unit), "meaning": m.meaning} for n, m in METRICS.items()},
            metadata=dict(metadata),
        )

    def write(self, kind: str, **content: object) -> None:
        """Hand over one record."""
        record = {"kind": kind, "time": time.time(), **content}
        for sink in self._sinks:
            try:
                sink.write(record)
            except Exception as error:  # a full disk, a tracker that is down: neither may end a run that has begun
                if kind == "header":
                    self.close()
                    raise
                logger.error("sonde: %s writes no more: %s", type(sink).__name__, error)
                self._sinks = tuple(s for s in self._sinks if s is not sink)
                _close_all([sink])

    def close(self) -> None:
        """Close the sinks; no record follows."""
        _close_all(self._sinks)
        self._sinks = ()


def _close_all(sinks: Sequence[Sink]) -> None:
    for sink in sinks:
        try:
            sink.close()
        except Exception as error:  # the others are to be closed too, and nothing is lost that was written
            logger.error("sonde: %s could not be closed: %s", type(sink).__name__, error)
