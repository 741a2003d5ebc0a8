from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sonde.demos.byte_lm.options import DemoOptions, Setup, decide


def _decide(*, n_cores: int = 2, **options: object) -> Setup:
    return decide(replace(DemoOptions(), **options), Path("out"), n_cores=n_cores)


@pytest.mark.parametrize(
    ("options", "threads", "batch"),
    [
        ({}, 1, 32),
        ({"n_cores": 9}, 4, 32),  # ranks share the cores
        ({"n_cores": 1, "ranks": 3}, 1, 48),  # and the batch grows with the ranks
        ({"micro_batches": 3}, 1, 2 * 15),  # the batch fits any number of micro-batches
        ({"micro_batches": 40}, 1, 2 * 40),
    ],
)
def test_what_is_decided(options: dict[str, object], threads: int, batch: int) -> None:
    setup = _decide(**options)  # type: ignore[arg-type]
    assert (setup.threads, setup.batch) == (threads, batch)


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
def test_invalid_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _decide(**options)  # type: ignore[arg-type]
