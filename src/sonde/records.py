"""What a run writes down: the kinds of record, the metrics with their units, and the one interface they go through.

A run is a sequence of records, each a flat JSON object with a `kind`:

- `header`, once, first: versions, the set-up that was found, the name of the unit, the user's metadata.
- `reading`, every `log_every` windows: `metrics` (a number, or null where it is not known), `groups`, `status`,
  `reason`, `dropped`, and `alerts`: what has looked wrong since the reading before it, a message by name.
- `policy`, around each optimizer step at which a policy's entropy was measured: `window`, `metrics`, `reason`, `per`
  ("token" or "response": what the forecast is of), `shares` and `causes` (prompts with their parts of the change in
  nats; `causes` is null where nobody asked), and `alerts`.
- `alert`, when something looks wrong for the first time, with its `name` and a `message` in plain words.
- `end`, when the probe was closed; a run without it was cut off.
"""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from sonde.version import __version__

SCHEMA = 1
"""Raised when a reader of older records could misunderstand newer ones."""


class Sink(Protocol):
    """Somewhere records go. Called on rank 0 only, when a window ends; it should return soon."""

    def write(self, record: Mapping[str, object]) -> None:
        """Take one record; its values are JSON values."""

    def close(self) -> None:
        """No record follows."""


@dataclass(frozen=True)
class Metric:
    """A metric's unit and meaning, for axes and legends. `{unit}` stands for the name of the run's unit."""

    unit: str
    meaning: str


METRICS: dict[str, Metric] = {
    "gns/b_simple": Metric("{unit}", "gradient noise scale tr Σ/|G|²"),
    "gns/b_simple_low": Metric("{unit}", "lower end of its 95 % interval"),
    "gns/b_simple_high": Metric("{unit}", "upper end of its 95 % interval; null when there is none"),
    "gns/grad_sq": Metric("gradient²", "squared norm of the true gradient |G|², unclamped"),
    "gns/trace_cov": Metric("gradient² · {unit}", "variance of one unit's gradient, tr Σ"),
    "gns/consistency": Metric(
        "ratio", "tr Σ seen within ranks over tr Σ seen between ranks; about 1 when data are sound"
    ),
    "gns/effective_units": Metric("{unit}", "effective number of units in a window (Kish)"),
    "gns/units_per_window": Metric("{unit}", "units in a window: the batch size"),
    "gns/windows_needed": Metric("windows", "windows still needed for ± 20 %; null when not known"),
    "gns/scale": Metric("ratio", "κ: the optimizer's gradient over the sum of the pieces' gradients"),
    "gns/scale_residual": Metric("ratio", "part of the gradient that is not that multiple"),
    "entropy/per_token": Metric("nats a token", "entropy of the policy, on the responses the forecast is evaluated on"),
    "entropy/delta_forecast": Metric("nats", "change of entropy that the step was to make, to first order"),
    "entropy/delta_se": Metric("nats", "its standard error"),
    "entropy/delta_low": Metric("nats", "lower end of its 95 % interval"),
    "entropy/delta_high": Metric("nats", "upper end of its 95 % interval"),
    "entropy/delta_fixed_prefixes": Metric("nats a token", "true change on the same prefixes"),
    "entropy/linear_over_true": Metric("ratio", "first order over truth on the same prefixes; about 1 for small steps"),
    "entropy/delta_importance": Metric("nats", "true change by importance sampling"),
    "entropy/ess_fraction": Metric("fraction", "its effective sample size over the responses"),
    "entropy/delta_rollouts": Metric("nats", "true change by fresh rollouts"),
    "entropy/delta_rollouts_se": Metric("nats", "its standard error"),
    "entropy/is_valid": Metric("0 or 1", "whether the step is small enough for a first-order forecast"),
    "entropy/is_of_own_prompts": Metric("0 or 1", "whether the forecast is of the prompts that the step learns from"),
    "entropy/token_weighted": Metric("nats a token", "entropy of what was sampled, all tokens weighing the same"),
    "entropy/sequence_weighted": Metric("nats a token", "the same, all responses weighing the same"),
    "entropy/sequence_sum": Metric("nats a response", "entropy of a whole response"),
    "entropy/advantage_correlation": Metric("ratio", "correlation of a response's mean entropy with its advantage"),
    "entropy/advantage_correlation_low": Metric("ratio", "lower end of its 95 % interval"),
    "entropy/advantage_correlation_high": Metric("ratio", "upper end of its 95 % interval"),
    "entropy/cov_log_prob_advantage": Metric("nats · advantage", "Cov(log π, A) over sampled tokens"),
    "length/mean": Metric("tokens", "mean length of a response"),
    "length/sd": Metric("tokens", "its standard deviation over responses"),
    "length/longest": Metric("tokens", "the longest response"),
    "length/at_limit": Metric("fraction", "responses as long as the mask is wide"),
    "cost/entropy_seconds": Metric("seconds", "time that the forecast of the entropy change took"),
    "gns_prompts/b_simple": Metric("prompts", "gradient noise scale tr Σ/|G|² in prompts"),
    "gns_prompts/b_simple_low": Metric("prompts", "lower end of its 95 % interval"),
    "gns_prompts/b_simple_high": Metric("prompts", "upper end of its 95 % interval; null when there is none"),
    "gns_prompts/grad_sq": Metric("gradient²", "squared norm of the true gradient |G|², unclamped"),
    "gns_prompts/trace_cov": Metric("gradient² · prompts", "variance of one prompt's gradient, tr Σ"),
    "gns_prompts/completions_share": Metric("fraction", "part of tr Σ that more completions to each would reduce"),
    "gns_prompts/prompts_per_window": Metric("prompts", "prompts in a window"),
    "grad/norm": Metric(
        "gradient", "norm of the rank-averaged gradient before clipping or any later scaling, mean over the interval"
    ),
    "grad/clip_fraction": Metric("fraction", "share of the windows that were clipped"),
    "cost/seconds_per_window": Metric("seconds", "host time spent inside the probe, per window"),
    "cost/fraction": Metric("fraction", "that over the time between windows"),
    "run/units_seen": Metric("{unit}", "units consumed since the start"),
    "run/units_per_second": Metric("{unit} per second", "units consumed per second of wall time"),
}
"""Every metric that sonde itself writes; a user's own scalars are written under the names they were logged with."""


logger = logging.getLogger("sonde")


class RecordWriter:
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
