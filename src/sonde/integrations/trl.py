"""Probes for TRL's GRPOTrainer: what each update does to the policy's entropy, in TRL's own logs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from sonde.measure.optimizers import innermost
from sonde.measure.rollouts import Rollouts
from sonde.measure.scoring import seed_everything, undisturbed
from sonde.measure.token_statistics import CausalLMStatistics
from sonde.probes.config import ProbesConfig, options_of, probes_from_config
from sonde.probes.entropy_change import AroundStep, EntropyChangeProbe
from sonde.probes.policy_entropy import PolicyEntropyProbe
from sonde.probes.prompt_noise import PromptNoiseProbe
from sonde.stats.entropy_forecast import EntropyForecast

try:
    from accelerate.utils import gather_object
    from transformers import TrainerCallback
    from trl import GRPOTrainer
except ImportError as error:
    raise ImportError("this needs trl: pip install 'sonde[trl]'") from error

GROUP = "sonde_prompt"
"""The key under which each completion's prompt travels through TRL's shuffle and split."""
WRAPPED = ("_generate_and_score_completions", "_compute_loss")
"""Methods of the trainer that are wrapped."""
USED = ("_tokenize_prompts", "_generate_single_turn")
"""Methods of the trainer that sample evaluation responses."""
DEFAULT = {name: {"enabled": True} for name in ("entropy_probe", "policy_entropy_probe")}
DIVIDED_BY_TOKENS = ("bnpo", "dapo", "cispo", "vespo")
"""Losses that are divided by the number of all tokens."""
MEANS_OVER_TOKENS = ("grpo", "sapo")
"""Losses in which each completion is averaged over its own."""


def attach(
    trainer: GRPOTrainer,
    config: ProbesConfig | Mapping[str, Any] | str | Path = DEFAULT,
    *,
    evaluation: Literal["fresh", "same"] = "fresh",
    evaluation_prompts: int = 16,
    causes: bool = False,
) -> TrlProbes:
    """Measure a GRPO run; call it before `trainer.train()`. Weights are bit for bit those of a run without it.

    `gns_probe` is the noise scale in prompts here, measured every `log_every` steps: TRL shuffles a prompt's
    completions over micro-batches, which are no independent samples then, so it takes backwards of its own
    (`PromptNoiseProbe`).
    Every `entropy_probe.every` optimizer steps the change of entropy along the step is forecast before it is taken and
    measured after it, on responses that the trainer's own sampler draws with random numbers of their own. Metrics go
    to the trainer's logs under sonde's names.

    Args:
        trainer: with any of its losses.
        config: which probes, as for `probes_from_config`; the temperature is the trainer's.
        evaluation: "fresh" samples responses to prompts that the step does not learn from; "same" takes those that it
            learns from, at no generation, biased by what an update does to its own prompts.
        evaluation_prompts: of all ranks, for "fresh", each with as many responses as the trainer generates.
        causes: also tell momentum from this batch, and which of the step's prompts do what: takes a backward more.

    Raises:
        ValueError: for a trainer whose sampling is truncated (top_p < 1 and the like), whose entropy is not the
            policy's, and for options out of range.
    """
    config = config if isinstance(config, ProbesConfig) else probes_from_config(config)
    if evaluation not in ("fresh", "same"):
        raise ValueError(f"evaluation must be 'fresh' or 'same', got {evaluation!r}")
    n_ranks = trainer.accelerator.num_processes
    if evaluation_prompts < 2 * n_ranks or evaluation_prompts % n_ranks:
        raise ValueError(
            f"evaluation_prompts must be a multiple of {n_ranks} ranks, 2 for each, got {evaluation_prompts}"
        )
    args = trainer.args
    rows = args.per_device_train_batch_size * args.gradient_accumulation_steps
    if config.gns_probe.enabled and (rows % trainer.num_generations or rows * n_ranks < 2 * trainer.num_generations):
        raise ValueError(
            f"the noise scale in prompts needs whole groups on each rank and 2 of them in a window, got {rows} "
            f"completions on each of {n_ranks} ranks in groups of {trainer.num_generations}"
        )
    if args.top_p < 1.0 or args.top_k or args.min_p:
        raise ValueError(
            f"the trainer samples with top_p={args.top_p}, top_k={args.top_k}, min_p={args.min_p}, and the entropy of "
            "what is cut off is not the policy's: sample with top_p=1.0, top_k=0, min_p=None"
        )
    return TrlProbes(trainer, config, evaluation, evaluation_prompts // n_ranks, causes)


class TrlProbes(TrainerCallback):  # type: ignore[misc]
    """What `attach` returns; it is a callback of the trainer already.

    Attributes:
        forecasts: every forecast with the number of the optimizer step it was of, from 1 up.
    """

    def __init__(
        self,
        trainer: GRPOTrainer,
        config: ProbesConfig,
        evaluation: Literal["fresh", "same"],
        n_prompts: int,
        causes: bool,
    ) -> None:
        self.forecasts: list[tuple[int, EntropyForecast]] = []
        self._trainer = trainer
        self._config = config
        self._evaluation = evaluation
        self._n_prompts = n_prompts
        self._causes = causes
        self._statistics = CausalLMStatistics(trainer.args.temperature)
        self._entropy: EntropyChangeProbe | None = None
        self._policy: PolicyEntropyProbe | None = None
        self._noise: PromptNoiseProbe | None = None
        self._has_probes = False
        self._window: list[Mapping[str, Any]] = []
        self._texts: dict[int, str] = {}
        self._n_generations = 0
        self._around: tuple[ExitStack, AroundStep] | None = None
        self._originals: dict[str, Callable[..., Any]] = {}
        for name, wrapper in zip(WRAPPED, (self._generated, self._micro_batch), strict=True):
            self._originals[name] = getattr(trainer, name)
            setattr(trainer, name, wrapper)
        trainer.add_callback(self)

    def close(self) -> None:
        """Leave the trainer as it was."""
        for name, original in self._originals.items():
            setattr(self._trainer, name, original)
        if self._originals:
            self._trainer.remove_callback(self)
        self._originals = {}

    # What the trainer does, with the prompts' numbers carried along.

    def _generated(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output: dict[str, Any] = self._originals[WRAPPED[0]](inputs)
        trainer = self._trainer
        if trainer.model.training:
            # Rows of all ranks, one after the other, are whole groups.
            rows = torch.arange(len(inputs)) + trainer.accelerator.process_index * len(inputs)
            n_groups = len(inputs) * trainer.accelerator.num_processes // trainer.num_generations
            numbers = self._n_generations * n_groups + rows // trainer.num_generations
            self._n_generations += 1
            output[GROUP] = numbers.to(output["completion_ids"].device)
            self._texts |= {int(n): str(x["prompt"]) for n, x in zip(numbers, inputs, strict=True)}
        return output

    def _micro_batch(self, model: Any, inputs: Mapping[str, Any]) -> Any:
        if GROUP in inputs:
            self._window.append(inputs)
        return self._originals[WRAPPED[1]](model, inputs)

    # What it tells its callbacks.

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A window begins."""
        self._window = []
        kept = sorted(self._texts)[-10_000:]  # a generation may serve many windows, but not for ever
        self._texts = {n: self._texts[n] for n in kept}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Gradients are whole, and clipped."""
        measures_noise = self._config.gns_probe.enabled and state.global_step % self._config.gns_probe.log_every == 0
        forecasts = state.global_step % self._config.entropy_probe.every == 0
        if not (measures_noise or forecasts):
            return
        self._make_probes(kwargs["optimizer"])
        update = self._update_rollouts()
        if measures_noise and self._noise is not None:
            self._noise.measure(update)
            self._log(self._noise.metrics())
        if not forecasts:
            return
        if self._policy is not None:
            self._policy.measure(update)
            self._log(self._policy.metrics())
        if self._entropy is not None:
            evaluation = update if self._evaluation == "same" else self._fresh_rollouts(state.global_step)
            stack = ExitStack()
            learned_from = update if self._causes else None
            around = stack.enter_context(self._entropy.around_step(evaluation, learned_from, causes=self._causes))
            self._around = stack, around

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The step is taken."""
        if self._around is None:
            return
        stack, around = self._around
        self._around = None
        stack.close()
        self.forecasts.append((state.global_step + 1, around.forecast))
        self._log(around.forecast.metrics())
        self._log({"entropy/is_of_own_prompts": float(self._evaluation == "same")})

    def _make_probes(self, optimizer: Any) -> None:
        """Of the model that is trained, which is wrapped only once training has begun."""
        if self._has_probes:
            return
        self._has_probes = True
        model, statistics, config = self._trainer.model_wrapped, self._statistics, self._config
        if config.entropy_probe.enabled:
            options = options_of(config.entropy_probe)
            self._entropy = EntropyChangeProbe(model, innermost(optimizer), token_statistics=statistics, **options)
        if config.policy_entropy_probe.enabled:
            options = options_of(config.policy_entropy_probe)
            self._policy = PolicyEntropyProbe(model, token_statistics=statistics, **options)
        if config.gns_probe.enabled:
            weighs: Literal["tokens", "completions"] = "completions"
            if self._trainer.loss_type in DIVIDED_BY_TOKENS:
                weighs = "tokens"
            self._noise = PromptNoiseProbe(
                model, token_statistics=statistics, weighs=weighs, horizon=config.gns_probe.horizon
            )

    def _log(self, metrics: Mapping[str, float | None]) -> None:
        """TRL writes means of what was logged between two of its own logs."""
        for name, value in metrics.items():
            if value is not None:
                self._trainer._metrics["train"][name].append(value)

    def _update_rollouts(self) -> Rollouts:
        """What the window learns from."""
        window = self._window
        prompts = _padded([(i["prompt_ids"], i["prompt_mask"]) for i in window], left=True)
        completions = _padded([(i["completion_ids"], i["completion_mask"]) for i in window], left=False)
        sampled = completions[1]
        if "tool_mask" in window[0]:
            sampled = sampled * _padded([(i["tool_mask"], i["tool_mask"]) for i in window], left=False)[1]
        advantage = torch.cat([i["advantages"].reshape(len(i["advantages"]), -1)[:, 0] for i in window])
        # TRL can empty the mask of a completion that did not end.
        rows = sampled.bool().any(1).nonzero()[:, 0]
        return Rollouts(
            inputs={
                "input_ids": torch.cat([prompts[0], completions[0]], 1)[rows],
                "attention_mask": torch.cat([prompts[1], completions[1]], 1)[rows],
            },
            mask=sampled[rows],
            prompt=torch.cat([i[GROUP] for i in window])[rows],
            advantage=advantage[rows],
            weight=self._token_weights(sampled)[rows],
            temperature=self._trainer.args.temperature,
            texts=self._texts,
        )

    def _token_weights(self, mask: Tensor) -> Tensor:
        """What the loss multiplies tokens by, up to a number common to all."""
        ones = mask.double()
        if self._trainer.loss_type in MEANS_OVER_TOKENS:
            return ones / ones.sum(1, keepdim=True).clamp(min=1.0)
        return ones

    def _fresh_rollouts(self, step: int) -> Rollouts:
        """Responses to prompts that this window does not learn from, by the trainer's own sampler."""
        trainer = self._trainer
        data, numbers = trainer.train_dataset, {int(n) for i in self._window for n in i[GROUP].unique()}
        # The same on all ranks, which each choose a part of the same prompts.
        learned = set(gather_object([self._texts[n] for n in sorted(numbers)]))
        rank = trainer.accelerator.process_index
        generator = torch.Generator().manual_seed(1_000_003 * (step + 1) + trainer.args.seed)
        order = [i for i in torch.randperm(len(data), generator=generator).tolist()]
        chosen: dict[str, int] = {}
        for i in order:
            text = str(data[i]["prompt"])
            if text not in learned and text not in chosen:
                chosen[text] = i
            if len(chosen) == self._n_prompts * trainer.accelerator.num_processes:
                break
        if len(chosen) < self._n_prompts * trainer.accelerator.num_processes:
            raise ValueError(
                f"the dataset has {len(chosen)} prompts that this step does not learn from, fewer than "
                "evaluation_prompts=: ask for fewer, or evaluation='same'"
            )
        own = list(chosen.values())[rank * self._n_prompts : (rank + 1) * self._n_prompts]
        rows = [i for i in own for _ in range(trainer.num_generations)]
        with undisturbed(trainer.model_wrapped), torch.no_grad():
            seed_everything(1_000_003 * (step + 1) + trainer.args.seed + rank)
            prompt_ids, images, fields = trainer._tokenize_prompts([data[i]["prompt"] for i in rows])
            completion_ids, _ = trainer._generate_single_turn(prompt_ids, images, fields, trainer.num_generations)
        device = trainer.accelerator.device
        prompts = _padded([(t, torch.ones_like(t)) for t in _as_rows(prompt_ids, device)], left=True)
        completions = _padded([(t, torch.ones_like(t)) for t in _as_rows(completion_ids, device)], left=False)
        return Rollouts(
            inputs={
                "input_ids": torch.cat([prompts[0], completions[0]], 1),
                "attention_mask": torch.cat([prompts[1], completions[1]], 1),
            },
            mask=completions[1],
            prompt=torch.tensor([-1 - i for i in rows], device=device),
            temperature=trainer.args.temperature,
            texts={-1 - i: str(data[i]["prompt"]) for i in own},
        )


def _as_rows(ids: Sequence[Sequence[int]], device: torch.device) -> list[Tensor]:
    return [torch.tensor(row, device=device)[None] for row in ids]


def _padded(parts: Sequence[tuple[Tensor, Tensor]], *, left: bool) -> tuple[Tensor, Tensor]:
    """Ids and masks of all rows, padded to the widest by 0, which the mask hides."""
    width = max(ids.shape[1] for ids, _ in parts)

    def wide(tensor: Tensor) -> Tensor:
        missing = width - tensor.shape[1]
        return torch.nn.functional.pad(tensor, (missing, 0) if left else (0, missing))

    ids, masks = zip(*[(wide(i), wide(m)) for i, m in parts], strict=True)
    return torch.cat(ids), torch.cat(masks)
