"""Logs of several runs whose noise scales, losses and batches are known."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.runs.report.plausible_run import Record, end_record, header_record, reading_record, with_metrics, written

ERROR = 0.1
"""Standard error of the log of each noise scale."""


def write_plausible(
    folder: Path,
    *,
    batch: float = 16.0,
    n: int = 80,
    noise: Callable[[float], float] = lambda units: 20 * (1 + units / 500) ** 0.5,
    loss: Callable[[float], float] | None = lambda units: 1.5 + 4 * units**-0.3,
    metrics: dict[str, float | None] | None = None,
    end: bool = True,
    **header: Any,
) -> Path:
    """Write a run of n readings, 10 steps apart, and return its folder.

    Args:
        folder: of the log.
        batch: units of a step.
        n: readings.
        noise: the noise scale by the units seen; readings have it as it is, with an interval of ± 20 %.
        loss: likewise; a log without one has None.
        metrics: further numbers of each reading.
        end: whether the run has ended.
        **header: what is changed in the header.
    """
    rng = random.Random(f"{folder.name} {batch}")
    records: list[Record] = []
    for i in range(n):
        record = reading_record(i, n, batch=batch, status="resolved")
        units = record["metrics"]["run/units_seen"]
        b, average = noise(units), noise(units / 2)
        known: dict[str, float | None] = {
            "gns/b_simple": b,
            "gns/b_simple_low": b / (1 + 2 * ERROR),
            "gns/b_simple_high": b * (1 + 2 * ERROR),
        }
        known |= {f"gns/b_simple_average{end}": average * f for end, f in (("", 1), ("_low", 0.8), ("_high", 1.25))}
        known |= {"loss": None if loss is None else loss(units) + 0.01 * rng.gauss(0, 1)}
        records.append(with_metrics(record, {**known, **(metrics or {})}))
    last = [end_record(10 * n)] if end else []
    return written(folder, [header_record(**{"run": folder.name} | header), *records, *last])
