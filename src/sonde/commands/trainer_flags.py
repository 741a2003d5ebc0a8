"""How a batch size is set in each trainer: one row for each, in one table."""

from __future__ import annotations

from collections.abc import Mapping

TRAINERS: Mapping[str, tuple[str, ...]] = {
    "plain loop": (
        "torchrun --nproc-per-node {ranks}",
        "{micro} {unit} in each backward, optimizer.step() after {accumulation} of them",
    ),
    "transformers": (
        "torchrun --nproc-per-node {ranks}",
        "--per_device_train_batch_size {micro} --gradient_accumulation_steps {accumulation}",
        "start a new run: changed within one, ranks may drift apart. max_steps and warm-up count steps: set them anew",
    ),
    "TRL": (
        "torchrun --nproc-per-node {ranks}",
        "per_device_train_batch_size × gradient_accumulation_steps × {ranks} = {rollouts}, in completions; "
        "generation_batch_size the same, and a multiple of num_generations",
        "num_iterations is the reuse of each batch. The sizes are fixed at the start of a run",
    ),
    "Lightning": (
        "Trainer(devices={ranks}, accumulate_grad_batches={accumulation}), DataLoader(batch_size={micro})",
        "from an epoch on: GradientAccumulationScheduler({{EPOCH: {accumulation}}})",
    ),
    "Accelerate": (
        "accelerate launch --num_processes {ranks}",
        "Accelerator(gradient_accumulation_steps={accumulation}), DataLoader(batch_size={micro})",
    ),
    "torchtitan": (
        "0.3.0: --training.local_batch_size {micro} --training.global_batch_size {batch}",
        "main: --training.num_tokens_per_microbatch_per_dp_rank {micro_tokens} "
        "--training.num_tokens_per_train_step {batch_tokens}",
        "{ranks} data-parallel ranks. The batch is fixed for a run",
    ),
    "Megatron": (
        "--micro-batch-size {micro} --global-batch-size {batch}, on {ranks} data-parallel ranks",
        'to grow within a run, main since 2026-04: --step-batch-size-schedule "0:{present} {seen_tokens}:{batch}" in '
        "tokens, without --global-batch-size",
        "core 0.16.1: --rampup-batch-size {present} {increment} {seen} --global-batch-size {batch}: one increment, "
        "after {seen} samples",
    ),
    "DeepSpeed": (
        '"train_batch_size": {batch}, "train_micro_batch_size_per_gpu": {micro}, '
        '"gradient_accumulation_steps": {accumulation}',
        "deepspeed --num_gpus {ranks}: the first number must be the product of the other two and this one",
    ),
    "verl": (
        "data.train_batch_size={batch} actor_rollout_ref.actor.ppo_mini_batch_size={batch} "
        "actor_rollout_ref.rollout.n={completions}",
        "both sizes are in prompts. train_batch_size over ppo_mini_batch_size is the number of steps on each batch",
    ),
    "prime-rl": (
        "[orchestrator] batch_size = {rollouts}, in rollouts",
        "group_size, rollouts_per_example in older versions, says how many of them answer one prompt",
    ),
    "nanochat": (
        "torchrun --nproc_per_node={ranks} -m scripts.base_train -- --device-batch-size={micro} "
        "--total-batch-size={batch_tokens}",
        "the total is in tokens. nanochat scales rates and weight decay with it by itself: do not scale them again",
    ),
}
"""What to set, in lines, by the trainer's name."""
_GROWS = "{present}"
"""In lines about a batch that grows within a run."""


def trainer_named(name: str) -> str:
    """The name of a trainer as the table has it.

    Args:
        name: in any letters.

    Raises:
        ValueError: for one that is not in the table.
    """
    found = {known.lower(): known for known in TRAINERS}
    if name.lower() not in found:
        raise ValueError(f"--trainer must be one of {', '.join(TRAINERS)}, got {name!r}")
    return found[name.lower()]


def in_trainer(
    name: str,
    *,
    batch: float,
    ranks: int,
    accumulation: int,
    unit: str,
    present: float,
    units_seen: float,
    tokens: float | None = None,
    completions: float | None = None,
) -> tuple[str, ...]:
    """How the trainer is told, in lines.

    Args:
        name: of the trainer. One that is not in the table is taken for a plain loop.
        batch: units of one optimizer step.
        ranks: data-parallel ranks.
        accumulation: micro-batches of each rank in a step.
        unit: plural name of the unit.
        present: the batch of the run that the log is of.
        units_seen: units that it has seen.
        tokens: of one unit; None where the log does not say it.
        completions: to each prompt, in RL; None where the log does not say it.
    """
    if name == "TRL" and unit != "prompts":  # of SFT and DPO
        name = "transformers"
    # A log has averages: an epoch's last batch may be short. What is set are whole numbers, whose product is the batch.
    micro = max(round(batch / (ranks * accumulation)), 1)
    whole = micro * ranks * accumulation
    of_unit = 1.0 if unit == "tokens" else tokens
    values = {
        "ranks": ranks,
        "accumulation": accumulation,
        "unit": unit,
        "micro": micro,
        "batch": whole,
        "present": round(present),
        "increment": whole - round(present),
        "seen": round(units_seen),
        "completions": "COMPLETIONS" if completions is None else round(completions),
        "rollouts": _product(whole, completions, "COMPLETIONS"),
        "micro_tokens": _product(micro, of_unit, "SEQUENCE_LENGTH"),
        "batch_tokens": _product(whole, of_unit, "SEQUENCE_LENGTH"),
        "seen_tokens": _product(units_seen, of_unit, "SEQUENCE_LENGTH"),
    }
    grows = batch > present and units_seen > 0
    lines = (line for line in TRAINERS.get(name, TRAINERS["plain loop"]) if grows or _GROWS not in line)
    return tuple(line.format(**values) for line in lines)


def _product(value: float, each: float | None, otherwise: str) -> str:
    """So many times `each`; the user's own number, in capitals, where it is not known."""
    return f"{round(value)}×{otherwise}" if each is None else f"{round(value * each)}"
