"""How right forecasts are of truncated policies: `python -m benchmarks.truncated_policies`, about 5 minutes.

A tiny policy that is sampled by top-p, top-k or min-p, whose truncated entropy is known exactly; in float64.

The next token depends on the prompt, the place and the last token, so that a sample has many different distributions,
and tokens enter and leave at some of them in each step.
"""

from __future__ import annotations

import copy
import statistics as of
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import sonde
from sonde.policy.scoring.token_statistics import statistics_of_logits

PROMPTS, RESPONSES = 24, 4
"""Of a batch."""


def _truncated(log_p: Tensor, how: dict[str, Any]) -> Tensor:
    """Log-probabilities of the tokens that stay, one row after the other: the definition, for the truth."""
    p = log_p.exp()
    if top_k := how.get("top_k"):
        p = torch.where(p >= p.sort(descending=True).values[..., top_k - 1 : top_k], p, 0.0)
        p = p / p.sum(-1, keepdim=True)
    if (top_p := how.get("top_p", 1.0)) < 1.0:  # a token stays if the likelier ones have less than top_p together
        likelier = (p[..., None, :] > p[..., None]) * p[..., None, :]
        p = torch.where(likelier.sum(-1) < top_p, p, 0.0)
        p = p / p.sum(-1, keepdim=True)
    if min_p := how.get("min_p"):
        p = torch.where(p >= min_p * p.amax(-1, keepdim=True), p, 0.0)
        p = p / p.sum(-1, keepdim=True)
    return p.log()


class Truncated(nn.Module):
    """8 tokens, the last of which ends a response."""

    n_prompts, vocabulary, width = 300, 8, 8

    def __init__(self, seed: int, *, longest: int = 32) -> None:
        super().__init__()

        def randn(part: int, *shape: int) -> Tensor:
            generator = torch.Generator().manual_seed(10 * seed + part)
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        w, v = self.width, self.vocabulary
        self.longest = longest
        self.features: Tensor
        self.places: Tensor
        self.bias: Tensor
        self.register_buffer("features", randn(0, self.n_prompts, w))
        self.register_buffer("places", randn(1, longest, w))
        self.register_buffer("bias", torch.tensor([*[0.0] * (v - 1), -1.0], dtype=torch.float64))
        self.last = nn.Parameter(randn(2, v + 1, w))  # the last row: nothing sampled yet
        self.mix = nn.Parameter(0.6 * randn(3, w, w))
        self.place = nn.Parameter(0.6 * randn(4, w, w))
        self.out = nn.Parameter(1.2 * randn(5, w, v) / w**0.5)

    def _logits(self, prompt: Tensor, last: Tensor, place: Tensor) -> Tensor:
        context = self.features[prompt] @ self.mix + self.places[place] @ self.place
        return torch.tanh(self.last[last] + context) @ self.out + self.bias

    def scores(self, prompt: Tensor, tokens: Tensor) -> Tensor:
        """Logits of the tokens at all places; [responses, places, vocabulary]."""
        last = nn.functional.pad(tokens[:, :-1], (1, 0), value=self.vocabulary)
        return self._logits(prompt[:, None], last, torch.arange(tokens.shape[1])[None])

    def next_token(self, prompt: Tensor, tokens: Tensor, place: int, how: dict[str, Any]) -> Tensor:
        """Truncated log-probabilities at a place; [responses, vocabulary]."""
        last = tokens[:, place - 1] if place else torch.full_like(prompt, self.vocabulary)
        return _truncated(self._logits(prompt, last, torch.tensor(place)).log_softmax(-1), how)

    def unlikeliest(self, rollouts: sonde.Rollouts, row: int, place: int) -> int:
        """The least likely token at a place of a response."""
        return int(self.scores(rollouts.inputs["prompt"], rollouts.inputs["tokens"])[row, place, :-1].argmin())

    @torch.no_grad()
    def rate(self, how: dict[str, Any]) -> float:
        """R = E[Σ H]/E[T] of the truncated policy, exactly: the states at each place follow from the place before."""
        v = self.vocabulary
        prompts, lasts = torch.arange(self.n_prompts)[:, None], torch.arange(v + 1)[None]
        reached = torch.zeros(self.n_prompts, v + 1, dtype=torch.float64)
        reached[:, -1] = 1.0
        entropy = length = 0.0
        for place in range(self.longest):
            p = _truncated(self._logits(prompts, lasts, torch.tensor(place)).log_softmax(-1), how).exp()
            h = -torch.where(p > 0.0, p * p.log(), 0.0).sum(-1)
            entropy, length = entropy + float((reached * h).sum()), length + float(reached.sum())
            at = torch.einsum("ml,mln->mn", reached, p)
            reached = torch.zeros_like(reached)
            reached[:, : v - 1] = at[:, :-1]  # a response that has ended goes nowhere
        return entropy / length


@torch.no_grad()
def sampled(policy: Truncated, n_prompts: int, generator: torch.Generator, how: dict[str, Any]) -> sonde.Rollouts:
    """Responses to prompts at random. The reward is the share of the token that the prompt asks for."""
    asked = torch.randint(policy.n_prompts, (n_prompts,), generator=generator)
    prompt, end = asked.repeat_interleave(RESPONSES), policy.vocabulary - 1
    tokens = torch.full((len(prompt), policy.longest), end)
    mask, is_over = torch.zeros_like(tokens, dtype=torch.bool), torch.zeros(len(prompt), dtype=torch.bool)
    for place in range(policy.longest):
        drawn = torch.multinomial(policy.next_token(prompt, tokens, place, how).exp(), 1, generator=generator)[:, 0]
        mask[:, place] = ~is_over
        tokens[:, place] = torch.where(is_over, end, drawn)
        is_over = is_over | (tokens[:, place] == end)
    wanted = (tokens == (prompt % end)[:, None]) & mask
    reward = (wanted.double().sum(1) / mask.sum(1)).view(-1, RESPONSES)
    advantage = (reward - reward.mean(1, keepdim=True)).flatten()
    numbers = torch.arange(n_prompts).repeat_interleave(RESPONSES)
    return sonde.Rollouts({"prompt": prompt, "tokens": tokens}, mask, numbers, advantage=advantage, **how)


def statistics(policy: Truncated, rollouts: sonde.Rollouts) -> tuple[Tensor, Tensor]:
    """The token statistics of sonde's probes."""
    logits = policy.scores(rollouts.inputs["prompt"], rollouts.inputs["tokens"])
    return statistics_of_logits(logits, rollouts.inputs["tokens"], **rollouts.truncation)


def next_step(
    seed: int, how: dict[str, Any], *, scale: float, longest: int = 32
) -> tuple[Truncated, torch.optim.AdamW, Truncated]:
    """A policy that has learned a little from truncated samples, with gradients; its optimizer; and its next step."""
    policy, generator = Truncated(seed, longest=longest), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, weight_decay=0.0)
    for k in range(11):
        optimizer.zero_grad()
        made = sampled(policy, 32, generator, how)
        s, _ = statistics(policy, made.untruncated())  # as trainers score what they learn from
        (-(made.credit() * s).sum() / made.mask.sum()).backward()
        if k < 10:
            optimizer.step()
    optimizer.param_groups[0]["lr"] *= scale
    after = copy.deepcopy(policy)
    other = torch.optim.AdamW(after.parameters(), lr=1e-3, weight_decay=0.0)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for p, q in zip(policy.parameters(), after.parameters(), strict=True):
        q.grad = None if p.grad is None else p.grad.clone()
    other.step()
    return policy, optimizer, after


@dataclass(frozen=True)
class Truncations:
    """The size of the measurement.

    Attributes:
        ways: how responses are sampled.
        scales: factors of the optimizer's step.
        seeds: number of seeds of the policy's weights.
        batches: forecasts for each way, scale and seed.
    """

    ways: tuple[tuple[str, float], ...] = (
        ("top_p", 1.0),
        ("top_p", 0.95),
        ("top_p", 0.8),
        ("min_p", 0.1),
        ("top_k", 4),
    )
    scales: tuple[float, ...] = (1.0, 10.0, 30.0)
    seeds: int = 40
    batches: int = 10


def coverage_by_truncation(plan: Truncations) -> list[dict[str, Any]]:
    """A row for each way and scale: how often the 95 % interval held the exact change."""
    rows = []
    for name, value in plan.ways:
        for scale in plan.scales:
            found = [f for seed in range(plan.seeds) for f in _forecasts(seed, {name: value}, scale, plan.batches)]
            valid = [f["held"] for f in found if f["valid"]]
            rows.append(
                {
                    "way": f"{name}={value:g}",
                    "scale": scale,
                    "forecasts": len(found),
                    "truth": of.median(abs(f["truth"]) for f in found),
                    "median_se": of.median(f["se"] for f in found),
                    "support": of.fmean(f["support"] for f in found),
                    "coverage": of.fmean(f["held"] for f in found),
                    "coverage_of_trusted": of.fmean(valid) if valid else None,
                    "trusted": len(valid) / len(found),
                }
            )
    return rows


def _forecasts(seed: int, how: dict[str, Any], scale: float, n: int) -> list[dict[str, Any]]:
    policy, optimizer, after = next_step(seed, how, scale=scale)
    truth = after.rate(how) - policy.rate(how)
    options = sonde.EntropyChangeOptions(micro_batch_prompts=PROMPTS)
    probe = sonde.EntropyChangeProbe(policy, optimizer, options, token_statistics=statistics)
    generator = torch.Generator().manual_seed(1_000 + seed)
    found = []
    for _ in range(n):
        forecast = probe.forecast(sampled(policy, PROMPTS, generator, how))
        assert forecast.support is not None
        low, high = forecast.low, forecast.high
        held = low is not None and high is not None and low < truth < high
        found.append(
            {
                "truth": truth,
                "held": held,
                "valid": forecast.is_valid,
                "support": forecast.support.ess_fraction,
                "se": forecast.se or 0.0,
            }
        )
    return found


if __name__ == "__main__":
    from benchmarks.entropy import truncated_table

    print("\n".join(truncated_table(coverage_by_truncation(Truncations()))))
