"""The windows of a run that logged each window: tr Σ and |G|² of that window alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sonde.runs.json_values import as_count, as_mapping, as_numbers, as_time


@dataclass(frozen=True)
class WindowReading:
    """One window, solved on its own. Windows that were dropped are not in a log.

    Attributes:
        segment: index of the start of the run it belongs to.
        window: number of the optimizer step, from 1.
        time: its end, in seconds since 1970.
        metrics: by name; "gns/trace_cov" and "gns/grad_sq" among them, None where a number is not known.
        groups: the same by group of parameters: "trace_cov" and "grad_sq".
    """

    segment: int
    window: int
    time: float
    metrics: Mapping[str, float | None]
    groups: Mapping[str, Mapping[str, float | None]]


def window_reading(record: Mapping[str, Any], segment: int) -> WindowReading:
    """Read one record.

    Args:
        record: as it was written.
        segment: index of its start.

    Raises:
        KeyError: when something is missing.
        TypeError: when something is of another kind than its schema says.
    """
    return WindowReading(
        segment,
        as_count(record["window"]),
        as_time(record["time"]),
        as_numbers(record["metrics"]),
        {name: as_numbers(group) for name, group in as_mapping(record["groups"]).items()},
    )
