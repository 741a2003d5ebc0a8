"""GRPO with TRL: what each update does to the policy's entropy, in TRL's own logs.

pip install '.[trl]'
python examples/trl_grpo.py
"""

import tempfile

from trl import GRPOConfig, GRPOTrainer

import sonde
from sonde.demos.arithmetic import task  # a tiny model that learns to add; yours goes here

with tempfile.TemporaryDirectory() as folder:
    trainer = GRPOTrainer(
        model=task.model(),
        processing_class=task.tokenizer(),
        train_dataset=task.dataset(),
        reward_funcs=task.reward,
        args=GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=32,
            num_generations=8,
            max_completion_length=6,
            learning_rate=3e-3,
            max_steps=40,
            logging_steps=10,
            loss_type="dr_grpo",
            scale_rewards="none",
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
        ),
    )
    # Every tenth step, however much of the time that takes: by default it is 5 % at most.
    probes = sonde.integrations.trl.attach(trainer, sonde.EntropyChangeOptions(every=10), causes=True)
    trainer.train()

for step, forecast in probes.forecasts:
    print(f"step {step}: {forecast}")
print("\nWhere the change of the last forecast comes from, in nats a token:")
print(probes.forecasts[-1][1].table(probes.texts))
