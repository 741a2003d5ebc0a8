"""What `attach` refuses before TRL's training begins: options that would fail later, or give wrong numbers."""

from __future__ import annotations

from typing import Any, Literal

from sonde.config import ProbesConfig

_HARMLESS = {"use_cache", "cache_implementation", "max_new_tokens", "pad_token_id", "bos_token_id", "eos_token_id"}
"""Arguments of generation that do not change the distribution of a token."""


def check_arguments(
    trainer: Any,
    config: ProbesConfig,
    *,
    evaluation: Literal["fresh", "same"],
    evaluation_prompts: int,
    causes: bool,
    rollouts: bool,
    coefficient_to_hold: bool,
) -> None:
    """Refuse whatever cannot be measured in this trainer's run; the arguments are those of `attach`.

    Raises:
        ValueError: naming the option, and the way out.
    """
    if evaluation not in ("fresh", "same"):
        raise ValueError(f"evaluation must be 'fresh' or 'same', got {evaluation!r}")
    if config.gns_probe.enabled:
        _check_whole_groups(trainer)
    _check_config(trainer, config, evaluation)
    if coefficient_to_hold and trainer.args.top_entropy_quantile < 1.0:
        raise ValueError(
            "coefficient_to_hold=True is about a bonus on all tokens, and with top_entropy_quantile below 1 TRL's "
            "bonus is on some of them: leave one of the two out"
        )
    if causes:
        _check_loss(trainer)
    is_fresh = config.entropy_probe.enabled and (evaluation == "fresh" or rollouts)
    _check_sampling(trainer, is_fresh=is_fresh)
    if is_fresh:
        _check_prompts(trainer, evaluation_prompts)


def _check_sampling(trainer: Any, *, is_fresh: bool) -> None:
    """Refuse a trainer whose samples are not the policy's, or cannot be drawn without disturbing training."""
    args = trainer.args
    cuts = {"top_p": (args.top_p, 1.0), "top_k": (args.top_k, 0), "min_p": (args.min_p, None)}
    cuts["repetition_penalty"] = (args.repetition_penalty, 1.0)
    if any(value and value != neutral for value, neutral in cuts.values()):
        raise ValueError(
            f"the trainer samples with {', '.join(f'{n}={v}' for n, (v, _) in cuts.items())}, which cuts off tokens or "
            "makes them less likely, so the responses do not have the policy's entropy: sample with "
            f"{', '.join(f'{n}={neutral}' for n, (_, neutral) in cuts.items())}"
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
    if is_fresh and (getattr(trainer, "tools", None) or getattr(trainer, "rollout_func", None)):
        raise ValueError(
            "the trainer samples with tools or a rollout_func, and fresh responses would not use them: pass "
            "evaluation='same', without rollouts"
        )
    if is_fresh and getattr(args, "use_transformers_continuous_batching", False):
        raise ValueError(
            "continuous batching moves the model while it samples: pass evaluation='same', without rollouts"
        )
    if is_fresh and args.use_vllm:
        raise ValueError(
            "vLLM samples by random numbers of its own, which cannot be restored: fresh responses would change the "
            "training. Pass evaluation='same', without rollouts"
        )
    if is_fresh and not hasattr(trainer.train_dataset, "__len__"):
        raise ValueError(
            "the dataset can only be read in order, and fresh responses need its prompts in any order: pass "
            "evaluation='same', without rollouts"
        )


def _check_config(trainer: Any, config: ProbesConfig, evaluation: str) -> None:
    """Refuse options that have no effect with TRL, or would fail at the first step or a later one."""
    used = {
        "gns_probe": ("enabled", "log_every"),
        "entropy_probe": tuple(vars(config.entropy_probe).keys() - {"temperature", "budget"}),
        "policy_entropy_probe": ("enabled", "micro_batch_prompts"),
    }
    for probe, names in used.items():
        options = getattr(config, probe)
        if probe == "gns_probe" and options.unit == "prompts":  # which it is in any case
            names = (*names, "unit")
        idle = [n for n, value in vars(options).items() if n not in names and value != getattr(type(options)(), n)]
        if idle:
            raise ValueError(f"{probe}: {idle[0]} does nothing with TRL: leave it out (temperatures are the trainer's)")
    if config.prompt_noise_probe.enabled:
        raise ValueError(
            "prompt_noise_probe does nothing with TRL, where gns_probe is the noise scale in prompts: write gns_probe: "
            "{enabled: true}"
        )
    if config.own:
        raise ValueError(
            f"{next(iter(config.own))} does nothing with TRL, which calls sonde's probes alone: leave it out"
        )
    if not config.entropy_probe.is_step:
        raise ValueError(
            "entropy_probe: {update: gradient} is not TRL's step, and only TRL's is forecast: leave it out"
        )
    leaves_out = trainer.args.mask_truncated_completions and evaluation == "same"
    if config.entropy_probe.enabled and config.entropy_probe.objective == "sequence" and leaves_out:
        raise ValueError(
            "objective='sequence' compares each response with others to its prompt, and mask_truncated_completions may "
            "leave a prompt of the step with one response: pass evaluation='fresh', or objective='per_token'"
        )
    if config.gns_probe.enabled and trainer.is_fsdp_enabled:
        raise ValueError(
            "the noise scale in prompts is not measured in TRL's trainer under FSDP: train under DDP, turn gns_probe "
            "off, or call sonde.PromptNoiseProbe on an FSDP2 model yourself"
        )


def _check_loss(trainer: Any) -> None:
    """Refuse causes of a loss whose token weights are not known here."""
    args = trainer.args
    unsupported = {
        "top_entropy_quantile": args.top_entropy_quantile < 1.0,
        "off_policy_mask_threshold": args.off_policy_mask_threshold is not None,
        "vllm_importance_sampling_correction": args.use_vllm and args.vllm_importance_sampling_correction,
        "loss_type='vespo'": trainer.loss_type == "vespo",
    }
    if named := [name for name, is_on in unsupported.items() if is_on]:
        raise ValueError(f"causes=True does not know the token weights of {named[0]}: leave out one of the two")


def _check_whole_groups(trainer: Any) -> None:
    """Refuse windows that hold parts of groups, or a single group."""
    args, n_ranks = trainer.args, trainer.accelerator.num_processes
    rows = args.per_device_train_batch_size * args.gradient_accumulation_steps
    if rows % trainer.num_generations or rows * n_ranks < 2 * trainer.num_generations:
        raise ValueError(
            f"the noise scale in prompts needs whole groups on each rank and at least 2 groups in a window, got {rows} "
            f"completions on each of {n_ranks} ranks in groups of {trainer.num_generations}: change "
            "per_device_train_batch_size or gradient_accumulation_steps, or turn gns_probe off"
        )
    if args.steps_per_generation != args.gradient_accumulation_steps:
        raise ValueError(
            "the noise scale in prompts needs windows of whole groups, got steps_per_generation="
            f"{args.steps_per_generation} and gradient_accumulation_steps={args.gradient_accumulation_steps}, so a "
            "group's completions are spread over several windows: make them equal, or turn gns_probe off"
        )


def default_prompts(trainer: Any) -> int:
    """The smallest number of evaluation prompts from 16 up that gives each rank as many as the others, and 2."""
    n_ranks = int(trainer.accelerator.num_processes)
    return max(-(-16 // n_ranks), 2) * n_ranks


def _check_prompts(trainer: Any, evaluation_prompts: int) -> None:
    """Refuse numbers that ranks cannot share, and a dataset with too few prompts besides those a step learns from."""
    n_learned, n_ranks = _prompts_of_a_step(trainer), trainer.accelerator.num_processes
    if isinstance(evaluation_prompts, bool) or not isinstance(evaluation_prompts, int):
        raise ValueError(f"evaluation_prompts must be a whole number, got {evaluation_prompts!r}: pass 16, say")
    if evaluation_prompts < 2 * n_ranks or evaluation_prompts % n_ranks:
        raise ValueError(
            f"evaluation_prompts must be a multiple of the {n_ranks} ranks and at least 2 for each, got "
            f"{evaluation_prompts}: pass {max(2, evaluation_prompts // n_ranks) * n_ranks}"
        )
    data, different = trainer.train_dataset, set[str]()
    for i in range(len(data)):
        different.add(str(data[i]["prompt"]))
        if len(different) >= evaluation_prompts + n_learned:
            return
    n_left = max(len(different) - n_learned, 0)
    n_most = n_left // n_ranks * n_ranks
    smaller = f"pass evaluation_prompts={n_most}, or " if n_most >= 2 * n_ranks else "pass "
    raise ValueError(
        f"the dataset has {len(different)} different prompts, and a step may learn from {n_learned} of them. That "
        f"leaves {n_left} for fresh responses, fewer than evaluation_prompts={evaluation_prompts}: {smaller}"
        "evaluation='same' without rollouts"
    )


def _prompts_of_a_step(trainer: Any) -> int:
    """The largest number of prompts that an optimizer step learns from, on all ranks."""
    args = trainer.args
    n_backwards, n_slices = args.gradient_accumulation_steps, args.steps_per_generation
    rows = args.per_device_train_batch_size * trainer.accelerator.num_processes  # of a micro-batch, on all ranks
    groups = rows * n_slices // trainer.num_generations  # of a generation, whose completions TRL shuffles
    is_aligned = not n_backwards % n_slices or not n_slices % n_backwards
    n_generations = max(n_backwards // n_slices, 1) if is_aligned else n_backwards // n_slices + 2
    return int(min(rows * n_backwards, n_generations * groups))
