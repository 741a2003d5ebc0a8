"""What is set in each trainer makes the batch that was asked for; names are those that real trainers take."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sonde.commands.run_script.measured import trainer_of
from sonde.decision.law import exactly
from sonde.decision.plans import Plan
from sonde.decision.trainers import TRAINERS, in_trainer, trainer_named

TO: dict[str, Any] = {"unit": "sequences", "tokens": 1024}


def plan(ranks: int = 8, accumulation: int = 4, micro_batch: int = 16) -> Plan:
    """By default of 512 sequences: 16 at a time on each of 8 ranks, 4 times."""
    cost, batch = exactly(1.0), ranks * accumulation * micro_batch
    costs = (cost, cost, cost, cost, cost, cost)  # of steps, units and time: no trainer is told
    return Plan(float(batch), ranks, accumulation, micro_batch, *costs, "measured", None, None)


def said(trainer: str, to: Plan | None = None, **others: Any) -> str:
    """By default of 512 sequences."""
    return "\n".join(in_trainer(trainer, to or plan(), **TO | others))


FACTORS = {
    "plain loop": r"node (\d+)|(\d+) sequences? in|after (\d+)",
    "transformers": r"node (\d+)|batch_size (\d+)|steps (\d+)$",
    "TRL": r"node (\d+)|batch_size (\d+)|steps (\d+)$",
    "Lightning": r"devices=(\d+)|batches=(\d+)|batch_size=(\d+)",
    "Accelerate": r"processes (\d+)|steps=(\d+)|batch_size=(\d+)",
    "torchtitan": r"global_batch_size (\d+)",
    "Megatron": r"micro-batch-size \d+ --global-batch-size (\d+)",
    "DeepSpeed": r'micro_batch_size_per_gpu": (\d+)|steps": (\d+)|gpus (\d+)',
    "verl": r"data.train_batch_size=(\d+)",
    "prime-rl": r"batch_size = (\d+)",
    "nanochat": r"total-batch-size=(\d+)",
}
"""Numbers that multiply to the batch."""
DIVIDES = {
    "torchtitan": r"local_batch_size (\d+)|size (\d+)\.",
    "Megatron": r"^--micro-batch-size (\d+)|size of (\d+)",
    "nanochat": r"device-batch-size=(\d+)|node=(\d+)",
}
"""Numbers whose product must divide it."""


def product(said: str, pattern: str) -> int:
    return math.prod(int("".join(found.groups(""))) for found in re.finditer(pattern, said.replace(",", ""), re.M))


@given(
    ranks=st.integers(1, 64) | st.integers(1, 10**12),
    accumulation=st.integers(1, 1024),
    micro=st.integers(1, 4096),
)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_numbers_multiply_to_the_batch(ranks: int, accumulation: int, micro: int) -> None:
    to = plan(ranks, accumulation, micro)
    n = ranks * accumulation * micro
    assert to.whole_batch == n
    for trainer in TRAINERS:
        unit = "prompts" if trainer in ("verl", "prime-rl") else "sequences"
        told = said(trainer, to, unit=unit, tokens=1, completions=1)
        assert product(told, FACTORS[trainer]) == n
        assert n % product(told, DIVIDES.get(trainer, "never")) == 0


def test_transformers_takes_the_flags(tmp_path: Any) -> None:
    transformers = pytest.importorskip("transformers")
    [flags] = re.findall(r"^--per_device.*$", said("transformers"), re.M)
    parser = transformers.HfArgumentParser(transformers.TrainingArguments)
    (args,) = parser.parse_args_into_dataclasses([*flags.split(), "--output_dir", str(tmp_path), "--use_cpu", "True"])
    assert args.per_device_train_batch_size * args.gradient_accumulation_steps * 8 == 512


def test_lightning_takes_the_arguments() -> None:
    pytorch = pytest.importorskip("lightning.pytorch")
    trainer, loader, schedule = re.findall(r"\w+\(.*?\)", said("Lightning"))
    arguments = {name: int(n) for name, n in re.findall(r"(\w+)=(\d+)", trainer)}
    trained = pytorch.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, **arguments | {"devices": 1})
    n = arguments["devices"] * trained.accumulate_grad_batches * int(re.findall(r"batch_size=(\d+)", loader)[0])
    assert n == 512
    change = eval(
        schedule, {"GradientAccumulationScheduler": pytorch.callbacks.GradientAccumulationScheduler, "EPOCH": 2}
    )
    assert change.scheduling[2] == 4


def test_a_script_shows_its_trainer_by_the_package_of_its_model() -> None:
    pytorch = pytest.importorskip("lightning.pytorch")
    adamw = torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
    assert trainer_of(pytorch.LightningModule(), adamw) == "Lightning"
    assert trainer_of(torch.nn.Linear(1, 1), adamw) == "plain loop"


def test_accelerate_takes_the_argument() -> None:
    accelerate = pytest.importorskip("accelerate")
    assert "gradient_accumulation_steps" in accelerate.Accelerator.__init__.__code__.co_varnames


def test_torchtitan_has_the_fields() -> None:
    """Of the version that is installed: 0.3.0 counts sequences, main tokens."""
    config = pytest.importorskip("torchtitan.config")
    fields = {field.name for field in dataclasses.fields(config.TrainingConfig)}
    is_released = importlib.metadata.version("torchtitan").startswith("0.3.")
    [line] = re.findall(rf"^{'0.3.0' if is_released else 'main'}: (.*)$", said("torchtitan"), re.M)
    values = {name: int(value) for name, value in re.findall(r"--training\.(\w+) (\d+)", line)}
    assert values.keys() <= fields
    assert list(values.values()) == ([16, 512] if is_released else [16 * 1024, 512 * 1024])


def test_without_the_length_of_sequences_tokens_are_left_to_the_user() -> None:
    for tokens in (None, 1023.7):  # an average without padding
        assert "--training.num_tokens_per_train_step 512×SEQUENCE_LENGTH" in said("torchtitan", tokens=tokens)


@pytest.mark.parametrize(
    ("trainer", "flags"),
    [
        ("verl", ["data.train_batch_size=32", "ppo_mini_batch_size=32", "rollout.n=8"]),
        ("prime-rl", ["batch_size = 256, in rollouts"]),
        ("TRL", ["gradient_accumulation_steps × 2 = 256, in completions", "num_iterations"]),
    ],
)
def test_in_rl_prompts_and_rollouts_are_told_apart(trainer: str, flags: list[str]) -> None:
    to = plan(2, 1, 16)
    told = said(trainer, to, unit="prompts", completions=8)
    assert all(flag in told for flag in flags), told


def test_trl_takes_the_names() -> None:
    trl = pytest.importorskip("trl")
    names = {field.name for field in dataclasses.fields(trl.GRPOConfig)}
    assert {"generation_batch_size", "num_generations", "num_iterations", "gradient_accumulation_steps"} <= names
    assert said("TRL") == said("transformers")  # of SFT and DPO


def test_a_trainer_is_found_by_its_name_in_any_letters() -> None:
    assert {trainer_named(name.upper()) for name in TRAINERS} == set(TRAINERS)
    with pytest.raises(ValueError, match=r"must be one of plain loop, .* got 'megatrn'"):
        trainer_named("megatrn")
    assert said("a loop of another name") == said("plain loop")
