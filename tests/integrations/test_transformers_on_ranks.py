"""A real Trainer of transformers on two ranks under DDP, against one process that trains on all of their pieces."""

from __future__ import annotations

import tempfile
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.integrations.as_launched import as_launched, free_port
from tests.integrations.plain_loop import Piece, plain_loop, same_numbers, weights
from tests.ranks import Ranks

pytest.importorskip("transformers", reason="needs transformers: pip install '.[transformers]'")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

NUMBERS = ("b_simple", "low", "high", "grad_sq", "trace_cov", "units_per_window", "windows", "dropped", "unit")


def _trained(port: int, options: dict[str, Any]) -> dict[str, Any]:
    """Once without sonde and once with it."""
    with as_launched(port):
        from sonde.integrations import transformers as integration
        from tests.integrations.hf_trainer import record, trainer_of

        plain = trainer_of(tempfile.mkdtemp(), **options)
        plain.train()
        trainer = trainer_of(tempfile.mkdtemp(), **options)
        recorded = record(trainer)
        probe = integration.attach(trainer, every=1, verbose=False, strict=True)
        trainer.train()
        reading = probe.reading()
        return {
            "is_bitwise": torch.equal(weights(plain.model), weights(trainer.model)),
            "reading": {name: getattr(reading, name) for name in NUMBERS},
            "windows": recorded.windows,
            "logged": [row.get("gns/b_simple") for row in trainer.state.log_history if "loss" in row],
        }


@pytest.mark.parametrize("over_ranks", [True, False])
def test_two_ranks(ranks2: Ranks, over_ranks: bool) -> None:
    """Tokens are averaged over ranks, or the ranks' means are averaged, each with tokens of its own number."""
    from tests.integrations.hf_trainer import gpt2

    first, second = ranks2(_trained, free_port(), {"average_tokens_across_devices": over_ranks})
    assert first["is_bitwise"]
    assert second["is_bitwise"]
    assert first["reading"] == second["reading"]
    windows = []
    for window in zip(first["windows"], second["windows"], strict=True):
        pieces = []
        for inputs, n_items in (micro_batch for of_rank in window for micro_batch in of_rank):
            tokens = [sum(label != -100 for label in row[1:]) for row in inputs["labels"].tolist()]
            weight = sum(tokens) / n_items / (1 if over_ranks else 2)
            pieces.append(Piece(inputs, {"unit_weights": tokens}, weight))
        windows.append(pieces)
    assert [len(pieces) for pieces in windows] == [6, 6, 6, 2] * 2
    expected = plain_loop(gpt2(), windows)
    assert same_numbers(SimpleNamespace(**first["reading"]), expected)
    assert first["reading"]["windows"] == 8
    assert first["logged"] == second["logged"]
