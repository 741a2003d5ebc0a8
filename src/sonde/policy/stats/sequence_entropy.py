"""The entropy of whole responses, H_w = E[−Σ_k w_k s_k]: its token weights, and its gradient.

What w_k depends on decides about everything else:

    nothing        w_k is the same whatever was sampled: 1, or a constant of the training. Then H_w = E[Σ_k w_k H_k],
                   and ∇H_w = E[Σ_k w_k ∇H_k + Σ_k (Σ_{j>k} w_j H_j − b_k)·∇s_k]
    a response     w_k depends on the response itself, as one over its length does. Then s_k stays:
                   ∇H_w = −E[(S_w − S_w of the other responses)·∇S] − E[∇S_w],  S_w = Σ_k w_k s_k, S = Σ_k s_k
    a group        w_k depends on the other responses to the prompt too, as one over the longest length does. Then each
                   response also moves the others' weights:
                   ∇H_w = −E[(Σ_i S_w,i − the same sum without the response)·∇S] − E[∇S_w], a mean over the group

The term E[∇S_w] is 0 where w_k depends on nothing. Without it, the gradient of an enumerable policy is 10–18 % wrong
for one over the length (`tests/policy/stats/test_entropy_gradient.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from sonde.policy.stats.entropy_gradient import Coefficients, Responses

SequenceWeights = Literal["one", "length", "longest"] | Callable[[Tensor, Tensor], Tensor]
"""w_k: 1; one over the response's length; one over the longest length among the prompt's responses; or a function of
the mask, [responses, tokens], and the prompts, [responses], that returns [responses, tokens]."""
DependsOn = Literal["nothing", "response", "group"]


def token_weights(weights: SequenceWeights, responses: Responses) -> Tensor:
    """w_k of every token, fp64, 0 outside the mask; [responses, tokens].

    Raises:
        ValueError: if a function returns another shape, or a number that is not finite.
    """
    if weights == "one":
        return responses.mask.double()
    if weights == "length":
        return responses.mask / responses.length[:, None]
    if weights == "longest":
        longest = torch.zeros(responses.n_prompts, dtype=torch.float64)
        longest = longest.scatter_reduce_(0, responses.index, responses.length, "amax")
        return responses.mask / longest[responses.index][:, None]
    made = weights(responses.mask, responses.prompts[responses.index])
    if not isinstance(made, Tensor):
        raise ValueError(f"sequence_weights must return a tensor, [responses, tokens], got {type(made).__name__}")
    return responses.tokens("sequence_weights", made.detach().cpu())


def depends_on(weights: SequenceWeights, responses: Responses) -> DependsOn:
    """What the weights depend on. For a function, it is found out: by other masks, and without some responses.

    Raises:
        ValueError: for a function whose weights depend on the responses to other prompts.
    """
    if weights == "one":
        return "nothing"
    if weights in ("length", "longest"):
        return "response" if weights == "length" else "group"
    made = token_weights(weights, responses)
    full, short = torch.ones_like(responses.mask), responses.mask & (responses.mask.cumsum(1) == 1)
    for half in responses.halves():
        for own, others in itertools.product((responses.mask, short), (full, short)):
            before, after = (torch.where(half[:, None], own, rest) for rest in (responses.mask, others))
            if _differ(weights, responses, before, after, half):
                raise ValueError(
                    "sequence_weights gives a response other weights if responses to other prompts change, so each "
                    "response moves the weights of all prompts, and no equation of sonde holds for that: let weights "
                    "depend on the responses to the same prompt only, or divide by a constant"
                )
    everyone = torch.ones_like(responses.index, dtype=torch.bool)
    if not any(_differ(weights, responses, responses.mask, other, everyone) for other in (full, short)):
        return "nothing"
    for kept in _without_one(responses):
        if not torch.equal(token_weights(weights, responses.rows(kept)), made[kept]):
            return "group"
    return "response"


def _differ(weights: SequenceWeights, responses: Responses, mask: Tensor, other: Tensor, rows: Tensor) -> bool:
    """Whether two masks give tokens that both have different weights, in some of the responses."""
    both = mask & other & rows[:, None]
    a, b = (token_weights(weights, Responses(m, responses.prompts[responses.index]))[both] for m in (mask, other))
    return not torch.allclose(a, b, rtol=1e-6, atol=0.0)  # functions may compute in 32 bits


def sequence_coefficients(
    log_prob: Tensor, entropy: Tensor, responses: Responses, weights: SequenceWeights = "one"
) -> Coefficients:
    """Coefficients of ∇H_w, by the equation for what the weights depend on.

    Args:
        log_prob: s_k in nats, [responses, tokens].
        entropy: H_k in nats, [responses, tokens].
        responses: which tokens count. Weights that depend on something need at least 2 responses to every prompt.
        weights: w_k.

    Raises:
        ValueError: for one response to a prompt, where 2 are needed.
    """
    w, share = token_weights(weights, responses), responses.share[:, None]
    depends = depends_on(weights, responses)
    if depends == "nothing":
        to_go = torch.where(responses.mask, responses.after(w * responses.tokens("entropy", entropy)), 0.0)
        to_go = to_go - responses.mean_at_position_of_other_prompts(to_go)
        return Coefficients(on_entropy=share * w, on_log_prob=share * to_go)
    log_prob = responses.tokens("log_prob", log_prob)
    weighted = (w * log_prob).sum(1)
    if depends == "response":
        credit = weighted - responses.leave_one_out(weighted)
    else:
        credit = _sum_without_each(weighted, log_prob, responses, weights)
    # Minus: entropy falls if likely responses become more likely. The plus sign of some implementations gives the
    # opposite direction.
    on_log_prob = -credit[:, None] * responses.mask - w
    return Coefficients(torch.zeros_like(log_prob), share * on_log_prob)


def _sum_without_each(weighted: Tensor, log_prob: Tensor, responses: Responses, weights: SequenceWeights) -> Tensor:
    """Σ_i S_w,i over the group, minus its expectation without the response: a baseline that knows nothing of it."""
    responses.leave_one_out(weighted)  # refuses prompts with one response
    n = 1.0 / responses.share
    credit: Tensor = responses.per_prompt(weighted)[responses.index] * n
    for kept in _without_one(responses):
        others = responses.rows(kept)
        sums = (token_weights(weights, others) * log_prob[kept]).sum(1)
        left_out = torch.ones(len(n), dtype=torch.bool)
        left_out[kept] = False
        rows = left_out.nonzero()[:, 0]
        # Every prompt is in `others`, in the same order. n·mean of n − 1 responses stands for the sum of n.
        place = torch.searchsorted(others.prompts, responses.prompts[responses.index[rows]])
        credit[rows] -= others.per_prompt(sums)[place] * n[rows]
    return credit


def _without_one(responses: Responses) -> list[Tensor]:
    """Rows of all responses but one of every prompt: without the first, without the second, and so on.

    Prompts keep their only response.
    """
    n_seen = [0] * responses.n_prompts
    rank = torch.zeros(len(responses.length), dtype=torch.long)
    for row, prompt in enumerate(responses.index.tolist()):
        rank[row] = n_seen[prompt]
        n_seen[prompt] += 1
    is_alone = responses.share == 1.0
    return [((rank != k) | is_alone).nonzero()[:, 0] for k in range(max(n_seen)) if max(n_seen) > 1]
