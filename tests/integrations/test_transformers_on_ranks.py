"""A real Trainer of transformers on two ranks, DDP or FSDP2, against one process that trains on all their pieces."""

from __future__ import annotations

import tempfile
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.integrations.as_launched import as_launched, free_port, fsdp2
from tests.integrations.plain_loop import BY_PIECES, Piece, plain_loop, same_numbers, whole_weights
from tests.ranks import Ranks

pytest.importorskip("transformers", reason="needs transformers: pip install '.[transformers]'")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

LR = 1e-3
"""At the 1e-2 of one process, Adam makes another training of the last bit: ranks sum in another order."""
NUMBERS = ("b_simple", "low", "high", "grad_sq", "trace_cov", "units_per_window", "windows", "dropped", "unit")


def _trainer_of(kind: str, **options: Any) -> Any:
    if kind == "Trainer":
        from tests.integrations import hf_trainer

        if "fsdp" in options:
            fsdp2()
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
        reading = probe.reading()
        return {
            "is_bitwise": torch.equal(whole_weights(plain.model_wrapped), whole_weights(trainer.model_wrapped)),
            "reading": {name: getattr(reading, name) for name in NUMBERS},
            "windows": recorded.windows,
            "logged": [row.get("gns/b_simple") for row in trainer.state.log_history if "loss" in row],
        }


def _measured(ranks2: Ranks, kind: str, options: dict[str, Any]) -> tuple[Any, list[list[tuple[Any, Any]]]]:
    """The reading, and the micro-batches of both ranks by window."""
    first, second = ranks2(_trained, free_port(), kind, options)
    assert first["is_bitwise"]
    assert second["is_bitwise"]
    assert first["reading"] == second["reading"]
    assert first["logged"] == second["logged"]
    both = zip(first["windows"], second["windows"], strict=True)
    return SimpleNamespace(**first["reading"]), [[*of_first, *of_second] for of_first, of_second in both]


def _by_tokens(window: list[tuple[Any, Any]], *, over_ranks: bool = True) -> list[Piece]:
    pieces = []
    for inputs, n_items in window:
        tokens = [sum(label != -100 for label in row[1:]) for row in inputs["labels"].tolist()]
        weight = sum(tokens) / n_items / (1 if over_ranks else 2)
        pieces.append(Piece(inputs, {"unit_weights": tokens}, weight, torch.tensor(n_items)))
    return pieces


@pytest.mark.parametrize(
    ("over_ranks", "bf16", "fsdp2"),
    [(True, False, False), (False, False, False), (True, True, False), (True, False, True)],
    ids=["over ranks", "means", "bf16", "FSDP2"],
)
def test_two_ranks(ranks2: Ranks, over_ranks: bool, bf16: bool, fsdp2: bool) -> None:
    """Tokens are averaged over ranks, or the ranks' means are averaged, each with tokens of its own number.

    A loss of the trainer's own is read through DDP, which hands on what the model returns by a function of its own.
    """
    from tests.integrations.hf_trainer import gpt2

    lr = LR if bf16 else 1e-2
    options: dict[str, Any] = {"average_tokens_across_devices": over_ranks, "bf16": bf16, "learning_rate": lr}
    options["has_own_loss"] = not (bf16 or fsdp2)
    if fsdp2:
        blocks = {"version": 2, "transformer_layer_cls_to_wrap": ["GPT2Block"], "cpu_ram_efficient_loading": False}
        options |= {"fsdp": True, "fsdp_config": blocks}
    reading, recorded = _measured(ranks2, "Trainer", options)
    windows = [_by_tokens(window, over_ranks=over_ranks) for window in recorded]
    assert [len(pieces) for pieces in windows] == [6, 6, 6, 2] * 2

    def loss_of(model: Any, piece: Piece) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            if over_ranks:  # in the trainer's order, since bf16 rounds
                return model(**piece.inputs, num_items_in_batch=piece.n_items).loss
            return model(**piece.inputs).loss * piece.weight

    assert same_numbers(reading, plain_loop(gpt2(), windows, loss_of, lr=lr), apart_in_16_bits=bf16)
    assert reading.windows == 8


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["SFTTrainer", "DPOTrainer"])
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
