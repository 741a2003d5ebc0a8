"""Forecasts beside fresh rollouts in TRL's trainer, for models, adapters, losses and ways to train; one table.

Each line trains twice from the same seed, with probes and without, and compares the weights bit for bit.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.machine import describe
from sonde.demos.arithmetic import task
from sonde.integrations import trl as integration
from sonde.policy.entropy_options import EntropyChangeOptions

STEPS, MEASURED_FROM, EVERY = 40, 16, 4
_SHARED = {"vocab_size": len(task.VOCABULARY), "bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}


@dataclass(frozen=True)
class Line:
    """One way to train.

    Attributes:
        name: for people.
        model: makes the model; it may be one of peft.
        options: of `GRPOConfig`, beyond those of all lines.
    """

    name: str
    model: Callable[[], Any]
    options: dict[str, Any] = field(default_factory=dict)


def qwen2() -> Any:
    """The demo's model."""
    return task.model()


def gpt2(dropout: float = 0.0) -> Any:
    """A GPT-2 of about as many parameters."""
    from transformers import GPT2Config, GPT2LMHeadModel

    rates = {"attn_pdrop": dropout, "embd_pdrop": dropout, "resid_pdrop": dropout}
    config = GPT2Config(n_embd=64, n_layer=2, n_head=4, n_positions=64, **rates, **_SHARED)
    return _seeded(lambda: GPT2LMHeadModel(config))


def llama() -> Any:
    """A Llama of about as many parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=64, tie_word_embeddings=False, **_SHARED,
    )  # fmt: skip
    return _seeded(lambda: LlamaForCausalLM(config))


def lora(dtype: torch.dtype, of_adapters: torch.dtype = torch.float32) -> Any:
    """peft's LoRA over the demo's model of this dtype, which has learned a little before."""
    from peft import LoraConfig, get_peft_model

    base = task.model()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        base.lm_head.weight.mul_(6.0)  # far from uniform, where the entropy has a slope
    adapter = LoraConfig(r=8, lora_alpha=32, target_modules=["q_proj", "v_proj", "up_proj"], task_type="CAUSAL_LM")
    model = _seeded(lambda: get_peft_model(base.to(dtype), adapter))
    for p in model.parameters():
        p.data = p.data.to(of_adapters) if p.requires_grad else p.data
    return model


def _seeded(make: Callable[[], Any]) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make()


_TWO = {"per_device_train_batch_size": 32, "gradient_accumulation_steps": 2}
"""Two micro-batches, over whose own tokens bnpo averages."""

LINES = (
    Line("Qwen2, dr_grpo", qwen2),
    Line("Qwen2, grpo", qwen2, {"loss_type": "grpo"}),
    Line("Qwen2, dapo", qwen2, {"loss_type": "dapo"}),
    Line("Qwen2, bnpo, 2 micro-batches", qwen2, {"loss_type": "bnpo", **_TWO}),
    Line("GPT-2, dr_grpo", gpt2),
    Line("GPT-2, grpo", gpt2, {"loss_type": "grpo"}),
    Line("GPT-2, dapo", gpt2, {"loss_type": "dapo"}),
    Line("GPT-2, bnpo, 2 micro-batches", gpt2, {"loss_type": "bnpo", **_TWO}),
    Line("GPT-2, dr_grpo, dropout 0.1", lambda: gpt2(0.1)),
    Line("Llama, dr_grpo", llama),
    Line("Llama, grpo", llama, {"loss_type": "grpo"}),
    Line("Llama, dapo", llama, {"loss_type": "dapo"}),
    Line("Llama, bnpo, 2 micro-batches", llama, {"loss_type": "bnpo", **_TWO}),
    Line("Qwen2, β = 0.04", qwen2, {"beta": 0.04}),
    Line("Qwen2, 2 iterations", qwen2, {"num_iterations": 2}),
    Line("Qwen2, temperature 0.7", qwen2, {"temperature": 0.7}),
    Line("fp32 LoRA over fp32", lambda: lora(torch.float32), {"learning_rate": 1e-2}),
    Line("fp32 LoRA over bf16", lambda: lora(torch.bfloat16), {"learning_rate": 1e-2}),
    Line("bf16 LoRA over bf16", lambda: lora(torch.bfloat16, torch.bfloat16), {"learning_rate": 1e-2}),
    Line("Qwen2, bf16 autocast", qwen2, {"bf16": True}),
)


@dataclass(frozen=True)
class Found:
    """What one line measured.

    Attributes:
        name: of the line.
        is_equal: whether weights are bit for bit those of the run without probes.
        pairs: forecast, its standard error, rollouts, theirs, and whether the forecast's interval held the change.
        precision: in which arithmetic responses were scored.
        own_policy_z: of each forecast.
    """

    name: str
    is_equal: bool
    pairs: list[tuple[float, float, float, float, bool]]
    precision: str
    own_policy_z: list[float]


def measure(line: Line) -> Found:
    """Train with and without probes."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = _trainer(line, folder)
        plain.train()
        watched = _trainer(line, folder)
        probes = integration.attach(
            watched,
            EntropyChangeOptions(every=EVERY, micro_batch_prompts=16),
            evaluation_prompts=32,
            rollouts=True,
            on_error="raise",
        )
        watched.train()
    pairs, z, precision = [], [], ""
    for step, f in probes.forecasts:
        if step <= MEASURED_FROM or f.se is None or f.rollouts is None:
            continue
        end = f.low if f.rollouts.delta < f.delta else f.high
        held = abs(f.rollouts.delta - f.delta) <= math.hypot(end - f.delta, 1.96 * f.rollouts.se)
        pairs.append((f.delta, f.se, f.rollouts.delta, f.rollouts.se, held))
        z.append(f.own_policy.z)
        precision = f.precision
    return Found(line.name, torch.equal(_weights(plain), _weights(watched)), pairs, precision, z)


def _weights(trainer: Any) -> Tensor:
    return torch.cat([p.detach().flatten().float() for p in trainer.model.parameters()])


def _trainer(line: Line, folder: str) -> Any:
    from trl import GRPOConfig, GRPOTrainer

    settings: dict[str, Any] = {
        "output_dir": folder, "per_device_train_batch_size": 64, "num_generations": 8, "max_completion_length": 6,
        "learning_rate": 3e-3, "lr_scheduler_type": "constant", "max_steps": STEPS, "loss_type": "dr_grpo",
        "scale_rewards": "none", "beta": 0.0, "report_to": [], "save_strategy": "no", "use_cpu": True, "bf16": False,
        "gradient_checkpointing": False, "disable_tqdm": True, "logging_steps": 50,
    }  # fmt: skip
    model: Any = line.model()
    if line.options.get("beta"):  # TRL loads the model a second time, as the reference
        model.save_pretrained(f"{folder}/model")
        model = f"{folder}/model"
    return GRPOTrainer(
        model=model,
        processing_class=task.tokenizer(),
        train_dataset=task.dataset(),
        reward_funcs=task.reward,
        args=GRPOConfig(**(settings | line.options)),
    )


def row(found: Found) -> str:
    """A line of the table."""
    errors = [(forecast - truth) / math.hypot(se, truth_se) for forecast, se, truth, truth_se, _ in found.pairs]
    median = sorted(abs(truth) for _, _, truth, _, _ in found.pairs)[len(found.pairs) // 2]
    signs = [f * t > 0 for f, _, t, truth_se, _ in found.pairs if abs(t) > 2 * truth_se]
    cells = (
        found.name,
        "yes" if found.is_equal else "**no**",
        found.precision,
        f"{median:.1e}",
        f"{sum(held for *_, held in found.pairs)} of {len(found.pairs)}",
        f"{sum(signs)} of {len(signs)}",
        f"{max(map(abs, errors)):.1f}",
        f"{min(found.own_policy_z):+.1f} to {max(found.own_policy_z):+.1f}",
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--only", default="", help="a part of the lines' names")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = [measure(line) for line in LINES if arguments.only in line.name]
    n = sum(len(f.pairs) for f in found)
    text = "\n".join(
        [
            "# Forecasts beside fresh rollouts, in TRL's trainer",
            "",
            *(
                f"- {name}: {value}"
                for name, value in describe("cpu", compared=("trl", "transformers", "peft")).items()
            ),
            "- again: `python -m benchmarks.trl_matrix`",
            "",
            f"GRPOTrainer of TRL, {STEPS} steps of 8 prompts with 8 completions each, adding two digits. Every "
            f"{EVERY}th step from {MEASURED_FROM} on is forecast from 32 fresh prompts, and measured by fresh rollouts "
            "to 32 prompts before and after it, with common random numbers. An interval holds the change if the two "
            "agree within the rollouts' own 95 % interval. Weights are compared, bit for bit, with those of a run "
            "without probes.",
            "",
            "| training | same weights | scored in | change, median size, nats a token | intervals that hold | "
            "same sign, for changes above 2 standard errors | largest error, in standard errors | own-policy z |",
            "| --- | --- | --- | --- | --- | --- | --- | --- |",
            *map(row, found),
            "",
            f"All lines: {sum(held for f in found for *_, held in f.pairs)} of {n} intervals hold.",
            "",
        ]
    )
    print(text)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "trl_matrix.md").write_text(text)
    (arguments.out / "trl_matrix.json").write_text(json.dumps([asdict(f) for f in found]) + "\n")


if __name__ == "__main__":
    main()
