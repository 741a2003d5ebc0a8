"""The readings of a policy in a run's log: a reading for each optimizer step that was measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sonde.policy.stats.attribution import doubt_of_parts
from sonde.policy.stats.forecast_point import Per, Point, forecast_point
from sonde.runs.json_values import as_count, as_list, as_mapping, as_number, as_numbers, as_time


@dataclass(frozen=True)
class PromptPart:
    """One prompt's part of a change of entropy.

    Attributes:
        prompt: its text, or its number in words.
        change: in nats; None where it is not known.
        parts: the change by its source, in nats: "sharpening" and "drift" for an evaluation prompt, "from_rewarded"
            and "from_penalised" for a prompt that was learned from; None where a part is not known.
    """

    prompt: str
    change: float | None
    parts: Mapping[str, float | None]


@dataclass(frozen=True)
class CausesReading:
    """Where a step's change of entropy comes from.

    Attributes:
        momentum: the part of earlier batches, in nats; None where it is not known, as for the next three.
        batch: the part of this batch, in nats.
        decay: the part of weight decay, in nats.
        explained: the sum of the prompts' parts over the part of the batch.
        cosine: cosine similarity of the loss's gradient and that of advantage × log-probability.
        prompts: the prompts of the batch with their parts.
    """

    momentum: float | None
    batch: float | None
    decay: float | None
    explained: float | None
    cosine: float | None
    prompts: tuple[PromptPart, ...]

    @property
    def doubt(self) -> str:
        """Why the prompts' parts are not to be trusted; empty if they are."""
        parts = [part.change or 0.0 for part in self.prompts]
        return doubt_of_parts(self.batch, self.explained, parts, cosine=self.cosine)


@dataclass(frozen=True)
class PolicyReading:
    """The measurements of a policy around an optimizer step.

    Attributes:
        segment: index into `Run.headers` of the start it belongs to.
        window: the optimizer step, from 0 up, as it was passed to `PolicyLog.measured`.
        time: seconds since 1970.
        metrics: a number for each name, None where it is not known.
        reason: why the forecast is unknown or not to be trusted; empty when it is.
        per: the unit of the forecast, "token" or "response".
        shares: evaluation prompts with their parts of the forecast.
        causes: where the change comes from; None if it was not asked for.
        alerts: a message for each check that failed, by its name.
    """

    segment: int
    window: int
    time: float
    metrics: Mapping[str, float | None]
    reason: str
    per: Per
    shares: tuple[PromptPart, ...]
    causes: CausesReading | None
    alerts: Mapping[str, str]

    @property
    def point(self) -> Point:
        """The forecast beside its truth."""
        return forecast_point(self.window, self.metrics, self.per, self.reason, self.segment)


@dataclass
class PromptEffect:
    """The effect of learning from one prompt on the entropy, summed over steps.

    Attributes:
        change: in nats.
        from_rewarded: the part of tokens that were rewarded.
        from_penalised: the part of tokens that were penalised.
        n_steps: optimizer steps that learned from the prompt.
    """

    change: float = 0.0
    from_rewarded: float = 0.0
    from_penalised: float = 0.0
    n_steps: int = 0


def prompt_effects(readings: Iterable[PolicyReading]) -> dict[str, PromptEffect]:
    """The effect of learning from each prompt on the entropy, by the prompt's text.

    Summed over the measured steps whose prompts' parts are to be trusted.
    """
    effects: dict[str, PromptEffect] = {}
    for reading in readings:
        if reading.causes is None or reading.causes.doubt:
            continue
        for part in reading.causes.prompts:
            effect = effects.setdefault(part.prompt, PromptEffect())
            effect.change += part.change or 0.0
            effect.from_rewarded += part.parts.get("from_rewarded") or 0.0
            effect.from_penalised += part.parts.get("from_penalised") or 0.0
            effect.n_steps += 1
    return effects


def policy_reading(record: Mapping[str, Any], segment: int) -> PolicyReading:
    """Read one record.

    Args:
        record: as it was written.
        segment: index of its start.

    Raises:
        KeyError: when something is missing.
        TypeError: when something is of another kind than its schema says.
    """
    return PolicyReading(
        segment=segment,
        window=as_count(record["window"]),
        time=as_time(record["time"]),
        metrics=as_numbers(record["metrics"]),
        reason=str(record["reason"]),
        per="response" if record["per"] == "response" else "token",
        shares=_parts(record["shares"]),
        causes=None if record["causes"] is None else _causes(as_mapping(record["causes"])),
        alerts={name: str(message) for name, message in as_mapping(record["alerts"]).items()},
    )


def _parts(value: object) -> tuple[PromptPart, ...]:
    return tuple(_part(as_mapping(each)) for each in as_list(value))


def _part(value: Mapping[str, Any]) -> PromptPart:
    parts = {name: as_number(each) for name, each in value.items() if name not in ("prompt", "change")}
    return PromptPart(str(value["prompt"]), as_number(value["change"]), parts)


def _causes(value: Mapping[str, Any]) -> CausesReading:
    names = ("momentum", "batch", "decay", "explained", "cosine")
    momentum, batch, decay, explained, cosine = (as_number(value[name]) for name in names)
    return CausesReading(momentum, batch, decay, explained, cosine, _parts(value["prompts"]))
