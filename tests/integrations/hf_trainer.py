"""Trainers of transformers on tiny models, and what they train on. It imports transformers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from tests.integrations.as_launched import fsdp2
from tests.integrations.plain_loop import Piece

VOCABULARY, WIDEST = 29, 12


def gpt2(**options: Any) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 64, "vocab_size": VOCABULARY}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**(sizes | no_dropout | tokens | options)))


def ragged_texts(n: int) -> list[dict[str, list[int]]]:
    """n sequences of 3 to `WIDEST` tokens; some of their first tokens are not in the loss."""
    generator = torch.Generator().manual_seed(1)
    texts = []
    for length in torch.randint(3, WIDEST + 1, (n,), generator=generator).tolist():
        first = int(torch.randint(1, VOCABULARY, (), generator=generator))
        ids = [(first + 5 * k) % VOCABULARY for k in range(length)]
        labels = [-100 if k < length // 4 else token for k, token in enumerate(ids)]
        texts.append({"input_ids": ids, "labels": labels})
    return texts


def padded(rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    width = max(len(row["input_ids"]) for row in rows)

    def stacked(name: str, fill: int) -> Tensor:
        return torch.tensor([[*row[name], *[fill] * (width - len(row[name]))] for row in rows])

    ids, labels = stacked("input_ids", 0), stacked("labels", -100)
    lengths = torch.tensor([[len(row["input_ids"])] for row in rows])
    return {"input_ids": ids, "labels": labels, "attention_mask": (torch.arange(width) < lengths).long()}


def arguments(folder: Path | str, **options: Any) -> dict[str, Any]:
    """7 windows of three micro-batches in an epoch, but for the last one, which has two."""
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 3,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "max_grad_norm": 0.5,
        "lr_scheduler_type": "constant",
        "logging_steps": 5,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "seed": 0,
        "disable_tqdm": True,
    }
    return settings | options


def trainer_of(folder: Path | str, *, kind: type[Trainer] = Trainer, model: Any = None, **options: Any) -> Trainer:
    ours = {
        name: options.pop(name)
        for name in ("train_dataset", "eval_dataset", "data_collator", "callbacks")
        if name in options
    }
    args = TrainingArguments(**arguments(folder, **options))
    if args.fsdp:
        fsdp2()
    return kind(
        model=gpt2() if model is None else model,
        args=args,
        **({"train_dataset": ragged_texts(80), "data_collator": padded} | ours),
    )


class OwnLoss(Trainer):
    """A `compute_loss` of its own, which adds nothing: how its loss weighs is seen in the graph alone."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


@dataclass
class Recorded:
    """The micro-batches of a training, by window."""

    windows: list[list[tuple[dict[str, Any], float | None]]] = field(default_factory=list)
    """Inputs and `num_items_in_batch` of each micro-batch."""


def record(trainer: Trainer) -> Recorded:
    """Note what the trainer trains on."""
    recorded, original, step = Recorded(), trainer.training_step, -1

    def training_step(model: Any, inputs: Any, n_items: Any = None) -> Tensor:
        nonlocal step
        if trainer.state.global_step != step:
            step = trainer.state.global_step
            recorded.windows.append([])
        recorded.windows[-1].append((dict(inputs), None if n_items is None else float(n_items)))
        return original(model, inputs, n_items)

    trainer.training_step = training_step
    return recorded


def by_tokens(windows: Sequence[Sequence[tuple[dict[str, Any], float | None]]]) -> Iterator[list[Piece]]:
    """Pieces of ragged sequences whose loss is the sum over tokens, divided by the window's tokens."""
    for window in windows:
        pieces = []
        for inputs, n_items in window:
            tokens = [sum(label != -100 for label in row[1:]) for row in inputs["labels"].tolist()]
            assert n_items is not None
            pieces.append(Piece(inputs, {"unit_weights": tokens}, sum(tokens) / n_items, torch.tensor(n_items)))
        yield pieces
