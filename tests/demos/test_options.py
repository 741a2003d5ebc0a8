from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sonde.demos.byte_lm.options import DemoOptions, Setup, decide


def _decide(*, n_gpus: int = 0, n_cores: int = 2, **options: object) -> Setup:
    return decide(replace(DemoOptions(), **options), Path("out"), n_gpus=n_gpus, n_cores=n_cores)


@pytest.mark.parametrize(
    ("options", "device", "ranks", "threads", "batch"),
    [
        ({}, "cpu", 2, 1, 32),
        ({"n_gpus": 3}, "cuda", 3, 1, 48),  # one rank per GPU, and the batch grows with them
        ({"n_gpus": 3, "device": "cpu"}, "cpu", 2, 1, 32),
        ({"n_cores": 9}, "cpu", 2, 4, 32),  # ranks share the cores
        ({"n_cores": 1, "ranks": 3}, "cpu", 3, 1, 48),
        ({"micro_batches": 3}, "cpu", 2, 1, 2 * 15),  # the batch fits any number of micro-batches
        ({"micro_batches": 40}, "cpu", 2, 1, 2 * 40),
    ],
)
def test_what_is_decided(options: dict[str, object], device: str, ranks: int, threads: int, batch: int) -> None:
    setup = _decide(**options)  # type: ignore[arg-type]
    assert (setup.device, setup.ranks, setup.threads, setup.batch) == (device, ranks, threads, batch)


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
        ({"device": "cuda"}, "got 0 ranks and 0 GPUs: pass --device cpu"),
        ({"device": "cuda", "ranks": 2, "n_gpus": 1}, "got 2 ranks and 1 GPUs: pass"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _decide(**options)  # type: ignore[arg-type]
