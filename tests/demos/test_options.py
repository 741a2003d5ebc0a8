from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sonde.demos.byte_lm.options import DemoOptions, Setup, decide


def _decide(*, n_gpus: int = 0, n_cores: int = 2, **options: object) -> Setup:
    return decide(replace(DemoOptions(), **options), Path("out"), n_gpus=n_gpus, n_cores=n_cores)


def test_defaults_without_a_gpu() -> None:
    setup = _decide()
    assert (setup.device, setup.ranks, setup.threads, setup.batch) == ("cpu", 2, 1, 32)


def test_one_rank_per_gpu_and_the_batch_grows_with_them() -> None:
    setup = _decide(n_gpus=3)
    assert (setup.device, setup.ranks, setup.batch) == ("cuda", 3, 48)
    assert _decide(n_gpus=3, device="cpu").device == "cpu"


def test_ranks_share_the_cores() -> None:
    assert _decide(n_cores=9).threads == 4
    assert _decide(n_cores=1, ranks=3).threads == 1


def test_default_batch_fits_any_number_of_micro_batches() -> None:
    assert _decide(micro_batches=3).batch == 2 * 15
    assert _decide(micro_batches=40).batch == 2 * 40


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
