"""Records like those of a real run: the noise scale rises from 4 to 200 while its interval narrows."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sonde.batch_size.log import METRICS
from sonde.log.sinks import JsonlSink
from sonde.record_values import SCHEMA

STARTED = 1_790_000_000.0
Record = dict[str, Any]

GROUPS = ("embed", *(f"blocks.{i}" for i in range(6)), "head")


def header_record(**changes: Any) -> Record:
    setup = {
        "wrapper": "DistributedDataParallel",
        "ranks": 2,
        "device": "cpu",
        "tap": "leaf hooks",
        "groups": list(GROUPS),
        "parameters": 1_234_567,
        "log_every": 10,
        "level": 0.95,
        "metric": "euclidean",
        "optimizer_kind": "Adam or AdamW (β = 0.9)",
    }
    record = {
        "kind": "header",
        "schema": SCHEMA,
        "writes": "reading",
        "time": STARTED,
        "run": "small language model",
        "unit": "sequences",
        "versions": {"sonde": "0.1.0", "torch": "2.13.0", "python": "3.11.7"},
        "setup": setup,
        "metrics": {name: {"unit": metric.unit, "meaning": metric.meaning} for name, metric in METRICS.items()},
        "metadata": {"learning rate": 0.003, "model": {"layers": 6, "width": 128}},
    }
    return record | changes


def reading_record(
    i: int,
    n: int,
    *,
    status: str | None = None,
    seed: int = 0,
    batch: float = 64.0,
    groups: Sequence[str] = GROUPS,
    log_every: int = 10,
    **changes: Any,
) -> Record:
    """Reading `i` of `n`; without a `status`, the first third is a lower bound and the rest is resolved."""
    rng = random.Random(1000 * seed + i)
    done = (i + 1) / n
    of_average = status or "resolved"
    status = status or ("unresolved" if i < n / 20 else "lower_bound" if i < n / 3 else "resolved")
    true = 4 * 50**done * math.exp(0.06 * rng.gauss(0, 1))
    width = 0.1 + 0.8 * math.exp(-4 * done)
    signal = 2.0 * math.exp(-3 * done) * math.exp(0.04 * rng.gauss(0, 1))
    noise = signal * true
    if status != "resolved":
        signal *= rng.gauss(0.6, 0.8)
    window = log_every * (i + 1)
    metrics = {
        **_interval("gns/b_simple", status, true, width),
        **_interval("gns/b_simple_average", of_average, 4 * 50 ** (done / 2), 0.1),
        "gns/grad_sq": signal,
        "gns/trace_cov": noise,
        "gns/consistency": rng.gauss(1, 0.03),
        "gns/effective_units": batch,
        "gns/units_per_window": batch,
        "gns/windows_needed": None if status != "resolved" else max(0, round(300 * (1.05 - done)) - 40),
        "gns/scale": 0.5,
        "gns/scale_residual": 3e-8,
        "grad/norm": 0.6 + 2.4 * math.exp(-4 * done) + 0.1 * abs(rng.gauss(0, 1)),
        "grad/clip_fraction": round(min(1.0, 1.4 * math.exp(-4 * done)), 1),
        "grad/max_norm": 1.0,
        "cost/seconds_per_window": 0.0021,
        "cost/fraction": 0.004,
        "cost/share": 0.0091,
        "cost/share_error": 0.0004,
        "cost/every": 12,
        "run/units_seen": batch * window,
        "run/units_per_second": 120.0,
        "loss": 1.6 + 2.8 * math.exp(-3.5 * done) + 0.03 * rng.gauss(0, 1),
    }
    record = {
        "kind": "reading",
        "time": STARTED + 5.3 * window,
        "window": window,
        "status": status,
        "reason": "" if status == "resolved" else "|G|² cannot yet be distinguished from 0",
        "advice": "" if status == "resolved" else "train about 120 more steps",
        "metrics": metrics,
        "groups": {name: _group(status, true, width, signal, k, len(groups)) for k, name in enumerate(groups)},
        "dropped": {"a piece was not finite": 2},
        "alerts": {},
        "pieces": {"per_window": 8},
    }
    return record | changes


def alert_record(
    message: str = "All ranks seem to train on the same data: check the sampler.", window: int = 40
) -> Record:
    return {"kind": "alert", "time": STARTED + 5.3 * window, "window": window, "name": "same_data", "message": message}


def end_record(window: int, reason: str = "closed") -> Record:
    return {"kind": "end", "time": STARTED + 5.3 * window, "window": window, "reason": reason}


def write_run(
    folder: Path,
    n_readings: int = 60,
    *,
    header: Record | None = None,
    alerts: Iterable[Record] = (),
    end: bool = True,
    **options: Any,
) -> Path:
    """Write a whole run into `folder` and return the folder. Options are those of `reading_record`."""
    readings = [reading_record(i, n_readings, **options) for i in range(n_readings)]
    # Groups as the probe gives them: with the first ten readings and every tenth.
    thinned = [r if i < 10 or i % 10 == 9 else without(r, "groups") for i, r in enumerate(readings)]
    last: list[Record] = [end_record(10 * n_readings)] if end else []
    if end and n_readings > 10 and n_readings % 10:
        last = [{key: readings[-1][key] for key in ("time", "window", "groups")} | {"kind": "details"}, *last]
    return written(folder, [header or header_record(), *thinned, *alerts, *last])


def written(folder: Path, records: Iterable[Record]) -> Path:
    """Write these records, the first of which is a header, and return the folder."""
    sink = JsonlSink(folder)
    for record in records:
        sink.write(record)
    sink.close()
    return folder


def with_metrics(record: Record, metrics: Mapping[str, float | None]) -> Record:
    """A record with these numbers in place of its own, or beside them."""
    return record | {"metrics": record["metrics"] | metrics}


def without(record: Record, name: str) -> Record:
    """A record that lacks one name."""
    return {key: value for key, value in record.items() if key != name}


def _interval(name: str, status: str, value: float, width: float) -> dict[str, float | None]:
    low, high = value * math.exp(-1.2 * width), value * math.exp(1.5 * width)
    match status:
        case "resolved":
            return {name: value, f"{name}_low": low, f"{name}_high": high}
        case "lower_bound":
            return {name: None, f"{name}_low": low, f"{name}_high": None}
        case "upper_bound":
            return {name: None, f"{name}_low": 0.0, f"{name}_high": high}
        case _:
            return {name: None, f"{name}_low": None, f"{name}_high": None}


def _group(status: str, value: float, width: float, signal: float, k: int, n_groups: int) -> Record:
    """Each group has its own noise scale. One in 5 groups has a lower bound only, and one in 7 is unresolved."""
    share = value * math.exp(0.8 * math.sin(2.3 * k))
    status = "unresolved" if k % 7 == 6 else "lower_bound" if k % 5 == 4 and status == "resolved" else status
    known = _interval("b_simple", status, share, 1.5 * width)
    return {
        "status": status,
        "b_simple": known["b_simple"],
        "low": known["b_simple_low"],
        "high": known["b_simple_high"],
        "grad_sq": signal / n_groups,
        "trace_cov": abs(signal) * share / n_groups,
    }
