"""A GRPOTrainer of a tiny model that learns to add; import it only where TRL is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer

from sonde.demos.arithmetic import task


def trainer_of(folder: Path, *, steps: int = 20, callbacks: Any = None, **options: Any) -> GRPOTrainer:
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 16,
        "gradient_accumulation_steps": 2,
        "num_generations": 8,
        "max_completion_length": 6,
        "learning_rate": 3e-3,
        "max_steps": steps,
        "logging_steps": 5,
        "loss_type": "dr_grpo",
        "scale_rewards": "none",
        "beta": 0.0,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "lr_scheduler_type": "constant",
        "seed": 0,
        "disable_tqdm": True,
    }
    model = task.model()
    if options.get("beta"):  # TRL loads the reference from the folder that the policy is said to be from
        task.model(seed=1).save_pretrained(folder / "reference")
        model.config._name_or_path = str(folder / "reference")
    return GRPOTrainer(
        model=model,
        reward_funcs=task.reward,
        args=GRPOConfig(**(settings | options)),
        train_dataset=task.dataset(),
        processing_class=task.tokenizer(),
        callbacks=callbacks,
    )


def weights(trainer: GRPOTrainer) -> Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
