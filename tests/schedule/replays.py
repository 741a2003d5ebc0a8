"""Every decision of a run, from what its log says was known at each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from sonde.schedule.stats.batch_rule import BatchRule, BatchState, Decision, NoiseScaleNow, next_batch


def now_from(metrics: Mapping[str, Any]) -> NoiseScaleNow:
    return NoiseScaleNow(**{field.name: metrics[f"schedule/{field.name}"] for field in fields(NoiseScaleNow)})


def replayed(rule: BatchRule, readings: Iterable[NoiseScaleNow]) -> list[Decision]:
    decisions: list[Decision] = []
    state = BatchState(rule.smallest)
    for now in readings:
        decisions.append(next_batch(rule, state, now))
        state = decisions[-1].state
    return decisions
