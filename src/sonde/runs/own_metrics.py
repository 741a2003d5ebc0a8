"""Collects the metrics of probes of the user's own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sonde.runs.blocks import Block, State
from sonde.runs.columns import Columns
from sonde.runs.json_values import as_count, as_mapping, as_numbers, as_time
from sonde.runs.run import MetricsReading
from sonde.runs.thinning import ThinnedRows

_STATE = State()


class OwnMetrics:
    """Collects `metrics` records.

    Args:
        file: the log, for messages.
        thinned: keep only the records that a figure can show.
    """

    def __init__(self, file: Path, *, thinned: bool) -> None:
        self._file, self._thinned = file, thinned
        self._all: list[MetricsReading] = []
        self._blocks: dict[tuple[int, tuple[str, ...]], Block] = {}
        """Records that follow each other, by start and names of metrics: each probe has its own names."""
        self._rows: dict[tuple[str, ...], ThinnedRows] = {}

    def add(self, record: Mapping[str, Any], segment: int, line: int) -> None:
        """Add one record.

        Raises:
            KeyError: when something is missing.
            TypeError: when something is of another kind than its schema says.
        """
        window, time = as_count(record["window"]), as_time(record["time"])
        if not self._thinned:
            self._all.append(MetricsReading(segment, window, time, as_numbers(record["metrics"]), alerts={}))
            return
        metrics = as_mapping(record["metrics"])
        names = tuple(metrics)
        if (block := self._blocks.get((segment, names))) is None:
            block = self._blocks[segment, names] = Block(self._file, segment, Columns(names), frozenset())
        block.windows.append(window)
        block.times.append(time)
        block.values.append(list(metrics.values()))
        block.states.append(_STATE)
        block.lines.append(line)

    def flush(self) -> None:
        """Leave out the records so far that no figure can show.

        Raises:
            ValueError: for a record that cannot be, with its line.
        """
        for (_, names), block in self._blocks.items():
            self._rows.setdefault(names, ThinnedRows()).add(block)
        self._blocks = {}

    def readings(self) -> list[MetricsReading]:
        """The records that were kept, in the order in which they were written."""
        if not self._thinned:
            return self._all
        kept = [row for rows in self._rows.values() for row in rows.rows()]
        kept.sort(key=lambda row: (row.segment, row.time))
        return [MetricsReading(row.segment, row.window, row.time, row.metrics, alerts={}) for row in kept]
