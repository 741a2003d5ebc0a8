"""GRPO with TRL that keeps the policy's entropy at a target, by the entropy coefficient that the forecast says.

pip install '.[trl]'
python examples/trl_hold_entropy.py
"""

import tempfile
from typing import Any

from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

import sonde
from sonde.demos.arithmetic import task  # a tiny model that learns to add; yours goes here

TARGET, RETURNS_IN = 2.2, 10  # nats a token; steps in which the entropy is to be back at the target


class HoldEntropy(TrainerCallback):  # type: ignore[misc]
    """Puts the coefficient of each forecast into the next step. sonde itself changes nothing in a training."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After sonde has measured the step."""
        step, forecast = probes.forecasts[-1]
        hold = forecast.coefficient_to_hold
        if step == state.global_step and hold is not None:
            coefficient = hold.for_change((TARGET - forecast.entropy) / RETURNS_IN)
            if coefficient is not None:  # otherwise not resolved, or no coefficient changes the entropy by so much
                trainer.entropy_coef = max(coefficient, 0.0)
        if state.global_step % 10 == 0:
            print(f"step {step}: entropy {forecast.entropy:.2f}, coefficient {trainer.entropy_coef:.4f}; {hold}")


with tempfile.TemporaryDirectory() as folder:
    trainer = GRPOTrainer(
        model=task.model(),
        processing_class=task.tokenizer(),
        train_dataset=task.dataset(),
        reward_funcs=task.reward,
        args=GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=64,
            num_generations=8,
            max_completion_length=6,
            learning_rate=3e-3,
            lr_scheduler_type="constant",
            max_steps=30,
            loss_type="dr_grpo",
            scale_rewards="none",
            entropy_coef=1e-12,  # above 0, so that TRL computes the bonus from the first step on
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
        ),
    )
    options = sonde.EntropyChangeOptions(micro_batch_prompts=16)
    probes = sonde.integrations.trl.attach(trainer, options, coefficient_to_hold=True)
    trainer.add_callback(HoldEntropy())  # after sonde's own callback
    trainer.train()
