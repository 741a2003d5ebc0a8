from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sonde.demos.byte_lm.options import DemoOptions, decided


def _decided(options: dict[str, Any]) -> DemoOptions:
    return decided(replace(DemoOptions(), **options))


@pytest.mark.parametrize(
    ("options", "batch"),
    [
        ({}, 32),
        ({"ranks": 3}, 48),  # the batch grows with the ranks
        ({"micro_batches": 3}, 2 * 15),  # the batch fits any number of micro-batches
        ({"micro_batches": 40}, 2 * 40),
    ],
)
def test_the_batch_that_is_decided(options: dict[str, Any], batch: int) -> None:
    assert _decided(options).batch == batch


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"batch": -8}, "batch must be at least 1, got -8"),
        ({"learning_rate": 0.0}, "learning_rate must be positive and finite, got 0.0: try"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"batch": 30}, "must be a multiple of ranks × micro-batches = 2 × 2, got 30: pass --batch 28"),
        ({"batch": 3}, "got 3: pass --batch 4"),
        ({"ranks": 1, "micro_batches": 1}, "need at least 2 pieces per step .* got 1 rank × 1 micro-batch: pass"),
        ({"ranks": 0}, "ranks must be at least 1, got 0"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _decided(options)
