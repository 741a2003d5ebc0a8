"""Trainers of TRL on the sums of two digits; import it only with TRL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import Qwen2Config, Qwen2ForSequenceClassification
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from sonde.demos.arithmetic import task
from tests.integrations.as_launched import fsdp2
from tests.integrations.hf_trainer import arguments

SUMS = [(f"{a}+{b}=", f"{a + b}", f"{a + b + 1}") for a in range(10) for b in range(8)]


def options_of(folder: Path | str, **options: Any) -> dict[str, Any]:
    return arguments(folder, gradient_checkpointing=False, **({"max_steps": 8} | options))


def sft(folder: Path | str, *, kind: type[SFTTrainer] = SFTTrainer, lora: bool = False, **options: Any) -> SFTTrainer:
    torch.manual_seed(0)  # of LoRA's own weights
    args = SFTConfig(**options_of(folder, **options))
    if args.fsdp:
        fsdp2()
    return kind(
        model=task.model(),
        args=args,
        train_dataset=Dataset.from_list([{"prompt": sum_, "completion": right} for sum_, right, _ in SUMS]),
        processing_class=task.tokenizer(),
        peft_config=LoraConfig(r=4, target_modules="all-linear") if lora else None,
    )


def dpo(folder: Path | str, **options: Any) -> DPOTrainer:
    rows = [{"prompt": sum_, "chosen": right, "rejected": wrong} for sum_, right, wrong in SUMS]
    return DPOTrainer(
        model=task.model(),
        ref_model=task.model(),
        args=DPOConfig(**options_of(folder, **options)),
        train_dataset=Dataset.from_list(rows),
        processing_class=task.tokenizer(),
    )


def reward(folder: Path | str, **options: Any) -> RewardTrainer:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    tokenizer = task.tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer), num_labels=1, intermediate_size=16, pad_token_id=tokenizer.pad_token_id, **sizes
    )
    return RewardTrainer(
        model=Qwen2ForSequenceClassification(config),
        args=RewardConfig(**options_of(folder, **options)),
        train_dataset=Dataset.from_list([{"chosen": s + right, "rejected": s + wrong} for s, right, wrong in SUMS]),
        processing_class=tokenizer,
    )
