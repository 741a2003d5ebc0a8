"""What is set in each trainer makes the batch that was asked for; names are those that real trainers take."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
import re
from typing import Any

import pytest
import torch

from sonde.commands.run_script.measured import trainer_of
from sonde.commands.trainer_flags import TRAINERS, in_trainer, trainer_named

TO: dict[str, Any] = {"batch": 512, "ranks": 8, "accumulation": 4, "unit": "sequences"}
TO |= {"present": 128, "units_seen": 64_000, "tokens": 1024}
"""512 sequences: 16 at a time on each of 8 ranks, 4 times; 128 so far."""


def said(trainer: str, **others: Any) -> str:
    return "\n".join(in_trainer(trainer, **TO | others))


@pytest.mark.parametrize(
    ("trainer", "flags"),
    [
        ("plain loop", ["--nproc-per-node 8", "16 sequences in each backward, optimizer.step() after 4 of them"]),
        ("Accelerate", ["--num_processes 8", "gradient_accumulation_steps=4", "batch_size=16"]),
        ("DeepSpeed", ['"train_batch_size": 512', '"train_micro_batch_size_per_gpu": 16', '_steps": 4']),
        ("nanochat", ["--device-batch-size=16", "--total-batch-size=524288", "--nproc_per_node=8"]),
        (
            "Megatron",
            [
                "--micro-batch-size 16",
                "--global-batch-size 512",
                '"0:128 65536000:512"',
                "--rampup-batch-size 128 384 64000",
            ],
        ),
    ],
)
def test_numbers_make_the_batch(trainer: str, flags: list[str]) -> None:
    assert all(flag in said(trainer) for flag in flags), said(trainer)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_an_average_of_batches_is_set_as_whole_numbers(trainer: str) -> None:
    assert said(trainer, batch=511.3, present=127.8) == said(trainer)


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
    assert "--training.num_tokens_per_train_step 512×SEQUENCE_LENGTH" in said("torchtitan", tokens=None)


def test_megatrons_ramp_has_one_increment_where_the_schedule_has_its_step() -> None:
    """By the rule of its RampupBatchsizeNumMicroBatchesCalculator: an increment after samples/increments."""
    start, increment, samples = map(int, re.findall(r"--rampup-batch-size (\d+) (\d+) (\d+)", said("Megatron"))[0])
    n_increments = (512 - start) / increment
    assert [start + math.floor(seen / (samples / n_increments)) * increment for seen in (63_999, 64_000)] == [128, 512]
    assert "--rampup" not in said("Megatron", batch=64)  # no ramp goes down


@pytest.mark.parametrize(
    ("trainer", "flags"),
    [
        ("verl", ["data.train_batch_size=32", "ppo_mini_batch_size=32", "rollout.n=8"]),
        ("prime-rl", ["batch_size = 256, in rollouts"]),
        ("TRL", ["gradient_accumulation_steps × 2 = 256, in completions", "num_iterations"]),
    ],
)
def test_in_rl_prompts_and_rollouts_are_told_apart(trainer: str, flags: list[str]) -> None:
    told = said(trainer, batch=32, ranks=2, accumulation=1, unit="prompts", present=16, completions=8)
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
