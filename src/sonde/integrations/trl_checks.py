"""What `attach` refuses before TRL's training begins: options that would fail later, or give wrong numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from sonde.policy.entropy_options import EntropyChangeOptions
from sonde.record_values import whole_number

_HARMLESS = {"use_cache", "cache_implementation", "max_new_tokens", "pad_token_id", "bos_token_id", "eos_token_id"}
"""Arguments of generation that do not change the distribution of a token."""
TRUNCATION = ("top_p", "top_k", "min_p")
"""TRL's arguments that leave tokens out of the sampling."""


@dataclass(frozen=True)
class Wanted:
    """What `attach` is asked for, by the names of its arguments; `n_prompts` is its `evaluation_prompts`."""

    options: EntropyChangeOptions | None
    noise_every: int | None
    evaluation: Literal["fresh", "same"]
    n_prompts: int
    causes: bool
    rollouts: bool
    coefficient_to_hold: bool


def check_arguments(trainer: Any, wanted: Wanted) -> None:
    """Refuse whatever cannot be measured in this trainer's run.

    Raises:
        ValueError: naming the option, and the way out.
    """
    options, noise_every = wanted.options, wanted.noise_every
    if wanted.evaluation not in ("fresh", "same"):
        raise ValueError(f"evaluation must be 'fresh' or 'same', got {wanted.evaluation!r}")
    if options is None and noise_every is None:
        raise ValueError("nothing would be measured: pass options=sonde.EntropyChangeOptions() or noise_every=10, say")
    if options is not None:
        _check_options(trainer, options, causes=wanted.causes, holds=wanted.coefficient_to_hold)
    if noise_every is not None:
        whole_number("noise_every must be a whole number of steps", noise_every)
        _check_noise_scale(trainer)
    _check_sampling(trainer)
    if options is not None and (wanted.evaluation == "fresh" or wanted.rollouts):
        _check_fresh(trainer, wanted.n_prompts)


def _check_options(trainer: Any, options: object, *, causes: bool, holds: bool) -> None:
    """Refuse what would fail at the first step or a later one."""
    args = trainer.args
    if not isinstance(options, EntropyChangeOptions):
        raise ValueError(f"options must be a sonde.EntropyChangeOptions, got {options!r:.60}")
    if not options.is_step:
        raise ValueError("update='gradient' is not TRL's step, and only TRL's is forecast: leave it out")
    if holds and args.top_entropy_quantile < 1.0:
        raise ValueError(
            "coefficient_to_hold=True is about a bonus on all tokens, and with top_entropy_quantile below 1 TRL's "
            "bonus is on some of them: leave one of the two out"
        )
    unknown_weights = {
        "top_entropy_quantile": args.top_entropy_quantile < 1.0,
        "off_policy_mask_threshold": args.off_policy_mask_threshold is not None,
        "vllm_importance_sampling_correction": args.use_vllm and args.vllm_importance_sampling_correction,
        "loss_type='vespo'": trainer.loss_type == "vespo",
    }
    truncates = {"top_p": args.top_p not in (None, 1.0), "top_k": (args.top_k or 0) > 0, "min_p": bool(args.min_p)}
    if any(truncates.values()) and (causes or holds):
        given = ", ".join(f"{name}={getattr(args, name)}" for name, is_on in truncates.items() if is_on)
        raise ValueError(
            f"{'causes' if causes else 'coefficient_to_hold'}=True needs derivatives, which do not see tokens that "
            f"enter or leave what is sampled, and the trainer samples with {given}: leave one of the two out"
        )
    if causes and (named := [name for name, is_on in unknown_weights.items() if is_on]):
        raise ValueError(f"causes=True does not know the token weights of {named[0]}: leave out one of the two")


def _check_noise_scale(trainer: Any) -> None:
    """Refuse windows that hold parts of groups, or a single group, and FSDP."""
    args, n_ranks = trainer.args, trainer.accelerator.num_processes
    rows = args.per_device_train_batch_size * args.gradient_accumulation_steps
    if rows % trainer.num_generations or rows * n_ranks < 2 * trainer.num_generations:
        raise ValueError(
            f"the noise scale in prompts needs whole groups on each rank and at least 2 groups in a window, got {rows} "
            f"completions on each of {n_ranks} ranks in groups of {trainer.num_generations}: change "
            "per_device_train_batch_size or gradient_accumulation_steps, or leave out noise_every="
        )
    if args.steps_per_generation != args.gradient_accumulation_steps:
        raise ValueError(
            "the noise scale in prompts needs windows of whole groups, got steps_per_generation="
            f"{args.steps_per_generation} and gradient_accumulation_steps={args.gradient_accumulation_steps}, so a "
            "group's completions are spread over several windows: make them equal, or leave out noise_every="
        )
    if trainer.is_fsdp_enabled:
        raise ValueError(
            "the noise scale in prompts is not measured in TRL's trainer under FSDP: train under DDP, leave "
            "out noise_every=, or call sonde.PromptNoiseProbe on an FSDP2 model yourself"
        )


def _check_sampling(trainer: Any) -> None:
    """Refuse a trainer whose samples are not the policy's, or whose responses sonde cannot score."""
    args = trainer.args
    if args.repetition_penalty and args.repetition_penalty != 1.0:
        raise ValueError(
            f"the trainer samples with repetition_penalty={args.repetition_penalty}, which makes tokens less likely, "
            "so the responses do not have the policy's entropy: sample with repetition_penalty=1.0"
        )
    if others := sorted(set(args.generation_kwargs or {}) - _HARMLESS):
        raise ValueError(
            f"generation_kwargs has {', '.join(others)}, which may change the sampling, so the responses may not have "
            "the policy's entropy: leave them out"
        )
    columns = set(getattr(trainer.train_dataset, "column_names", None) or ())
    if images := sorted(columns & {"image", "images"}):
        raise ValueError(
            f"the dataset has the column {images[0]!r}, and sonde scores only text so far: attach no probe"
        )
    if trainer.is_deepspeed_enabled:
        raise ValueError("DeepSpeed does not show its gradients, so no step can be forecast: use DDP or FSDP2")


def _check_fresh(trainer: Any, evaluation_prompts: int) -> None:
    """Refuse fresh responses that cannot be drawn without disturbing training, or to too few prompts."""
    reasons = {
        "the trainer samples with tools or a rollout_func, and fresh responses would not use them": (
            getattr(trainer, "tools", None) or getattr(trainer, "rollout_func", None)
        ),
        "continuous batching moves the model while it samples": getattr(
            trainer.args, "use_transformers_continuous_batching", False
        ),
        "vLLM samples by random numbers of its own, which cannot be restored": trainer.args.use_vllm,
        "the dataset can only be read in order, and fresh responses need its prompts in any order": not hasattr(
            trainer.train_dataset, "__len__"
        ),
    }
    for reason, applies in reasons.items():
        if applies:
            raise ValueError(f"{reason}: pass evaluation='same', without rollouts")
    n_ranks = trainer.accelerator.num_processes
    if isinstance(evaluation_prompts, bool) or not isinstance(evaluation_prompts, int):
        raise ValueError(f"evaluation_prompts must be a whole number, got {evaluation_prompts!r}: pass 16, say")
    if evaluation_prompts < 2 * n_ranks or evaluation_prompts % n_ranks:
        raise ValueError(
            f"evaluation_prompts must be a multiple of the {n_ranks} ranks and at least 2 for each, got "
            f"{evaluation_prompts}: pass {max(2, evaluation_prompts // n_ranks) * n_ranks}"
        )
    if evaluation_prompts >= (n := len(trainer.train_dataset)):  # most steps need more; they say so when they come
        raise ValueError(
            f"the dataset has {n} prompts, of which a step learns from some, fewer than evaluation_prompts="
            f"{evaluation_prompts} need: pass a smaller number, or evaluation='same' without rollouts"
        )


def default_prompts(trainer: Any) -> int:
    """The smallest number of evaluation prompts from 16 up that gives each rank as many as the others, and 2."""
    n_ranks = int(trainer.accelerator.num_processes)
    return max(-(-16 // n_ranks), 2) * n_ranks
