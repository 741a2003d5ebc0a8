"""Coverage of the finite step's intervals for responses of many tokens."""

from __future__ import annotations

import copy
import math
import pydoc_data.topics
import statistics
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import sonde
from sonde.policy.scoring.scorer import Scored, Scorer
from sonde.policy.scoring.token_statistics import CausalLMStatistics
from sonde.policy.stats.entropy_change import EntropyObjective
from sonde.policy.stats.entropy_gradient import Responses, weighted_entropy_rate
from sonde.policy.stats.finite_step import FiniteStep, Scores, change_by_finite_step
from sonde.policy.stats.importance import importance_sampled_change

PROMPTS, RESPONSES = 24, 4
"""Of a batch."""
_VOCABULARY, _PROMPT_TOKENS = 64, 16
_TEXT = pydoc_data.topics.topics
_TRAINED_ON = 256
"""Tokens of a row of text."""


@dataclass(frozen=True)
class Lengths:
    """The size of the measurement.

    Attributes:
        tokens: tokens of each response.
        scales: factors of the optimizer's step.
        prompts: prompts of the large sample.
        batches: forecasts for each length, of prompts drawn from the large sample.
        learning_rate: of AdamW.
        trained_for: steps of the language model before that, of 16 rows of text each.
    """

    tokens: tuple[int, ...] = (16, 64, 256, 512)
    scales: tuple[float, ...] = (3.0, 1.0, 0.1)
    prompts: int = 1600
    batches: int = 400
    learning_rate: float = 3e-4
    trained_for: int = 300


def coverage_by_length(plan: Lengths) -> list[dict[str, Any]]:
    """A row for each length and scale."""
    torch.manual_seed(0)
    text = _text()
    model = _policy(text, plan)
    state = copy.deepcopy(model.state_dict())
    rows = []
    for tokens in plan.tokens:
        torch.manual_seed(tokens)
        model.load_state_dict(state)
        step = _step(model, text, plan.learning_rate, tokens)
        before = _scored(model, sampled := _sampled(model, text, plan.prompts, tokens))
        for scale in plan.scales:
            _add(step, scale)
            after = _scored(model, sampled)
            fresh = _scored(model, _sampled(model, text, plan.prompts // 4, tokens))
            _add(step, -scale)
            rows.append({"tokens": tokens, "scale": scale} | _row(before, after, fresh, plan.batches))
    return rows


@torch.no_grad()
def _add(step: dict[Tensor, Tensor], scale: float) -> None:
    for p, delta in step.items():
        p.add_(delta, alpha=scale)


def _row(before: Scored, after: Scored, fresh: Scored, n: int) -> dict[str, Any]:
    found = []
    for _ in range(n):
        prompts = torch.randperm(before.responses.n_prompts)[:PROMPTS]
        found.append(_change(before, after, torch.isin(before.responses.index, prompts)))
    whole = _change(before, after, torch.ones(len(before.log_prob), dtype=torch.bool))
    truth, truth_se = whole.change.delta, whole.change.se
    held = [abs(f.change.delta - truth) <= math.hypot(f.change.high - f.change.delta, 1.96 * truth_se) for f in found]
    trusted = [is_held for f, is_held in zip(found, held, strict=True) if f.support.is_enough]
    r = [weighted_entropy_rate(s.entropy, s.responses, None)[0] for s in (before, fresh)]
    importance = importance_sampled_change(
        before.entropy, after.entropy, before.log_prob, after.log_prob, before.responses
    )
    return {
        "batches": n,
        "truth": truth,
        "truth_se": truth_se,
        "fresh": r[1] - r[0],
        "fresh_se": math.hypot(*(weighted_entropy_rate(s.entropy, s.responses, None)[1] for s in (before, fresh))),
        "median_se": statistics.median(f.change.se for f in found),
        "support": statistics.fmean(f.support.ess_fraction for f in found),
        "whole": importance.ess_fraction,
        "coverage": sum(held) / n,
        "coverage_of_trusted": sum(trusted) / len(trusted) if trusted else None,
        "trusted": len(trusted) / n,
    }


def _change(before: Scored, after: Scored, rows: Tensor) -> FiniteStep:
    responses = Responses(before.responses.mask[rows], before.responses.index[rows])
    return change_by_finite_step(
        Scores(before.log_prob[rows], before.entropy[rows]),
        Scores(after.log_prob[rows], after.entropy[rows]),
        responses,
        EntropyObjective("per_token"),
    )


def _text() -> Tensor:
    """Python's own documentation, a token for each character; rare characters share the last token."""
    text = "".join(str(of) for _, of in sorted(_TEXT.items()))
    common = [c for c, _ in Counter(text).most_common(_VOCABULARY - 1)]
    number = {c: i for i, c in enumerate(common)}
    return torch.tensor([number.get(c, _VOCABULARY - 1) for c in text])


def _rows(text: Tensor, n: int, width: int) -> Tensor:
    """Rows from random places; [n, width]."""
    return text[torch.randint(len(text) - width, (n, 1)) + torch.arange(width)]


def _policy(text: Tensor, plan: Lengths) -> nn.Module:
    """A language model of characters, trained a little: its next characters are neither certain nor uniform."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=_VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=_PROMPT_TOKENS + max(plan.tokens),
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = Qwen2ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(plan.trained_for):
        ids = _rows(text, 16, _TRAINED_ON)
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    return model.eval()


def _step(model: nn.Module, text: Tensor, learning_rate: float, tokens: int) -> dict[Tensor, Tensor]:
    """The third step of AdamW by policy gradients, whose reward is the share of the 8 most common characters."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    before: list[Tensor] = []
    for _ in range(3):
        made = _sampled(model, text, 8, tokens)
        reward = (made.inputs["input_ids"][:, -tokens:] < 8).double().mean(1).view(8, RESPONSES)
        advantage = (reward - reward.mean(1, keepdim=True)).flatten()
        optimizer.zero_grad()
        s, _ = CausalLMStatistics()(model, made)
        (-(advantage[:, None] * s).sum() / len(made) / tokens).backward()
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.step()
    step = {p: p.detach() - b for p, b in zip(model.parameters(), before, strict=True)}
    _add(step, -1.0)
    return step


@torch.no_grad()
def _sampled(model: Any, text: Tensor, n_prompts: int, tokens: int) -> sonde.Rollouts:
    prompts = _rows(text, n_prompts, _PROMPT_TOKENS).repeat_interleave(RESPONSES, 0)
    parts = [
        model.generate(
            part,
            attention_mask=torch.ones_like(part),
            do_sample=True,
            top_k=0,
            min_new_tokens=tokens,
            max_new_tokens=tokens,
        )
        for part in prompts.split(1024)
    ]
    numbers = torch.arange(n_prompts).repeat_interleave(RESPONSES)
    mask = torch.ones(len(prompts), tokens, dtype=torch.bool)
    return sonde.Rollouts({"input_ids": torch.cat(parts)}, mask, numbers)


def _scored(model: nn.Module, rollouts: sonde.Rollouts) -> Scored:
    return Scorer(model, CausalLMStatistics(), 64, None).scored(rollouts)
