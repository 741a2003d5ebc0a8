"""How a batch size is set in each trainer: one row for each, in one table."""

from __future__ import annotations

from collections.abc import Mapping

from sonde.decision.plans import Plan
from sonde.wording import plural, units

_TORCHRUN = "torchrun --nproc-per-node {ranks}"
"""Said for several ranks."""
TRAINERS: Mapping[str, tuple[str, ...]] = {
    "plain loop": (
        _TORCHRUN,
        "{size} in each backward, optimizer.step() after {backwards}",
    ),
    "transformers": (
        _TORCHRUN,
        "--per_device_train_batch_size {micro_batch} --gradient_accumulation_steps {accumulation}",
        "start a new run: changed within one, ranks may drift apart. max_steps and warm-up count steps: set them anew",
    ),
    "TRL": (
        _TORCHRUN,
        "per_device_train_batch_size × gradient_accumulation_steps × {ranks} = {rollouts}, in completions; "
        "generation_batch_size the same, and a multiple of num_generations",
        "num_iterations is the reuse of each batch. The sizes are fixed at the start of a run",
    ),
    "Lightning": (
        "Trainer(devices={ranks}, accumulate_grad_batches={accumulation}), DataLoader(batch_size={micro_batch})",
        "from an epoch on: GradientAccumulationScheduler({{EPOCH: {accumulation}}})",
    ),
    "Accelerate": (
        "accelerate launch --num_processes {ranks}",
        "Accelerator(gradient_accumulation_steps={accumulation}), DataLoader(batch_size={micro_batch})",
    ),
    "torchtitan": (
        "0.3.0: --training.local_batch_size {micro_batch} --training.global_batch_size {batch}",
        "main: --training.num_tokens_per_microbatch_per_dp_rank {micro_tokens} "
        "--training.num_tokens_per_train_step {batch_tokens}",
        "data-parallel size {ranks}. The batch is fixed for a run",
    ),
    "Megatron": ("--micro-batch-size {micro_batch} --global-batch-size {batch}, with a data-parallel size of {ranks}",),
    "DeepSpeed": (
        '"train_batch_size": {batch}, "train_micro_batch_size_per_gpu": {micro_batch}, '
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
        "torchrun --nproc_per_node={ranks} -m scripts.base_train -- --device-batch-size={micro_batch} "
        "--total-batch-size={batch_tokens}",
        "the total is in tokens. nanochat scales rates and weight decay with it by itself: do not scale them again",
    ),
}
"""What to set, in lines, by the trainer's name."""
SET_THEIR_RATES = ("nanochat",)
"""Trainers that scale their rates with the batch by themselves."""


def trainer_named(name: str) -> str:
    """The name of a trainer as the table has it.

    Args:
        name: in any letters.

    Raises:
        ValueError: for one that is not in the table.
    """
    if not (found := [known for known in TRAINERS if known.lower() == name.lower()]):
        raise ValueError(f"--trainer must be one of {', '.join(TRAINERS)}, got {name!r}")
    return found[0]


def in_trainer(
    name: str,
    plan: Plan,
    *,
    unit: str,
    tokens: float | None = None,
    completions: float | None = None,
) -> tuple[str, ...]:
    """How the trainer is told, in lines. All numbers are whole, and multiply to the batch.

    Args:
        name: of the trainer. One that is not in the table is taken for a plain loop.
        plan: of the batch to set.
        unit: plural name of the unit.
        tokens: of one unit on average; None where the log does not say it.
        completions: to each prompt, in RL; None where the log does not say it.
    """
    if name == "TRL" and unit != "prompts":  # of SFT and DPO
        name = "transformers"
    if name in ("verl", "prime-rl") and unit != "prompts":
        return (f"{name} is told in prompts, and this log counts {unit}: measure with unit='prompts'",)
    micro, batch = plan.micro_batch, plan.whole_batch
    if tokens is not None and tokens != round(tokens):  # not the length of the sequences, which are padded
        tokens = None
    values = vars(plan) | {
        "size": units(micro, unit),
        "backwards": plural(plan.accumulation, "backward"),
        "batch": batch,
        "completions": _product(1, completions, "COMPLETIONS"),
        "rollouts": _product(batch, completions, "COMPLETIONS"),
        "micro_tokens": _product(micro, tokens, "SEQUENCE_LENGTH"),
        "batch_tokens": _product(batch, tokens, "SEQUENCE_LENGTH"),
    }
    return tuple(
        line.format(**values)
        for line in TRAINERS.get(name, TRAINERS["plain loop"])
        if plan.ranks > 1 or line != _TORCHRUN
    )


def _product(n: int, each: float | None, otherwise: str) -> str:
    """So many times `each`; the user's own number, in capitals, where it is not known."""
    if each is None:
        return otherwise if n == 1 else f"{n}×{otherwise}"
    return f"{n * round(each)}"
