"""A real Trainer of transformers on two ranks, DDP or FSDP2, against one process that trains on all their pieces."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch

from tests.integrations.as_launched import as_launched, free_port, reading_of_all, result_of
from tests.integrations.plain_loop import BY_PIECES, Piece, plain_loop, same_numbers, whole_weights
from tests.ranks import Ranks

pytest.importorskip("transformers", reason="needs transformers: pip install '.[transformers]'")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

LR = 1e-3
"""At the 1e-2 of one process, Adam makes another training of the last bit: ranks sum in another order."""


def _trainer_of(kind: str, **options: Any) -> Any:
    if kind == "Trainer":
        from tests.integrations import hf_trainer

        if options.pop("has_own_loss", False):
            options["kind"] = hf_trainer.OwnLoss
        return hf_trainer.trainer_of(tempfile.mkdtemp(), **options)
    from tests.integrations import trl_trainers

    return {"SFTTrainer": trl_trainers.sft, "DPOTrainer": trl_trainers.dpo}[kind](tempfile.mkdtemp(), **options)


def _trained(port: int, kind: str, options: dict[str, Any]) -> dict[str, Any]:
    """Once without sonde and once with it."""
    with as_launched(port):
        from sonde.integrations import transformers as integration
        from tests.integrations.hf_trainer import record

        plain = _trainer_of(kind, **options)
        plain.train()
        trainer = _trainer_of(kind, **options)
        recorded = record(trainer)
        probe = integration.attach(trainer, on_error="raise", **BY_PIECES)
        trainer.train()
        without, measured = whole_weights(plain.model_wrapped), whole_weights(trainer.model_wrapped)
        return result_of(without, measured, probe.reading()) | {
            "windows": recorded.windows,
            "logged": [row.get("gns/b_simple") for row in trainer.state.log_history if "loss" in row],
        }


def _measured(ranks2: Ranks, kind: str, options: dict[str, Any]) -> tuple[Any, list[list[tuple[Any, Any]]]]:
    """The reading, and the micro-batches of both ranks by window."""
    first, second = ranks2(_trained, free_port(), kind, options)
    reading = reading_of_all((first, second))
    assert first["logged"] == second["logged"]
    both = zip(first["windows"], second["windows"], strict=True)
    return reading, [[*of_first, *of_second] for of_first, of_second in both]


def _by_tokens(window: list[tuple[Any, Any]], *, over_ranks: bool = True) -> list[Piece]:
    pieces = []
    for inputs, n_items in window:
        tokens = [sum(label != -100 for label in row[1:]) for row in inputs["labels"].tolist()]
        weight = sum(tokens) / n_items / (1 if over_ranks else 2)
        pieces.append(Piece(inputs, {"unit_weights": tokens}, weight, torch.tensor(n_items)))
    return pieces


@pytest.mark.parametrize(
    ("over_ranks", "fsdp2"),
    [(True, False), (False, False), (True, True)],
    ids=["over ranks", "means", "FSDP2"],
)
def test_two_ranks(ranks2: Ranks, over_ranks: bool, fsdp2: bool) -> None:
    """Tokens are averaged over ranks, or the ranks' means are averaged, each with tokens of its own number.

    A loss of the trainer's own is read through DDP, which hands on what the model returns by a function of its own.
    """
    from tests.integrations.hf_trainer import gpt2

    options: dict[str, Any] = {"average_tokens_across_devices": over_ranks, "has_own_loss": not fsdp2}
    if fsdp2:
        blocks = {"version": 2, "transformer_layer_cls_to_wrap": ["GPT2Block"], "cpu_ram_efficient_loading": False}
        options |= {"fsdp": True, "fsdp_config": blocks}
    reading, recorded = _measured(ranks2, "Trainer", options)
    windows = [_by_tokens(window, over_ranks=over_ranks) for window in recorded]
    assert [len(pieces) for pieces in windows] == [6, 6, 6, 2] * 2

    def loss_of(model: Any, piece: Piece) -> Any:
        return model(**piece.inputs).loss * piece.weight

    assert same_numbers(reading, plain_loop(gpt2(), windows, loss_of))
    assert reading.windows == 8


@pytest.mark.parametrize(("kind", "bf16"), [("SFTTrainer", True), ("DPOTrainer", False)])
def test_trainers_of_trl(ranks2: Ranks, kind: str, bf16: bool) -> None:
    pytest.importorskip("trl", reason="needs trl: pip install '.[trl]'")
    reading, recorded = _measured(ranks2, kind, {"bf16": bf16, "max_steps": 6, "learning_rate": LR})
    if kind == "SFTTrainer":
        windows = [_by_tokens(window) for window in recorded]
    else:
        windows = [
            [Piece(inputs, {"units": len(inputs["input_ids"]) // 2}, 1 / len(window)) for inputs, _ in window]
            for window in recorded
        ]
    other = _trainer_of(kind, bf16=bf16)

    def loss_of(model: Any, piece: Piece) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            if kind == "SFTTrainer":
                return other.compute_loss(model, dict(piece.inputs), num_items_in_batch=piece.n_items)
            return other.compute_loss(model, dict(piece.inputs)) * piece.weight

    assert reading.windows == 6
    assert reading.unit == ("sequences" if kind == "SFTTrainer" else "pairs")
    assert same_numbers(reading, plain_loop(other.model, windows, loss_of, lr=LR), apart_in_16_bits=bf16)
