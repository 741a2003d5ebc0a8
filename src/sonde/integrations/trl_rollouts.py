"""TRL's batches as rollouts: the responses that a window learns from, and fresh ones of the trainer's own sampler."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sonde.integrations.trl_checks import TRUNCATION
from sonde.policy.scoring.precision import without_autocast
from sonde.policy.scoring.rollouts import Rollouts
from sonde.policy.scoring.token_statistics import CausalLMStatistics

GROUP = "sonde_prompt"
"""Key of each completion's prompt number in TRL's batches, through shuffle and split."""
USED = ("_tokenize_prompts", "_generate_single_turn")
"""Methods of the trainer that sample evaluation responses."""

_OLD, _REPORTED, _REFERENCE = "old_per_token_logps", "sampling_per_token_logps", "ref_per_token_logps"
"""Keys of log-probabilities in TRL's batches: of the policy that sampled, those that vLLM reported, and those of the
reference policy of the KL term."""
_MEANS_OVER_COMPLETIONS = ("grpo", "sapo")
"""Losses that average each completion over its own tokens."""
_MEANS_OVER_MICRO_BATCHES = ("bnpo",)
"""Losses that average each micro-batch over all its tokens."""
_MEANS_OVER_GENERATED = ("cispo", "dapo", "vespo")
"""Losses that divide by a part of the tokens that were generated together."""


class FullPrecision(CausalLMStatistics):
    """Scores without the autocast that accelerate puts around a model's forward: its rounding swallows differences."""

    def __call__(self, model: nn.Module, rollouts: Rollouts, /) -> tuple[Tensor, Tensor]:
        """The scores of `CausalLMStatistics`."""
        with without_autocast(model, rollouts.mask.device.type):
            return super().__call__(model, rollouts)


class TrlRollouts:
    """The responses that a trainer samples and learns from, with prompts as numbers.

    Args:
        trainer: a `GRPOTrainer`.
        n_prompts: number of fresh prompts on each rank.
    """

    def __init__(self, trainer: Any, n_prompts: int) -> None:
        self._trainer = trainer
        self._n_prompts = n_prompts
        self._window: list[Mapping[str, Any]] = []
        self._texts: dict[int, str] = {}
        self._n_generations = 0
        self._old: Tensor | None = None
        """Log-probabilities of the window's tokens under the policy that sampled them, if it is older."""
        self._sampler: Tensor | None = None
        """The same as the sampler reported them, if it did, as vLLM does."""
        self._reference: Tensor | None = None
        """The same of the reference policy, if the loss has a KL term."""
        self._of_bonus = torch.zeros(0)
        """The weight of each token's entropy in the loss for a coefficient of 1, in the unit of the tokens' weights."""

    # Called as the trainer goes on.

    def generated(self, inputs: list[dict[str, Any]], output: dict[str, Any]) -> None:
        """Number the prompts of a generated batch."""
        trainer = self._trainer
        # The rows of all ranks, one rank after the other, form whole groups.
        rows = torch.arange(len(inputs)) + trainer.accelerator.process_index * len(inputs)
        n_groups = len(inputs) * trainer.accelerator.num_processes // trainer.num_generations
        numbers = self._n_generations * n_groups + rows // trainer.num_generations
        self._n_generations += 1
        output[GROUP] = numbers.to(output["completion_ids"].device)
        self._texts |= {int(n): str(x["prompt"]) for n, x in zip(numbers, inputs, strict=True)}

    def begin_window(self) -> None:
        """Begin a window: the next optimizer step learns from the micro-batches that follow."""
        self._window = []
        kept = sorted(self._texts)[-10_000:]  # one generation may serve many windows, but a bounded number
        self._texts = {n: self._texts[n] for n in kept}

    def learned_from(self, inputs: Mapping[str, Any]) -> None:
        """Add a micro-batch to the window."""
        if GROUP not in inputs:
            raise ValueError("the prompts of a micro-batch are not known, since numbering them has failed")
        self._window.append(inputs)

    # Called for measurements.

    def window(self) -> Rollouts | None:
        """This rank's responses that the window learns from; None if TRL has emptied all their masks."""
        window = self._window
        masks = [_sampled_mask(i) for i in window]
        weights = [self._token_weights(mask) for mask in masks]
        bonuses = [self._bonus_weights(mask, i) for mask, i in zip(masks, window, strict=True)]
        sampled, weight, bonus = map(_padded, (masks, weights, bonuses))
        # Leave out completions whose mask TRL has emptied because they did not end.
        rows = sampled.bool().any(1).nonzero()[:, 0]
        if not len(rows):
            return None
        names = (_OLD, _REPORTED, _REFERENCE)
        self._old, self._sampler, self._reference = (self._in_window(name, rows) for name in names)
        self._of_bonus = bonus[rows]
        return Rollouts(
            inputs={
                "input_ids": self._joined("prompt_ids", "completion_ids")[rows],
                "attention_mask": self._joined("prompt_mask", "completion_mask")[rows],
            },
            mask=sampled[rows],
            prompt=torch.cat([i[GROUP] for i in window])[rows],
            advantage=_advantages(window)[rows],
            weight=weight[rows],
            texts=self._texts,
            **self._sampling(),
        )

    def _sampling(self) -> dict[str, Any]:
        """How the trainer samples, as `Rollouts` take it."""
        args = self._trainer.args
        return {name: getattr(args, name) for name in ("temperature", *TRUNCATION)}

    def _joined(self, of_prompts: str, of_completions: str) -> Tensor:
        """The window's prompts, each with its completion behind it."""
        return _joined(*([i[name] for i in self._window] for name in (of_prompts, of_completions)))

    def _in_window(self, name: str, rows: Tensor) -> Tensor | None:
        """What TRL keeps of each token of the window; None if it does not."""
        kept = [i[name] for i in self._window if i.get(name) is not None]
        return _padded(kept)[rows] if len(kept) == len(self._window) else None

    @property
    def sampled_log_prob(self) -> Tensor | None:
        """Log-probabilities of the last `window` at sampling, [responses, tokens], if another policy sampled it: those
        that the sampler reported, or else those of the older policy."""
        if self._sampler is None or self._old is None:
            return self._old if self._sampler is None else self._sampler
        return torch.where(self._sampler.isnan(), self._old, self._sampler)  # vLLM does not report every token

    @property
    def has_ratios(self) -> bool:
        """Whether the loss has likelihood ratios to an older policy."""
        return self._old is not None

    @property
    def has_kl(self) -> bool:
        """Whether the loss has a KL term."""
        return self._reference is not None and self._trainer.beta != 0.0

    def with_kl(self, update: Rollouts, log_prob: Tensor) -> Rollouts:
        """The window with the slope of the loss's KL term; before `reweighed`, whose ratios it does not have.

        Args:
            update: the last `window`.
            log_prob: log-probabilities of its tokens under the present policy; [responses, tokens].
        """
        assert self._reference is not None
        assert update.weight is not None
        mask, weight = update.mask.cpu().bool(), update.weight.cpu()
        # TRL's estimate is exp(r) − r − 1, with r the log-ratio of the reference and the policy.
        r = torch.where(mask, self._reference.cpu().double() - log_prob.cpu(), 0.0)
        kl, slope = weight * (r.exp() - r - 1.0), weight * (1.0 - r.exp())
        if getattr(self._trainer.args, "use_bias_correction_kl", False):  # times the likelihood ratio, which moves too
            if self._trainer.importance_sampling_level == "sequence":
                kl = (kl.sum(1, keepdim=True) / mask.sum(1, keepdim=True)).expand_as(kl)
            slope = self._log_ratio(mask, log_prob).exp() * (slope + kl)
        terms = {"KL": (-self._trainer.beta * slope).to(update.weight.device)}
        return dataclasses.replace(update, terms=terms)

    def with_bonus(self, update: Rollouts, coefficient: float) -> Rollouts:
        """The window with the weights of its tokens' entropies in the loss."""
        return dataclasses.replace(update, entropy_bonus=coefficient * self._of_bonus)

    def reweighed(self, update: Rollouts, log_prob: Tensor | None) -> Rollouts:
        """The window with the weights that the loss gives it.

        They are the loss's likelihood ratios, 0 where they are clipped.

        Args:
            update: the last `window`.
            log_prob: log-probabilities of its tokens under the present policy, [responses, tokens]; None unless an
                older policy sampled it.
        """
        assert update.weight is not None
        ratio = self._log_ratio(update.mask.cpu().bool(), log_prob).exp()
        slope = self._slope(ratio, update.per_token("advantage").cpu().double())
        return dataclasses.replace(update, weight=update.weight * slope.to(update.weight.device))

    def _log_ratio(self, mask: Tensor, log_prob: Tensor | None) -> Tensor:
        """Of the present policy and that which sampled, as the loss takes it; 0 if they are the same."""
        if self._old is None or log_prob is None:
            return torch.zeros_like(mask, dtype=torch.float64)
        log_ratio = torch.where(mask, log_prob.cpu() - self._old.cpu().double(), 0.0)
        if self._trainer.importance_sampling_level == "sequence":
            log_ratio = (log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True)).expand_as(log_ratio)
        return log_ratio

    def _slope(self, ratio: Tensor, advantage: Tensor) -> Tensor:
        """The derivative of a token's objective with respect to its log-probability, divided by its advantage."""
        trainer, args = self._trainer, self._trainer.args
        low, high = trainer.epsilon_low, trainer.epsilon_high
        if trainer.loss_type == "cispo":
            return ratio.clamp(max=high)
        if trainer.loss_type == "sapo":
            temperature = torch.where(advantage > 0, args.sapo_temperature_pos, args.sapo_temperature_neg)
            soft = torch.sigmoid(temperature * (ratio - 1))
            return 4 * soft * (1 - soft) * ratio
        if trainer.loss_type == "vespo":
            return torch.ones_like(ratio)
        is_clipped = ((advantage > 0) & (ratio > 1 + high)) | ((advantage < 0) & (ratio < 1 - low))
        if args.delta is not None:
            is_clipped |= (advantage < 0) & (ratio > args.delta)
        return torch.where(is_clipped, 0.0, ratio)

    def fresh(self, chosen: Sequence[int]) -> Rollouts:
        """Responses to prompts of the dataset by the trainer's own sampler, with the global random numbers.

        Args:
            chosen: rows of the dataset, by `choose`.
        """
        trainer, data = self._trainer, self._trainer.train_dataset
        rows = [i for i in chosen for _ in range(trainer.num_generations)]
        with torch.no_grad():
            prompt_ids, images, fields = trainer._tokenize_prompts([data[i]["prompt"] for i in rows])
            completion_ids, _ = trainer._generate_single_turn(prompt_ids, images, fields, trainer.num_generations)
        device = trainer.accelerator.device
        ids = [[torch.tensor(row, device=device)[None] for row in of] for of in (prompt_ids, completion_ids)]
        masks = [list(map(torch.ones_like, of)) for of in ids]
        return Rollouts(
            inputs={"input_ids": _joined(*ids), "attention_mask": _joined(*masks)},
            mask=_padded(masks[1]),
            prompt=torch.tensor([-1 - i for i in rows], device=device),
            texts={-1 - i: str(data[i]["prompt"]) for i in chosen},
            **self._sampling(),
        )

    def learned_texts(self) -> list[str]:
        """Texts of the prompts that this rank's window learns from."""
        numbers = {int(n) for i in self._window for n in i[GROUP].unique()}
        return [self._texts[n] for n in sorted(numbers)]

    def choose(self, seed: int, learned: Container[str]) -> list[int]:
        """Rows of the dataset for this rank's evaluation: all ranks make the same choice, and each takes its part.

        Args:
            seed: the choice depends on nothing else.
            learned: texts of the prompts that any rank's window learns from.

        Raises:
            ValueError: if the dataset has too few prompts.
        """
        trainer = self._trainer
        data = trainer.train_dataset
        n = self._n_prompts * trainer.accelerator.num_processes
        chosen: dict[str, int] = {}
        for i in torch.randperm(len(data), generator=torch.Generator().manual_seed(seed)).tolist():
            text = str(data[i]["prompt"])
            if text not in learned:
                chosen.setdefault(text, i)
            if len(chosen) == n:
                break
        if len(chosen) < n:
            raise ValueError(
                f"the dataset has {len(chosen)} prompts that this step does not learn from, fewer than the {n} of "
                "evaluation_prompts=: pass a smaller number, or evaluation='same'"
            )
        rank = trainer.accelerator.process_index
        return list(chosen.values())[rank * self._n_prompts : (rank + 1) * self._n_prompts]

    def _token_weights(self, mask: Tensor) -> Tensor:
        """The weights of a micro-batch's tokens in the loss, up to a common factor."""
        ones = mask.double()
        if self._trainer.loss_type in _MEANS_OVER_MICRO_BATCHES:
            return ones / ones.sum().clamp(min=1.0)
        if self._trainer.loss_type in _MEANS_OVER_COMPLETIONS:
            return ones / ones.sum(1, keepdim=True).clamp(min=1.0)
        return ones

    def _bonus_weights(self, mask: Tensor, inputs: Mapping[str, Any]) -> Tensor:
        """The weights of a micro-batch's entropies for a coefficient of 1, in the unit of `_token_weights`.

        TRL's bonus is a mean over the micro-batch's tokens, and its policy's term is divided by something else.
        """
        trainer, ones = self._trainer, mask.double()
        divisor = float(len(mask))
        if trainer.loss_type in _MEANS_OVER_MICRO_BATCHES:
            divisor = 1.0
        elif trainer.loss_type == "dr_grpo":
            divisor *= trainer.max_completion_length
        elif trainer.loss_type in _MEANS_OVER_GENERATED:
            n = float(inputs["num_items_in_batch"].clamp(min=1.0)) / trainer.accelerator.num_processes
            divisor = n / trainer.args.steps_per_generation
        return divisor * ones / ones.sum().clamp(min=1.0)


def _sampled_mask(inputs: Mapping[str, Any]) -> Tensor:
    """Mask of the tokens that the policy sampled and learns from; without a tool's answers."""
    mask: Tensor = inputs["completion_mask"]
    return mask * inputs["tool_mask"] if "tool_mask" in inputs else mask


def _advantages(window: Sequence[Mapping[str, Any]]) -> Tensor:
    """Advantages of each completion, or of each of its tokens."""
    parts = [i["advantages"] for i in window]
    if parts[0].dim() == 1 or parts[0].shape[1] == 1:
        return torch.cat([a.reshape(-1) for a in parts])
    return _padded(parts)


def _joined(prompts: Sequence[Tensor], completions: Sequence[Tensor]) -> Tensor:
    """Prompts, padded on their left, with completions behind them."""
    return torch.cat([_padded(prompts, left=True), _padded(completions)], 1)


def _padded(parts: Sequence[Tensor], *, left: bool = False) -> Tensor:
    """The rows of all parts, padded with 0 to the widest."""
    missing = [max(part.shape[1] for part in parts) - part.shape[1] for part in parts]
    pads = ((n, 0) if left else (0, n) for n in missing)
    return torch.cat([torch.nn.functional.pad(part, pad) for part, pad in zip(parts, pads, strict=True)])
