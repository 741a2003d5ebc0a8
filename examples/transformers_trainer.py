"""transformers' Trainer on a tiny GPT-2: one line of sonde, before `train()`.

python examples/transformers_trainer.py
"""

from __future__ import annotations

import pydoc_data.topics
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from sonde.integrations.transformers import attach

CONTEXT = 32

text = torch.frombuffer(bytearray(Path(pydoc_data.topics.__file__).read_bytes()), dtype=torch.uint8).long()
stretches = text[: 150 * 4 * 8 * CONTEXT].view(-1, CONTEXT)  # one epoch is 150 steps of 4 micro-batches of 8
torch.manual_seed(0)
config = GPT2Config(n_layer=1, n_head=2, n_embd=32, n_positions=CONTEXT, vocab_size=256, bos_token_id=0, eos_token_id=0)
trainer = Trainer(
    model=GPT2LMHeadModel(config),
    args=TrainingArguments(
        output_dir="runs/transformers-trainer",
        per_device_train_batch_size=8,
        gradient_accumulation_steps=4,
        num_train_epochs=1,
        learning_rate=3e-3,
        logging_steps=50,
        save_strategy="no",
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
    ),
    train_dataset=[{"input_ids": stretch, "labels": stretch} for stretch in stretches],
)

# Without `every=1`, measuring takes 1 % of the run's time, or 10 seconds.
attach(trainer, every=1, log="runs/transformers-trainer")
trainer.train()
