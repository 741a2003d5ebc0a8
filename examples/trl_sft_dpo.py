"""Fine-tuning with TRL, then preferences, both of LoRA adapters: one line of sonde for each trainer.

pip install '.[trl]' peft
python examples/trl_sft_dpo.py

The first counts sequences and weighs them by their loss tokens, the second counts pairs.
"""

import torch
from datasets import Dataset
from peft import LoraConfig
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from sonde.demos.arithmetic import task  # a tiny model that knows digits; yours goes here
from sonde.integrations.transformers import attach

SUMS = [(f"{a}+{b}=", f"{a + b}", f"{a + b + 1}") for a in range(10) for b in range(8)]
common = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 4,
    "learning_rate": 3e-3,
    "logging_steps": 10,
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": not torch.cuda.is_available(),
    "bf16": False,
    "gradient_checkpointing": False,
    "disable_tqdm": True,
}
adapter = LoraConfig(r=8, target_modules="all-linear")
torch.manual_seed(0)

sft = SFTTrainer(
    model=task.model(),
    processing_class=task.tokenizer(),
    train_dataset=Dataset.from_list([{"prompt": sum_, "completion": right} for sum_, right, _ in SUMS]),
    args=SFTConfig(output_dir="runs/sft", max_steps=40, **common),
    peft_config=adapter,
)
attach(sft, every=1, log="runs/sft")  # measures every window
sft.train()

dpo = DPOTrainer(
    model=sft.model.merge_and_unload(),
    processing_class=task.tokenizer(),
    train_dataset=Dataset.from_list(
        [{"prompt": sum_, "chosen": right, "rejected": wrong} for sum_, right, wrong in SUMS]
    ),
    args=DPOConfig(output_dir="runs/dpo", max_steps=20, **common),
    peft_config=adapter,
)
attach(dpo, every=1, log="runs/dpo")
dpo.train()
